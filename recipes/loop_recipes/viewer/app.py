"""The viewer's HTTP face: a page of static files and a little JSON, for the browser on this machine only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from loop_recipes.viewer.continuation import CannotContinue, continuation_state, continue_rollout
from loop_recipes.viewer.run_data import RunData

STATIC = Path(__file__).parent / "static"
LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")
# What agents wrote is hostile: no inline script, nothing from elsewhere, nothing sent anywhere.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)


def build_app(run: RunData) -> web.Application:
    """The application; every answer carries the content security policy."""
    app = web.Application(middlewares=[_guard])
    routes = _Routes(run)
    app.add_routes(
        [
            web.get("/", routes.page),
            web.get("/api/run", routes.overview),
            web.get("/api/collections/{collection}", routes.summaries),
            web.get("/api/collections/{collection}/rollouts/{cursor:[0-9]{1,12}}", routes.rollout),
            web.get("/api/collections/{collection}/search", routes.search),
            web.post(
                "/api/collections/{collection}/rollouts/{cursor:[0-9]{1,12}}/turns/{turn:[0-9]{1,12}}/branch",
                routes.branch,
            ),
            web.post("/api/collections/{collection}/rollouts/{cursor:[0-9]{1,12}}/note", routes.note),
            web.get("/api/branches/{collection}", routes.branch_state),
            web.static("/static", STATIC),
        ]
    )
    return app


@web.middleware
async def _guard(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer only to a local name, so that a web page elsewhere cannot reach this server by a name of its own."""
    host = request.host.rsplit(":", 1)[0] if not request.host.endswith("]") else request.host
    if host not in LOCAL_NAMES:
        return web.Response(status=403, text="the viewer answers to 127.0.0.1 and localhost only")
    response = await handler(request)
    response.headers["Content-Security-Policy"] = CONTENT_SECURITY_POLICY
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Referrer-Policy"] = "no-referrer"
    response.headers["Cache-Control"] = "no-store"
    return response


class _Routes:
    def __init__(self, run: RunData) -> None:
        self._run = run
        self._reading = asyncio.Lock()

    async def page(self, request: web.Request) -> web.StreamResponse:
        return web.FileResponse(STATIC / "index.html")

    async def overview(self, request: web.Request) -> web.Response:
        return await self._answer(self._run.overview)

    async def summaries(self, request: web.Request) -> web.Response:
        return await self._answer(self._run.summaries, request.match_info["collection"])

    async def rollout(self, request: web.Request) -> web.Response:
        cursor = int(request.match_info["cursor"])
        return await self._answer(self._run.rollout, request.match_info["collection"], cursor)

    async def search(self, request: web.Request) -> web.Response:
        return await self._answer(self._run.search, request.match_info["collection"], request.query.get("q", ""))

    async def branch(self, request: web.Request) -> web.Response:
        """Ask the run's node to go on from a turn: {"collection": its id}."""
        if request.content_type != "application/json":
            return _no_json()
        collection, cursor = request.match_info["collection"], int(request.match_info["cursor"])

        def ask() -> dict[str, str]:
            log, line = self._run.stored(collection, cursor)
            return {"collection": continue_rollout(log, line, int(request.match_info["turn"]))}

        return await self._answer(ask)

    async def note(self, request: web.Request) -> web.Response:
        """Keep what a reader wrote of a rollout: {"note": text}."""
        if request.content_type != "application/json":
            return _no_json()
        collection, cursor = request.match_info["collection"], int(request.match_info["cursor"])
        try:
            said = json.loads(await request.read())
        except ValueError:
            said = None
        match said:
            case {"note": str(text)}:
                return await self._answer(self._run.write_note, collection, cursor, text)
        return web.json_response({"error": 'send {"note": text}'}, status=400)

    async def branch_state(self, request: web.Request) -> web.Response:
        """Whether a branch that was asked for has ended; its log is there soon after it was asked for."""
        return await self._answer(lambda: continuation_state(self._run.log(request.match_info["collection"])))

    async def _answer(self, read: Callable[..., Any], *arguments: Any) -> web.Response:
        """Read beside the event loop, one at a time: the index of a log has one writer."""

        def dump() -> str:
            # ASCII only: a lone surrogate in an agent's text cannot be encoded otherwise.
            return json.dumps(read(*arguments), separators=(",", ":"))

        try:
            async with self._reading:
                text = await asyncio.to_thread(dump)
        except KeyError as error:
            return web.json_response({"error": f"not there: {error.args[0]}"}, status=404)
        except CannotContinue as error:
            return web.json_response({"error": str(error)})  # an answer: nothing is wrong with the request
        except ValueError as error:
            return web.json_response({"error": str(error)}, status=500)
        return web.Response(text=text, content_type="application/json")


def _no_json() -> web.Response:
    """Refuse what a page from elsewhere could send without being asked for: anything but JSON."""
    return web.json_response({"error": "send application/json"}, status=415)
