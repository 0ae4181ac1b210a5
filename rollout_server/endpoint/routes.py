"""The HTTP face of the recording endpoint: the chat APIs of its dialects, a key per episode.

The key comes as the bearer token, as OpenAI's clients send it, in a header of Anthropic's or Google's clients, or in
the path for one that can send none: ``/sessions/<key>/v1/chat/completions``. An answer is complete before its first
event is sent, even in a stream. So a failure has its HTTP status (except after twenty seconds, when a stream is kept
alive), a request can move to another server if one dies, and a client that hangs up finds the same answer when it asks
again. Sending tokens as they are sampled would also cost the node an event for each token.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from aiohttp import web

from loop_formats.schema import from_mapping
from loop_plumbing.http_server import BadBody, read_agents_json, read_body, read_json, refusal, trust_client
from rollout_server.endpoint.dialects import CHAT, Route, routes
from rollout_server.endpoint.dialects.dialect import MODEL_CHARACTERS, Dialect
from rollout_server.endpoint.endpoint import Endpoint, ServeRequest
from rollout_server.endpoint.session import Session
from rollout_server.endpoint.wire import MODEL, Answer, ApiError, Asked

WRITE_DEADLINE_S = 60.0
ALIVE_S = 20.0
"""Seconds between signs of life in a stream: clients hang up after 60 to 300 seconds without a byte."""
KEY_HEADERS = ("x-api-key", "x-goog-api-key")
PATH_CHARACTERS = 200
_WITH_KEY = re.compile(r"/sessions/([^/]*)(/.*)")
MAX_FIGURES = 64
"""Most figures of a kind with which an agent may finish."""

ENDPOINT: web.AppKey[Endpoint] = web.AppKey("endpoint", Endpoint)

Handler = Callable[[web.Request, Session], Awaitable[web.StreamResponse]]


def add_routes(app: web.Application, endpoint: Endpoint) -> set[str]:
    """Add the endpoint's routes. Return the paths of the routes that check episode keys themselves."""
    app[ENDPOINT] = endpoint
    app.add_routes([web.post("/v1/keys", open_key), web.delete("/v1/keys/{key}", close_key)])
    paths = set()
    calls: list[tuple[str, str, Handler]] = [("POST", one.path, partial(complete, one)) for one in routes()]
    calls += [("POST", one.counts, partial(count_tokens, one)) for one in routes() if one.counts]
    for method, path, handler in (
        *calls,
        ("GET", "/v1/models", models),
        ("GET", "/v1/models/{model}", model),
        ("GET", "/v1/episode", episode),
        ("POST", "/v1/episode/step", step),
        ("POST", "/v1/episode/finish", finish),
    ):
        for place in (path, "/sessions/{key}" + path):
            app.router.add_route(method, place, _with_session(handler))
            paths.add(place)
    return paths


