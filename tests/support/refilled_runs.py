"""Small runs whose groups without signal are replaced, on a node that plays what it is asked for, ended at any moment
and gone on with."""

from __future__ import annotations

import random
import threading
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

from omegaconf import OmegaConf

import loop_appworld
from loop_appworld import LoopAppWorldRecipe
from loop_formats.collection_request import CollectionEnd, CollectionRequest
from loop_formats.rollout import Rollout
from loop_recipes.rollouts.several_nodes import SeveralNodes
from loop_recipes.rollouts.source import Collected
from loop_recipes.run.stop_request import StopRequested
from support.fake_node import FakeNode
from support.rank_records import recorded
from support.small_runs import stored_rollout, train

TOKEN_ENV = "LOOP_TEST_TOKEN"
TASKS = [f"task_{number}" for number in range(1, 9)]
DULL = ("task_1", "task_3", "task_4", "task_8")
"""The first half of them are always solved, the others never."""
STEPS = ("update", "_log", "save_checkpoint")
"""What the recipe does with a collection, each of which is a moment before it begins."""


def adapters(folder: Path) -> dict[str, bytes]:
    """What a run has exported."""
    return {file.parent.name: file.read_bytes() for file in sorted(folder.glob("policies/*/adapter_model.safetensors"))}


@dataclass
class Disk:
    """What nodes keep: the rollouts of each collection, from which early stop has cut what chance would have it cut;
    the same of the same tasks where ``seed`` is the same."""

    seed: float = field(default_factory=random.random)
    collections: dict[str, list[Rollout]] = field(default_factory=dict)

    def read(self, request: CollectionRequest) -> list[Rollout]:
        if request.id not in self.collections:
            chance = random.Random(f"{self.seed}/{request.seed}/{request.tasks}")
            kept = chance.choices([2, 3, 4], k=len(request.tasks))
            parts = zip(request.tasks, kept, strict=True)
            self.collections[request.id] = [
                made_up_rollout(request, task, n) for task, count in parts for n in range(count)
            ]
        return self.collections[request.id]


def made_up_rollout(request: CollectionRequest, task: str, index: int) -> Rollout:
    """What a node plays."""
    reward = (index % 2) if task not in DULL else float(DULL.index(task) < 2)
    seed = zlib.crc32(f"{request.seed}/{task}/{index}".encode())
    return stored_rollout(request.id, task, index, request.policy_version, float(reward), 300, seed)


@dataclass
class Moments:
    """The moments that a run has reached, calls of its node and :data:`STEPS`, by name; ``end`` comes at the number
    ``at`` (from 0) of them."""

    at: int | None = None
    end: Callable[[], None] = lambda: None
    names: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def reach(self, name: str) -> None:
        with self.lock:  # several nodes are called at once
            self.names.append(name)
            number = len(self.names) - 1
        if number == self.at:
            self.end()

    def before(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, which begins at a moment of this name."""

        @wraps(method)
        def reached(*arguments: Any, **options: Any) -> Any:
            self.reach(name)
            return method(*arguments, **options)

        return reached


class Node(FakeNode):
    """Plays what it is asked for. As a real one's source, it looks for the run's stop file where it waits."""

    def __init__(self, logs: Path, disk: Disk, moments: Moments, stop: Path) -> None:
        super().__init__(logs)
        self.disk, self.moments, self.stop = disk, moments, stop

    def tasks(self, split: str) -> tuple[str, list[str]]:
        return "made-up", TASKS

    def note(self, event: str) -> None:
        self.moments.reach(event.partition(" ")[0])

    def read(self, request: CollectionRequest, deadline_s: float = 0.0) -> Collected:
        rollouts = self.disk.read(request)
        self.note("read")
        if self.stop.exists():
            raise StopRequested
        dropped = request.episodes - len(rollouts)
        return Collected(rollouts, CollectionEnd("early_stop", len(rollouts), dropped, 10 * dropped, {}, 1.0), 0.0)


def train_refilled(
    config: Path,
    output_dir: Path,
    disk: Disk,
    collection: dict[str, Any],
    nodes: int = 1,
    at: int | None = None,
    end: Callable[[], None] = lambda: None,
    kind: type[Node] = Node,
) -> list[str]:
    """The recipe of a config of :func:`support.small_runs.replay_config`, on nodes with this disk, from its last
    checkpoint; returns the moments that it reached. ``TOKEN_ENV`` has to be set."""
    cfg = OmegaConf.load(config)
    logs, cfg.output_dir = Path(cfg.rollout_node.replay), str(output_dir)
    cfg.rollout_node = {"url": "http://127.0.0.1:1", "launch": False, "token_env": TOKEN_ENV}
    cfg.sampler_gap = {"ok": 1e6, "broken": 1e6}  # nobody sampled these
    cfg["update"] = {"minibatch_rollouts": 4, "micro_batch_tokens": 600}
    cfg.resume_from_checkpoint = True
    cfg.collection = OmegaConf.merge(cfg.collection, collection)
    moments = Moments(at, end)
    node = kind(logs, disk, moments, output_dir / "stop")
    urls = [f"http://node{number}:1" for number in range(nodes)]
    source = node if nodes == 1 else SeveralNodes(lambda url, stop: node, urls, lambda: False)
    with ExitStack() as changed:
        changed.enter_context(mock.patch.object(loop_appworld, "open_source", return_value=source))
        for name in STEPS:
            step = moments.before(name, getattr(LoopAppWorldRecipe, name))
            changed.enter_context(mock.patch.object(LoopAppWorldRecipe, name, step))
        train(cfg)
    return moments.names


def train_refilled_recorded(config: Path, output_dir: Path, *arguments: Any) -> list[str]:
    """:func:`train_refilled` on each rank of a job, or in this process, with a record of what it does."""
    with recorded(output_dir):
        return train_refilled(config, output_dir, *arguments)
