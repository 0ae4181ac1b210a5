"""The HTTP face of the recording endpoint: OpenAI's chat API, a key per episode.

The key comes as the bearer token, as every OpenAI client sends it, or in the path for one that cannot:
``/sessions/<key>/v1/chat/completions``. Answers are whole before their first byte is sent, also those that stream: so a
failure has its HTTP status, and a client that hangs up finds the same answer when it asks again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from aiohttp import web

from agent_environments.http_server import BadBody, read_agents_json, read_body, trust
from rollout_server.endpoint.session import Session
from rollout_server.endpoint.sessions import Sessions
from rollout_server.endpoint.wire import MODEL, ApiError, ChatRequest, Completion

WRITE_DEADLINE_S = 60.0

SESSIONS: web.AppKey[Sessions] = web.AppKey("sessions", Sessions)

Handler = Callable[[web.Request, Session], Awaitable[web.StreamResponse]]


def add_routes(app: web.Application, sessions: Sessions) -> set[str]:
    """Add the endpoint's routes; returns their paths, which authenticate by themselves."""
    app[SESSIONS] = sessions
    paths = set()
    for method, path, handler in (
        ("POST", "/v1/chat/completions", chat_completions),
        ("GET", "/v1/models", models),
        ("GET", "/v1/episode", episode),
        ("POST", "/v1/episode/step", step),
        ("POST", "/v1/episode/finish", finish),
    ):
        for place in (path, "/sessions/{key}" + path):
            app.router.add_route(method, place, _with_session(handler))
            paths.add(place)
    return paths


def _with_session(handler: Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Find the session of the request's key; refusals are in OpenAI's shape."""

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request, _session(request))
        except ApiError as error:
            return _refusal(error)
        except BadBody as error:
            return _refusal(ApiError(400, "invalid_json", str(error)))
        except TimeoutError:
            return _refusal(ApiError(408, "timeout", "the request's body did not arrive in time"))
        except web.HTTPRequestEntityTooLarge as error:
            return _refusal(ApiError(413, "too_large", error.text or "the body is too large"))

    return handle


def _session(request: web.Request) -> Session:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    key = request.match_info.get("key", token.strip() if scheme == "Bearer" else "")
    session = request.app[SESSIONS].find(key)
    if session is None:
        raise ApiError(401, "invalid_api_key", "Incorrect API key: it is that of no episode, or its episode is over")
    trust(request)
    return session


def _refusal(error: ApiError) -> web.Response:
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    return web.json_response(error.body(), status=error.status, headers=headers)


async def models(request: web.Request, session: Session) -> web.Response:
    listed = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rollout-server"}
    return web.json_response({"object": "list", "data": [listed]})


async def chat_completions(request: web.Request, session: Session) -> web.StreamResponse:
    body = await read_body(request)
    asked = ChatRequest.parse(body)
    identity = request.headers.get("Idempotency-Key") or hashlib.sha256(body).hexdigest()
    # What OpenAI's own clients, in Python and in Node, say of themselves.
    tried = request.headers.get("X-Stainless-Retry-Count", "0")
    retried = "Idempotency-Key" in request.headers or tried not in ("", "0")
    completion = await session.complete(asked, identity, retried, lambda: _listens(request))
    response = _response(completion, asked)
    try:
        async with asyncio.timeout(WRITE_DEADLINE_S):
            await response.prepare(request)
            if asked.stream:
                for event in completion.events(bool(asked.stream_options and asked.stream_options.include_usage)):
                    await response.write(event)
            await response.write_eof()
    except (TimeoutError, ConnectionResetError):  # it has gone, or takes nothing: the answer waits for its retry
        if request.transport is not None:
            request.transport.abort()
    else:
        if _listens(request):
            session.heard(identity)
    return response


async def episode(request: web.Request, session: Session) -> web.Response:
    """The task, and the messages with which the episode's world opens, where there is one."""
    world = session.world
    opening = [asdict(message) for message in world.opening]
    return web.json_response({"task_id": world.task_id, "messages": opening})


async def step(request: web.Request, session: Session) -> web.Response:
    """Act in the episode's world: ``{"action": ...}`` is an assistant's message."""
    action = (await _object(request)).get("action")
    if not isinstance(action, str):
        raise ApiError(400, "invalid_request", 'the body must be {"action": "..."}')
    result = await session.step(action)
    return web.json_response({"observation": result.observation, "done": result.done, "failed": result.failed})


async def finish(request: web.Request, session: Session) -> web.Response:
    """The agent is done: ``{}``, or with a ``reward`` in [0, 1] where the node takes the harness's word."""
    reward = (await _object(request)).get("reward")
    if reward is not None and not (isinstance(reward, int | float) and 0.0 <= reward <= 1.0):
        raise ApiError(400, "invalid_request", "reward must be a number from 0 to 1")
    session.finish(None if reward is None else float(reward))
    return web.json_response({})


async def _object(request: web.Request) -> dict[str, Any]:
    value = read_agents_json(await read_body(request) or b"{}")
    if not isinstance(value, dict):
        raise ApiError(400, "invalid_request", "the body must be a JSON object")
    return value


def _response(completion: Completion, asked: ChatRequest) -> web.StreamResponse:
    if asked.stream:
        return web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
    return web.Response(body=json.dumps(completion.body()).encode(), content_type="application/json")


def _listens(request: web.Request) -> bool:
    return request.transport is not None and not request.transport.is_closing()
