"""The common part of the clients of both protocols: HTTP, the token, and the words of a served episode."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import aiohttp

from agent_environments.description import TOOLS_BEHAVIOR, Description
from agent_environments.lost_worlds import Loss, WorldLost
from agent_environments.protocol import EnvironmentCrashed, Message, TokenSpans
from agent_environments.remote.episode import RemotePool
from agent_environments.remote.line import LineStuck, RequestFailed, WorldLine
from agent_environments.scale import Scale
from loop_contrib.services.sessions import UNKNOWN_SESSION
from loop_plumbing.secret import read_secret

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "SERVE_ENVIRONMENT_TOKEN"
MAX_MESSAGE_BYTES = 16 << 20
MAX_OPENING_CHARACTERS = 1 << 19
"""Characters of all messages that open an episode: more than any policy here can read."""
MAX_REMINDER_CHARACTERS = 4000
"""A longer reminder is cut with the observation that it ends."""
MAX_ERROR_CHARACTERS = 1000

PROBE_S = 10.0
"""Seconds for a new session, while one request is not answered."""


class NoSuchPath(WorldLost):
    """The service does not serve this path."""

    def __init__(self, why: str) -> None:
        super().__init__(why, Loss.CUT)


class NoSuchField(RequestFailed):
    """An observation lacks the field that should hold its text according to the config."""


class NoPlace(WorldLost):
    """The service has no free session."""

    def __init__(self, why: str) -> None:
        super().__init__(why, Loss.REFUSED)


class ServicePool(RemotePool):
    """Lends episodes that a service plays; the service may be on another machine.

    An assistant message is sent unchanged. If the service names no opening messages, its first text follows the system
    message ``instructions``; if that text is empty, ``instructions`` are the question. The token is read from the
    variable :data:`TOKEN_VARIABLE`, if it is set.

    Args:
        token_spans: the policy's tokenizer, which cuts observations.
        url: URL of the service, ``http://host:port``.
        dataset: the name printed with every score.
        splits: split -> [first, end) of its tasks' numbers, if the service names no tasks.
        instructions: system message, if the service gives none.
        action_field: field with an action's text, if the service uses its own name.
        observation_field: field with an observation's text, if the service uses its own name.
        rewards: for a service without grades: an episode earns its ``last`` reward, or the ``sum`` of all.
        scale: lowest and highest possible earnings of an episode; None is [0, 1].
        max_worlds, observation_max_tokens: as for any remote pool.
        step_timeout_s: time for one command (with the grade if it ends the episode), and for a grade alone.
        start_timeout_s: time for a task to start, and for a service that is gone or cuts connections to come back.
    """

    description = Description(behavior=(TOOLS_BEHAVIOR,))

    def __init__(
        self,
        token_spans: TokenSpans,
        url: str,
        dataset: str,
        splits: Mapping[str, Sequence[Any]] | None = None,
        instructions: str = "",
        action_field: str | None = "action",
        observation_field: str = "text",
        rewards: Literal["last", "sum"] = "last",
        scale: Sequence[float] | None = None,
        max_worlds: int = 64,
        observation_max_tokens: int = 3000,
        step_timeout_s: float = 180.0,
        start_timeout_s: float = 300.0,
    ) -> None:
        super().__init__(dataset, token_spans, max_worlds, observation_max_tokens, step_timeout_s, start_timeout_s)
        if rewards not in ("last", "sum"):
            raise ValueError(f"rewards is last or sum, not {rewards!r}")
        self._sums = rewards == "sum"
        self._scale = Scale.of(scale)
        self.url = url.rstrip("/")
        self.action_field = action_field
        self.observation_field = observation_field
        self.field_is_known = False
        """True if the service's schema has this field: an observation that lacks it has no text."""
        self._ranges = splits
        self._instructions = instructions
        self._http: aiohttp.ClientSession | None = None
        self._lines: set[WorldLine] = set()
        self._warned_of_rewards = False

    @property
    def http(self) -> aiohttp.ClientSession:
        if self._http is None:
            raise EnvironmentCrashed("the pool is not open")
        return self._http

    async def open(self) -> None:
        """Ask the service for its tasks.

        Raises:
            EnvironmentCrashed: the service cannot be reached or does not speak the protocol.
        """
        token = read_secret(TOKEN_VARIABLE)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # No proxy, no time-out of its own (every call has a deadline), and no fewer connections than episodes.
        self._http = aiohttp.ClientSession(
            headers=headers, timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0)
        )
        try:
            async with asyncio.timeout(self.start_timeout_s):
                self._know(await self._tasks())
        except (WorldLost, TimeoutError, KeyError, TypeError, ValueError) as error:
            await self.close()
            raise EnvironmentCrashed(f"the environment service at {self.url} gives no tasks: {error!r}") from error

    async def _tasks(self) -> Mapping[str, list[str]]:
        """Return split -> task ids."""
        raise NotImplementedError

    async def request(self, method: str, path: str, **arguments: Any) -> Any:
        """Send an HTTP request; raises WorldLost (``CUT``) unless the answer is JSON with status 200."""
        try:
            async with self.http.request(method, self.url + path, **arguments) as response:
                if response.status in (404, 405, 501):
                    raise NoSuchPath(f"{method} {path} is not served")
                body = await _body(response)
                if response.status != 200:
                    text = body[:200].decode(errors="replace")
                    raise WorldLost(f"{method} {path} has status {response.status}: {text}", Loss.CUT)
                return json.loads(body)
        except (aiohttp.ClientError, OSError, ValueError, RecursionError) as error:
            raise WorldLost(f"{method} {path}: {error!r}", Loss.CUT) from error

    def opening(self, answer: dict[str, Any]) -> list[Message]:
        system = [Message("system", self._instructions)] if self._instructions else []
        own = [Message(message["role"], message["content"]) for message in answer["messages"]]
        first = Message("user", answer["observation"] or self._instructions)
        messages = own or ([*system, first] if answer["observation"] else [first])
        size = sum(len(message.content) for message in messages)
        if size > MAX_OPENING_CHARACTERS:
            raise EnvironmentCrashed(
                f"the service at {self.url} opens with {size} characters; {MAX_OPENING_CHARACTERS} are the most"
            )
        return messages

    def text_of(self, observation: Mapping[str, Any]) -> str:
        """Return the text in a service's observation. Raises NoSuchField, with the existing fields, if it has none."""
        if self.observation_field not in observation and not self.field_is_known:
            there = ", ".join(sorted(observation))
            raise NoSuchField(f"there is no {self.observation_field!r}: set observation_field to one of {there}")
        text = _text_of(observation.get(self.observation_field))
        rest = {name: value for name, value in observation.items() if value is not None and name != "metadata"}
        return text or (_text_of(rest) if rest and self.field_is_known else "")

    def reward_of(self, value: Any, before: float | None) -> float | None:
        """Return an episode's earnings after the service's reward ``value``. ``before`` are the earnings so far. Raises
        WorldLost if ``value`` is not a number, a truth value or None."""
        if value is None:
            return before
        try:
            reward = float(value)
        except (TypeError, ValueError, OverflowError):
            reward = math.nan
        if not math.isfinite(reward):
            raise WorldLost(f"the service's reward is not a finite number: {str(value)[:200]}", Loss.CUT)
        return reward + (before or 0.0) if self._sums else reward

    def grade_of(self, reward: float | None, done: bool) -> dict[str, Any]:
        """Return the grade for a service that sends only rewards: the earnings on the scale, 0 before the first reward.
        If the service ended the episode without a reward, the episode is ungradable, unlike one with reward 0.
        """
        if reward is None:
            why = {"ungradable": "the service ended the episode without any reward"} if done else {}
            return {"reward": 0.0, "success": False, **why}
        low, high = self._scale.low, self._scale.high
        if not low <= reward <= high and not self._warned_of_rewards:
            self._warned_of_rewards = True
            logger.warning(
                "the service at %s gave the reward %g, and all beyond %g and %g count as these: set scale if its "
                "rewards are on another one, and rewards: sum if they are what each step adds to a score",
                *(self.url, reward, low, high),
            )
        share = self._scale.share(min(high, max(low, reward)))
        return {"reward": share, "success": share == 1.0}

    def command(self, message: str) -> str:
        """Return the whole message. An empty message is an action too, and the service must answer it."""
        return message

    async def lease(self) -> WorldLine:
        """Open a separate line for one episode.

        Raises:
            WorldLost: there is no connection. No episode is blamed for it, whatever its last action was, because all
                episodes lose the service. The service itself must prevent harm by agents.
            EnvironmentCrashed: the pool is closed.
        """
        if self._closing:
            raise EnvironmentCrashed("the pool is closed")
        deadline_s = self.start_timeout_s
        try:
            async with asyncio.timeout(deadline_s):
                line = await self._connect()
        except TimeoutError as error:
            raise WorldLost(f"no connection to {self.url} within {deadline_s:g} s", Loss.REFUSED) from error
        except (WorldLost, RequestFailed) as error:
            raise WorldLost(f"no connection to {self.url}: {error}", Loss.REFUSED) from error
        self._lines.add(line)
        return line

    async def answers(self) -> bool:
        """Return whether the service works: it gives a session, or says that it has none left."""
        try:
            async with asyncio.timeout(PROBE_S):
                line = await self._connect()
        except NoPlace:
            return True
        except (WorldLost, RequestFailed, TimeoutError):
            return False
        with contextlib.suppress(WorldLost, LineStuck, RequestFailed):
            await line.call(PROBE_S, "close")
        await line.hang_up()
        return True

    async def _connect(self) -> WorldLine:
        """Open a line. Raises WorldLost without a connection, RequestFailed if the service refuses."""
        raise NotImplementedError

    async def give_back(self, line: WorldLine) -> None:
        self._lines.discard(line)
        await line.hang_up()

    async def _close_lines(self) -> None:
        for line in list(self._lines):
            await self.give_back(line)
        if self._http is not None:
            await self._http.close()


