"""The node's HTTP face (aiohttp): JSON in, JSON or lines of JSON out, a bearer token on everything but /health.

The recording endpoint, which agents talk to, is beside it with keys of its own (:mod:`rollout_server.endpoint`).
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import shutil
from collections.abc import Callable, Set
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from aiohttp import BodyPartReader, web
from aiohttp.web_protocol import RequestPayloadError
from pydantic import Field
from pydantic.dataclasses import dataclass

from loop_formats.collection_request import CollectionRequest
from loop_formats.run_files import ADAPTER_FILES, ADAPTER_WEIGHTS, is_blank
from loop_formats.schema import STRICT, ConfigError, from_mapping
from loop_plumbing import http_server, moving
from loop_plumbing.http_server import BadBody, read_body, read_json, refusal, route_of, trust_client
from rollout_server.collecting.rollout_log import beside
from rollout_server.collecting.run import CollectionRun
from rollout_server.inference.router import ServerUnavailable
from rollout_server.inference.server_group import ServerAwake
from rollout_server.node import Node, RequestError
from rollout_server.policies.adapter_check import MAX_CONFIG_BYTES, AdapterError
from rollout_server.policies.store import StillInUse, UnknownPolicy

logger = logging.getLogger(__name__)

MAX_JSON_BYTES = http_server.MAX_BODY_BYTES
UPLOAD_DEADLINE_S = 1800.0
WRITE_DEADLINE_S = 120.0
MAX_WAIT_S = 60.0
HEARTBEAT_S = 2.0
RECORDS_PER_READ = 16
MAX_DIGITS = 9
"""Most digits of a whole number in a path or query."""

ALWAYS_ROUTES = ("/metrics", "/v1/status")
EARLY_ROUTES = (*ALWAYS_ROUTES, "/v1/servers/sleep", "/v1/servers/wake")
"""Routes that answer before the node is ready: servers may wait for the trainer's turn to end, and "wake" ends it."""

NODE: web.AppKey[Node] = web.AppKey("node", Node)


def _build_app(node: Node, token: str) -> web.Application:
    """Return the node's web application; requests must carry the bearer ``token``."""
    app = web.Application(client_max_size=MAX_JSON_BYTES)
    app[NODE] = node
    if node.endpoint is None:
        own_keys, not_served = set[str](), _no_endpoint
    else:
        from rollout_server.endpoint import routes as endpoint

        own_keys, not_served = endpoint.add_routes(app, node.endpoint), endpoint.not_served
    app.middlewares.extend([_errors, _authentication(token, own_keys | {"/health"}, not_served)])
    app.add_routes(
        [
            web.get("/health", health),
            web.get("/metrics", metrics),
            web.get("/v1/status", status),
            web.get("/v1/tasks", tasks),
            web.get("/v1/environment", environment),
            web.get("/v1/collections", collections),
            web.post("/v1/collections", start_collection),
            web.get("/v1/collections/{id}/rollouts", stream_rollouts),
            web.post("/v1/collections/{id}/end", end_collection),
            web.delete("/v1/collections/{id}", cancel_collection),
            web.post("/v1/episodes", take_episode),
            web.post("/v1/servers/sleep", sleep_servers),
            web.post("/v1/servers/wake", wake_servers),
            web.put("/v1/policies/{version}", publish_policy),
            web.delete("/v1/policies/{version}", retire_policy),
        ]
    )
    return app


def build_runner(node: Node, token: str, shutdown_timeout_s: float) -> web.AppRunner:
    """Return the aiohttp runner that serves the node's web application."""
    return web.AppRunner(_build_app(node, token), shutdown_timeout=shutdown_timeout_s)


@web.middleware
async def _errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """Middleware: answer every refusal with ``{"error": "one line"}`` and a fitting HTTP status."""
    try:
        return await handler(request)
    except RequestError as error:
        return _refusal(error.status, error, request.app[NODE])
    except (ConfigError, AdapterError, BadBody) as error:
        return refusal(400, error)
    except UnknownPolicy as error:
        return refusal(404, error)
    except (ServerUnavailable, ServerAwake, StillInUse) as error:
        return _refusal(503, error, request.app[NODE])
    except TimeoutError:
        return refusal(408, "the request's body did not arrive in time")
    except ConnectionError:  # the client is gone; there is nobody to answer
        raise
    except OSError as error:
        logger.exception("%s", route_of(request))
        return refusal(507, f"the node's disk or network failed: {error.strerror or type(error).__name__}")


def _refusal(status: int, error: object, node: Node) -> web.Response:
    """Return the response that refuses a request; ``moved`` tells a client that retries whether the node progresses:
    servers and the environment's processes while it is not ready (503), episodes while it is full (429)."""
    if status == 503:
        return refusal(status, error, moved=moving.signs())
    if status == 429:
        now = node.status()
        return refusal(status, error, moved=[now[key] for key in ("open_collections", "running", "waiting")])
    return refusal(status, error)


