"""``rollout-server --config node.yaml [key=value ...]`` runs a node; ``rollout-server status NODE`` shows one,
``rollout-server cancel NODE ID`` ends a collection of it."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback

from loop_formats.schema import ConfigError
from loop_plumbing import running_time
from loop_plumbing.http_server import FEWEST_FILES, MAX_STRANGERS, Site, raise_open_files
from loop_plumbing.sanitize import SanitizingFormatter, show_all_text
from loop_plumbing.secret import required_secret
from loop_plumbing.start import prepare_process
from rollout_server.app import build_runner
from rollout_server.config import ALL_ADDRESSES, NodeConfig, load_node_config, node_url
from rollout_server.node import Node

logger = logging.getLogger("rollout_server")

ORPHAN_GRACE_S = 120.0
FAREWELL_S = 10.0
"""Seconds for which a failed node goes on reporting why, to clients on other machines."""
OPEN_FILES_PER_EPISODE = 16
"""Files of its world, its program's pipes, its connections to a server and from an agent."""


def main(arguments: list[str] | None = None, program: str = "rollout-server") -> None:
    """Run the command; exits with 0 after an orderly stop, with 1 and one line on stderr after an error.

    Args:
        program: the name of this command in help and errors.
    """
    prepare_process()
    show_all_text()
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if arguments[:1] in (["status"], ["cancel"]):
            from rollout_server.asking import ask  # which a node does without

            ask(arguments, program)
        else:
            _serve(arguments, program)
    except (ConfigError, ValueError, RuntimeError, OSError) as error:
        sys.exit(f"{program}: {_one_line(error)}")
    except Exception as error:
        traceback.print_exc()
        sys.exit(f"{program}: {_one_line(error)}")


def _one_line(error: Exception) -> str:
    """Return the error's message in one line. For an error without a message, return its type and place."""
    if str(error) and isinstance(error, ConfigError | ValueError | RuntimeError | OSError):
        return " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {frames[-1].name} ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{' '.join(repr(error).split())}{where}"


def _serve(arguments: list[str], program: str) -> None:
    parser = argparse.ArgumentParser(program, description=__doc__)
    parser.add_argument("--config", required=True, help="YAML file; see docs/rollout_node.md")
    parser.add_argument("--owner-pid", type=int, help="stop when the process with this id ends")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that replace those of the file")
    options = parser.parse_args(arguments)
    config = load_node_config(options.config, options.overrides)
    token = required_secret(config.token_env, "a secret of your choice")
    del os.environ[config.token_env]  # servers, worlds and tools are started with this environment
    handler = logging.StreamHandler()
    handler.setFormatter(SanitizingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    if options.owner_pid is not None:
        _follow(options.owner_pid)
    _raise_open_files(config.max_concurrent_episodes)
    running_time.run(_run(config, token))


def _raise_open_files(episodes: int) -> None:
    """Raise the limit of open files to what these episodes need, or warn that the system's hard limit is lower."""
    needed = FEWEST_FILES + MAX_STRANGERS + episodes * OPEN_FILES_PER_EPISODE
    if (allowed := raise_open_files(needed)) < needed:
        logger.warning(
            "at most %d files may be open, and %d episodes may need %d: raise the hard limit (ulimit -Hn, LimitNOFILE) "
            "or lower max_concurrent_episodes",
            allowed,
            episodes,
            needed,
        )


def _follow(owner: int) -> None:
    """Stop this node when the process ``owner`` ends for any reason. Kill the node if it does not stop by itself.

    A thread waits for the owner, so that even a node whose event loop hangs does not outlive the owner. The node's
    children die with the node.
    """
    try:
        descriptor = os.pidfd_open(owner)
    except OSError as error:
        raise ConfigError(f"--owner-pid {owner}: no such process") from error

    def wait() -> None:
        select.select([descriptor], [], [])
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_GRACE_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="owner watch", daemon=True).start()


async def _run(config: NodeConfig, token: str) -> None:
    """Bind the port, then start the node and serve until a signal. A port in use fails before anything is started."""
    node = Node(config)
    runner = build_runner(node, token, shutdown_timeout_s=5.0)
    await runner.setup()
    try:
        try:
            await Site(runner, config.host, config.port).start()
        except OSError as error:
            cure = f"{error.strerror or error}; choose another port or host"
            raise ConfigError(f"cannot listen on {node_url(config.host, config.port)}: {cure}") from error
        port = runner.addresses[0][1]
        node.listens_at(node_url(config.host, port))
        # Other machines read it too, where 0.0.0.0 would be those machines themselves.
        host = socket.gethostname() if config.host in ALL_ADDRESSES else config.host
        node.write_address(node_url(host, port), os.getpid())
        logger.info("listening on %s", node_url(config.host, port))
        await _until_stopped(node)
    finally:
        node.remove_address()
        await runner.cleanup()


async def _until_stopped(node: Node) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    starting = asyncio.create_task(node.start())
    stopping = asyncio.create_task(stop.wait())
    failing = asyncio.create_task(node.until_given_up())
    try:
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            await asyncio.wait([stopping, failing], return_when=asyncio.FIRST_COMPLETED)
            if failing.done():
                raise RuntimeError(node.failure)
        logger.info("stopping")
    except Exception as error:
        node.failure = node.failure or _one_line(error)
        logger.info("stopping: %s", node.failure)
        await asyncio.wait([stopping], timeout=FAREWELL_S)
        raise
    finally:
        tasks = (starting, stopping, failing)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # the error of a failed start is on its way up already
        await node.stop()


if __name__ == "__main__":
    main()
