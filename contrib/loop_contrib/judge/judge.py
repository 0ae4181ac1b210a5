"""``judge``, a parameter of rewards: a model that grades texts that no program can grade."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any

from agent_environments.protocol import EnvironmentCrashed
from loop_contrib.chat_model import ChatEndpoint, ChatModel
from loop_plumbing import deadline, running_time


class Judge:
    """A model that an async reward can ask: ``answer = await judge("...")``. Meanwhile the reward's time stands still.

    Args:
        options: the arguments of :class:`~loop_contrib.chat_model.ChatEndpoint`.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._endpoint = ChatEndpoint.of("judge", options)
        self._model: ChatModel | None = None
        self._crashed: EnvironmentCrashed | None = None
        self._until: float | None = None

    @staticmethod
    def variables_of(options: Mapping[str, Any]) -> dict[str, str]:
        """Return the environment variables that a judge needs, by name. Raises ValueError for a wrong option."""
        name = ChatEndpoint.of("judge", options).api_key_env
        return {} if name is None else {name: os.environ[name]}

    def answer_within(self, seconds: float) -> None:
        """Set a deadline, ``seconds`` from now. A judge that has not answered by then counts as away."""
        self._until = running_time.now() + seconds

    async def __call__(self, text: str) -> str:
        """Return the answer to a text.

        Raises:
            ValueError: the judge is there and has no answer to this text, perhaps because of what the agent wrote.
            EnvironmentCrashed: the judge is away, or busy for too long.
        """
        try:
            with deadline.paused():
                answer = await self._ask(text)
        except EnvironmentCrashed as error:
            self._crashed = error
            raise
        if not answer:
            raise ValueError("the judge has no answer to this text")
        return answer

    async def _ask(self, text: str) -> str:
        try:
            async with asyncio.timeout_at(self._until):
                if self._model is None:
                    model = ChatModel("judge", self._endpoint)
                    await model.open()
                    self._model = model
                return await self._model.ask(text)
        except TimeoutError:
            raise EnvironmentCrashed("the judge does not answer in time, or is busy") from None

    def check(self) -> None:
        """Raise EnvironmentCrashed if the judge was away since the last check, even if the reward caught that error."""
        crashed, self._crashed = self._crashed, None
        if crashed is not None:
            raise crashed
