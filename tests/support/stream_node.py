"""A node that works on a stream's groups in moments of its own: the one that a small run of a stream is trained on."""

from __future__ import annotations

import random
from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

from loop_formats.collection_request import CollectionEnd, CollectionRequest, LostRollout
from loop_formats.ids import parse_collection_id
from loop_formats.rollout import Rollout
from loop_recipes.rollouts import stream
from loop_recipes.rollouts.source import Collected
from loop_recipes.run.stop_request import StopRequested
from rollout_server.client import CollectionFailed, RolloutNodeError
from support.refilled_runs import Node, made_up_rollout, train_refilled

SLOTS, ROLLOUTS, FLOOR = 10, 4, 2


@dataclass
class Work:
    """A group on the node."""

    request: CollectionRequest
    state: str = "running"
    versions: list[int] = field(default_factory=list)
    """Those that were served while it ran."""
    finished: list[Rollout] = field(default_factory=list)
    lost: int = 0


@dataclass
class StreamDisk:
    """What a node keeps. Each look at it is a moment in which chance lets rollouts finish. The groups whose numbers are
    in ``lose`` are lost."""

    lose: Container[int] = ()
    chance: random.Random = field(default_factory=lambda: random.Random(7))
    groups: dict[str, Work] = field(default_factory=dict)
    served: int = 0

    def move(self) -> None:
        free = SLOTS
        for work in [each for each in self.groups.values() if each.state == "running"]:
            if free <= 0:
                return
            free -= ROLLOUTS - len(work.finished)
            if self.served not in work.versions:
                work.versions.append(self.served)
            if parse_collection_id(work.request.id).group in self.lose:
                work.state, work.lost = "failed", ROLLOUTS
            elif self.chance.random() < 0.6:
                self._finish(work)

    def _finish(self, work: Work) -> None:
        rollout = made_up_rollout(work.request, work.request.tasks[0], len(work.finished))
        pinned = work.request.policy_mode == "pinned"
        versions = [work.request.policy_version] if pinned else sorted(self.chance.choices(work.versions, k=3))
        turns = [replace(turn, policy_version=v) for turn, v in zip(rollout.turns, [*versions * 3], strict=False)]
        work.finished.append(replace(rollout, turns=turns, seconds=self.chance.uniform(1.0, 50.0)).validate())
        if len(work.finished) == ROLLOUTS:
            work.state = "complete"


class StreamNode(Node):
    """A node that works on as many groups as it has slots for."""

    disk: StreamDisk  # type: ignore[assignment]

    def publish(self, version: int, folder: Path, canary: Any = None) -> None:
        super().publish(version, folder, canary)
        self.disk.served = version

    def start(self, request: CollectionRequest) -> None:
        super().start(request)
        work = self.disk.groups.setdefault(request.id, Work(request))
        if work.state == "cancelled":
            work.state = "running"
        assert work.request == request

    def collections(self) -> dict[str, dict[str, Any]]:
        self.moments.reach("look")
        if self.stop.exists():
            raise StopRequested
        self.disk.move()
        return {
            name: {
                "finished": len(work.finished),
                "lost": work.lost,
                "state": work.state,
                "seconds": self.seconds(work),
            }
            for name, work in self.disk.groups.items()
        }

    @staticmethod
    def seconds(work: Work) -> float:
        return float(10 * len(work.finished) + 1) if work.versions and work.state == "running" else 0.0

    def end_early(self, request: CollectionRequest) -> None:
        work = self.disk.groups[request.id]
        assert len(work.finished) >= FLOOR
        if work.state == "running":
            work.state = "early_stop"

    def cancel(self, request: CollectionRequest) -> None:
        if request.id not in self.disk.groups:
            raise RolloutNodeError(404, f"no collection {request.id}")
        self.disk.groups[request.id].state = "cancelled"

    def read(self, request: CollectionRequest, deadline_s: float = 0.0) -> Collected:
        self.moments.reach("read")
        work = self.disk.groups[request.id]
        lost = [LostRollout(request.tasks[0], index, "server_error", "boom") for index in range(work.lost)]
        dropped = ROLLOUTS - len(work.finished) - work.lost
        times: dict[str, Any] = {"lost": lost, "dropped_seconds": [30.0] * dropped}
        end = CollectionEnd(work.state, len(work.finished), dropped, 10 * dropped, {}, 1.0, **times)
        if work.state == "failed":
            raise CollectionFailed("4 of 4 rollouts lost", end)
        assert work.state in ("complete", "early_stop"), "it is read once it has ended"
        return Collected(list(work.finished), end, 0.0)


def train_streamed(
    config: Path,
    output_dir: Path,
    disk: StreamDisk,
    collection: dict[str, Any],
    at: int | None = None,
    end: Callable[[], None] = lambda: None,
) -> list[str]:
    """:func:`support.refilled_runs.train_refilled` with a stream, on a node with this disk."""
    settings = {"stream": True, "min_rollouts_per_task": FLOOR, "min_rollouts_fraction": 0.7, **collection}
    with mock.patch.object(stream, "POLL_S", 0.0):
        return train_refilled(config, output_dir, disk, settings, 1, at, end, StreamNode)  # type: ignore[arg-type]
