"""Serves a pool of environments by OpenEnv's protocol and by AgentGym's, on one port.

OpenEnv: ``/ws`` holds one episode at a time (messages of type "reset", "step", "state" and "close"), and the Task API
lists tasks: ``/list_environments``, ``/{env}/splits``, ``/tasks``, ``/num_tasks``, ``/task``, ``/task_range``.
AgentGym: ``/create``, ``/reset``, ``/step``, ``/close``, ``/observation``; its errors are answers with status 200. Ours
besides: ``/tasks``, the ids behind ``data_idx``.

Both give the grader's reward, at the end of an episode. A trainer also needs the grade of an episode that it ends
itself: OpenEnv's "state" holds it as ``grade``, and so does ``/grade`` for AgentGym's clients. Only the
trainer asks for it; the agent's text only ever reaches ``step``.

Every request but ``/health`` carries the token, as a bearer or as the password of basic authentication: AgentGym's own
clients send no header of theirs, but they take an address such as ``http://any:<token>@host:port``. An OpenEnv session
ends with its socket; AgentGym's protocol has no connection, so a session that was idle for ``idle_timeout_s`` ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import reprlib
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from typing import Any

from aiohttp import BasicAuth, WSMsgType, web

from agent_environments.protocol import EnvironmentFault, EnvironmentPool, UnknownTask
from loop_contrib.services.sessions import (
    UNKNOWN_SESSION,
    NoEpisode,
    ServedAnswer,
    ServedSession,
    ServedTasks,
    SessionEnded,
)
from loop_plumbing.http_server import (
    MAX_BODY_BYTES,
    BadBody,
    one_line,
    read_agents_json,
    read_body,
    refusal,
    trust_client,
)

logger = logging.getLogger(__name__)

MAX_SESSIONS = 1024
MAX_WAITING = 16
"""Messages of a socket that may wait for the answer to another one; a client that sends more is disconnected."""
HEARTBEAT_S = 30.0

ACTION_SCHEMA = {"type": "object", "properties": {"action": {"type": "string"}}, "required": ["action"]}


class NoSession(BadBody):
    """The request names a session that has ended, or that belonged to another server process."""

    reason = UNKNOWN_SESSION


class EnvironmentServer:
    """The web application that serves one open pool.

    Args:
        pool: an open pool; the caller closes it.
        splits: the splits to serve; AgentGym's ``data_idx`` counts through all of them.
        token: the bearer token that every request must have.
        idle_timeout_s: seconds without a request after which a session of AgentGym's protocol ends.
    """

    def __init__(self, pool: EnvironmentPool, splits: Sequence[str], token: str, idle_timeout_s: float = 600.0) -> None:
        self._pool = pool
        self._tasks = ServedTasks(pool, splits)
        self._name = pool.dataset
        self._token = token.encode()
        self._idle_timeout_s = idle_timeout_s
        self._sessions: dict[int, ServedSession] = {}
        """AgentGym's."""

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._authenticate], client_max_size=MAX_BODY_BYTES)
        app.cleanup_ctx.append(self._reaper)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/schema", self._schema),
                web.get("/ws", self._socket),
                web.get("/list_environments", self._environments),
                web.get("/{env}/splits", self._splits),
                web.post("/{env}/tasks", self._task_api(self._list_tasks)),
                web.post("/{env}/num_tasks", self._task_api(self._num_tasks)),
                web.post("/{env}/task", self._task_api(self._task)),
                web.post("/{env}/task_range", self._task_api(self._task_range)),
                web.get("/tasks", self._agentgym(self._named_tasks)),
                web.post("/create", self._agentgym(self._create)),
                web.post("/reset", self._agentgym(self._reset)),
                web.post("/step", self._agentgym(self._step)),
                web.post("/close", self._agentgym(self._close)),
                web.get("/observation", self._agentgym(self._observation)),
                web.get("/grade", self._agentgym(self._grade)),
            ]
        )
        return app

    @web.middleware
    async def _authenticate(self, request: web.Request, handler: Any) -> web.StreamResponse:
        token = _token(request.headers.get("Authorization", ""))
        if request.path != "/health" and not hmac.compare_digest(token, self._token):
            return refusal(401, "missing or wrong bearer token; send 'Authorization: Bearer <token>'")
        if request.path != "/health":
            trust_client(request)
        try:
            return await handler(request)
        except TimeoutError:
            return refusal(408, "the request's body did not arrive in time")

    async def _reaper(self, app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(self._reap())
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for number in list(self._sessions):
            await self._forget(number)

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._idle_timeout_s / 4))
            for number, session in list(self._sessions.items()):
                if session.idle_s() > self._idle_timeout_s:
                    logger.warning("session %d was idle for %g s: it ends", number, self._idle_timeout_s)
                    await self._forget(number)

    async def _forget(self, number: int) -> None:
        session = self._sessions.pop(number, None)
        if session is not None:  # while the reaper ended one session, a client may have closed the next
            await _closed(session)

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "healthy"})

    async def _schema(self, request: web.Request) -> web.Response:
        return web.json_response({"action": ACTION_SCHEMA, "observation": {"type": "object"}, "state": {}})

    # OpenEnv's Task API

    async def _environments(self, request: web.Request) -> web.Response:
        return web.json_response([self._name])

    async def _splits(self, request: web.Request) -> web.Response:
        if (unknown := self._unknown(request)) is not None:
            return unknown
        kinds = {"train": "train", "dev": "validation"}
        return web.json_response([{"name": split, "type": kinds.get(split, "test")} for split in self._tasks.by_split])

    def _unknown(self, request: web.Request) -> web.Response | None:
        """Return the refusal if a request names another environment than the served one; None if not."""
        name = request.match_info["env"]
        if name == self._name:
            return None
        return _detail(404, f"unknown environment {reprlib.repr(name)}; there is {self._name}")

    def _task_api(self, answer: Any) -> Any:
        async def handler(request: web.Request) -> web.Response:
            if (unknown := self._unknown(request)) is not None:
                return unknown
            try:
                return web.json_response(answer(await _json_object(request)))
            except (BadBody, UnknownTask) as error:
                return _detail(400, error)

        return handler

    def _list_tasks(self, body: dict[str, Any]) -> Any:
        return {"tasks": [{"id": task} for task in self._tasks.split(body.get("split"))], "env_name": self._name}

    def _num_tasks(self, body: dict[str, Any]) -> Any:
        return {"num_tasks": len(self._tasks.split(body.get("split")))}

    def _task(self, body: dict[str, Any]) -> Any:
        return {"task": {"id": self._tasks.at(body.get("index"), body.get("split"))}}

    def _task_range(self, body: dict[str, Any]) -> Any:
        tasks, start, stop = self._tasks.split(body.get("split")), body.get("start"), body.get("stop")
        if not all(number is None or isinstance(number, int) for number in (start, stop)):
            raise BadBody("start and stop must be whole numbers")
        return {"tasks": [{"id": task} for task in tasks[start:stop]]}

    # OpenEnv's socket

    async def _socket(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=MAX_BODY_BYTES, heartbeat=HEARTBEAT_S)
        await socket.prepare(request)
        session = ServedSession(self._pool, f"openenv-{secrets.token_hex(8)}")
        waiting: asyncio.Queue[str | None] = asyncio.Queue()
        answering = asyncio.create_task(self._answer(socket, session, waiting))
        try:
            # It is read all the time: a socket that nobody reads answers no ping, and a step may take minutes.
            async for message in socket:
                if waiting.qsize() == MAX_WAITING:
                    break
                if message.type is WSMsgType.TEXT:
                    waiting.put_nowait(message.data)
            waiting.put_nowait(None)
            await answering
        finally:
            answering.cancel()
            await asyncio.shield(_closed(session))
        return socket

    async def _answer(
        self, socket: web.WebSocketResponse, session: ServedSession, waiting: asyncio.Queue[str | None]
    ) -> None:
        """Answer the socket's messages one by one. Stop at None, at "close", or when the socket ends."""
        try:
            while (text := await waiting.get()) is not None:
                reply = await self._openenv_reply(session, text)
                if reply is None:
                    break
                await socket.send_str(json.dumps(reply))
        except ConnectionError:  # the client is gone; its session goes too
            pass
        finally:
            await socket.close()

    async def _openenv_reply(self, session: ServedSession, text: str) -> dict[str, Any] | None:
        """Return the answer to a message; None if the message is "close"."""
        try:
            message = read_agents_json(text)
        except BadBody as error:
            return _socket_error("INVALID_JSON", error)
        data = message.get("data", {}) if isinstance(message, dict) else None
        if not isinstance(data, dict):
            return _socket_error("VALIDATION_ERROR", 'a message is {"type": ..., "data": {...}}')
        try:
            match message.get("type"):
                case "reset":
                    task = self._tasks.asked_for(data.get("index"), data.get("seed"), data.get("split"))
                    return _openenv_observation(await session.reset(_text(data, "task_id", task)))
                case "step":
                    return _openenv_observation(await session.step(_action(data)))
                case "state":
                    state = {"episode_id": session.name, "step_count": session.steps, "grade": await session.grade()}
                    return {"type": "state", "data": state}
                case "close":
                    return None
                case kind:
                    return _socket_error("UNKNOWN_TYPE", f"there is no message of type {reprlib.repr(kind)}")
        except (BadBody, UnknownTask) as error:
            return _socket_error("VALIDATION_ERROR", error)
        except (NoEpisode, EnvironmentFault, TimeoutError) as error:
            return _socket_error("EXECUTION_ERROR", error)

    # AgentGym

    def _agentgym(self, answer: Any) -> Any:
        async def handler(request: web.Request) -> web.Response:
            try:
                body = dict(request.query) if request.method == "GET" else await _json_object(request)
                return web.json_response(await answer(body))
            except (BadBody, NoEpisode, EnvironmentFault, TimeoutError) as error:
                return web.json_response(_error(error))

        return handler

    def _session(self, body: dict[str, Any]) -> ServedSession:
        try:
            session = self._sessions[int(body["id"])]
        except (KeyError, TypeError, ValueError, OverflowError):
            raise NoSession(f"there is no session {reprlib.repr(body.get('id'))}; ask /create for one") from None
        session.touch()
        return session

    async def _named_tasks(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return split -> task ids, in the order of ``data_idx``. AgentGym's protocol has no such request."""
        return {"tasks": self._tasks.by_split}

    async def _create(self, body: dict[str, Any]) -> dict[str, Any]:
        if len(self._sessions) >= MAX_SESSIONS:
            raise BadBody(f"there are {MAX_SESSIONS} sessions; close some")
        number = secrets.randbelow(1 << 53)  # no client meets another's session, not even one of a server before this
        session = self._sessions[number] = ServedSession(self._pool, f"agentgym-{number}")
        return {"id": number, **_agentgym_observation(session.last)}

    async def _reset(self, body: dict[str, Any]) -> dict[str, Any]:
        session = self._session(body)
        answer = await session.reset(self._tasks.at(body.get("data_idx", 0)))
        opening = {"messages": [asdict(message) for message in answer.messages]}
        return {"id": int(body["id"]), **_agentgym_observation(answer), **opening}

    async def _step(self, body: dict[str, Any]) -> dict[str, Any]:
        return _agentgym_observation(await self._session(body).step(_action(body)))

    async def _observation(self, body: dict[str, Any]) -> str:
        return self._session(body).last.result.observation

    async def _grade(self, body: dict[str, Any]) -> dict[str, Any]:
        return await self._session(body).grade()

    async def _close(self, body: dict[str, Any]) -> dict[str, Any]:
        self._session(body)
        await self._forget(int(body["id"]))
        return {"closed": True}


async def _closed(session: ServedSession) -> None:
    with contextlib.suppress(Exception):  # the pool ends what an environment could not
        await session.close()


def _token(authorization: str) -> bytes:
    """Return the token in a header; b"" if there is none, which never is a valid token."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.encode(errors="surrogateescape")
    try:
        return BasicAuth.decode(authorization).password.encode(errors="surrogateescape")
    except ValueError:
        return b""


async def _json_object(request: web.Request) -> dict[str, Any]:
    """Read the body as a JSON object. An empty body counts as an empty object."""
    body = read_agents_json(await read_body(request) or b"{}")
    if not isinstance(body, dict):
        raise BadBody("the body is not a JSON object")
    return body


def _action(data: dict[str, Any]) -> str:
    return _text(data, "action")


def _text(data: dict[str, Any], name: str, otherwise: str | None = None) -> str:
    text = data.get(name, otherwise)
    if not isinstance(text, str):
        raise BadBody(f'"{name}" must be a text')
    return text


def _openenv_observation(answer: ServedAnswer) -> dict[str, Any]:
    messages = [asdict(message) for message in answer.messages]
    observation = {"text": answer.result.observation, **_flags(answer), "messages": messages}
    data = {"observation": observation, "reward": answer.reward, "done": answer.result.done}
    return {"type": "observation", "data": data}


def _agentgym_observation(answer: ServedAnswer) -> dict[str, Any]:
    """Return an answer with the reward also as ``score``, which some of AgentGym's clients read instead."""
    reward = {"reward": answer.reward, "score": answer.reward}
    return {"observation": answer.result.observation, **reward, "done": answer.result.done, **_flags(answer)}


def _flags(answer: ServedAnswer) -> dict[str, Any]:
    """Return the fields of an answer that only clients of this project read."""
    flags = {name: getattr(answer.result, name) for name in ("failed", "empty_action", "reminder")}
    return {**flags, "reason": answer.reason, "turn_reward": answer.result.reward}


def _error(error: object) -> dict[str, Any]:
    reason = {"reason": error.reason} if isinstance(error, EnvironmentFault | NoSession | SessionEnded) else {}
    return {"error": one_line(error), **reason}


def _socket_error(code: str, error: object) -> dict[str, Any]:
    described = _error(error)
    return {"type": "error", "data": {"message": described.pop("error"), "code": code, **described}}


def _detail(status: int, error: object) -> web.Response:
    return web.json_response({"detail": one_line(error)}, status=status)
