"""A model behind a chat endpoint that an environment asks: the human of ColBench, the judge of a reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

import aiohttp
from pydantic.dataclasses import dataclass

from agent_environments.protocol import EnvironmentCrashed
from loop_contrib.chat_client import ChatClient, Completion, NoCompletion, Patience
from loop_formats.schema import STRICT, from_mapping
from loop_plumbing.agent_timeout import paused_agent_timeout
from loop_plumbing.breakage import raised_as
from loop_plumbing.secret import read_secret
from loop_plumbing.urls import url_problem

PATIENCE = Patience(tries=5, busy_s=1800.0)
"""Patience with one question."""
MAX_TIMEOUT_S = 600.0
"""Highest ``timeout_s``: a text without an answer, and the greeting after it, then fit into a judge's time."""


@dataclass(frozen=True, config=STRICT)
class ChatEndpoint:
    """The endpoint of a model, ``POST <url>/chat/completions``. Raises ValueError if a setting is wrong."""

    url: str
    """The address without ``/chat/completions``."""
    model: str
    """The name of the model there."""
    api_key_env: str | None = "OPENAI_API_KEY"
    """The environment variable that holds the key; null sends none."""
    timeout_s: float = 120.0
    """Seconds until one answer must be there."""
    request: Mapping[str, Any] = field(default_factory=dict)
    """Keys that are merged into the body of every request."""

    def __post_init__(self) -> None:
        if (problem := url_problem(self.url)) is not None:
            raise ValueError(f"url {problem}")
        if self.api_key_env is not None and not read_secret(self.api_key_env):
            raise ValueError(f"set the environment variable {self.api_key_env}, or api_key_env to null")
        if not 0.0 < self.timeout_s <= MAX_TIMEOUT_S:
            raise ValueError(f"timeout_s must be above 0 and at most {MAX_TIMEOUT_S:g}")

    @classmethod
    def of(cls, name: str, options: Mapping[str, Any]) -> ChatEndpoint:
        """Read an endpoint from the config section ``name``. Raises ValueError, one line that begins with ``name``."""
        return from_mapping(cls, options, name)


class ChatModel:
    """Answers one text or one conversation at a time, at temperature 0. The agent's time stands still meanwhile.

    If the model refuses a text, fails on it or stays silent, the answer is "". A greeting, which does not depend on the
    agent, then tests whether the model works at all. So an agent cannot void an episode with a text that breaks the
    model. If the model is busy, the request waits.
    """

    def __init__(self, name: str, endpoint: ChatEndpoint) -> None:
        self._name = name
        self._endpoint = endpoint
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Connect to the model. Raises EnvironmentCrashed if the model does not answer a greeting."""
        key = read_secret(self._endpoint.api_key_env) if self._endpoint.api_key_env is not None else ""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = aiohttp.ClientTimeout(total=self._endpoint.timeout_s)
        self._session = aiohttp.ClientSession(headers=headers, timeout=timeout)
        try:
            await self._say_hello()
        except EnvironmentCrashed:
            await self.close()
            raise

    async def ask(self, text: str) -> str:
        """Return the model's answer; "" if it has none to this text. Raises EnvironmentCrashed if the model does not
        even answer a greeting, or is busy for longer than :data:`PATIENCE`."""
        completion = await self.reply({"messages": [{"role": "user", "content": text}]})
        return "" if completion is None else completion.text.strip()

    async def reply(self, body: Mapping[str, Any]) -> Completion | None:
        """Return the answer to a request, which may offer tools; None without one. Raises as :meth:`ask`."""
        with paused_agent_timeout():
            try:
                completion = await self._complete(body)
            except NoCompletion as error:
                if error.busy:
                    raise EnvironmentCrashed(f"the {self._name} is busy: {error}") from error
                completion = None
            if completion is None or not (completion.text.strip() or completion.tool_calls):
                await self._say_hello()
        return completion

    async def _say_hello(self) -> None:
        with raised_as(EnvironmentCrashed, f"the {self._name} does not answer: ", NoCompletion):
            completion = await self._complete({"messages": [{"role": "user", "content": "Say hello."}]})
        if not completion.text.strip():
            cure = ", for its thinking is cut: raise request.max_tokens" if completion.cut_in_thinking else ""
            raise EnvironmentCrashed(f"the {self._name} at {self._endpoint.url} does not answer: it says nothing{cure}")

    async def _complete(self, body: Mapping[str, Any]) -> Completion:
        if self._session is None:
            raise EnvironmentCrashed(f"the {self._name} is not there: the pool is not open")
        client = ChatClient(self._session, self._endpoint.url)
        request = {"model": self._endpoint.model, "temperature": 0, **body}
        return await client.complete({**request, **self._endpoint.request}, PATIENCE)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None
