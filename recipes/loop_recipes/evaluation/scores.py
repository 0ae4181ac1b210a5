"""Turns rollouts into scores: whether an attempt solved its task, and both scores over runs, with their spread.

A task counts as solved if its environment says so: usually if all its tests passed *and* the agent ended the episode
itself. An episode that ran into a limit of turns, context or time is over budget, which is a failure (LOOP, appendix
D).

A rollout that was lost, through no fault of the agent, is neither a success nor a failure. A score is the mean over the
tasks of each task's mean over its runs, here as in intervals, comparisons and dev scores. So a run that lost most
rollouts weighs little. :class:`Bounds` say what the scores would be if all lost rollouts had failed or had succeeded.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from agent_environments.description import DEFAULT_DESCRIPTION, Description
from loop_formats.rollout import Rollout, sequence_texts
from loop_plumbing.grouping import grouped
from loop_recipes.evaluation.pass_at_k import PassAtK, passes
from loop_recipes.evaluation.statistics import Interval, rate_interval


@dataclass(frozen=True)
class TaskResult:
    """The result of one task in one run: a rollout, or a lost rollout.

    ``run`` counts from 0. ``success`` is the grader's verdict, ``solved`` whether the task counts as solved by the
    environment's rule (by default, that of :data:`DEFAULT_DESCRIPTION`). ``behavior`` holds the counts behind the
    environment's figures. ``failure`` says why the rollout was lost; the other fields are then empty. ``broke`` holds
    the place and the error if the environment itself broke.
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
    behavior: dict[str, int] | None = None
    failure: str | None = None
    solved: bool | None = None
    broke: dict[str, str] | None = None

    def __post_init__(self) -> None:
        if self.solved is None:
            object.__setattr__(self, "solved", DEFAULT_DESCRIPTION.solved(self.task_id, self.success, self.end_reason))

    @property
    def lost(self) -> bool:
        return self.failure is not None

    @property
    def over_budget(self) -> bool:
        """Return whether a limit, and not the agent, ended the episode; False for a lost rollout."""
        return not self.lost and self.end_reason != "completed"

    @classmethod
    def from_rollout(
        cls, rollout: Rollout, *further: Rollout, environment: Description = DEFAULT_DESCRIPTION
    ) -> TaskResult:
        """Make the result of an episode from its first sequence and any further ones."""
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
            behavior=environment.counts(rollout.task_id, sequence_texts(sequences)),
            solved=environment.solved(rollout.task_id, rollout.success, rollout.end_reason),
            broke=rollout.broke,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data; ``broke`` only if the environment broke."""
        return {name: value for name, value in asdict(self).items() if name != "broke" or value is not None}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TaskResult:
        """Invert :meth:`to_dict`; unknown keys are ignored.

        Raises:
            TypeError: the data is not a result.
        """
        if not isinstance(data.get("behavior"), dict | None):
            raise TypeError("behavior holds no counts")
        return cls(**{name: data[name] for name in cls.__dataclass_fields__ if name in data})


@dataclass(frozen=True)
class NamedResults:
    """The results of one score: policy, way of sampling, and every attempt; ``seeds`` holds the results of each
    evaluation, where several were pooled."""

    name: str
    sampling: str
    results: Sequence[TaskResult]
    seeds: Sequence[Sequence[TaskResult]] = ()


@dataclass(frozen=True)
class Figure:
    """A percentage: the mean over tasks (or groups) of the means over runs, and its bootstrap interval.

    ``std`` is the standard deviation over whole runs, None with fewer than two.
    """

    mean: float
    std: float | None
    interval: Interval


@dataclass(frozen=True)
class RunSuccess:
    """Both scores of one run, in percent: the share of solved tasks among its ``tasks``, and the share of groups whose
    tasks are all solved."""

    success: float
    group_success: float
    tasks: int
    group_count: int


@dataclass(frozen=True)
class Bounds:
    """The means [low, high]: low if every lost rollout had failed, high if each had succeeded."""

    success: tuple[float, float]
    group_success: tuple[float, float]
    reward: tuple[float, float]


@dataclass(frozen=True)
class Score:
    """All figures of one policy under one way of sampling. ``per_run`` holds both scores of each run with a rollout,
    over the tasks that it has.

    ``reward`` is a mean as in a :class:`Figure`. ``behavior`` holds the environment's figures by name (None for an
    undefined figure) and the number of ``rollouts``. ``interactions`` is the mean number of agent turns; ``passes``
    holds pass@k and pass^k, nothing for one run. ``over_budget`` names rollouts as (task id, run); ``lost`` names, with
    the reason, the rollouts that no figure counts. ``bounds`` is None without lost rollouts.
    """

    runs: int
    tasks: int
    group_count: int
    success: Figure
    group_success: Figure
    per_run: list[RunSuccess]
    by_difficulty: dict[int, RunSuccess]
    reward: float
    interactions: float
    over_budget: list[tuple[str, int]]
    lost: list[tuple[str, int, str]]
    bounds: Bounds | None
    behavior: dict[str, float | None] | None
    passes: list[PassAtK] = field(default_factory=list)


def score_names(environment: Description) -> dict[str, str]:
    """Return key in a report -> printed name of each score; only the first score if every task is its own group."""
    names = {"success": environment.score}
    return names | {"group_success": environment.group_score} if environment.grouped else names


def run_success(successes: Mapping[str, bool], environment: Description) -> RunSuccess:
    """Compute both scores of one run from task id -> solved; at least one task is needed."""
    groups: dict[str, bool] = {}
    for task_id, solved in successes.items():
        group = environment.group_of(task_id)
        groups[group] = groups.get(group, True) and solved
    success, group_success = (100.0 * sum(each.values()) / len(each) for each in (successes, groups))
    return RunSuccess(success, group_success, len(successes), len(groups))


def success_table(results: Iterable[TaskResult]) -> list[dict[str, bool]]:
    """Return task id -> solved for each run with a rollout, ascending; lost rollouts are left out."""
    runs: dict[int, dict[str, bool]] = {}
    for result in results:
        if not result.lost:
            runs.setdefault(result.run, {})[result.task_id] = bool(result.solved)
    return [runs[run] for run in sorted(runs)]


def task_means(values: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return task id -> the mean of its values over its runs; the mean of these means is a score.

    Args:
        values: (task id, value) of each rollout.
    """
    return {task: statistics.fmean(each) for task, each in grouped(values).items()}


