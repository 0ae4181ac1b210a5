"""A second vLLM server for the price of none: a proxy in front of a real one, which can hold requests and can die."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from types import TracebackType

import aiohttp
from aiohttp import web


class VllmProxy:
    """Passes everything on to the server at ``target``, from a thread of its own.

    From its second turn on an episode's requests are held until :meth:`release`. ``held`` are the episodes that wait:
    each has a turn that was sampled here and another one under way.
    """

    def __init__(self, target: str) -> None:
        self.url = ""
        self.held: set[str] = set()
        self._target = target
        self._transports: set[asyncio.Transport] = set()
        self._turns: Counter[str] = Counter()
        self._released = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vLLM proxy")

    def release(self) -> None:
        """Hold nothing any more."""
        self._released.set()

    def kill(self) -> None:
        """Cut all connections and refuse new ones, as a machine does whose process was killed."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()

    def __enter__(self) -> VllmProxy:
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.kill()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> str:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False)
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _stop(self) -> None:
        # Closing would wait for the requests that are held; a connection that is cut ends its handler.
        for transport in self._transports:
            transport.abort()
        await self._runner.cleanup()
        await self._session.close()

    async def _pass_on(self, request: web.Request) -> web.Response:
        if request.transport is not None:
            self._transports.add(request.transport)
        body = await request.read()
        if request.path == "/inference/v1/generate":
            await self._hold(await request.json())
        headers = {name: value for name, value in request.headers.items() if name.lower() != "host"}
        target = f"{self._target}{request.path_qs}"
        async with self._session.request(request.method, target, data=body, headers=headers) as answer:
            kind = {"Content-Type": answer.headers.get("Content-Type", "text/plain")}
            return web.Response(status=answer.status, body=await answer.read(), headers=kind)

    async def _hold(self, body: dict) -> None:
        if "prompt_logprobs" in body["sampling_params"]:  # a canary, no turn
            return
        episode = body["request_id"].rpartition("-")[0]
        self._turns[episode] += 1
        if self._turns[episode] > 1 and not self._released.is_set():
            self.held.add(episode)
            while not self._released.is_set():  # noqa: ASYNC110 - set by another thread
                await asyncio.sleep(0.01)
            self.held.discard(episode)
