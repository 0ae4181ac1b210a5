"""An advantage that fails on one rank alone, while the others go on into the update's collectives."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from loop_recipes.algorithm.advantages import LeaveOneOut


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
