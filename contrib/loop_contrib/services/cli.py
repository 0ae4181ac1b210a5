"""Serves any environment of a config, by OpenEnv's and AgentGym's protocols.

    SERVE_ENVIRONMENT_TOKEN=... loop serve textcraft python=.venv-worlds/bin/python --splits train dev
    SERVE_ENVIRONMENT_TOKEN=... loop serve appworld python=.venv-appworld/bin/python root=worlds/synthetic

Clients send the token of SERVE_ENVIRONMENT_TOKEN. Observations are not cut here: the client does that, by its policy's
tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from agent_environments.protocol import ENVIRONMENTS, EnvironmentFault, create_pool, is_harness, pool_class
from agent_environments.shared_grade import refuse_shared_grade
from loop_contrib.services.server import MAX_SESSIONS, EnvironmentServer
from loop_contrib.services.service_pool import TOKEN_VARIABLE
from loop_plumbing import running_time
from loop_plumbing.http_server import FEWEST_FILES, MAX_STRANGERS, Site, raise_open_files
from loop_plumbing.plug_ins import plug_ins
from loop_plumbing.sanitize import SanitizingFormatter
from loop_plumbing.secret import read_secret
from loop_recipes.config.arguments import verb_parser

OPEN_FILES_PER_SESSION = 16
"""Open files of one session: its connection, and its world's processes and files."""


def option(text: str) -> tuple[str, Any]:
    """Return (key, value) of a ``key=value`` argument. The value is read as JSON, or else kept as text."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not key=value")
    with contextlib.suppress(ValueError):
        return key, json.loads(value)
    return key, value


def parser() -> argparse.ArgumentParser:
    described = verb_parser("serve", __doc__)
    names = ", ".join(sorted({*ENVIRONMENTS, *plug_ins("environments")} - {"harness"}))
    described.add_argument("name", metavar="ENVIRONMENT", help=f"module:Class, or one of {names}")
    described.add_argument("options", type=option, nargs="*", metavar="key=value", help="options of its config")
    splits = "tasks that AgentGym's data_idx counts through, one split after the other (train)"
    described.add_argument("--splits", nargs="+", default=["train"], metavar="SPLIT", help=splits)
    host = "address to listen at; 0.0.0.0 lets other machines in (127.0.0.1)"
    described.add_argument("--host", default="127.0.0.1", help=host)
    described.add_argument("--port", type=int, default=8800, help="port to listen at; 0: any that is free (8800)")
    idle = "seconds after which an idle session of AgentGym's protocol ends (600)"
    described.add_argument("--idle-timeout-s", type=float, default=600.0, metavar="SECONDS", help=idle)
    return described


def no_spans(text: str) -> list[tuple[int, int]]:
    """Return no token spans, so that no observation is cut."""
    return []


async def serve(arguments: argparse.Namespace, token: str) -> None:
    """Serve until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    if is_harness(arguments.name):
        raise ValueError("a harness cannot be served; its world can")
    pool = create_pool(arguments.name, dict(arguments.options), no_spans)
    refuse_shared_grade(pool.dataset)  # its clients would not know
    await pool.open()
    runner = None
    try:
        server = EnvironmentServer(pool, arguments.splits, token, arguments.idle_timeout_s)
        runner = web.AppRunner(server.application(), handle_signals=False, shutdown_timeout=5.0)
        await runner.setup()
        await Site(runner, arguments.host, arguments.port).start()
        port = runner.addresses[0][1]
        host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
        print(f"serving {pool.dataset} at http://{host}:{port}", flush=True)
        await stop.wait()
    finally:
        if runner is not None:
            await runner.cleanup()
        await pool.close()


def main(words: Sequence[str] | None = None) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(SanitizingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    arguments = parser().parse_intermixed_args(words)
    if not 0 <= arguments.port <= 65535:
        parser().error(f"--port is {arguments.port}; it must be 0 to 65535")
    if not arguments.idle_timeout_s > 0:
        parser().error(f"--idle-timeout-s is {arguments.idle_timeout_s:g}; it must be above 0")
    raise_open_files(FEWEST_FILES + MAX_STRANGERS + MAX_SESSIONS * OPEN_FILES_PER_SESSION)
    try:
        if Path(arguments.name).is_dir():
            raise ValueError(f"{arguments.name} is a folder, no environment; to serve a policy: loop export RUN")
        pool_class(arguments.name)  # an unknown name is reported first
        token = read_secret(TOKEN_VARIABLE)
        if not token:
            raise ValueError(f"set {TOKEN_VARIABLE}, the token that clients must send")
        running_time.run(serve(arguments, token))
    except (EnvironmentFault, OSError, ValueError) as error:
        sys.exit(f"loop serve: {' '.join(str(error).split())}")
