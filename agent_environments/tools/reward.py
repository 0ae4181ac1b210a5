"""``@reward``: a plain function that grades an episode."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from agent_environments.protocol import Grade
from agent_environments.tools import deadline

OWN_NAMES = ("answer", "trajectory", "instance")
"""Parameters that are filled from the episode; all others from the task's fields."""
DEADLINE_S = 600.0
"""For a call; the node itself waits 300 s for a grade."""


class Reward:
    """A function that grades an episode; :func:`reward` makes it. Called from Python it is the function itself."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.name = function.__name__
        self._parameters = inspect.signature(function).parameters
        for parameter in self._parameters.values():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise ValueError(f"reward {self.name}: parameter {parameter} must be one that can be passed by name")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    @property
    def takes_instance(self) -> bool:
        """Whether it is given the instance that the episode's tools worked on."""
        return "instance" in self._parameters

    def missing(self, task: Mapping[str, Any]) -> list[str]:
        """The parameters that neither an episode nor ``task`` has a value for."""
        known = {*OWN_NAMES, *task}
        return [
            parameter.name
            for parameter in self._parameters.values()
            if parameter.name not in known and parameter.default is parameter.empty
        ]

    async def grade(self, task: Mapping[str, Any], **episode: Any) -> Grade:
        """The grade of an episode.

        Args:
            task: the task's fields.
            episode: a value for each of :data:`OWN_NAMES`.

        Raises:
            Raised, DeadlinePassed: of the function.
            ValueError: it returned something else than a number in [0, 1], True, False or a Grade.
        """
        values = {**task, **episode}
        arguments = {name: values[name] for name in self._parameters if name in values}
        result = await deadline.call(self.function, arguments, DEADLINE_S)
        if isinstance(result, Grade):
            return result
        if getattr(result, "shape", None) == ():
            result = result.item()  # numpy's numbers, and torch's
        if not isinstance(result, int | float) or not 0.0 <= result <= 1.0:
            raise ValueError(f"reward {self.name} returned {result!r}, which is no number from 0 to 1")
        return Grade(float(result), result >= 1.0)


def reward(function: Callable[..., Any]) -> Reward:
    """Makes a reward of a function, sync or async.

    Its parameters are filled by name: ``answer`` (what the terminal tool returned, or the text of the turn that called
    no tool; "" if there was neither), ``trajectory`` (the episode's messages, a list of {"role", "content"}),
    ``instance`` (the one that the episode's tools worked on), and any field of the task.

    It returns a number in [0, 1], where 1 is success; True or False; or a :class:`~agent_environments.protocol.Grade`.
    """
    return Reward(function)
