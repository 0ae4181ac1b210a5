"""What is kept of each policy that a benchmark made: one small file for each name and seed.

A run's folder is large and stays where it was made. Its record is a few kilobytes, and tables and pictures are made of
records alone: they can be made again, and be completed, on another machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from loop_formats.ids import parse_collection_id
from loop_formats.run_files import find_logs, read_rollouts, write_whole
from loop_formats.schema import require
from loop_recipes.evaluation.report import read_report
from loop_recipes.evaluation.scores import TaskResult
from loop_recipes.run.metrics import read_metrics

KEPT_METRICS = ("iteration", "steps", "reward", "success", "dev_success")
KEPT_OF_RESULTS = ("task_id", "run", "reward", "success", "end_reason")


@dataclass(frozen=True)
class Record:
    """A policy, how it was made and what it solves.

    ``policy`` is the digest of the weights that it began from. ``budget`` is the number of rollouts that it was
    allowed to sample to learn from, ``rollouts`` and ``sampled_tokens`` what it took. ``rate`` is its learning rate
    (None: nothing was learned). ``iterations`` are the lines of metrics.jsonl with :data:`KEPT_METRICS`, ``results``
    the attempts at held-out tasks, none of a run that only chose a learning rate.
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

    @classmethod
    def of_run(
        cls, name: str, seed: int, budget: int, run: Path | None, logs: Iterable[Path], evaluation: Path | None
    ) -> Record:
        """The record of a policy that was made here.

        Args:
            run: the output folder of the training run; None for the base model.
            logs: the folders in which its nodes kept what they sampled; collections of dev are not counted.
            evaluation: the output folder of ``eval_appworld``, with one policy and one way of sampling; None for a run
                that was not scored on held-out tasks.
        """
        config = None if run is None else OmegaConf.load(run / "config.yaml")
        lines = [] if run is None else read_metrics(run)
        if evaluation is not None:
            report, (only,) = read_report(evaluation)
            dataset, model, results = report["dataset"], report["model"], list(only.results)
        elif config is not None:
            dataset, model, results = lines[-1]["dataset"], config.checkpointer.checkpoint_dir, []
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
        )

    def write(self, folder: Path) -> None:
        """Into ``folder``, an attempt a line."""
        head = {key: value for key, value in asdict(self).items() if key not in ("iterations", "results")}
        attempts = [[getattr(result, key) for key in KEPT_OF_RESULTS] for result in self.results]
        text = json.dumps(head, indent=1).removesuffix("\n}")
        text += f',\n "iterations": {_rows(self.iterations)},\n "results": {_rows(attempts)}\n}}\n'
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(record_file(folder, self.name, self.seed), text)


def _rows(rows: Sequence[Any]) -> str:
    return "[" + ",".join(f"\n  {json.dumps(row)}" for row in rows) + "\n ]"


def record_file(folder: Path, name: str, seed: int) -> Path:
    return folder / f"{name}-seed{seed}.json"


def read_record(folder: Path, name: str, seed: int, budget: int) -> Record | None:
    """The record of a name and seed; None where there is none.

    Raises:
        ConfigError: it is of another budget.
    """
    file = record_file(folder, name, seed)
    if not file.exists():
        return None
    data = json.loads(file.read_text())
    own = data["budget"]
    require(own == budget, f"{file} is of a budget of {own} rollouts, not {budget}: take another --records")
    attempts = [dict(zip(KEPT_OF_RESULTS, attempt, strict=True)) for attempt in data.pop("results")]
    return Record(**data, results=[TaskResult.from_dict(attempt) for attempt in attempts])


def came_from_elsewhere(folder: Path, name: str, seed: int, budget: int, made_in: Path) -> bool:
    """Whether there is a record, but nothing of the run on this machine: it is then taken as it is.

    Raises:
        ConfigError: the record is of another budget.
    """
    return read_record(folder, name, seed, budget) is not None and not made_in.exists()


def read_records(folder: Path, names: Iterable[str], seeds: Sequence[int], budget: int) -> dict[str, list[Record]]:
    """Of each name that has any, the records of the seeds that are there.

    Raises:
        ConfigError: one is of another budget, or they began from different policies.
    """
    found = {name: [read_record(folder, name, seed, budget) for seed in seeds] for name in names}
    policies = {one.policy: record_file(folder, one.name, one.seed) for some in found.values() for one in some if one}
    require(len(policies) < 2, f"these began from different policies: {', '.join(map(str, policies.values()))}")
    return {name: there for name, some in found.items() if (there := [one for one in some if one is not None])}