def _no_endpoint(request: web.Request) -> web.Response:
    place = f"{request.method} {request.path[:200]}"
    return refusal(404, f"{place} is not served here; for agents of your own start the node with endpoint=true")


def _authentication(token: str, exempt: Set[str], not_served: Callable[[web.Request], web.Response]) -> Any:
    """Return the middleware that checks the token. Routes in ``exempt`` need no token, or check their own
    keys. ``not_served`` answers requests to unknown routes."""
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Any) -> web.StreamResponse:
        resource = request.match_info.route.resource
        if resource is not None and resource.canonical in exempt:
            return await handler(request)
        header = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if not hmac.compare_digest(header, expected):
            if resource is None:  # an agent's request, perhaps; the paths that exist are not a secret
                return not_served(request)
            raise RequestError(401, "missing or wrong bearer token; send 'Authorization: Bearer <token>'")
        trust_client(request)
        node = request.app[NODE]
        if resource is None and node.endpoint is None:
            return not_served(request)
        usable = node.ready and node.failure is None
        if not usable and request.path not in (EARLY_ROUTES if node.failure is None else ALWAYS_ROUTES):
            raise _not_ready(node)
        return await handler(request)

    return check


def _not_ready(node: Node) -> RequestError:
    match node.health():
        case {"status": "failed", "reason": str(reason)}:
            return RequestError(500, f"it gave up: {reason}")
        case {"waits_for": [*waits]} if waits:
            return RequestError(503, f"it is starting: {'; '.join(waits)}")
        case report:
            return RequestError(503, f"it is {report['status']}; ask /health")


async def health(request: web.Request) -> web.Response:
    report = request.app[NODE].health()
    return web.json_response(report, status=200 if report["status"] == "ok" else 503)


async def metrics(request: web.Request) -> web.Response:
    return web.Response(body=request.app[NODE].metrics.render(), content_type="text/plain", charset="utf-8")


async def status(request: web.Request) -> web.Response:
    return web.json_response(request.app[NODE].status())


async def tasks(request: web.Request) -> web.Response:
    node = request.app[NODE]
    if "split" not in request.query:
        raise RequestError(400, "say which split: /v1/tasks?split=train")
    return web.json_response({"dataset": node.pool.dataset, "tasks": node.tasks(request.query["split"])})


async def environment(request: web.Request) -> web.Response:
    return web.json_response(asdict(request.app[NODE].description))


async def start_collection(request: web.Request) -> web.Response:
    collection = CollectionRequest.from_dict(read_json(await read_body(request)))
    run = await request.app[NODE].start_collection(collection)
    return web.json_response({"id": run.request.id, "state": run.state})


async def collections(request: web.Request) -> web.Response:
    return web.json_response({"collections": request.app[NODE].collections()})


async def end_collection(request: web.Request) -> web.Response:
    """If every task has reached its floor, end the collection early and keep its finished rollouts."""
    run = await request.app[NODE].collection(request.match_info["id"])
    if not run.end_early():
        raise RequestError(
            409, f"collection {run.request.id} has a task below its floor of {run.request.floor_per_task}"
        )
    return web.json_response({"id": run.request.id, "state": run.collector.outcome})


async def cancel_collection(request: web.Request) -> web.Response:
    run = await request.app[NODE].collection(request.match_info["id"])
    await run.cancel()
    return web.json_response({"id": run.request.id, "state": run.end.reason if run.end else run.collector.outcome})


async def stream_rollouts(request: web.Request) -> web.StreamResponse:
    """Stream the records after a cursor as they become durable, with a heartbeat and the progress in between.

    A node that stops closes the connection without an end record. The reader reconnects with its cursor.
    """
    node = request.app[NODE]
    run = await node.collection(request.match_info["id"])
    cursor, there = _whole_number(request.query.get("after", "0")), run.stored.rollouts.count
    if cursor is None or cursor > there:
        raise RequestError(400, f"after is not a cursor of {run.request.id}, which has 0 to {there}")
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"})
    await response.prepare(request)
    while not node.stopping.is_set():
        # Taken before looking, so that a change between the look and the wait is not missed.
        changed, ended = run.changed, run.end
        records = await beside(run.stored.rollouts.read, cursor, RECORDS_PER_READ)
        numbered = enumerate(records, start=cursor + 1)
        lines = [b'{"cursor":%d,"rollout":%b}\n' % (n, record) for n, record in numbered if not is_blank(record)]
        cursor += len(records)
        if not records and ended is not None:
            lines = [json.dumps({"end": asdict(ended)}).encode() + b"\n"]
        elif not records and not await _wait_for_change(changed, node):
            lines = [_heartbeat(run)]
        if lines and not await _write(response, b"".join(lines)):
            break
        if not records and ended is not None:
            await response.write_eof()
            return response
    if request.transport is not None:
        request.transport.abort()
    return response


