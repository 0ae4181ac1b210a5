"""``@reward``: a plain function that grades an episode, alone or with others."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

from agent_environments.plain_values import plain_grade, scalar
from agent_environments.protocol import Broke, Grade, Requirement
from agent_environments.scale import Scale
from agent_environments.tools.function_tool import NAMED, OwnFunction
from loop_plumbing import deadline
from loop_plumbing.breakage import Raised, error_line, raised_as
from loop_plumbing.names import did_you_mean, explained, similar_names

JUDGE_PATIENCE_S = 2700.0
"""Seconds for all questions of an episode's, or a group's, rewards to a judge; with a reward's own time less than the
protocol's for a grade."""
OWN_NAMES = {
    "answer": "what the agent answered",
    "trajectory": "the episode's messages",
    "instance": "what the tools worked on",
    "judge": "the model that it may ask",
    "code_folder": "the files that the agent's code left",
}
"""Parameters that the episode fills, with the meaning of each; the task's fields fill all others."""
GROUP_NAMES = {
    "answers": "what the agents answered",
    "trajectories": "the episodes' messages",
    "rewards": "what the other rewards gave each",
    "judge": OWN_NAMES["judge"],
}
"""The same parameters for a reward that sees the whole group."""
DEADLINE_S, LONGEST_S = 600.0, 3000.0
"""Seconds for a call without a judge's time, unless the reward says otherwise; and the most that it may say."""


class NoGrade(ValueError):
    """A reward did not return a grade; ``place`` is the reward's file and line."""

    def __init__(self, message: str, place: str) -> None:
        super().__init__(message)
        self.place = place


