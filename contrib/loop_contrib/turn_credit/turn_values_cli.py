"""Values the turns of stored rollouts by Monte Carlo.

    loop method turn-values runs/demo --continuations 8 --node runs/demo/rollout_node.yaml
    loop method turn-values runs/demo --collection demo-3f21bc-i0007-38d16ba024 --every 2 --most 20

Values go to RUN/turn_values/<collection>.jsonl. The same command continues after a stop. It asks the run's rollout
node. If that does not run, --node names the YAML of a node to start, such as RUN/rollout_node.yaml. This YAML names
programs that will run, so read it first if the run is not yours.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from loop_contrib.turn_credit.turn_values import ValuedRollout, write_turn_values
from loop_formats.ids import parse_collection_id
from loop_formats.run_files import find_logs, is_adapter, node_address, read_rollouts
from loop_formats.run_folder import groups_taken
from loop_formats.turn_values import TurnValue, values_file
from loop_recipes.bar import Bar
from loop_recipes.config.arguments import verb_parser
from loop_recipes.config.rollout_node import RolloutNodeConfig, check_token
from loop_recipes.exit_status import exit_status
from loop_recipes.rollouts.branching import HowToSample, stored_protocol
from loop_recipes.rollouts.node_source import NodeSource
from loop_recipes.rollouts.open import open_nodes
from loop_recipes.rollouts.several_nodes import SeveralNodes
from loop_recipes.rollouts.source import SOURCE_ERRORS
from rollout_server.client import NodeUnreachable, RolloutClient
from rollout_server.config import load_node_config

TOKEN_ENV = RolloutNodeConfig.token_env
DEADLINE_S = 7200.0
"""Longest wait for the continuations of one rollout."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command with these arguments and return its exit status."""
    parser = verb_parser("method turn-values", __doc__)
    parser.add_argument("run", type=Path, help="folder of a training run")
    parser.add_argument("--continuations", type=int, default=8, metavar="N", help="rollouts of every turn (8)")
    parser.add_argument("--every", type=int, default=1, metavar="K", help="value every K-th turn only (1)")
    parser.add_argument("--collection", metavar="ID", help="collection to value (the newest that was trained on)")
    parser.add_argument("--most", type=int, metavar="N", help="the first N rollouts of the collection only")
    parser.add_argument("--policy-version", type=int, metavar="V", help="version that continues (the one that sampled)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--node", type=Path, metavar="FILE", help="YAML of a node to start if the run's is not running")
    options = parser.parse_args(arguments)
    for name in ("continuations", "every", "most"):
        if (value := getattr(options, name)) is not None and value < 1:
            parser.error(f"--{name} is {value}; it must be at least 1")
    return exit_status(parser.prog, lambda: _value(options), (ValueError, OSError, *SOURCE_ERRORS))


def _value(options: argparse.Namespace) -> str:
    """Value the turns and return a line that names the file. Raises ValueError if a rollout could not be valued."""
    log = _log(options.run, options.collection)
    sampling, limits = stored_protocol(log)
    wanted = []
    for rollout in read_rollouts(log)[: options.most]:
        version = rollout.policy_versions[-1] if options.policy_version is None else options.policy_version
        how = HowToSample(options.continuations, version, sampling, limits, options.seed)
        wanted.append(ValuedRollout.every(rollout, options.every, how))
    file = values_file(options.run, log.stem)
    nodes = _open_nodes(options)
    try:
        published = _serve(nodes, options.run, sorted({valued.how.policy_version for valued in wanted}))
        with Bar(total=len(wanted), doing="rollouts") as bar:
            failures = write_turn_values(nodes, wanted, file, lambda valued, values: _show(bar, values))
        for version in published:
            nodes.retire(version)
    finally:
        nodes.close()
    if failures:
        raise ValueError(f"written: {file}, without {len(failures)} rollouts: {'; '.join(failures)}")
    return f"written: {file}"


def _show(bar: Bar, values: Sequence[TurnValue]) -> None:
    bar.update()
    bar.facts = {"refused": sum(value.refused for value in values)}


def _log(run: Path, collection: str | None) -> Path:
    """Return the log of the collection; None takes the newest collection that was trained on.

    Raises:
        ValueError: the run has no such log.
    """
    logs = {log.stem: log for log in find_logs(run)}
    trained = [name for name in sorted(logs) if parse_collection_id(name).is_training]
    taken = groups_taken(run)
    asked = {name: parse_collection_id(name).iteration or 0 for name in trained}
    if collection is None and trained:
        return logs[max(trained, key=lambda name: taken.get(name, 0) if taken else asked[name])]
    if collection not in logs:
        known = ", ".join(logs) or "none"
        raise ValueError(f"{run} has no collection {collection or 'that was trained on'}; there are: {known}")
    return logs[collection]


def _open_nodes(options: argparse.Namespace) -> NodeSource | SeveralNodes:
    """Open the run's own node if it is running, else start the node of ``--node``. Wait until it is ready.

    Raises:
        ConfigError: the token of a running node is missing, or the run does not describe its node.
        NodeUnreachable, NodeDied: the node does not answer or did not start.
    """
    url, node = _running(options.run / "node"), None
    if url is None:
        if options.node is None:
            raise ValueError(f"the run's node is not running: start it with --node {options.run / 'rollout_node.yaml'}")
        node = load_node_config(options.node)
        url = _running(Path(node.root))
    if url is not None:
        check_token(TOKEN_ENV)
        config = RolloutNodeConfig(url=url)
    else:
        config = RolloutNodeConfig(launch=True)
    nodes = open_nodes(config, node, options.run, DEADLINE_S)
    try:
        nodes.wait_ready()
    except BaseException:
        nodes.close()
        raise
    return nodes


def _running(root: Path) -> str | None:
    """Return the URL of the node with the folder ``root``; None if no node is running there."""
    url = node_address(root)
    if url is None:
        return None
    try:
        RolloutClient(url, "").health()
    except NodeUnreachable:
        return None
    return url


def _serve(nodes: NodeSource | SeveralNodes, run: Path, versions: Sequence[int]) -> list[int]:
    """Make the node serve ``versions``. Return the versions that it did not serve before.

    Raises:
        ValueError: the run has no adapter of a version that is not served.
    """
    missing = [version for version in versions if version not in nodes.wait_ready()]
    for version in missing:
        folder = run / "policies" / f"policy-v{version:04d}"
        if not is_adapter(folder):
            raise ValueError(f"policy version {version} is neither served nor in {folder}; choose --policy-version")
        nodes.publish(version, folder)
    return missing
