"""The records of the policies that an experiment made: a line each in one file.

A run's folder is large and stays where it was made. Its record is a few kilobytes, and tables and pictures are made of
records alone: they can be made again, and be completed, on another machine. Where a policy has several lines, the last
one counts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from loop_formats.ids import parse_collection_id
from loop_formats.run_files import append_to, find_logs, read_lines, read_rollouts
from loop_formats.run_folder import read_metrics
from loop_formats.schema import require
from loop_recipes.evaluation.report import read_report
from loop_recipes.evaluation.scores import TaskResult

KEPT_METRICS = ("iteration", "steps", "reward", "success", "dev_success")
KEPT_OF_RESULTS = ("task_id", "run", "reward", "success", "end_reason")

Key = tuple[str, int, float | None]
"""Name, seed, and the rate that was tried, for a run of a search."""


@dataclass(frozen=True)
class Record:
    """A policy, how it was made and what it solves.

    ``policy`` is the digest of the weights that it began from. ``budget`` is the number of rollouts that it was
    allowed to sample to learn from, ``rollouts`` and ``sampled_tokens`` what it took. ``rate`` is its learning rate
    (None: nothing was learned). ``iterations`` are the lines of metrics.jsonl with :data:`KEPT_METRICS`, ``results``
    the attempts at held-out tasks. ``searched`` says that the run was one of a search for the rate, and is in no table.
    """

    name: str
    seed: int
    dataset: str
    policy: str
    budget: int
    rate: float | None
    rollouts: int
    sampled_tokens: int
    iterations: list[dict[str, Any]]
    results: list[TaskResult]
    searched: bool = False

    @classmethod
    def of_run(
        cls, name: str, seed: int, budget: int, run: Path | None, logs: Iterable[Path], evaluation: Path | None
    ) -> Record:
        """Return the record of a policy that was made here.

        Args:
            run: the output folder of the training run; None for the base model.
            logs: the folders in which its nodes kept what they sampled; collections of dev are not counted.
            evaluation: the output folder of ``eval_appworld``, with one policy and one way of sampling; None for a run
                of a search, which is not scored on held-out tasks.
        """
        config = None if run is None else OmegaConf.load(run / "config.yaml")
        lines = [] if run is None else read_metrics(run)
        if evaluation is not None:
            report, (only,) = read_report(evaluation)
            dataset, model, results = report["dataset"], report["model"], list(only.results)
        elif config is not None:
            dataset, model, results = (
                lines[-1]["dataset"],
                config.model.get("path") or config.checkpointer.checkpoint_dir,
                [],
            )
        else:
            raise ValueError("a record needs a run or an evaluation")
        files = [log for folder in logs for log in find_logs(folder) if not parse_collection_id(log.stem).dev]
        rollouts = [rollout for file in files for rollout in read_rollouts(file)]
        return cls(
            name=name,
            seed=seed,
            dataset=dataset,
            policy=hashlib.sha256((Path(model) / "model.safetensors").read_bytes()).hexdigest()[:12],
            budget=budget,
            rate=None if config is None else config.optimizer.lr,
            rollouts=sum(rollout.segment == 0 for rollout in rollouts),
            sampled_tokens=sum(rollout.sampled_tokens for rollout in rollouts),
            iterations=[{key: line[key] for key in KEPT_METRICS if key in line} for line in lines],
            results=results,
            searched=evaluation is None,
        )

    @property
    def key(self) -> Key:
        return self.name, self.seed, self.rate if self.searched else None

    def write(self, file: Path) -> None:
        """Add it to ``file``, a line."""
        attempts = [[getattr(result, key) for key in KEPT_OF_RESULTS] for result in self.results]
        file.parent.mkdir(parents=True, exist_ok=True)
        with append_to(file) as lines:
            lines.write(json.dumps(asdict(self) | {"results": attempts}) + "\n")


def read_all(file: Path) -> Mapping[Key, Record]:
    """Read all records of ``file``; empty before there is a file."""
    records = [_record(line.record) for line in read_lines(file)] if file.exists() else []
    return {record.key: record for record in records}


def _record(data: dict[str, Any]) -> Record:
    attempts = [dict(zip(KEPT_OF_RESULTS, attempt, strict=True)) for attempt in data.pop("results")]
    return Record(**data, results=[TaskResult.from_dict(attempt) for attempt in attempts])


def read_record(file: Path, name: str, seed: int, budget: int, searched: float | None = None) -> Record | None:
    """Read the record of a name and seed, or of its run of a search at the rate ``searched``; None without one.

    Raises:
        ConfigError: it is of another budget.
    """
    record = read_all(file).get((name, seed, searched))
    return None if record is None else of_budget(file, record, budget)


def of_budget(file: Path, record: Record, budget: int) -> Record:
    """Return ``record``; raises ConfigError if it is of another budget."""
    own, what = record.budget, f"{record.name}, seed {record.seed}"
    require(own == budget, f"{file}: {what} is of a budget of {own} rollouts, not {budget}: take another --records")
    return record


def came_from_elsewhere(file: Path, name: str, seed: int, budget: int, made_in: Path) -> bool:
    """Return whether there is a record, but nothing of the run on this machine: it is then taken as it is.

    Raises:
        ConfigError: the record is of another budget.
    """
    return read_record(file, name, seed, budget) is not None and not made_in.exists()


def read_records(file: Path, names: Iterable[str], seeds: Sequence[int], budget: int) -> dict[str, list[Record]]:
    """Return the records of these seeds by name, for each name that has any.

    Raises:
        ConfigError: one is of another budget, or they began from different policies.
    """
    records = read_all(file)
    by_name = {
        name: [of_budget(file, records[key], budget) for seed in seeds if (key := (name, seed, None)) in records]
        for name in names
    }
    policies = {one.policy: f"{one.name}, seed {one.seed}" for some in by_name.values() for one in some}
    require(len(policies) < 2, f"{file}: these began from different policies: {'; '.join(policies.values())}")
    return {name: there for name, there in by_name.items() if there}
