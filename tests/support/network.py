"""A network between a client and a service on this machine, which a test can cut."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from urllib.parse import urlsplit


class Network:
    """Forwards TCP connections to a service; the client's address of it is ``url``."""

    def __init__(self, service_url: str) -> None:
        self._host, self._port = urlsplit(service_url).hostname, urlsplit(service_url).port
        self._writers: set[asyncio.StreamWriter] = set()
        self._down = False
        self._flows = asyncio.Event()
        self._flows.set()
        self.url = ""

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Network]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            self.cut()

    def cut(self) -> None:
        """Reset all connections."""
        for writer in self._writers:
            writer.transport.abort()

    def go_down(self) -> None:
        """Reset all connections, now and when they are made."""
        self._down = True
        self.cut()

    def fall_silent(self) -> None:
        """Keep all connections, and carry nothing more."""
        self._flows.clear()

    def flow(self) -> None:
        """Carry again."""
        self._flows.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._down:
            writer.transport.abort()
            return
        there, back = await asyncio.open_connection(self._host, self._port)
        self._writers |= {writer, back}
        await asyncio.gather(self._carry(reader, back), self._carry(there, writer))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while part := await reader.read(1 << 16):
                await self._flows.wait()
                writer.write(part)
                await writer.drain()
        self._writers.discard(writer)
        writer.close()
