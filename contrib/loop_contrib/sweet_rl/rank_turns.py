"""Samples candidates for the turns of stored rollouts, and ranks them by a critic of turns (SWEET-RL's actor).

    loop method rank-turns tiny_cpu output_dir=runs/tiny_cpu_ranked --logs runs/demo \\
        --critic runs/tiny_cpu_turn_critic
    loop sft tiny_cpu algorithm=sweet_rl

Node, limits, sampling and policy (the base model, or initial_adapter) are those of a training config; the critic is the
newest of a run of algorithm=turn_critic. The pairs and their rollouts are in OUTPUT_DIR/turn_pairs. The same command
samples only missing candidates, and ranks again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from loop_contrib.served_policy import POLICY_VERSION, served_policy
from loop_contrib.turn_pairs import TURN_PAIRS, TurnPair, write_pairs
from loop_formats.collection_request import Sampling
from loop_formats.schema import require
from loop_recipes.config.arguments import config_parser
from loop_recipes.config.sft_config import FixedSetConfig
from loop_recipes.exit_status import exit_status
from loop_recipes.rollouts.branching import HowToSample
from loop_recipes.rollouts.source import SOURCE_ERRORS


def main(arguments: list[str] | None = None) -> int:
    """Run the command with these arguments and return its exit status."""
    parser = config_parser("method rank-turns", __doc__)
    parser.add_argument("--logs", required=True, action="append", help="rollouts: a log, or a run's folder; repeatable")
    parser.add_argument("--critic", required=True, type=Path, metavar="RUN", help="folder of the critic's run")
    parser.add_argument("--candidates", type=int, default=16, metavar="N", help="for every turn (16)")
    parser.add_argument("--pairs", type=int, default=4, metavar="N", help="for every turn (4)")
    parser.add_argument("--every", type=int, default=1, metavar="K", help="rank every K-th turn only (1)")
    parser.add_argument("--most", type=int, metavar="N", help="the first N rollouts only")
    parser.add_argument(
        "--blind-reference", action="store_true", help="hide the hidden information from the critic's reference"
    )
    options = parser.parse_intermixed_args(arguments)

    def work() -> str:
        folder, pairs = rank_turns(options)
        return f"{folder}: {len(pairs)} pairs of turns, of {len({pair.task_id for pair in pairs})} tasks"

    return exit_status(parser.prog, work, (ValueError, OSError, *SOURCE_ERRORS))


def rank_turns(options: argparse.Namespace) -> tuple[Path, list[TurnPair]]:
    """Sample the candidates on the node and rank them in this process. Return the folder of the pairs, and the pairs.

    Raises:
        ConfigError: the config, an option, a log or the critic is wrong. The node's errors are raised too.
    """
    # torch, which --help does without
    from loop_contrib.sweet_rl.stored_critic import critic_adapter, critic_config, load_turn_critic
    from loop_contrib.sweet_rl.turn_candidates import candidate_requests, pairs_of, sample_candidates
    from loop_recipes.engine.samples import Sample
    from loop_recipes.rollouts.fixed_set import read_fixed_set

    for name, least in (("candidates", 2), ("pairs", 1), ("every", 1), ("most", 1)):
        value = getattr(options, name)
        require(value is None or value >= least, f"--{name} is {value}; it must be at least {least}")
    rollouts = read_fixed_set(FixedSetConfig(options.logs)).rollouts[: options.most]
    critic_config(options.critic)
    adapter = critic_adapter(options.critic)  # the one that there is now
    with served_policy(options.config, options.overrides, branching=True) as served:
        collection, seed = served.conf.collection, served.conf.seed
        how = HowToSample(options.candidates, POLICY_VERSION, Sampling(), collection.limits, seed)
        requests = candidate_requests(rollouts, options.every, how)
        done = iter(range(1, len(requests) + 1))
        candidates = sample_candidates(
            served.nodes, requests, lambda _: print(f"collection {next(done)} of {len(requests)}", flush=True)
        )
        folder = served.out / TURN_PAIRS
    every = [candidate for of_turn in candidates.values() for candidate in of_turn]
    # Not before the node has given its memory back.
    critic = load_turn_critic(options.critic, adapter, reference_sees_hidden=not options.blind_reference)
    values = critic.advantages([Sample.from_rollout(candidate).only_turn(0) for candidate in every])
    pairs = [
        pair for turn, of_turn in candidates.items() for pair in pairs_of(turn, of_turn, values, options.pairs, seed)
    ]
    write_pairs(folder, every, pairs)
    return folder, pairs
