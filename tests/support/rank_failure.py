"""How ranks end: one fails alone, while the others go on into the update's collectives; all are killed, or stop, also
where only one of them was asked to."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from loop_appworld import LoopAppWorldRecipe, recipe_main
from loop_recipes.algorithm.advantages import LeaveOneOut
from loop_recipes.engine import checkpoint
from loop_recipes.rollouts import stream
from loop_recipes.rollouts.node_source import NodeSource
from loop_recipes.rollouts.stream import Stream
from support.signals import signalled
from support.small_runs import train
from support.waiting import block_until


@dataclass(frozen=True)
class FailsOnOneRank:
    """Leave-one-out, but for ``rank``, which writes the time into ``mark`` and raises."""

    rank: int
    mark: str

    def __call__(self, rewards: Tensor, groups: Tensor) -> Tensor:
        if int(os.environ.get("RANK", "-1")) == self.rank:
            Path(self.mark).write_text(str(time.time()))
            raise RuntimeError(f"rank {self.rank} fails alone")
        return LeaveOneOut()(rewards, groups)


@dataclass(frozen=True)
class HeldBack:
    """Leave-one-out, once there is a file ``until``; each rank says in ``folder`` that it waits for it."""

    folder: str
    until: str

    def __call__(self, rewards: Tensor, groups: Tensor) -> Tensor:
        Path(self.folder, f"rank{os.environ['RANK']}").write_text(str(os.getpid()))
        block_until(Path(self.until).exists)
        return LeaveOneOut()(rewards, groups)


def train_until_killed(config: Path, output_dir: Path, iteration: int) -> None:
    """Train, and have this process killed in the first optimizer step of ``iteration``."""
    recipe = LoopAppWorldRecipe(OmegaConf.merge(OmegaConf.load(config), {"output_dir": str(output_dir)}))
    recipe.setup()
    update = recipe.update

    def mortal(rollouts: Any, number: int, *others: Any) -> Any:
        if number == iteration:
            recipe._learner.optimizer.step = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        return update(rollouts, number, *others)

    recipe.update = mortal  # type: ignore[method-assign]
    recipe.train()


def stopped_in_step(config: Path, said: Path, at: int, *words: str) -> None:
    """:func:`run_to_its_end`, but the last rank alone is asked twice to stop, in its ``at``-th optimizer step."""
    last = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
    with signalled(at if last else 0):
        run_to_its_end(config, said, *words)


def run_to_its_end(config: Path, said: Path, *words: str) -> None:
    """Run the recipe as `tune run` does; fails if it ends with a status. ``said`` gets what each rank said of it."""
    sys.argv = ["loop_appworld", "--config", str(config), *words]
    with open(said / f"rank{os.environ['RANK']}", "w") as file, contextlib.redirect_stderr(file):
        status = recipe_main()
    assert status == 0, status


PLACES = {
    "group noted, not asked for": (NodeSource, "start"),
    "rollouts read, not taken": (Stream, "_note_taken"),
    "taken, not learned": (LoopAppWorldRecipe, "update"),
    "in the update": (torch.optim.AdamW, "step"),
    "updated, not logged": (LoopAppWorldRecipe, "_log"),
    "logged, not saved": (LoopAppWorldRecipe, "save_checkpoint"),
    "half a checkpoint": (checkpoint, "save_file"),
    "saved, not published": (LoopAppWorldRecipe, "_publish"),
    "exported, not served": (NodeSource, "publish"),
    "served, nothing asked": (LoopAppWorldRecipe, "_take"),
}
"""Where a run of a stream may be killed: before the method does anything."""


def train_to_a_place(config: Path, place: str | None = None, number: int = 0, delay_s: float = 0.0) -> Counter[str]:
    """Train, and have this process killed ``delay_s`` after it came to the place for the time ``number``, from 0.
    Returns how often it came to each."""
    reached, stream.POLL_S = Counter[str](), 0.05

    def come_to(name: str) -> None:
        reached[name] += 1
        if (name, reached[name]) == (place, number + 1):
            kill = partial(os.kill, os.getpid(), signal.SIGKILL)
            threading.Timer(delay_s, kill).start() if delay_s else kill()

    for name, (owner, method) in PLACES.items():
        setattr(owner, method, preceded(getattr(owner, method), partial(come_to, name)))
    train(OmegaConf.load(config))
    return reached


def preceded(work: Callable[..., Any], first: Callable[[], None]) -> Callable[..., Any]:
    """``work``, before which ``first`` is called."""

    @wraps(work)
    def both(*arguments: Any, **options: Any) -> Any:
        first()
        return work(*arguments, **options)

    return both
