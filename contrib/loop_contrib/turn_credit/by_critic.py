"""Credit for turns by a critic of turns that was trained before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from loop_contrib.sweet_rl.stored_critic import TRAINS_ONE, adapter_from_the_start, critic_over
from loop_contrib.sweet_rl.turn_critic import TurnCritic
from loop_contrib.turn_credit.spread import TurnCredit
from loop_formats.schema import require
from loop_recipes.algorithm.credit import TrainingRun
from loop_recipes.config.loop_config import LoopConfig
from loop_recipes.engine.samples import ScoredSample


class ByCritic(TurnCredit):
    """Spreads each rollout's advantage over its turns, according to a critic of turns.

    Args:
        critic: folder of a run of ``sft_appworld`` with ``TurnAdvantage``. The newest adapter at the first start is
            used; a resumed run keeps this adapter.
        strength: how much is added to the advantage, in standard deviations of the advantages.
    """

    same_scale = True
    _critic: TurnCritic
    _adapter: str
    _longest_rollout: int

    def __init__(self, critic: str, strength: float = 1.0) -> None:
        super().__init__(strength)
        self._run = Path(critic)
        self._before: str | None = None

    def check(self, config: LoopConfig) -> None:
        there = (self._run / "config.yaml").is_file()
        none = f"{self.key}.critic {self._run} is not a folder of a run: it holds no config.yaml"
        require(there, f"{none}; {TRAINS_ONE}")

    def setup(self, run: TrainingRun) -> None:
        adapter = adapter_from_the_start(self._run, self._before)
        self._adapter, self._longest_rollout = str(adapter), run.config.longest_rollout
        self._critic = critic_over(run.config, run.scorer, self._run, adapter)

    def check_tasks(self, tasks: Sequence[str]) -> None:
        self._critic.check_room(tasks, self._longest_rollout, f"{self.key}.critic")

    def credits(self, samples: Sequence[ScoredSample]) -> Mapping[str, Tensor]:
        return self._critic.advantages(samples)

    def saved(self) -> dict[str, Any]:
        return {"adapter": self._adapter}

    def restore(self, saved: Mapping[str, Any]) -> None:
        self._before = saved["adapter"]
