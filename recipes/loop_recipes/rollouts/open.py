"""Opens the source of a config's ``rollout_node``: a node started here, one or several elsewhere, or stored logs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from agent_environments.description import trust_environment
from loop_formats.run_files import new_node_secret
from loop_recipes.config.loop_config import RolloutSourceConfig
from loop_recipes.config.rollout_node import RolloutNodeConfig, read_token
from loop_recipes.rollouts.node_source import NodeSource
from loop_recipes.rollouts.source import CollectionSource
from loop_recipes.run.stop_request import StopRequested
from rollout_server.client import RolloutClient
from rollout_server.config import NodeConfig
from rollout_server.node_process import NodeProcess

if TYPE_CHECKING:
    from loop_recipes.rollouts.several_nodes import SeveralNodes


def open_source(
    config: RolloutSourceConfig,
    node: NodeConfig | None,
    output_dir: Path,
    deadline_s: float,
    stop_requested: Callable[[], bool],
) -> CollectionSource:
    """Open the source of a training run. Nodes that run elsewhere are ready; a launched node may still be starting.

    Servers that share their GPUs with the trainer are asleep at first: the trainer has its turn.

    Args:
        node: the node to launch, if ``config`` launches one.
        deadline_s: longest time to wait for one collection.
        stop_requested: called while waiting; true ends the wait with StopRequested.

    Raises:
        NodeDied, NodeUnreachable: no node answers, or it is not ready before ``start_deadline_s``.
        NoRollouts: the nodes differ.
    """
    if config.replay is not None:
        from loop_recipes.rollouts.replay_source import ReplaySource  # few runs need it

        return ReplaySource(Path(config.replay))
    nodes = open_nodes(config, node, output_dir, deadline_s, stop_requested)
    if node is not None and node.servers.share is not None:
        nodes.sleep()
    elif not config.launch:
        nodes.wait_ready()
    return nodes


def open_nodes(
    config: RolloutNodeConfig,
    node: NodeConfig | None,
    output_dir: Path,
    deadline_s: float,
    stop_requested: Callable[[], bool] = lambda: False,
) -> NodeSource | SeveralNodes:
    """Open (or launch, if the config says so) the nodes of a config without replay. They may still be starting.

    Raises:
        NodeDied: the node that was launched ended at once.
    """
    if node is not None:
        trust_environment({"name": node.environment.name, **node.environment.options})
    token = read_token(config.token_env) or (new_node_secret(Path(node.root)) if config.launch and node else "")

    def node_source(url: str, stop: Callable[[], bool], child: NodeProcess | None = None) -> NodeSource:
        def alive() -> None:
            if stop():
                raise StopRequested
            if child is not None:
                child.check()

        client = RolloutClient(url, token, alive=alive, reconnect_s=config.start_deadline_s)
        return NodeSource(client, child, config.start_deadline_s, deadline_s, stop)

    if config.launch:
        assert node is not None, "the config says what to launch"
        with contextlib.ExitStack() as undo:
            child = NodeProcess(node, output_dir, token)
            undo.callback(child.stop)
            child.start()
            source = node_source(child.url, stop_requested, child)
            undo.pop_all()
        return source
    urls = str(config.url).split(",")
    if len(urls) == 1:
        return node_source(urls[0], stop_requested)
    from loop_recipes.rollouts.several_nodes import SeveralNodes  # few runs need it

    return SeveralNodes(node_source, urls, stop_requested)