class Reward(OwnFunction):
    """A function that grades an episode, made by :func:`reward`. Calling this object from Python calls the function."""

    def __init__(
        self,
        function: Callable[..., Any],
        weight: float = 1.0,
        name: str | None = None,
        scale: Sequence[float] | None = None,
        group: bool = False,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        super().__init__(function)
        self.name = name or self.__name__
        self.weight = weight
        self.group = group
        self.deadline_s = deadline_s
        self._own_names = GROUP_NAMES if group else OWN_NAMES
        self.scaled = scale is not None
        if not isinstance(weight, int | float) or not 0.0 <= weight < math.inf:
            raise ValueError(f"reward {self.name}: weight must be a number from 0 on, not {weight!r}")
        if not isinstance(deadline_s, int | float) or not 0.0 < deadline_s <= LONGEST_S:
            raise ValueError(f"reward {self.name}: deadline_s must be in (0, {LONGEST_S:g}], not {deadline_s!r}")
        with raised_as(ValueError, f"reward {self.name}: "):
            self._scale = Scale.of(scale)
        for parameter in self.passed.values():
            if parameter.kind not in NAMED:
                raise ValueError(f"reward {self.name}: parameter {parameter} must be one that can be passed by name")

    @property
    def takes_instance(self) -> bool:
        """Return whether the reward takes the instance on which the episode's tools worked."""
        return "instance" in self.passed

    @property
    def takes_judge(self) -> bool:
        """Return whether the reward asks the model that the config names."""
        return "judge" in self.passed

    @property
    def takes_code_folder(self) -> bool:
        """Return whether the reward reads the files that the agent's code left."""
        return "code_folder" in self.passed

    @property
    def takes_rewards(self) -> bool:
        """Return whether the reward takes the numbers of the other rewards for each episode of a group."""
        return self.group and "rewards" in self.passed

    @property
    def place(self) -> str:
        """``file:line`` of the reward's function; "" if the function is not written in Python."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        return "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"

    @property
    def task_fields(self) -> list[str]:
        """The names of the task's fields that the reward reads."""
        return [name for name in self.passed if name not in self._own_names]

    def check_task(self, task: Mapping[str, Any]) -> None:
        """Raise ValueError if a task lacks a parameter's value, or has a field with the name of an episode's value."""
        for parameter in self.passed.values():
            name = parameter.name
            if name in self._own_names and name in task:
                raise ValueError(
                    f"has a field {name!r}, but the {name!r} of reward {self.name} is {self._own_names[name]}; rename "
                    f'the field: TASKS = [{{"target": task.pop("{name}"), **task}} for task in TASKS], or for the '
                    "lines of a file 'for task in map(json.loads, open(FILE))'"
                )
            if name not in self._own_names and name not in task and parameter.default is parameter.empty:
                own, near = ", ".join(self._own_names), similar_names(name, [*self._own_names, *task])
                cure = f"; {did_you_mean(near)}" if near else ""
                if name in GROUP_NAMES:
                    cure = "; one that sees the whole group is @reward(group=True)"
                raise ValueError(f"has no field {name!r}, which reward {self.name} asks for beside {own}{cure}")

    def grade(self, task: Mapping[str, Any], **episode: Any) -> Grade:
        """Return the grade of an episode, computed in this process.

        Args:
            task: the task's fields.
            episode: a value for each of :data:`OWN_NAMES`.

        Raises:
            Raised, DeadlinePassed: the function raised, or took too long.
            NoGrade: the function returned something other than a number on its scale, True, False or a Grade. A
                reward of weight 0 may return any finite number.
        """
        result = self._called({**task, **episode})
        try:
            return self._grade_of(result)
        except ValueError as error:
            raise NoGrade(str(error), self.place) from error

    def grade_group(self, task: Mapping[str, Any], **episodes: Any) -> list[Grade]:
        """Return the grade of each episode of a group, computed in this process.

        Args:
            task: the task's fields.
            episodes: for each of :data:`GROUP_NAMES` except the judge, a list with one item per episode.

        An episode for which the function returned a value that :meth:`grade` refuses is ungradable; the grade's
        ``broke`` says so.

        Raises:
            Raised, DeadlinePassed: the function raised, or took too long.
            NoGrade: the function did not return a list with one value for each episode.
        """
        size = len(episodes["answers"])
        result = self._called({**task, **episodes})
        values = result.tolist() if hasattr(result, "tolist") else result
        if not isinstance(values, list | tuple):
            raise NoGrade(f"reward {self.name} returned {result!r:.80}, and not a list of {size} numbers", self.place)
        if len(values) != size:
            raise NoGrade(f"reward {self.name} returned {len(values)} numbers for a group of {size}", self.place)
        grades = []
        for place, value in enumerate(values):
            try:
                grades.append(plain_grade(self._grade_of(value)))
            except ValueError as error:
                what = error_line(Raised(f"{error}, for answer {place} of {size}", self.place))
                grades.append(Grade.of_ungradable(what, Broke(f"reward {self.name}", what)))
        return grades

    def _called(self, values: Mapping[str, Any]) -> Any:
        arguments = {name: values[name] for name in self.passed if name in values}
        return deadline.call(self.function, arguments, self.deadline_s)

    def _grade_of(self, result: Any) -> Grade:
        if isinstance(result, Grade):
            return result
        result = scalar(result)
        wrong = f"reward {self.name} returned {result!r}, which is not a number"
        if not isinstance(result, int | float) or (not math.isfinite(result) and self.weight == 0.0):
            raise ValueError(wrong)
        stated = {self.name: float(result)}
        if self.weight == 0.0:
            return Grade(0.0, False, metrics=stated)
        try:
            share = self._scale.share(float(result))
        except ValueError as error:
            plain = not self.scaled and math.isfinite(result)
            cure = "; one on another scale says so: @reward(scale=(LOW, HIGH))" if plain else ""
            raise ValueError(f"{wrong} from {self._scale.low:g} to {self._scale.high:g}{cure}") from error
        return Grade(share, share == 1.0, rewards=stated)


def together(grades: Sequence[tuple[Reward, Grade]]) -> Grade:
    """Return an episode's grade from the grades of its rewards: their weighted mean, and success if all succeed.

    A single reward's grade is the episode's grade; it names no parts unless the reward has a scale of its own.
    """
    counted = [(each.weight, grade) for each, grade in grades if each.weight > 0.0]
    ungradable = next((grade.ungradable for _, grade in counted if grade.ungradable is not None), None)
    if len(grades) == 1 and not grades[0][0].scaled:
        return replace(grades[0][1], rewards={})
    whole = sum(weight for weight, _ in counted)
    success = all(grade.success for _, grade in counted)
    mean = sum(weight * grade.reward for weight, grade in counted) / whole
    return Grade(
        min(1.0, mean),
        success,
        tuple(requirement for _, grade in counted for requirement in grade.requirements),
        ungradable,
        rewards={name: value for _, grade in counted for name, value in grade.rewards.items()},
        metrics={name: value for _, grade in grades for name, value in grade.metrics.items()},
    )


@overload
def reward(function: Callable[..., Any]) -> Reward: ...


@overload
def reward(
    *,
    weight: float = 1.0,
    name: str | None = None,
    scale: Sequence[float] | None = None,
    group: bool = False,
    deadline_s: float = DEADLINE_S,
) -> Callable[[Callable[..., Any]], Reward]: ...


@explained
def reward(
    function: Callable[..., Any] | None = None,
    *,
    weight: float = 1.0,
    name: str | None = None,
    scale: Sequence[float] | None = None,
    group: bool = False,
    deadline_s: float = DEADLINE_S,
) -> Reward | Callable[[Callable[..., Any]], Reward]:
    """Make a reward from a sync or async function.

    The function's parameters are filled by name: ``answer`` (the result of the terminal tool, or the text of the turn
    that called no tool; "" if there was neither), ``trajectory`` (the episode's messages, a list of {"role",
    "content"}), ``instance`` (on which the episode's tools worked), ``judge`` (asks the config's judge model, see
    :class:`~loop_contrib.judge.judge.Judge`), ``code_folder`` (the files that the agent's code left, name -> bytes),
    and any field of the task.

    It returns a number in [0, 1] (1 is success), True, False or a :class:`~agent_environments.protocol.Grade`.

    Args:
        weight: the reward's weight in the mean of all rewards, which is the episode's reward; 0 makes it only a metric.
        name: the reward's name in the record; by default the function's name.
        scale: the lowest and the highest number that the function returns, if these are not 0 and 1.
        group: whether the function sees all rollouts of the task at once and returns a list with a number for each
            rollout. Its parameters are then ``answers``, ``trajectories``, ``rewards`` (for each rollout the numbers of
            the other rewards, by name), ``judge`` and the task's fields.
        deadline_s: seconds for a call, without a judge's time; a longer call raises.
    """
    make = functools.partial(Reward, weight=weight, name=name, scale=scale, group=group, deadline_s=deadline_s)
    return make if function is None else make(function)


def grade_of(fields: Mapping[str, Any]) -> Grade:
    """Build a grade from the fields that a process has sent; the values are not checked."""
    requirements = tuple(Requirement(**each) for each in fields["requirements"])
    return Grade(**{**fields, "requirements": requirements, "broke": None, "tools": ()})
