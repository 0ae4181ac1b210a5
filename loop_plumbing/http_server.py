"""The base of the project's HTTP servers: every refusal is one line of JSON, and strangers take few of the files.

A stranger is a connection that has shown no token yet. It takes a file descriptor all the same, so the server closes
the oldest of too many strangers. :func:`trust_client` marks a connection that has shown a token: the server keeps it.
But an agent's key has a limited number of connections: beyond it, the oldest that waits for no answer is closed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError
from aiohttp.web_protocol import RequestPayloadError
from pydantic_core import from_json

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 8 << 20
BODY_DEADLINE_S = 60.0
KEEP_ALIVE_S = 75.0
"""Seconds that a connection stays open without a request. Longer than clients keep one for their next request, else
a request could meet its end; short, because each takes a file descriptor."""
MAX_STRANGERS = 512
"""More connections than an event loop accepts before it reads from them (twice the backlog of 128)."""
LEAST_STRANGERS = 16
MAX_CONNECTIONS_OF_KEY = 64
"""Twice the calls that an agent may make at once by its key."""
FEWEST_FILES = 256
"""Files that a server has open whatever it serves: logs, uploads, clients."""


class BadBody(ValueError):
    """A request's body cannot be read; the message is one line."""


def refusal(status: int, error: object, **more: Any) -> web.Response:
    """Build the response ``{"error": "one line"}`` with this status; the keys of ``more`` are added."""
    return web.json_response({"error": one_line(error), **more}, status=status)


def one_line(error: object) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def read_json(text: str | bytes) -> Any:
    """Return the value of a JSON document from outside.

    Raises:
        BadBody: the text is not JSON, is nested too deeply, or holds half a surrogate pair, NaN or a number of
            thousands of digits: such values would break code far from here.
    """
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise BadBody(f"not JSON: {error}") from error


def read_agents_json(text: str | bytes) -> Any:
    """Return the value of an agent's JSON. Accepts all that :mod:`json` accepts, because a text that was cut within a
    surrogate pair must not end the agent's episode. Raises BadBody."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadBody(f"not JSON: {error}") from error


async def read_body(request: web.Request, arrived: Callable[[int], None] = lambda size: None) -> bytes:
    """Return the body of a request; ``arrived`` is called with each chunk's number of bytes, and may raise.

    Raises:
        TimeoutError: the body does not arrive in time.
        BadBody: the body is not encoded as its header says.
        web.HTTPRequestEntityTooLarge: the body is larger than the application allows.
    """
    body, most = bytearray(), request.client_max_size
    try:
        async with asyncio.timeout(BODY_DEADLINE_S):
            async for chunk in request.content.iter_any():
                arrived(len(chunk))
                body += chunk
                if len(body) > most:
                    raise web.HTTPRequestEntityTooLarge(max_size=most, actual_size=len(body))
            return bytes(body)
    except RequestPayloadError as error:
        raise BadBody(f"not readable: {one_line(error)}") from error


def route_of(request: web.BaseRequest) -> str:
    """Return a request's method and route for logs, which must not show the path: the path may hold a key."""
    resource = request.match_info.route.resource if isinstance(request, web.Request) else None
    return f"{request.method} {resource.canonical if resource is not None else '(no route)'}"


def trust_client(request: web.Request, key: str | None = None) -> None:
    """Mark the connection of this request as trusted, because the request has shown a token.

    Args:
        key: the token, if it is an agent's; such a key has at most :data:`MAX_CONNECTIONS_OF_KEY` connections.
    """
    own = request.protocol
    if not isinstance(own, _ServedConnection):
        return
    is_new = key is not None and own.key != key
    own.stranger, own.key, own.is_answered = False, key, True
    if is_new:
        others = [other for other in _connections(own.server) if other.key == key and other is not own]
        idle_first = sorted(others, key=lambda other: other.is_answered)
        for other in idle_first[: max(0, len(others) + 1 - min(MAX_CONNECTIONS_OF_KEY, _files_for(8)))]:
            other.force_close()


def _connections(server: web.Server) -> list[_ServedConnection]:
    """Return the open connections, the oldest first."""
    return [connection for connection in server.connections if isinstance(connection, _ServedConnection)]


def _files_for(share: int) -> int:
    """Return the number of open files allowed divided by ``share``, but at least :data:`LEAST_STRANGERS`."""
    return max(LEAST_STRANGERS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // share)


class Site(web.BaseSite):
    """Serve an application at ``host`` and ``port`` (0: any free port), under the rules in this module's docstring.

    Raises (when started):
        OSError: the address is taken or not this machine's.
    """

    def __init__(self, runner: web.AppRunner, host: str, port: int) -> None:
        super().__init__(runner)
        self._host, self._port = host, port
        self._most_strangers = min(MAX_STRANGERS, _files_for(4))

    @property
    def name(self) -> str:
        return f"http://{self._host}:{self._port}"

    async def start(self) -> None:
        await super().start()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, self._host, self._port, backlog=self._backlog)

    def _accept(self) -> _ServedConnection:
        server = self._runner.server
        assert server is not None, "set up before it listens"
        strangers = [connection for connection in _connections(server) if connection.stranger]
        for oldest in strangers[: max(0, len(strangers) + 1 - self._most_strangers)]:
            oldest.force_close()
        return _ServedConnection(
            server, loop=asyncio.get_running_loop(), keepalive_timeout=KEEP_ALIVE_S, access_log=None
        )


class _ServedConnection(web.RequestHandler):
    """A connection, with what the server knows of its client."""

    __slots__ = ("is_answered", "key", "server", "stranger")

    def __init__(self, server: web.Server, **options: Any) -> None:
        super().__init__(server, **options)
        self.server = server
        self.stranger, self.is_answered = True, False
        self.key: str | None = None

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if isinstance(resp, web.HTTPException):  # raised by the router: no such path, another method, a header
            original, resp = resp, refusal(resp.status, resp.reason)
            if "Allow" in original.headers:
                resp.headers["Allow"] = original.headers["Allow"]
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self.is_answered = False

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the response to data that is not HTTP, or to a request that met an error in our code."""
        if isinstance(exc, ContentEncodingError):  # it needs a library that is not here, such as zstd
            answer = refusal(415, "the Content-Encoding of the body is not read here: send it plain, or gzipped")
        elif status < 500:
            # Neither sent nor logged in full: the parser's message holds the header, and so perhaps a token.
            answer = refusal(status, f"this is not an HTTP request ({type(exc).__name__})")
        else:
            logger.error("%s met a defect", route_of(request), exc_info=exc)
            answer = refusal(status, f"a defect of the server ({type(exc).__name__}); its log says where")
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun already")
        answer.force_close()
        return answer


def raise_open_files(needed: int) -> int:
    """Raise the limit of open files to ``needed``, or as far as the system lets us; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft == resource.RLIM_INFINITY or soft >= allowed:
        return allowed
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed
