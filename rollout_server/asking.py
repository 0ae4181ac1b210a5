"""``status`` and ``cancel``: asks a node that runs, by its address or by the folder of the run that it works for."""

from __future__ import annotations

import argparse
from pathlib import Path

from loop_formats.run_files import NODE_SECRET, node_address
from loop_formats.schema import ConfigError
from loop_plumbing.secret import required_secret
from rollout_server.client import RolloutClient
from rollout_server.display import status_lines

DEFAULT_TOKEN_ENV = "ROLLOUT_SERVER_TOKEN"
ROOTS = (".", "node", "evaluation/node")
"""The folders of nodes, within the folder that a user names."""


def node_secret(root: Path) -> str:
    """Return the secret of a node that a run started; "" if there is no secret, or its file has another owner."""
    try:
        return (root / NODE_SECRET).read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""


def ask(arguments: list[str], program: str) -> None:
    """Show a node's state or end one of its collections. The first of ``arguments`` chooses.

    Raises:
        ConfigError: no node runs in that folder, or the node's secret is not found.
        NodeUnreachable: the node does not answer.
    """
    word, *rest = arguments
    about = {
        "status": "Show the state of a running rollout node.",
        "cancel": "End a collection of a running node; its finished rollouts stay there.",
    }
    parser = argparse.ArgumentParser(f"{program} {word}", description=about[word])
    parser.add_argument("node", help="http://host:port of the node, or the folder of the run that started it")
    if word == "cancel":
        parser.add_argument("id", help="id of the collection; status lists them")
    parser.add_argument("--token-env", default=DEFAULT_TOKEN_ENV, help="variable that holds the bearer token")
    options = parser.parse_args(rest)
    url, secret = options.node, ""
    if "://" not in url:
        running = {each: at for each in ROOTS if (at := node_address(Path(options.node, each)))}
        if not running:
            why = "a run's node runs while the run does, and an address begins with http://"
            raise ConfigError(f"no rollout node is running in {options.node}; {why}")
        root, url = next(iter(running.items()))
        secret = node_secret(Path(options.node, root))
    token = secret or required_secret(options.token_env, "the secret that the node was started with")
    client = RolloutClient(url, token, timeout_s=10.0, reconnect_s=0.0)
    if word == "status":
        print(*status_lines(url, client.status()), sep="\n")
    else:
        print(f"{options.id}: {client.cancel(options.id)}")