class ServiceLine(WorldLine):
    """The line to one episode of a service. It also keeps the rewards that the episode has earned."""

    def __init__(self, pool: ServicePool) -> None:
        super().__init__(pool.losses)
        self._pool = pool
        self._earned: float | None = None
        self._done = False
        self._cut = False

    @property
    def alive(self) -> bool:
        return not self._cut

    def kill(self) -> None:
        """Send nothing more on this line. The service will end the open session at a time of its choice."""
        self._cut = True

    def _observed(self, observation: Mapping[str, Any], done: object, reward: Any) -> dict[str, Any]:
        """Return a step's answer, made from the observation, ``done`` and reward that the service sent."""
        self._done = bool(done)
        self._earned = self._pool.reward_of(reward, self._earned)
        return {"observation": self._pool.text_of(observation), "done": self._done, **flags_of(observation)}


async def _body(response: aiohttp.ClientResponse) -> bytes:
    """Read the body; raises ValueError if it is too long."""
    body = bytearray()
    async for chunk in response.content.iter_chunked(1 << 16):
        body += chunk
        if len(body) > MAX_MESSAGE_BYTES:
            raise ValueError(f"the answer has more than {MAX_MESSAGE_BYTES} bytes")
    return bytes(body)


def failure(message: str, reason: object) -> RequestFailed | WorldLost:
    """Return the exception for a service's error: WorldLost for an unknown session, RequestFailed for all else."""
    message = message[:MAX_ERROR_CHARACTERS]
    if reason == UNKNOWN_SESSION:  # the service was started again, or the session was idle for too long
        return WorldLost(message, Loss.GONE)
    return RequestFailed(message, reason if isinstance(reason, str) else None)


