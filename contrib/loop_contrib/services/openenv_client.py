"""A pool on a service that speaks OpenEnv: tasks by its Task API or by seeds, one WebSocket an episode.

Facts of the protocol are of the package ``openenv`` 0.10: only ``/ws`` holds an episode; plain HTTP makes a new one for
each request. A server with as many sessions as it can have (one, unless it says otherwise) sends an error and closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import aiohttp

from agent_environments.lost_worlds import Loss, WorldLost
from agent_environments.observation import FAILURE_HEAD
from agent_environments.protocol import TokenSpans
from agent_environments.remote.line import LineStuck, RequestFailed, WorldLine
from loop_contrib.services.service_pool import (
    MAX_ERROR_CHARACTERS,
    MAX_MESSAGE_BYTES,
    NoPlace,
    NoSuchField,
    NoSuchPath,
    ServiceLine,
    ServicePool,
    failure,
    flags_of,
    is_ours,
)
from loop_plumbing import running_time

logger = logging.getLogger(__name__)

CLOSING = aiohttp.ClientWSTimeout(ws_close=5.0)
NO_SESSION = "CAPACITY_REACHED"
PLACE_PAUSE_S = 0.5
"""Seconds between two tries of the first episode that waits for a session."""
COMMON_FIELDS = ("done", "reward", "metadata")
"""Fields that every observation of OpenEnv has beside its own, and an action ``metadata``."""
NAME_OBJECTIONS = ("missing", "extra_forbidden")
"""Kinds of a server's objections to the name of a field, which is the config's, and not the policy's."""


class ActionRefused(Exception):
    """The service refuses this action and says why. The episode goes on."""


