"""A forwarder in a container: 127.0.0.1:8700 there leads to the Unix socket beside this file, which is mounted.

The container's own Python runs it, from 3.8 on, without a package.
"""

import asyncio
import contextlib
from pathlib import Path

HOST, PORT, SOCKET = "127.0.0.1", 8700, "endpoint"


def forward(connect):
    """Return a server's connection handler: it opens a connection with ``connect()`` and copies bytes both ways."""

    async def join(reader, writer):
        with contextlib.suppress(OSError):
            far_reader, far_writer = await connect()
            try:
                await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))
            finally:
                far_writer.close()
        writer.close()

    async def copy(reader, writer):
        while not reader.at_eof():
            writer.write(await reader.read(65536))
            await writer.drain()
        writer.write_eof()

    return join


async def _serve(path):
    server = await asyncio.start_server(forward(lambda: asyncio.open_unix_connection(path)), HOST, PORT)
    print("it listens", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(str(Path(__file__).with_name(SOCKET))))
