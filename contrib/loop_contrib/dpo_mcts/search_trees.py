"""Searches a tree of turns for every task, and keeps pairs of turns (DPO-MCTS, LOOP's table 1).

    loop method trees tiny_cpu output_dir=runs/tiny_cpu_trees
    loop method trees tiny_cpu output_dir=runs/tiny_cpu_trees --iterations 10 --threshold 0.2

Node, tasks, limits, sampling and policy (the base model, or initial_adapter) are those of a training config. The pairs
and their rollouts are in OUTPUT_DIR/turn_pairs, for algorithm=dpo_mcts. The same command continues after a stop; with
more iterations the trees grow.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from loop_contrib.dpo_mcts.tree_search import TreeSearch, check_search
from loop_contrib.served_policy import POLICY_VERSION, served_policy
from loop_contrib.turn_pairs import PAIRS_FILE, TURN_PAIRS, read_pairs
from loop_formats.collection_request import Sampling
from loop_recipes.config.arguments import config_parser
from loop_recipes.exit_status import exit_status
from loop_recipes.rollouts.branching import HowToSample
from loop_recipes.rollouts.source import SOURCE_ERRORS


def main(arguments: list[str] | None = None) -> int:
    """Run the command with these arguments and return its exit status."""
    parser = config_parser("method trees", __doc__)
    parser.add_argument("--iterations", type=int, default=30, help="rollouts of a task beside its first two (30)")
    parser.add_argument("--exploration", type=float, default=1.0, help="weight of UCB's second term (1.0)")
    parser.add_argument(
        "--threshold", type=float, default=0.0, help="the values of a pair differ by more than this (0.0)"
    )
    options = parser.parse_intermixed_args(arguments)

    def work() -> str:
        folder = search_trees(options)
        pairs = read_pairs(folder / PAIRS_FILE)
        return f"{folder}: {len(pairs)} pairs of turns, of {len({pair.task_id for pair in pairs})} tasks"

    return exit_status(parser.prog, work, (ValueError, OSError, *SOURCE_ERRORS))


def search_trees(options: argparse.Namespace) -> Path:
    """Open the node, serve the policy and search. Return the folder of the pairs.

    Raises:
        ConfigError: the config or an option is wrong. The node's errors are raised too.
    """
    check_search(options.iterations, options.exploration, options.threshold)  # before the node starts
    with served_policy(options.config, options.overrides, branching=True) as served:
        collection = served.conf.collection
        how = HowToSample(1, POLICY_VERSION, Sampling(), collection.limits, served.conf.seed)
        search = TreeSearch(
            served.name,
            served.tasks,
            how,
            iterations=options.iterations,
            exploration=options.exploration,
            threshold=options.threshold,
            paid=served.conf.update,
        )
        folder = served.out / TURN_PAIRS
        search.run(served.nodes, folder, lambda done, rollouts: _show(done, options.iterations, rollouts))
        return folder


def _show(done: int, iterations: int, rollouts: int) -> None:
    print(f"iteration {done} of {iterations}: {rollouts} rollouts", flush=True)