class OpenEnvPool(ServicePool):
    """Lends episodes of an OpenEnv service.

    A task has the service's id if that id is unique, or else ``<split>_<index>``. It is started by split and index.
    If the service has no session left, episodes wait for one.

    Args:
        reset: additional arguments of every ``reset``.
        options: as for :class:`ServicePool`. For a service without tasks, ``splits`` are ranges of seeds, with tasks
            ``seed_<n>``, or lists of ``reset`` arguments, one object for each task. If ``action_field`` is None, the
            policy writes an action as a JSON object with all fields.
    """

    def __init__(
        self,
        token_spans: TokenSpans,
        url: str,
        dataset: str,
        reset: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(token_spans, url, dataset, **options)
        self._reset = dict(reset or {})
        self.places: dict[str, dict[str, Any]] = {}
        """Task id -> what it is started with."""
        self.crowded = False
        """True once the service has refused a session because it had no more."""
        self._queue = asyncio.Lock()

    async def _tasks(self) -> Mapping[str, list[str]]:
        if self._ranges is not None:
            with contextlib.suppress(NoSuchPath):
                await self.request("GET", "/health")
            await self._check_fields()
            by_split = {split: self._places_in(split, those) for split, those in self._ranges.items()}
            self.places = {task: self._reset | place for each in by_split.values() for task, place in each.items()}
            await self._look_at_seeds()
            return {split: list(each) for split, each in by_split.items()}
        try:
            (name, *_) = await self.request("GET", "/list_environments")
            splits = await self._named_tasks(name)
        except NoSuchPath:
            raise ValueError("it has no Task API: set splits to ranges of its seeds") from None
        await self._check_fields()
        return splits

    @staticmethod
    def _places_in(split: str, entries: Sequence[Any]) -> dict[str, dict[str, Any]]:
        """Return task id -> the task's arguments of ``reset``."""
        if entries and all(isinstance(one, Mapping) for one in entries):
            return {f"{split}_{index}": dict(one) for index, one in enumerate(entries)}
        if len(entries) == 2 and all(isinstance(one, int) for one in entries):
            return {f"seed_{seed}": {"seed": seed} for seed in range(*entries)}
        raise ValueError(f"splits.{split} is [first, end) of its seeds, or a list of objects, arguments of reset")

    async def _check_fields(self) -> None:
        """Compare the config's fields with the service's schema, if there is one.

        Raises:
            ValueError: the schema lacks a field; the message names the fields that exist.
        """
        try:
            schema = await self.request("GET", "/schema")
        except WorldLost:
            return
        fields, more = _fields(schema, "observation"), _fields(schema, "reset_observation")
        if fields and self.observation_field not in {*fields, *more}:
            there = " or ".join(name for name in dict.fromkeys([*fields, *more]) if name not in COMMON_FIELDS)
            raise ValueError(f"its observations have no {self.observation_field!r}: set observation_field to {there}")
        self.field_is_known = bool(fields)
        taken = {name: needed for name, needed in _fields(schema, "action").items() if name not in COMMON_FIELDS}
        if not taken or self.action_field is None:
            return
        needed = [name for name in taken if taken[name] and name != self.action_field]
        if needed:
            raise ValueError(
                f"its actions need {', '.join(needed)} beside {self.action_field!r}: set action_field to null, and "
                f"have the policy write an action as a JSON object with {', '.join(taken)}"
            )
        if self.action_field not in taken:
            raise ValueError(f"its actions have no {self.action_field!r}: set action_field to {' or '.join(taken)}")

    async def _look_at_seeds(self) -> None:
        """Start two tasks and the first again. Warn if the seed changes nothing, or if one task starts in two ways."""
        first, second, *_ = [*(task for task, place in self.places.items() if "seed" in place), "", ""]
        if not second:
            return
        try:
            line = await self._connect()
        except (WorldLost, RequestFailed):  # no session now; the episodes wait for their place
            return
        try:
            opened = [
                await line.call(self.start_timeout_s, "start", episode=0, task=task) for task in (first, second, first)
            ]
        except NoSuchField as error:
            raise ValueError(str(error)) from error
        except (WorldLost, LineStuck, RequestFailed):  # an episode that starts so reports it
            return
        finally:
            await line.hang_up()
        openings = [answer["observation"] for answer in opened]
        if openings[0] != openings[2]:
            logger.warning(
                "the service at %s opens %s differently each time: the rollouts of a task may not be of one task, and "
                "a lost connection cannot be made good",
                *(self.url, first),
            )
        elif openings[0] == openings[1]:
            logger.warning(
                "the service at %s opens %s and %s alike: if it does nothing with seeds, all its %d tasks are one, or "
                "each rollout is of another; give reset, or splits as lists of its arguments",
                *(self.url, first, second, len(self.places)),
            )

    def action(self, command: str) -> dict[str, Any]:
        """Return the action in a policy's message. Raises ActionRefused if it has to be a JSON object but is not."""
        if self.action_field is not None:
            return {self.action_field: command}
        try:
            written = json.loads(command.strip().removeprefix("```json").strip("`"))
        except (ValueError, RecursionError) as error:
            raise ActionRefused(f"An action is a JSON object: {error}") from error
        if not isinstance(written, dict):
            raise ActionRefused("An action is a JSON object.")
        return written

    async def _named_tasks(self, name: str) -> Mapping[str, list[str]]:
        listed: dict[str, list[str | None]] = {}
        path = "/" + quote(name, safe="")  # a dataset's name may hold a slash
        for split in await self.request("GET", f"{path}/splits"):
            answer = await self.request("POST", f"{path}/tasks", json={"split": split["name"]})
            listed[split["name"]] = [_own_id(task) for task in answer["tasks"]]
        times = Counter(known for ids in listed.values() for known in ids)
        splits = {
            split: [
                known if known is not None and times[known] == 1 else f"{split}_{index}"
                for index, known in enumerate(ids)
            ]
            for split, ids in listed.items()
        }
        self.places = {
            task: self._reset | {"split": split, "index": index}
            for split, ids in splits.items()
            for index, task in enumerate(ids)
        }
        return splits

    async def lease(self) -> WorldLine:
        """Open a line to the service. Once the service has refused a session, episodes wait in order for a free one.

        While episodes of this pool hold sessions there is no deadline, because these sessions will end.
        """
        if not self.crowded:
            return await super().lease()
        async with self._queue:
            since = running_time.now()
            while True:
                try:
                    return await super().lease()
                except WorldLost as error:
                    since = running_time.now() if self._lines else since
                    late = running_time.now() - since > self.start_timeout_s
                    if late or not isinstance(error.__cause__, NoPlace):
                        raise
                await self.losses.pause(PLACE_PAUSE_S)

    async def _connect(self) -> WorldLine:
        try:
            url = "ws" + self.url.removeprefix("http") + "/ws"
            socket = await self.http.ws_connect(url, max_msg_size=MAX_MESSAGE_BYTES, timeout=CLOSING)
        except (aiohttp.ClientError, OSError) as error:
            raise WorldLost(repr(error), Loss.REFUSED) from error
        line = OpenEnvLine(self, socket)
        if self.crowded:
            try:
                await line.greet()
            except BaseException:
                await line.hang_up()
                raise
        return line


def _fields(schema: Any, section: str) -> dict[str, bool]:
    """Return field -> whether it is required, of a section of a schema; {} if it lists none or allows any."""
    match schema:
        case dict() if isinstance(described := schema.get(section), dict) and not described.get("additionalProperties"):
            needed = described.get("required", [])
            return {name: name in needed for name in described.get("properties", {})}
    return {}


def _refusal(data: Mapping[str, Any]) -> str:
    """Return the server's error text about an action: each problem, with the field that has it."""
    words = str(data["message"])
    for error in data.get("errors") or []:
        if isinstance(error, dict):
            words += f"; {'.'.join(map(str, error.get('loc', ())))}: {error.get('msg', '')}"
    return words[:MAX_ERROR_CHARACTERS]


def _is_refusal(text: str) -> bool:
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        return False
    match message:
        case {"type": "error", "data": {"code": code}}:
            return bool(code == NO_SESSION)
    return False


def _own_id(task: Any) -> str | None:
    known = task.get("id") if isinstance(task, dict) else None
    return known if isinstance(known, str) else None


class OpenEnvLine(ServiceLine):
    """A WebSocket, and the episode it holds.

    The socket is read all the time, also while the policy samples. An unread socket answers no ping, and a service
    then ends the episode (uvicorn after 40 s).
    """

    _pool: OpenEnvPool

    def __init__(self, pool: OpenEnvPool, socket: aiohttp.ClientWebSocketResponse) -> None:
        super().__init__(pool)
        self._socket = socket
        self._ours = False
        self._refused = False
        self._answer: asyncio.Future[str] | None = None
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        """Pass each message to the request that waits for it. Drop messages for which no request waits."""
        try:
            while True:
                text = await self._socket.receive_str()
                if NO_SESSION in text[:MAX_ERROR_CHARACTERS] and _is_refusal(text):
                    self._refused = self._pool.crowded = True
                if self._answer is not None and not self._answer.done():
                    self._answer.set_result(text)
        except (aiohttp.ClientError, OSError, TypeError, ValueError) as error:  # TypeError: a frame that is not a text
            if not self._cut:
                self._cut = True
                self._ended()
            if self._answer is not None and not self._answer.done():
                self._answer.set_exception(WorldLost(f"the socket ended: {error!r}", Loss.CUT))

    async def greet(self) -> None:
        """Wait for the service to confirm a session. Raises NoPlace if it has none left, WorldLost for a lost line."""
        try:
            await self._ask("state", {})
        except RequestFailed:  # of an environment that has no state yet
            pass
        except WorldLost:
            if not self._refused:
                raise
        if self._refused:
            raise NoPlace("it has no sessions left")

    @property
    def alive(self) -> bool:
        return super().alive and not self._socket.closed

    async def hang_up(self) -> None:
        self.kill()
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        await self._socket.close()
        await super().hang_up()

    async def _round_trip(self, request: Mapping[str, Any]) -> dict[str, Any]:
        match request["op"]:
            case "start":
                data = await self._ask("reset", self._pool.places[request["task"]])
                self._ours = is_ours(data["observation"])
                return {**self._answered(data), "messages": data["observation"]["messages"] if self._ours else []}
            case "step":
                try:
                    return self._answered(await self._ask("step", self._pool.action(request["command"])))
                except ActionRefused as error:
                    return {"observation": f"{FAILURE_HEAD} {error}", "done": False, **flags_of({}), "failed": True}
            case "grade":
                state = await self._ask("state", {}) if self._ours else {}
                return state.get("grade") or self._pool.grade_of(self._earned, self._done)
        self.kill()  # "close": the session ends with its socket
        return {}

    def _answered(self, data: dict[str, Any]) -> dict[str, Any]:
        return self._observed(data["observation"], data["done"], data["reward"])

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        message = {"type": kind, "data": data} if kind != "state" else {"type": kind}
        self._answer = asyncio.get_running_loop().create_future()
        try:
            await self._socket.send_str(json.dumps(message))
            answer = json.loads(await self._answer)
        except (aiohttp.ClientError, OSError, ValueError, RecursionError) as error:
            raise WorldLost(f"the service ended at {kind!r}: {error!r}", Loss.CUT) from error
        match answer:
            case {"type": "error"} if self._refused:
                raise NoPlace("the service has no sessions left")
            case {"type": "error", "data": {"message": str(), "code": "VALIDATION_ERROR"} as details} if kind == "step":
                kinds = [error.get("type") for error in details.get("errors") or [] if isinstance(error, dict)]
                if self._pool.action_field is not None and any(one in NAME_OBJECTIONS for one in kinds):
                    raise RequestFailed(f"{_refusal(details)}; set action_field")
                raise ActionRefused(_refusal(details))
            case {"type": "error", "data": {"message": str(text), **more}}:
                raise failure(text, more.get("reason"))
            case {"type": "observation", "data": {"observation": dict(), "reward": _, "done": _}} if kind != "state":
                return answer["data"]
            case {"type": "state", "data": dict(state)} if kind == "state":
                return state
        raise WorldLost(f"the service's answer to {kind!r} is malformed: {str(answer)[:200]}", Loss.CUT)
