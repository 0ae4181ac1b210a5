"""What the clients of both protocols share: HTTP, the token, and the words of a served episode."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import aiohttp

from agent_environments.protocol import EnvironmentCrashed, Message, TokenSpans
from agent_environments.remote.line import Line, LineLost
from agent_environments.remote.pool import RemotePool
from agent_environments.secret import read_secret

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "SERVE_ENVIRONMENT_TOKEN"
MAX_MESSAGE_BYTES = 64 << 20


RETRY_S = 1.0
"""Pause after a connection that was not to be had."""


class NoSuchPath(LineLost):
    """The service does not serve this."""


class ServicePool(RemotePool):
    """Lends episodes that a service plays; the service may be on another machine.

    An assistant message is sent as it is. A service that does not name its own opening messages gives one text, which
    follows ``instructions``. The token is read from :data:`TOKEN_VARIABLE`, if it is set.

    Args:
        token_spans: the policy's tokenizer, for cutting observations.
        url: of the service, ``http://host:port``.
        dataset: the name printed with every score.
        instructions: system message where the service gives none.
        action_field: name of an action's text, where the service has its own.
        observation_field: name of an observation's text, where the service has its own.
        max_worlds, observation_max_tokens: as for any remote pool.
        step_timeout_s: time for one command, with the grade if it ends the episode, and for a grade.
        start_timeout_s: time for a task to start, and for a service that went away to come back.
    """

    def __init__(
        self,
        token_spans: TokenSpans,
        url: str,
        dataset: str,
        instructions: str = "",
        action_field: str = "action",
        observation_field: str = "text",
        max_worlds: int = 64,
        observation_max_tokens: int = 3000,
        step_timeout_s: float = 180.0,
        start_timeout_s: float = 300.0,
    ) -> None:
        super().__init__(dataset, token_spans, max_worlds, observation_max_tokens, step_timeout_s, start_timeout_s)
        self.url = url.rstrip("/")
        self.action_field = action_field
        self.observation_field = observation_field
        self._instructions = instructions
        self._http: aiohttp.ClientSession | None = None
        self._lines: set[Line] = set()
        self._told_of_rewards = False

    @property
    def http(self) -> aiohttp.ClientSession:
        if self._http is None:
            raise EnvironmentCrashed("the pool is not open")
        return self._http

    async def open(self) -> None:
        """Ask the service for its tasks.

        Raises:
            EnvironmentCrashed: it cannot be reached, or does not speak the protocol.
        """
        token = read_secret(TOKEN_VARIABLE)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # No proxy, no time-out of its own (every call has a deadline), and no fewer connections than episodes.
        self._http = aiohttp.ClientSession(
            headers=headers, timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0)
        )
        try:
            async with asyncio.timeout(self.rules.start_timeout_s):
                self._know(await self._tasks())
        except (LineLost, TimeoutError, KeyError, TypeError, ValueError) as error:
            await self.close()
            raise EnvironmentCrashed(f"the environment service at {self.url} gives no tasks: {error!r}") from error

    async def _tasks(self) -> Mapping[str, list[str]]:
        """Split -> task ids."""
        raise NotImplementedError

    async def request(self, method: str, path: str, **arguments: Any) -> Any:
        """One HTTP request; raises LineLost for whatever is no answer in JSON with status 200."""
        try:
            async with self.http.request(method, self.url + path, **arguments) as response:
                text = await response.text()
                if response.status in (404, 405):
                    raise NoSuchPath(f"{method} {path} is not served")
                if response.status != 200:
                    raise LineLost(f"{method} {path} has status {response.status}: {text[:200]}")
                return await response.json()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise LineLost(f"{method} {path}: {error!r}") from error

    def opening(self, answer: dict[str, Any]) -> list[Message]:
        if messages := answer["messages"]:
            return [Message(message["role"], message["content"]) for message in messages]
        system = [Message("system", self._instructions)] if self._instructions else []
        return [*system, Message("user", answer["observation"])]

    def text_of(self, observation: Mapping[str, Any]) -> str:
        """The text in a service's observation; raises LineLost, which names the fields there are."""
        if self.observation_field not in observation:
            there = ", ".join(sorted(observation))
            raise LineLost(f"there is no {self.observation_field!r}: set observation_field to one of {there}")
        return str(observation[self.observation_field])

    def reward_of(self, value: Any) -> float:
        """A service's reward as ours: in [0, 1]; it may be missing or a truth value."""
        reward = float(value or 0.0)
        if reward > 1.0 and not self._told_of_rewards:
            self._told_of_rewards = True
            logger.warning(
                "the service at %s gave the reward %g, and all above 1 count as 1: grades are wrong if its rewards are "
                "on another scale, or are what each step adds to a score",
                *(self.url, reward),
            )
        return min(1.0, max(0.0, reward))

    def command(self, message: str) -> str:
        """All of it; an empty message is an action too, which the service has to answer."""
        return message

    async def lease(self) -> Line:
        """A line of its own for one episode. Waits for a service that is not there: it may be starting again.

        Raises:
            EnvironmentCrashed: it did not come in time. It is gone for all: no episode is charged with it, whatever it
                did last. What an agent can do to a service is the service's to prevent.
        """
        deadline_s = self.rules.start_timeout_s
        why = "it takes none"
        try:
            async with asyncio.timeout(deadline_s):
                while not self._closing:
                    try:
                        line = await self._connect()
                    except LineLost as error:
                        why = str(error)
                        await asyncio.sleep(RETRY_S)
                    else:
                        self._lines.add(line)
                        return line
        except TimeoutError as error:
            raise EnvironmentCrashed(f"no connection to {self.url} within {deadline_s:g} s: {why}") from error
        raise EnvironmentCrashed("the pool is closed")

    async def _connect(self) -> Line:
        """Raises LineLost."""
        raise NotImplementedError

    async def give_back(self, line: Line) -> None:
        self._lines.discard(line)
        await line.hang_up()

    async def _close_lines(self) -> None:
        for line in list(self._lines):
            await self.give_back(line)
        if self._http is not None:
            await self._http.close()


def flags_of(observation: Mapping[str, Any]) -> dict[str, Any]:
    """What a service of ours says of a step besides its text and reward."""
    return {
        "failed": bool(observation.get("failed", False)),
        "empty_action": bool(observation.get("empty_action", False)),
        "reminder": str(observation.get("reminder", "")),
        "reason": observation.get("reason"),
    }