OWN_FIELDS = ("failed", "empty_action", "reminder", "reason", "turn_reward")
"""Fields of an observation that say more than its text; a service of ours sends all of them, any other may mean another
thing by one of them."""


def is_ours(observation: Mapping[str, Any]) -> bool:
    """Return whether the observation comes from a service of this project, which sends messages and grades."""
    return observation.keys() >= set(OWN_FIELDS)


def flags_of(observation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a step's answer other than text and reward."""
    if not is_ours(observation):
        return {"failed": False, "empty_action": False, "reminder": "", "reason": None, "turn_reward": None}
    reminder = str(observation["reminder"])
    return {
        "failed": bool(observation["failed"]),
        "empty_action": bool(observation["empty_action"]),
        "reminder": reminder if len(reminder) <= MAX_REMINDER_CHARACTERS else "",
        "reason": observation["reason"],
        "turn_reward": observation["turn_reward"],
    }


def _text_of(value: Any) -> str:
    """Return an observation as text: the texts of its messages and parts on separate lines, anything else as JSON."""
    match value:
        case str():
            return value
        case None:
            return ""
        case {"content": inner} | {"text": inner}:
            return _text_of(inner)
        case list() if all(
            isinstance(one, str) or (isinstance(one, dict) and one.keys() & {"content", "text"}) for one in value
        ):
            return "\n".join(map(_text_of, value))
    return json.dumps(value, ensure_ascii=False)
