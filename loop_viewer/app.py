"""The viewer's HTTP face: a page of static files and a little JSON, for the browser on this machine only."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web

from loop_formats.run_files import to_json
from loop_plumbing.http_server import BadBody, read_agents_json, read_body
from loop_viewer.run_data import RunData
from loop_viewer.run_folder import RunFolder
from loop_viewer.summaries import columns, episodes


class CannotContinue(RuntimeError):
    """No running node can continue the rollout, or the node refuses; the message is one line for the user."""


class Continuation(Protocol):
    """Asks the node of a live run to go on from a turn; :mod:`loop_recipes.verbs.continuation` does so."""

    def continue_rollout(self, log: Path, line: bytes, turn: int) -> str:
        """Return the id of the collection that will hold the new rollout; raises :class:`CannotContinue`."""

    def continuation_state(self, log: Path) -> dict[str, Any]:
        """Return {"ended", "error"} for a collection of :meth:`continue_rollout`; raises :class:`CannotContinue`."""


STATIC = Path(__file__).parent / "static"
LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")
# Agents' texts are hostile: no inline script, nothing from elsewhere, nothing sent anywhere.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)


def build_app(data: RunData | RunFolder, continuation: Continuation | None = None) -> web.Application:
    """Build the application; every answer carries the content security policy. For a folder, the first page lists the
    runs; the pages of a run are at addresses that begin with ``/run/NAME``. Without a ``continuation`` no rollout can
    be continued."""
    app = web.Application(middlewares=[_guard])
    routes = _Routes(data, continuation)
    here, rollout = "", "/api/collections/{collection}/rollouts/{cursor:[0-9]{1,12}}"
    if isinstance(data, RunFolder):
        here = "/run/{run}"
        app.add_routes(
            [
                web.get("/", routes.page),
                web.get("/api/run", routes.folder),
                web.get("/api/curves/{quantity}", routes.curves),
            ]
        )
    app.add_routes(
        [
            web.get(f"{here}/", routes.page),
            web.get(f"{here}/api/run", routes.overview),
            web.get(f"{here}/api/collections/{{collection}}", routes.summaries),
            web.get(f"{here}{rollout}", routes.rollout),
            web.get(f"{here}/api/collections/{{collection}}/search", routes.search),
            web.post(f"{here}{rollout}/turns/{{turn:[0-9]{{1,12}}}}/branch", routes.branch),
            web.post(f"{here}{rollout}/note", routes.note),
            web.get(f"{here}/api/branches/{{collection}}", routes.branch_state),
            web.static("/static", STATIC),
        ]
    )
    return app


@web.middleware
async def _guard(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer only requests for a local host name: a web page elsewhere could point its own name at this server."""
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
    def __init__(self, data: RunData | RunFolder, continuation: Continuation | None) -> None:
        self._data, self._continuation = data, continuation
        self._reading = asyncio.Lock()

    async def page(self, request: web.Request) -> web.StreamResponse:
        return web.FileResponse(STATIC / "index.html")

    async def folder(self, request: web.Request) -> web.Response:
        return await self._answer(lambda: self._data.overview())

    async def curves(self, request: web.Request) -> web.Response:
        """Return the curves of one quantity for the runs in the address."""
        assert isinstance(self._data, RunFolder)
        names = request.query.getall("run", [])
        return await self._answer(partial(self._data.curves, request.match_info["quantity"], names))

    async def overview(self, request: web.Request) -> web.Response:
        """Return the run's overview; ``folder`` names the folder of runs that the page shows, "" for none."""
        folder = self._data.name if isinstance(self._data, RunFolder) else ""
        return await self._answer(lambda: {**self._run(request).overview(), "folder": folder})

    async def summaries(self, request: web.Request) -> web.Response:
        collection = request.match_info["collection"]
        return await self._answer(lambda: columns(episodes(self._run(request).summaries(collection))))

    async def rollout(self, request: web.Request) -> web.Response:
        return await self._answer(lambda: self._run(request).rollout(*_place(request)))

    async def search(self, request: web.Request) -> web.Response:
        wanted = request.query.get("q", "")
        return await self._answer(lambda: self._run(request).search(request.match_info["collection"], wanted))

    async def branch(self, request: web.Request) -> web.Response:
        """Ask the run's node to go on from a turn: {"collection": its id}."""
        if request.content_type != "application/json":
            return _no_json()

        def ask() -> dict[str, str]:
            log, line = self._run(request).stored(*_place(request))
            return {"collection": self._asked().continue_rollout(log, line, int(request.match_info["turn"]))}

        return await self._answer(ask)

    async def note(self, request: web.Request) -> web.Response:
        """Keep a reader's note on a rollout: {"note": text}."""
        if request.content_type != "application/json":
            return _no_json()
        try:
            body = read_agents_json(await read_body(request))
        except BadBody:
            body = None
        match body:
            case {"note": str(text)}:
                return await self._answer(lambda: self._run(request).write_note(*_place(request), text))
        return web.json_response({"error": 'send {"note": text}'}, status=400)

    async def branch_state(self, request: web.Request) -> web.Response:
        """Return whether a requested branch has ended; its log appears soon after the request."""
        collection = request.match_info["collection"]
        return await self._answer(lambda: self._asked().continuation_state(self._run(request).log(collection)))

    def _asked(self) -> Continuation:
        if self._continuation is None:
            raise CannotContinue("this viewer asks no rollout node")
        return self._continuation

    def _run(self, request: web.Request) -> RunData:
        """Return the viewer's only run, or the run that the address names."""
        return self._data if isinstance(self._data, RunData) else self._data.run(request.match_info["run"])

    async def _answer(self, read: Callable[[], Any]) -> web.Response:
        """Run a read in a thread beside the event loop, one read at a time: the index of a log has one writer."""

        def dump() -> str:
            return to_json(read(), separators=(",", ":"))

        try:
            async with self._reading:
                text = await asyncio.to_thread(dump)
        except KeyError as error:
            return web.json_response({"error": f"not there: {error.args[0]}"}, status=404)
        except CannotContinue as error:
            return web.json_response({"error": str(error)})  # an answer: nothing is wrong with the request
        except OSError as error:  # removed or renamed since its folder was listed
            return web.json_response({"error": f"{error.filename}: {error.strerror}"}, status=404)
        except ValueError as error:
            return web.json_response({"error": str(error)}, status=500)
        return web.Response(text=text, content_type="application/json")


def _place(request: web.Request) -> tuple[str, int]:
    """Return the collection and the cursor (position from 1) of the rollout in an address."""
    return request.match_info["collection"], int(request.match_info["cursor"])


def _no_json() -> web.Response:
    """Refuse bodies other than JSON, which a page from elsewhere could send without permission."""
    return web.json_response({"error": "send application/json"}, status=415)