async def _write(response: web.StreamResponse, data: bytes) -> bool:
    """Write to the reader. Return False if the reader has gone, or took no data for :data:`WRITE_DEADLINE_S`."""
    try:
        async with asyncio.timeout(WRITE_DEADLINE_S):
            await response.write(data)
    except (TimeoutError, ConnectionResetError):
        return False
    return True


async def _wait_for_change(changed: asyncio.Event, node: Node) -> bool:
    """Return whether anything changed, or the node stopped, within :data:`HEARTBEAT_S`."""
    waits = [asyncio.ensure_future(changed.wait()), asyncio.ensure_future(node.stopping.wait())]
    try:
        done, _ = await asyncio.wait(waits, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)
    finally:
        for wait in waits:
            wait.cancel()


def _heartbeat(run: CollectionRun) -> bytes:
    return json.dumps({"heartbeat": True, "progress": asdict(run.collector.progress())}).encode() + b"\n"


@dataclass(frozen=True, config=STRICT)
class TakeRequest:
    """The body of a request in which an outside program asks for an episode."""

    task_id: str | None = None
    """Its task; null takes any."""
    wait_s: Annotated[float, Field(ge=0, le=MAX_WAIT_S)] = 0.0
    """Seconds to wait for it."""


async def take_episode(request: web.Request) -> web.Response:
    """Give an episode to an outside program: the task, the episode's id, and the policy's URL and key.

    The body is a :class:`TakeRequest`. Answers 204 if no episode comes in the time that the request allows.
    """
    asked = from_mapping(TakeRequest, read_json(await read_body(request)))
    offer = await request.app[NODE].take_episode(asked.task_id, asked.wait_s)
    if offer is None:
        return web.Response(status=204)
    response = web.json_response({"task_id": offer.task_id, "split": offer.split, **asdict(offer.connection)})
    try:
        await response.prepare(request)
        await response.write_eof()
        if request.transport is None or request.transport.is_closing():
            raise ConnectionResetError
    except BaseException:  # the client has gone, before the answer or in the middle of it
        offer.give_back()
        raise
    return response


def _whole_number(text: str) -> int | None:
    """Return the text as a whole number of at least 0; None if the text is another thing."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS else None


def _version(request: web.Request) -> int:
    version = _whole_number(request.match_info["version"])
    if version is None:
        raise RequestError(400, f"the policy version is not a whole number from 0 with at most {MAX_DIGITS} digits")
    return version


async def publish_policy(request: web.Request) -> web.Response:
    """Publish an adapter from a multipart upload: the adapter's two files, and optionally a JSON part "canary"."""
    node, version = request.app[NODE], _version(request)
    most = node.policies.max_adapter_bytes + 2 * MAX_JSON_BYTES
    if (request.content_length or 0) > most:
        raise RequestError(
            413, f"the body has {request.content_length} bytes; an adapter of this model has under {most}"
        )
    folder = await asyncio.to_thread(node.policies.staging)
    try:
        async with asyncio.timeout(UPLOAD_DEADLINE_S):
            canary = await _receive(request, folder, node.policies.max_adapter_bytes)
        policy = await node.policies.publish(version, folder, canary)
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
    return web.json_response({"version": version, "name": policy.name, "seconds": policy.seconds})


async def _receive(request: web.Request, folder: Path, most: int) -> Any:
    """Write the upload's files into ``folder``, and return the decoded canary or None."""
    try:
        return await _write_parts(request, folder, most)
    except (ValueError, KeyError, RuntimeError, AssertionError, RequestPayloadError) as error:  # aiohttp's own
        raise RequestError(400, f"the upload is not multipart/form-data: {error}") from error


async def _write_parts(request: web.Request, folder: Path, most: int) -> Any:
    canary = None
    async for part in await request.multipart():
        if not isinstance(part, BodyPartReader) or part.name not in (*ADAPTER_FILES, "canary"):
            raise RequestError(400, f"the upload may hold {', '.join(ADAPTER_FILES)} and canary only")
        bound = {ADAPTER_WEIGHTS: most, "canary": MAX_JSON_BYTES}.get(part.name, MAX_CONFIG_BYTES)
        # The name is one of three constants: no text of a client becomes a path.
        with await asyncio.to_thread((folder / part.name).open, "wb") as file:
            size = 0
            while chunk := await part.read_chunk(1 << 20):
                size += len(chunk)
                if size > bound:
                    raise RequestError(413, f"{part.name} has more than {bound} bytes, the most there can be")
                await asyncio.to_thread(file.write, chunk)
        if part.name == "canary":
            try:
                canary = read_json((folder / part.name).read_bytes())
            except BadBody as error:
                raise RequestError(400, f"the canary is {error}") from error
            (folder / part.name).unlink()
    return canary


async def retire_policy(request: web.Request) -> web.Response:
    version = _version(request)
    await request.app[NODE].policies.retire(version)
    return web.json_response({"version": version})


async def sleep_servers(request: web.Request) -> web.Response:
    await request.app[NODE].sleep()
    return web.json_response({})


async def wake_servers(request: web.Request) -> web.Response:
    await request.app[NODE].wake()
    return web.json_response({})
