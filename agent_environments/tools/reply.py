"""``@reply``: a function that answers the text of a turn, where an agent writes words instead of tool calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from agent_environments.tools.function_tool import OwnFunction, result_text
from agent_environments.tools.tool import DEADLINE_S
from loop_plumbing import deadline
from loop_plumbing.names import explained


class Reply(OwnFunction):
    """A function that answers a turn, made by :func:`reply`. Calling this object from Python calls the function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self.name = self.__name__
        if len(self.passed) != 1 + self.stateful:
            raise ValueError(f"reply {self.name} must take one parameter, the text of a turn")

    def run(self, text: str, instance: Any) -> str | None:
        """Answer the text of a turn in this process; None ends the episode.

        Raises:
            Raised, DeadlinePassed: the function raised, or took too long.
            ToolError: the result cannot be shown as text.
        """
        answer = deadline.call(functools.partial(self.bound(instance), text), {}, DEADLINE_S)
        return None if answer is None else result_text(answer, DEADLINE_S)


@explained
def reply(function: Callable[..., Any]) -> Reply:
    """Make a reply from a sync or async function; a reply from a method works on the episode's own instance.

    The function takes the text of a turn that calls no tool and returns the answering text; None ends the episode.
    """
    return Reply(function)
