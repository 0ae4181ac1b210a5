"""Turns rollouts into scores: whether an attempt solved its task, and both scores over runs, with their spread.

A task counts as solved when its environment says so, mostly when all its tests passed *and* the agent ended the episode
itself: one that ran into a limit of turns, context or time is over budget, which is a failure (LOOP, appendix D).

A rollout that was lost, through no fault of the agent, is neither a success nor a failure: all figures are over what
there is, and :class:`Bounds` say what they would be if all that is lost had failed or had succeeded.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from agent_environments.description import UNSAID, Description
from loop_formats.rollout import Rollout, sequence_texts
from loop_recipes.evaluation.goal_completion import (
    GoalCompletion,
    goal_completion,
    goal_completion_by_difficulty,
    group_success,
)
from loop_recipes.evaluation.statistics import Interval, rate_interval


@dataclass(frozen=True)
class TaskResult:
    """The rollout of one task in one run, or that it was lost.

    ``run`` counts from 0. ``success`` is the grader's verdict, ``solved`` whether the task counts as solved: as the
    environment says, and unless given as :data:`UNSAID` does.
    ``behavior`` holds the counts that the environment's figures are made of. ``failure`` says why the rollout was lost;
    the other fields are then empty. ``broke`` says where and in what the environment itself broke, as in the rollout.
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
    behavior: dict[str, int] | None = None
    failure: str | None = None
    solved: bool | None = None
    broke: dict[str, str] | None = None

    def __post_init__(self) -> None:
        if self.solved is None:
            object.__setattr__(self, "solved", UNSAID.solved(self.task_id, self.success, self.end_reason))

    @property
    def lost(self) -> bool:
        return self.failure is not None

    @property
    def over_budget(self) -> bool:
        """The agent did not end the episode itself."""
        return not self.lost and self.end_reason != "completed"

    @classmethod
    def from_rollout(cls, rollout: Rollout, *further: Rollout, environment: Description = UNSAID) -> TaskResult:
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
            behavior=environment.counts(rollout.task_id, sequence_texts(sequences)),
            solved=environment.solved(rollout.task_id, rollout.success, rollout.end_reason),
            broke=rollout.broke,
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields; ``broke`` only where something did."""
        return {name: value for name, value in asdict(self).items() if name != "broke" or value is not None}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TaskResult:
        """The inverse of :meth:`to_dict`; keys it does not know are ignored.

        Raises:
            TypeError: the data is no result.
        """
        if not isinstance(data.get("behavior"), dict | None):
            raise TypeError("behavior holds no counts")
        return cls(**{name: data[name] for name in cls.__dataclass_fields__ if name in data})


@dataclass(frozen=True)
class Figure:
    """A percentage: mean over the runs, their standard deviation (None for one run), bootstrap interval of the mean."""

    mean: float
    std: float | None
    interval: Interval


@dataclass(frozen=True)
class Bounds:
    """[low, high] of the means: what they would be if every lost rollout had failed, or had succeeded."""

    tgc: tuple[float, float]
    sgc: tuple[float, float]
    reward: tuple[float, float]


@dataclass(frozen=True)
class Score:
    """All figures of one policy under one way of sampling. ``per_run`` holds both scores of each run with a rollout.

    ``behavior`` holds the environment's figures by name, None where one is not defined, and the number of ``rollouts``.
    ``interactions`` is the mean number of agent turns; ``over_budget`` names rollouts as (task id, run), ``lost`` those
    that are in no figure, with the reason. ``bounds`` is None where nothing was lost.
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
    lost: list[tuple[str, int, str]]
    bounds: Bounds | None
    behavior: dict[str, float | None] | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def success_table(results: Iterable[TaskResult]) -> list[dict[str, bool]]:
    """For each run that has a rollout, ascending: task id -> solved; lost rollouts are left out."""
    runs: dict[int, dict[str, bool]] = {}
    for result in results:
        if not result.lost:
            runs.setdefault(result.run, {})[result.task_id] = bool(result.solved)
    return [runs[run] for run in sorted(runs)]


def success_rates(runs: Sequence[Mapping[str, bool]]) -> dict[str, float]:
    """Task id -> share of the runs that solved it, of those that have it."""
    solved: dict[str, list[bool]] = {}
    for run in runs:
        for task, success in run.items():
            solved.setdefault(task, []).append(success)
    return {task: sum(successes) / len(successes) for task, successes in solved.items()}


