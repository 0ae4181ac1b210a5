"""An endpoint of chat completions, for those who ask a model."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer


class FakeChatEndpoint:
    """Answers what ``reply`` makes of a request's body, awaited if it is to be: a text, a message, a status, or a
    status with headers. Keeps bodies and keys."""

    url: str

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.reply: Callable[[dict[str, Any]], Any] = lambda body: "Hello."

    async def _complete(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        self.keys.append(request.headers.get("Authorization"))
        reply = self.reply(self.bodies[-1])
        if inspect.isawaitable(reply):
            reply = await reply
        status, headers = reply if isinstance(reply, tuple) else (reply, {})
        if isinstance(status, int):
            return web.Response(status=status, text="no", headers=headers)
        message = reply if isinstance(reply, dict) else {"content": reply}
        choices = [{"message": {"role": "assistant", **message}}]
        return web.json_response({"model": self.bodies[-1].get("model"), "choices": choices})

    @asynccontextmanager
    async def served(self) -> AsyncIterator[FakeChatEndpoint]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._complete)
        async with TestServer(app) as server:
            self.url = str(server.make_url("/v1"))
            yield self
