"""The keys of ``sft_appworld``'s YAML, each with its sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from loop_formats.run_files import find_logs
from loop_formats.schema import STRICT, Some, require
from loop_recipes.config.loop_config import Component, LearnerConfig

REFUSED = tuple(f"update.{name}" for name in ("exact_entropy", "token_statistics", "max_trajectory_log_ratio"))
"""Keys of the learner's sections that a fixed set does not use."""
WHY_REFUSED = "a fixed set is trained on without log-probs of the policy that sampled it"


@dataclass(frozen=True, config=STRICT)
class FixedSetConfig:
    """The rollouts to train on; ``advantage`` decides which of them count, and how much."""

    logs: Some[str]
    """Logs of rollouts, or folders of runs, collections and demonstrations with logs. Evaluations in a folder, also
    those on dev, are left out."""

    def paths(self) -> list[tuple[Path, list[Path]]]:
        """Return each of ``logs`` with the logs there. Raises ConfigError for one without logs."""
        paths = [(Path(name), find_logs(Path(name)) if Path(name).exists() else []) for name in self.logs]
        for path, logs in paths:
            none = f"rollouts.logs: {path} is not a log of rollouts, or a folder with collections/*.jsonl below it"
            require(logs, f"{none}; name the folder of a run, as in rollouts.logs='[runs/demo]'")
        return paths


@dataclass(frozen=True, config=STRICT, kw_only=True)
class SftConfig(LearnerConfig):
    """All keys of the recipe `sft_appworld`. An iteration is ``update.epochs`` passes over the set."""

    rollouts: FixedSetConfig
    data: str | Some[str] | None = None
    """Files of conversations (JSONL, JSON or parquet) to train on in place of ``rollouts.logs``: OpenAI's messages,
    ShareGPT, ATIF trajectories or verifiers' traces. The model's own chat format writes them."""
    turns: Literal["all", "last"] = "all"
    """The assistant's turns to learn from in the conversations of ``data``."""
    held_out: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of the conversations in ``data`` that are held out of training, for the metric ``held_out_loss``."""
    samples: Component | None = None
    """Maker of samples from rollouts: a subclass of ``loop_recipes.rollouts.fixed_set.SampleMaker``. Null makes one
    sample of each rollout."""
    export_every: PositiveInt = 1
    """Iterations between two policies in ``policies/``; the last one is always exported."""

    def __post_init__(self) -> None:
        for key in REFUSED:
            value = getattr(self.update, key.removeprefix("update."))
            require(not value, f"{key} must be left out: {WHY_REFUSED}")
        fits = self.data is not None or (self.turns == "all" and not self.held_out)
        require(fits, "turns and held_out are for conversations: give data, or leave them out")

    @property
    def data_files(self) -> list[str]:
        """The files of ``data``."""
        return [self.data] if isinstance(self.data, str) else list(self.data or ())

    def check_set(self) -> None:
        """Raise ConfigError unless the files of the set are there."""
        for file in self.data_files:
            require(Path(file).is_file(), f"data: {file} is not a file")
        if not self.data_files:
            self.rollouts.paths()