def success_rates(runs: Sequence[Mapping[str, bool]]) -> dict[str, float]:
    """Return task id -> share of its runs that solved it."""
    return task_means(item for run in runs for item in run.items())


def task_success(results: Iterable[TaskResult]) -> dict[str, float]:
    """Return task id -> share of its runs that solved it."""
    return success_rates(success_table(results))


def reward_rates(results: Iterable[TaskResult]) -> dict[str, float]:
    """Return task id -> its mean reward over its runs."""
    return task_means((result.task_id, result.reward) for result in results if not result.lost)


def group_rates(runs: Sequence[Mapping[str, bool]], environment: Description = DEFAULT_DESCRIPTION) -> dict[str, float]:
    """Return group -> share of runs that solved all tasks of the group, among the runs that have one of these tasks.

    If a run lacks a task, the task counts there with the share of other runs that solved it. A task without any run is
    left out of its group.
    """
    shares = success_rates(runs)
    groups = grouped((environment.group_of(task), task) for task in shares)
    return {
        group: statistics.fmean(
            math.prod(run.get(task, shares[task]) for task in tasks) for run in runs if not run.keys().isdisjoint(tasks)
        )
        for group, tasks in groups.items()
    }


def score(
    results: Sequence[TaskResult],
    difficulties: Mapping[str, int] | None = None,
    environment: Description = DEFAULT_DESCRIPTION,
    **bootstrap: Any,
) -> Score:
    """Score R runs over the same tasks.

    The intervals say how far a score could lie from the score over all tasks of this kind: groups of tasks are
    resampled, each with all its tasks and runs.

    Args:
        results: one per task and run, lost ones included.
        difficulties: task id -> difficulty; figures by difficulty are left out without it.
        environment: groups the tasks, and defines the figures of behaviour.
        bootstrap: as for :func:`~loop_recipes.evaluation.statistics.rate_interval`.

    Raises:
        ValueError: no rollout, or runs that do not cover the same tasks.
    """
    tasks, numbers = ({getattr(result, key) for result in results} for key in ("task_id", "run"))
    attempts = {(result.task_id, result.run) for result in results}
    if not results or not len(results) == len(attempts) == len(tasks) * len(numbers):
        raise ValueError("a score needs exactly one result for each task and run")
    runs = success_table(results)
    if not runs:
        raise ValueError("there is nothing to score: every rollout was lost")
    per_run = [run_success(run, environment) for run in runs]
    whole = [run for run in per_run if run.tasks == len(tasks)]
    rewards = reward_rates(results)
    made = [result for result in results if not result.lost]
    lost = sorted((result.task_id, result.run, str(result.failure)) for result in results if result.lost)
    return Score(
        runs=len(numbers),
        tasks=len(tasks),
        group_count=len(set(map(environment.group_of, tasks))),
        success=_figure(
            [run.success for run in whole], rate_interval(success_rates(runs), environment.group_of, **bootstrap)
        ),
        group_success=_figure(
            [run.group_success for run in whole], rate_interval(group_rates(runs, environment), str, **bootstrap)
        ),
        per_run=per_run,
        by_difficulty=_mean_by_difficulty(runs, difficulties or {}, environment),
        reward=statistics.fmean(rewards.values()),
        interactions=sum(result.turns for result in made) / len(made),
        over_budget=sorted((result.task_id, result.run) for result in results if result.over_budget),
        lost=lost,
        bounds=score_bounds(results, environment) if lost else None,
        behavior=_behavior(made, environment),
        passes=passes(runs, environment.group_of, **bootstrap),
    )


