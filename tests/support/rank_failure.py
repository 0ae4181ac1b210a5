"""How ranks end: one fails alone, while the others go on into the update's collectives; all are killed, or stop, also
where only one of them was asked to."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from torch import Tensor

from loop_appworld import LoopAppWorldRecipe, recipe_main
from loop_recipes.algorithm.advantages import LeaveOneOut
from support.signals import signalled
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