def _with_session(handler: Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Return a handler that finds the session of the request's key. Refusals have the dialect's shape."""

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            session = _session(request, request.match_info.get("key"))
        except ApiError as error:
            return _refusal(request, error)
        try:
            return await handler(request, session)
        except ApiError as error:
            refused = error
        except BadBody as error:
            refused = ApiError(400, "invalid_json", str(error))
        except TimeoutError:
            refused = ApiError(408, "timeout", "the request's body did not arrive in time")
        except web.HTTPRequestEntityTooLarge as error:
            refused = ApiError(413, "too_large", error.text or "the body is too large")
        session.note_refusal(refused)
        return _refusal(request, refused)

    return handle


def _session(request: web.Request, in_path: str | None) -> Session:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    candidates = (in_path, bearer, *(request.headers.get(name) for name in KEY_HEADERS))
    # A key in the path goes first: clients send a header, too, with any key that they have.
    keys = candidates[:1] if candidates[0] is not None else candidates[1:]
    for key in keys:
        if key and (session := request.app[ENDPOINT].sessions.find(key)) is not None:
            trust_client(request, key)
            return session
    raise ApiError(401, "invalid_api_key", "Incorrect API key: it belongs to no episode, or its episode is over")


def not_served(request: web.Request) -> web.Response:
    """Return the refusal for an unknown path, in the shape of the request's dialect."""
    known = request.match_info.http_exception
    status = 404 if known is None else known.status
    served = ", ".join([*(one.path for one in routes()), "/v1/models"])
    key, path = _key_in_path(request)
    place = f"{request.method} {path[:PATH_CHARACTERS]}"
    error = ApiError(status, "not_served", f"{place} is not served here; what is: {served}")
    with contextlib.suppress(ApiError):  # its key belongs to no episode
        _session(request, key).note_refusal(error)
    return _refusal(request, error)


def _key_in_path(request: web.Request) -> tuple[str | None, str]:
    """Return the key that begins a request's path (or None), and the path without this key."""
    match = _WITH_KEY.fullmatch(request.path)
    return (match[1], match[2]) if match else (None, request.path)


def _refusal(request: web.Request, error: ApiError) -> web.Response:
    matching = (one for one in routes() if one.header in request.headers or one.path in request.path)
    dialect = next(matching, CHAT).dialect
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    return web.json_response(dialect.refusal(error), status=error.status, headers=headers)


def _listed(name: str) -> dict[str, Any]:
    """Return the entry of a model in a list of models, with the fields of both OpenAI and Anthropic."""
    openais = {"id": name, "object": "model", "created": 0, "owned_by": "rollout-server"}
    return {**openais, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


async def models(request: web.Request, session: Session) -> web.Response:
    pages = {"has_more": False, "first_id": MODEL, "last_id": MODEL}
    return web.json_response({"object": "list", "data": [_listed(MODEL)], **pages})


async def model(request: web.Request, session: Session) -> web.Response:
    """Answer with the entry of the named model. Every name stands for the policy."""
    return web.json_response(_listed(request.match_info["model"]))


async def complete(route: Route, request: web.Request, session: Session) -> web.StreamResponse:
    """Answer a call in the dialect of the route."""
    dialect = route.dialect
    asked, body = await _asked(dialect, request, session)
    same = request.headers.get("Idempotency-Key", "").encode(errors="surrogateescape") or body
    identity = f"{route.path} {hashlib.sha256(same).hexdigest()}"
    del body
    # The header by which OpenAI's and Anthropic's own clients mark a retry.
    tried = request.headers.get("X-Stainless-Retry-Count", "0")
    retried = "Idempotency-Key" in request.headers or tried not in ("", "0")
    transport = request.transport  # not the request, which holds its body as long as its call is kept
    answering = asyncio.create_task(session.complete(asked, identity, retried, lambda: _is_open(transport)))
    stream = await _kept_alive(request, dialect, answering) if asked.stream else None
    try:
        answer = await answering
    except ApiError as error:
        if stream is None:
            raise
        session.note_refusal(error)
        await _is_sent(request, stream, [dialect.failure(error)])
        return stream
    if asked.stream:
        response, events = stream or _stream(), dialect.events(asked, answer)
    else:
        response, events = _whole(dialect.whole(asked, answer)), iter(())
    if await _is_sent(request, response, events) and _is_open(transport):
        session.calls.heard(identity)
    return response


async def _kept_alive(
    request: web.Request, dialect: Dialect, answering: asyncio.Task[Answer]
) -> web.StreamResponse | None:
    """Send signs of life until the answer is ready. Return the stream used, or None if no sign was needed."""
    stream: web.StreamResponse | None = None
    try:
        while not (await asyncio.wait([answering], timeout=ALIVE_S))[0]:
            stream = stream or _stream()
            if not await _is_sent(request, stream, [dialect.alive], ends=False):
                break
    except asyncio.CancelledError:
        answering.cancel()
        raise
    return stream


async def _is_sent(
    request: web.Request, response: web.StreamResponse, events: Iterable[bytes], ends: bool = True
) -> bool:
    """Send events, and the response's end if ``ends``. Return False if the client has gone or takes no data; a retry
    can get the answer then."""
    try:
        async with asyncio.timeout(WRITE_DEADLINE_S):
            if not response.prepared:
                await response.prepare(request)
            for event in events:
                await response.write(event)
            if ends:
                await response.write_eof()
    except (TimeoutError, ConnectionResetError):
        if request.transport is not None:
            request.transport.abort()
        return False
    return True


async def count_tokens(route: Route, request: web.Request, session: Session) -> web.Response:
    """Answer with the number of tokens in the prompt of a call, without sampling."""
    asked, _ = await _asked(route.dialect, request, session)
    return web.json_response(route.dialect.counted(await session.count(asked)))


async def _asked(dialect: Dialect, request: web.Request, session: Session) -> tuple[Asked, bytes]:
    """Read a request, and return its call and its body."""
    with session.calls.reading() as arrived:
        body = await read_body(request, arrived)
        asked = await session.calls.beside(len(body), lambda: dialect.read(body, session.recall))
    model = request.match_info.get("model", asked.model)[:MODEL_CHARACTERS]
    return replace(asked, size=len(body), model=model), body


async def open_key(request: web.Request) -> web.Response:
    """Open a key that belongs to no episode; the body is a :class:`~rollout_server.endpoint.endpoint.ServeRequest`."""
    endpoint, asked = request.app[ENDPOINT], from_mapping(ServeRequest, read_json(await read_body(request)))
    return web.json_response({"base_url": endpoint.sessions.base_url, "api_key": endpoint.open_key(asked)})


async def close_key(request: web.Request) -> web.Response:
    """Close a key that belongs to no episode."""
    if not await request.app[ENDPOINT].close_key(request.match_info["key"]):
        return refusal(404, "no such key")
    return web.json_response({})


async def episode(request: web.Request, session: Session) -> web.Response:
    """Answer with the task and, if the episode has a world, the messages that open it."""
    world = session.world
    opening = [asdict(message) for message in world.opening]
    return web.json_response({"task_id": world.task_id, "messages": opening})


async def step(request: web.Request, session: Session) -> web.Response:
    """Act in the episode's world: ``{"action": ...}`` is an assistant's message."""
    action = (await _object(request, session)).get("action")
    if not isinstance(action, str):
        raise ApiError(400, "invalid_request", 'the body must be {"action": "..."}')
    result = await session.step(action)
    return web.json_response({"observation": result.observation, "done": result.done, "failed": result.failed})


async def finish(request: web.Request, session: Session) -> web.Response:
    """Finish the episode. The body is ``{}`` or, if the node trusts the harness's grade, has a ``reward`` in [0, 1].

    ``rewards`` and ``metrics`` map names to numbers, which are only recorded.
    """
    body = await _object(request, session)
    reward = body.get("reward")
    if reward is not None and not (isinstance(reward, int | float) and 0.0 <= reward <= 1.0):
        raise ApiError(400, "invalid_request", "reward must be a number from 0 to 1")
    kinds: list[str] = [kind for kind in ("rewards", "metrics") if kind in body]
    figures = {kind: _figures(kind, body[kind]) for kind in kinds}
    session.finish(None if reward is None else float(reward), figures)
    return web.json_response({})


def _figures(what: str, figures: object) -> dict[str, float]:
    """Check a mapping of names to numbers, and return the mapping in the record's form."""
    named: dict[str, Any] = figures if isinstance(figures, dict) and len(figures) <= MAX_FIGURES else {"": None}
    if not all(0 < len(name) <= 64 and name.isprintable() and _is_number(value) for name, value in named.items()):
        raise ApiError(400, "invalid_request", f"{what} must be at most {MAX_FIGURES} finite numbers by short names")
    return {name: float(value) for name, value in named.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e300  # false for NaN


async def _object(request: web.Request, session: Session) -> dict[str, Any]:
    with session.calls.reading() as arrived:
        body = await read_body(request, arrived) or b"{}"
        value = await session.calls.beside(len(body), lambda: read_agents_json(body))
    if not isinstance(value, dict):
        raise ApiError(400, "invalid_request", "the body must be a JSON object")
    return value


def _stream() -> web.StreamResponse:
    return web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})


def _whole(answer: Mapping[str, Any]) -> web.StreamResponse:
    return web.Response(body=json.dumps(answer).encode(), content_type="application/json")


def _is_open(transport: asyncio.Transport | None) -> bool:
    return transport is not None and not transport.is_closing()
