"""Samples each task at several temperatures until it is solved (RFT, LOOP's appendix C.2).

    loop method solved tiny_cpu output_dir=runs/rft_rollouts
    loop method solved tiny_cpu output_dir=runs/rft_rollouts \\
        --temperatures 0.5 1.0 --attempts 4

Node, tasks, limits and policy (the base model, or initial_adapter) are those of a training config. Solved rollouts are
in OUTPUT_DIR/solved, for sft_appworld. The same command continues after a stop.
"""

from __future__ import annotations

import argparse
import time

from loop_contrib.rft.solved import SearchState, SolvedSearch, check_budget, search
from loop_contrib.served_policy import POLICY_VERSION, served_policy
from loop_recipes.config.arguments import config_parser
from loop_recipes.exit_status import exit_status
from loop_recipes.rollouts.source import SOURCE_ERRORS

SOLVED = "solved"
"""The folder of the solved rollouts, in the output folder."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command with these arguments and return its exit status."""
    parser = config_parser("method solved", __doc__)
    parser.add_argument(
        "--temperatures", type=float, nargs="+", default=[n / 20 for n in range(1, 21)], help="(0.05 0.1 ... 1.0)"
    )
    parser.add_argument("--attempts", type=int, default=8, help="rollouts of a task at a temperature, at most (8)")
    parser.add_argument("--rollouts", type=int, help="the most rollouts in all")
    parser.add_argument("--hours", type=float, help="begin no new round after so many hours")
    options = parser.parse_intermixed_args(arguments)

    def work() -> str:
        state = collect_solved(options)
        return f"{state.solved} rollouts solved, of {state.tasks} tasks"

    return exit_status(parser.prog, work, (ValueError, OSError, *SOURCE_ERRORS))


def collect_solved(options: argparse.Namespace) -> SearchState:
    """Open the node, serve the policy and search for solved rollouts.

    Raises:
        ConfigError: the config or an option is wrong. The node's errors are raised too.
    """
    check_budget(options.temperatures, options.attempts, options.rollouts)  # before the node starts
    started = time.monotonic()
    hours = float("inf") if options.hours is None else options.hours
    with served_policy(options.config, options.overrides) as served:
        wanted = SolvedSearch(
            name=served.name,
            tasks=served.tasks,
            temperatures=options.temperatures,
            attempts=options.attempts,
            limits=served.conf.collection.limits,
            policy_version=POLICY_VERSION,
            seed=served.conf.seed,
            rollouts=options.rollouts,
        )
        return search(
            served.nodes, wanted, served.out / SOLVED, _show, lambda: time.monotonic() - started > 3600 * hours
        )


def _show(state: SearchState) -> None:
    counts = f"{state.solved} of {state.wanted} tasks x temperatures solved, {state.tasks} tasks at any"
    print(f"round {state.attempt}: {counts}", flush=True)
