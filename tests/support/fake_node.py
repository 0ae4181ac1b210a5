"""A rollout node for tests of trainers: it plays stored rollouts, and keeps what it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent_environments.description import Description
from loop_formats.collection_request import CollectionEnd, CollectionRequest, LostRollout
from loop_formats.ids import parse_collection_id
from loop_formats.rollout import Rollout
from loop_recipes.rollouts.replay_source import ReplaySource
from loop_recipes.rollouts.source import Collected


def short(request: CollectionRequest) -> str:
    """The collection's id without the hash at its end."""
    return request.id.rpartition("-")[0]


def collected(rollouts: Sequence[Rollout], lost: Sequence[LostRollout] = ()) -> Collected:
    """What a node that collected these rollouts, and lost those, answers."""
    return Collected([*rollouts], CollectionEnd("complete", len(rollouts), 0, 0, {}, 0.0, lost=[*lost]), 0.0)


class FixedNode:
    """Answers each request by ``answer(request, deadline_s)``, or with the same collection, or raises the error."""

    def __init__(self, answer: Collected | BaseException | Callable[[CollectionRequest, float], Collected]) -> None:
        self.answer = answer
        self.asked: list[CollectionRequest] = []

    def start(self, request: CollectionRequest) -> None:
        self.asked.append(request)

    def read(self, request: CollectionRequest, deadline_s: float = 0.0) -> Collected:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer if isinstance(self.answer, Collected) else self.answer(request, deadline_s)

    def description(self) -> Description:
        return Description()


class FakeNode(ReplaySource):
    """Replays the collections of a folder, and plays the ``dev_tasks`` with the first of their rollouts. Notes each
    call in ``events``; what a test needs of a moment, a subclass does in ``note``."""

    def __init__(self, logs: Path, dev_tasks: Sequence[str] = ("dev_1",)) -> None:
        super().__init__(logs)
        self.dev_tasks = [*dev_tasks]
        self.events: list[str] = []

    def note(self, event: str) -> None:
        self.events.append(event)

    def tasks(self, split: str) -> tuple[str, list[str]]:
        return ("made-up", self.dev_tasks) if split == "dev" else super().tasks(split)

    def publish(self, version: int, folder: Path, canary: Any = None) -> None:
        self.note(f"publish {version}")

    def sleep(self) -> None:
        self.note("sleep")

    def wake(self) -> None:
        self.note("wake")

    def start(self, request: CollectionRequest) -> None:
        self.note(f"start {short(request)}")

    def read(self, request: CollectionRequest, deadline_s: float = 0.0) -> Collected:
        self.note(f"read {short(request)}")
        if not parse_collection_id(request.id).dev:
            return super().read(request)
        example = super().read(replace(request, id="made-up-i0001")).rollouts[0]
        return collected([replace(example, task_id=task) for task in self.dev_tasks])
