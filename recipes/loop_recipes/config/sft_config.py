"""The keys of ``sft_appworld``'s YAML, each with its sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass

from loop_formats.schema import STRICT, require
from loop_recipes.config.files import read_config
from loop_recipes.config.loop_config import Component, LearnerConfig

REFUSED = tuple(f"update.{name}" for name in ("exact_entropy", "token_statistics", "max_trajectory_log_ratio"))
"""Keys of the learner's sections that a fixed set has no use for."""
WHY_REFUSED = "a fixed set is trained on without log-probs of the policy that sampled it"


@dataclass(frozen=True, config=STRICT)
class FixedSetConfig:
    """The rollouts to train on; which of them count, and how much, is said by ``advantage``."""

    logs: list[str]
    """Logs of rollouts, or folders of runs, collections and demonstrations that hold some. In a folder, evaluations,
    also those on dev, are left out."""
    most_per_task: PositiveInt | None = None
    """Solved rollouts of a task that are used, those first in the order of logs and lines; null uses all."""

    def __post_init__(self) -> None:
        require(self.logs, "logs must name at least one log or folder")


@dataclass(frozen=True, config=STRICT, kw_only=True)
class SftConfig(LearnerConfig):
    """All keys of the recipe `sft_appworld`. An iteration is ``update.epochs`` passes over the set."""

    rollouts: FixedSetConfig
    samples: Component | None = None
    """What makes the samples of the rollouts: a subclass of ``loop_recipes.rollouts.fixed_set.SampleMaker``. Null makes
    one of each rollout."""
    export_every: PositiveInt = 1
    """Iterations between two policies in ``policies/``; the last one is always exported."""

    def __post_init__(self) -> None:
        for key in REFUSED:
            value = getattr(self.update, key.removeprefix("update."))
            require(not value, f"{key} must be left out: {WHY_REFUSED}")


def read_sft_config(cfg: DictConfig | Mapping[str, Any]) -> SftConfig:
    """The recipe's config, as far as it can be judged by itself; preflight.py looks at what it names.

    Raises:
        ConfigError: one line that names the key and the cure.
    """
    return read_config(cfg, SftConfig)
