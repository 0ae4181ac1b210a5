"""Turns rollouts into scores: whether an attempt solved its task, and TGC and SGC over runs, with their spread.

A task counts as solved when all its unit tests passed *and* the agent ended the episode itself: an episode that ran
into a limit of turns, context or time is over budget, which in evaluation is a failure (LOOP, appendix D).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from appworld_adapter.behavior import Behavior, RolloutBehavior, aggregate, rollout_behavior
from appworld_adapter.dataset import scenario_of
from appworld_adapter.goal_completion import (
    GoalCompletion,
    goal_completion,
    goal_completion_by_difficulty,
    scenario_success,
)
from loop_recipes.evaluation.statistics import Interval, rate_interval
from rollout_server.rollout import Rollout, episode_turns


@dataclass(frozen=True)
class TaskResult:
    """One attempt at one task.

    ``run`` counts from 0. ``success`` is the grader's verdict; whether the task counts as solved is :attr:`solved`.
    ``failure`` says why there is no rollout; the other fields are then empty.
    """

    task_id: str
    run: int
    rollout_id: str | None = None
    seed: int | None = None
    reward: float = 0.0
    success: bool = False
    end_reason: str | None = None
    turns: int = 0
    tokens: int = 0
    sampled_tokens: int = 0
    seconds: float = 0.0
    failed_requirements: list[str] = field(default_factory=list)
    tampered: str | None = None
    behavior: RolloutBehavior | None = None
    failure: str | None = None

    @property
    def solved(self) -> bool:
        return self.success and self.end_reason == "completed"

    @property
    def over_budget(self) -> bool:
        """The agent did not end the episode itself."""
        return self.failure is None and self.end_reason != "completed"

    @classmethod
    def from_rollout(cls, rollout: Rollout, *further: Rollout) -> TaskResult:
        """Of an episode: its first sequence and the further ones, where it has several."""
        sequences = [rollout, *further]
        return cls(
            task_id=rollout.task_id,
            run=rollout.index,
            rollout_id=rollout.rollout_id,
            seed=rollout.seed,
            reward=rollout.reward,
            success=rollout.success,
            end_reason=rollout.end_reason,
            turns=sum(len(sequence.turns) for sequence in sequences),
            tokens=sum(len(sequence.token_ids) for sequence in sequences),
            sampled_tokens=sum(sequence.sampled_tokens for sequence in sequences),
            seconds=rollout.seconds,
            failed_requirements=[item["text"] for item in rollout.requirements if not item["passed"]],
            tampered=rollout.tampered,
            behavior=rollout_behavior(episode_turns(sequences)),
        )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "solved": self.solved}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TaskResult:
        """The inverse of :meth:`to_dict`; keys it does not know are ignored."""
        values = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        if values.get("behavior") is not None:
            values["behavior"] = RolloutBehavior(**values["behavior"])
        return cls(**values)


@dataclass(frozen=True)
class Figure:
    """A percentage: mean over the runs, their standard deviation (None for one run), bootstrap interval of the mean."""

    mean: float
    std: float | None
    interval: Interval


@dataclass(frozen=True)
class Score:
    """All figures of one policy under one way of sampling. ``per_run`` holds TGC and SGC of each run.

    ``interactions`` is the mean number of agent turns over the attempts that were made; ``over_budget`` and ``failed``
    name attempts as (task id, run).
    """

    runs: int
    tasks: int
    scenarios: int
    tgc: Figure
    sgc: Figure
    per_run: list[GoalCompletion]
    by_difficulty: dict[int, GoalCompletion]
    reward: float
    interactions: float
    over_budget: list[tuple[str, int]]
    failed: list[tuple[str, int, str]]
    behavior: Behavior | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def success_table(results: Iterable[TaskResult]) -> list[dict[str, bool]]:
    """For each run, ascending: task id -> solved."""
    runs: dict[int, dict[str, bool]] = {}
    for result in results:
        runs.setdefault(result.run, {})[result.task_id] = result.solved
    return [runs[run] for run in sorted(runs)]


def success_rates(runs: Sequence[Mapping[str, bool]]) -> dict[str, float]:
    """Task id -> share of the runs that solved it."""
    return {task: sum(run[task] for run in runs) / len(runs) for task in runs[0]}


def scenario_rates(runs: Sequence[Mapping[str, bool]]) -> dict[str, float]:
    """Scenario -> share of the runs that solved all of its tasks."""
    return success_rates([scenario_success(run) for run in runs])


def score(
    results: Sequence[TaskResult],
    difficulties: Mapping[str, int] | None = None,
    *,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Score:
    """Score R runs over the same tasks.

    The intervals say how far the mean over runs could lie from that over all tasks of the kind: scenarios are
    resampled, each with all its tasks and runs. Figures by difficulty are means over the runs.

    Args:
        results: one per task and run; attempts that failed included.
        difficulties: task id -> difficulty; figures by difficulty are left out without it.

    Raises:
        ValueError: no results, or runs that do not cover the same tasks.
    """
    runs = success_table(results)
    if not runs or any(run.keys() != runs[0].keys() for run in runs) or len(results) != sum(map(len, runs)):
        raise ValueError("a score needs exactly one result for each task and run")
    per_run = [goal_completion(run) for run in runs]
    made = [result for result in results if result.failure is None]
    bootstrap: dict[str, Any] = {"level": level, "resamples": resamples, "seed": seed}
    behaviors = [result.behavior for result in made if result.behavior is not None]
    return Score(
        runs=len(runs),
        tasks=per_run[0].tasks,
        scenarios=per_run[0].scenarios,
        tgc=_figure([run.tgc for run in per_run], rate_interval(success_rates(runs), scenario_of, **bootstrap)),
        sgc=_figure([run.sgc for run in per_run], rate_interval(scenario_rates(runs), str, **bootstrap)),
        per_run=per_run,
        by_difficulty=_mean_by_difficulty(runs, difficulties or {}),
        reward=sum(result.reward for result in results) / len(results),
        interactions=sum(result.turns for result in made) / max(len(made), 1),
        over_budget=sorted((result.task_id, result.run) for result in results if result.over_budget),
        failed=sorted((result.task_id, result.run, result.failure) for result in results if result.failure is not None),
        behavior=aggregate(behaviors) if behaviors else None,
    )


def _figure(values: list[float], interval: Interval) -> Figure:
    std = statistics.stdev(values) if len(values) > 1 else None
    return Figure(statistics.fmean(values), std, interval.scaled(100.0))


def _mean_by_difficulty(
    runs: Sequence[Mapping[str, bool]], difficulties: Mapping[str, int]
) -> dict[int, GoalCompletion]:
    per_run = [goal_completion_by_difficulty(run, difficulties) for run in runs]
    return {
        difficulty: GoalCompletion(
            tgc=statistics.fmean(run[difficulty].tgc for run in per_run),
            sgc=statistics.fmean(run[difficulty].sgc for run in per_run),
            tasks=first.tasks,
            scenarios=first.scenarios,
        )
        for difficulty, first in per_run[0].items()
    }