def group_rates(runs: Sequence[Mapping[str, bool]], environment: Description = UNSAID) -> dict[str, float]:
    """Group of tasks -> share of the runs that solved all of its tasks."""
    return success_rates([group_success(run, environment) for run in runs])


def score(
    results: Sequence[TaskResult],
    difficulties: Mapping[str, int] | None = None,
    environment: Description = UNSAID,
    *,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Score:
    """Score R runs over the same tasks.

    The intervals say how far the mean over runs could lie from that over all tasks of the kind: groups of tasks are
    resampled, each with all its tasks and runs. Figures by difficulty are means over the runs.

    Args:
        results: one per task and run; those that were lost included.
        difficulties: task id -> difficulty; figures by difficulty are left out without it.
        environment: groups the tasks, and says which figures of behaviour there are.

    Raises:
        ValueError: no rollout, or runs that do not cover the same tasks.
    """
    tasks, numbers = ({getattr(result, key) for result in results} for key in ("task_id", "run"))
    asked = {(result.task_id, result.run) for result in results}
    if not results or not len(results) == len(asked) == len(tasks) * len(numbers):
        raise ValueError("a score needs exactly one result for each task and run")
    runs = success_table(results)
    if not runs:
        raise ValueError("there is nothing to score: every rollout was lost")
    per_run = [goal_completion(run, environment) for run in runs]
    made = [result for result in results if not result.lost]
    lost = sorted((result.task_id, result.run, str(result.failure)) for result in results if result.lost)
    bootstrap: dict[str, Any] = {"level": level, "resamples": resamples, "seed": seed}
    return Score(
        runs=len(numbers),
        tasks=len(tasks),
        scenarios=len(set(map(environment.group_of, tasks))),
        tgc=_figure(
            [run.tgc for run in per_run], rate_interval(success_rates(runs), environment.group_of, **bootstrap)
        ),
        sgc=_figure([run.sgc for run in per_run], rate_interval(group_rates(runs, environment), str, **bootstrap)),
        per_run=per_run,
        by_difficulty=_mean_by_difficulty(runs, difficulties or {}, environment),
        reward=sum(result.reward for result in made) / len(made),
        interactions=sum(result.turns for result in made) / len(made),
        over_budget=sorted((result.task_id, result.run) for result in results if result.over_budget),
        lost=lost,
        bounds=score_bounds(results, environment) if lost else None,
        behavior=_behavior(made, environment),
    )


def _behavior(results: Sequence[TaskResult], environment: Description) -> dict[str, float | None] | None:
    """The environment's figures over the results that have counts; None where there are none."""
    counts = [result.behavior for result in results if result.behavior]
    if not counts:
        return None
    return {"rollouts": len(counts), **{figure.name: figure.value(counts) for figure in environment.figures}}


def score_bounds(results: Sequence[TaskResult], environment: Description = UNSAID) -> Bounds:
    """Of results as for :func:`score`."""
    ends = []
    for lost_as in (False, True):
        filled = [replace(each, failure=None, **_outcome(lost_as)) if each.lost else each for each in results]
        per_run = [goal_completion(run, environment) for run in success_table(filled)]
        reward = sum(each.reward for each in filled) / len(filled)
        ends.append(
            (statistics.fmean(run.tgc for run in per_run), statistics.fmean(run.sgc for run in per_run), reward)
        )
    return Bounds(*zip(*ends, strict=True))


def _outcome(solved: bool) -> dict[str, Any]:
    return {"reward": float(solved), "success": solved, "end_reason": "completed", "solved": solved}


def _figure(values: list[float], interval: Interval) -> Figure:
    std = statistics.stdev(values) if len(values) > 1 else None
    return Figure(statistics.fmean(values), std, interval.scaled(100.0))


def _mean_by_difficulty(
    runs: Sequence[Mapping[str, bool]], difficulties: Mapping[str, int], environment: Description
) -> dict[int, GoalCompletion]:
    levels: dict[int, list[GoalCompletion]] = {}
    for run in runs:
        for difficulty, completion in goal_completion_by_difficulty(run, difficulties, environment).items():
            levels.setdefault(difficulty, []).append(completion)
    return {
        difficulty: GoalCompletion(
            tgc=statistics.fmean(run.tgc for run in levels[difficulty]),
            sgc=statistics.fmean(run.sgc for run in levels[difficulty]),
            tasks=max(run.tasks for run in levels[difficulty]),
            scenarios=max(run.scenarios for run in levels[difficulty]),
        )
        for difficulty in sorted(levels)
    }