def _behavior(results: Sequence[TaskResult], environment: Description) -> dict[str, float | None] | None:
    """Compute the environment's figures over the results that have counts; None without such results."""
    counts = [result.behavior for result in results if result.behavior]
    if not counts:
        return None
    return {"rollouts": len(counts), **{figure.name: figure.value(counts) for figure in environment.figures}}


def score_bounds(results: Sequence[TaskResult], environment: Description = DEFAULT_DESCRIPTION) -> Bounds:
    """Return the bounds of the scores of ``results``; arguments as for :func:`score`."""
    ends = []
    for solved in (False, True):
        outcome: dict[str, Any] = {"reward": float(solved), "success": solved, "end_reason": "completed"}
        outcome |= {"solved": solved, "failure": None}
        filled = [replace(each, **outcome) if each.lost else each for each in results]
        per_run = [run_success(run, environment) for run in success_table(filled)]
        means = [statistics.fmean(getattr(run, key) for run in per_run) for key in ("success", "group_success")]
        ends.append((*means, sum(each.reward for each in filled) / len(filled)))
    return Bounds(*zip(*ends, strict=True))


def _figure(of_whole_runs: list[float], interval: Interval) -> Figure:
    std = statistics.stdev(of_whole_runs) if len(of_whole_runs) > 1 else None
    return Figure(interval.estimate * 100.0, std, interval.scaled(100.0))


def _mean_by_difficulty(
    runs: Sequence[Mapping[str, bool]], difficulties: Mapping[str, int], environment: Description
) -> dict[int, RunSuccess]:
    """Return both scores over the tasks of each difficulty, ascending; difficulties without a rollout are left out."""
    levels = {}
    for difficulty in sorted(set(difficulties.values())):
        of_level = [{task: run[task] for task in run if difficulties.get(task) == difficulty} for run in runs]
        tasks, groups = success_rates(of_level), group_rates(of_level, environment)
        if tasks:
            success, group_success = (100.0 * statistics.fmean(rates.values()) for rates in (tasks, groups))
            levels[difficulty] = RunSuccess(success, group_success, len(tasks), len(groups))
    return levels
