"""The model that tau2-bench asks to play the user: a stand-in of litellm, whose answers come from outside.

To be imported before the package. It also stands in for pandas, which the package imports for tables of results.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any


class UserAsked(Exception):
    """The play needs an answer of the user's model first. ``body`` is the body of the request to that model."""

    def __init__(self, body: dict[str, Any]) -> None:
        super().__init__("the user's model is asked")
        self.body = body


class NoAnswer(Exception):
    """The user's model has no answer to this conversation."""


class UserModel:
    """Gives completions of the model that plays the user: first the stored answers, then it raises UserAsked.

    If an answer is empty, the package asks for the same message several times.
    """

    def __init__(self) -> None:
        self.answers: list[dict[str, Any] | None] = []
        self._given = 0

    def again(self) -> None:
        """Give the stored answers from the first one again."""
        self._given = 0

    def completion(self, messages: list[Any], tools: Any = None, tool_choice: Any = None, **options: Any) -> Any:
        """Return the next stored answer in place of ``litellm.completion``. Raises UserAsked if there is none."""
        if self._given == len(self.answers):
            offered = {"tools": tools, "tool_choice": tool_choice} if tools else {}
            sampling = {name: options[name] for name in ("temperature", "seed") if name in options}
            raise UserAsked({"messages": messages, **offered, **sampling})
        answer = self.answers[self._given]
        self._given += 1
        if answer is None:
            raise NoAnswer("the user's model has no answer to this conversation")
        calls = [
            SimpleNamespace(id=call["id"], function=SimpleNamespace(name=call["name"], arguments=call["arguments"]))
            for call in answer["calls"]
        ]
        message = SimpleNamespace(role="assistant", content=answer["content"], tool_calls=calls)
        choice = SimpleNamespace(message=message, finish_reason="stop", to_dict=dict)
        return SimpleNamespace(choices=[choice], model="", get=lambda name: None)


USER_MODEL = UserModel()


def _stand_in(name: str, **attributes: Any) -> None:
    module = ModuleType(name)
    vars(module).update(attributes)
    sys.modules[name] = module


# Imports of the package that these worlds do not need: clients of language models, and tables of results.
_stand_in(
    "litellm",
    completion=USER_MODEL.completion,
    completion_cost=lambda completion_response: 0.0,
    disable_cache=lambda: None,
)
_stand_in("litellm.caching")
_stand_in("litellm.caching.caching", Cache=None)
_stand_in("litellm.main", ModelResponse=None, Usage=None)
_stand_in("pandas", DataFrame=None)
