"""Runs a recipe: ``loop train``, ``loop sft`` and ``loop eval`` are `tune run` with the recipe's name filled in."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from loop_formats.schema import ConfigError
from loop_recipes.config.arguments import config_parser
from loop_recipes.config.files import compose, config_name
from loop_recipes.methods.steps import tune


def train(arguments: Sequence[str]) -> None:
    """Train an agent with LOOP or another algorithm: `tune run loop_appworld --config CONFIG key=value ...`.

    loop train tiny_cpu output_dir=runs/mine
    loop train tiny_cpu world=babyai
    loop train qwen2_5_7b algorithm=grpo preset=on_policy --nproc-per-node 4
    """
    _become("train", "loop_appworld", train.__doc__, arguments)


def sft(arguments: Sequence[str]) -> None:
    """Train on stored rollouts: `tune run sft_appworld --config CONFIG key=value ...`.

    loop sft tiny_cpu 'rollouts.logs=[runs/rft_rollouts/solved]'
    """
    _become("sft", "sft_appworld", sft.__doc__, arguments)


def evaluate(arguments: Sequence[str]) -> None:
    """Score policies on held-out tasks: `tune run eval_appworld --config CONFIG key=value ...`.

    loop eval tiny_cpu run=runs/demo
    """
    _become("eval", "eval_appworld", evaluate.__doc__, arguments, one_process=True)


def _become(
    verb: str, recipe: str, description: str | None, arguments: Sequence[str], one_process: bool = False
) -> None:
    """Replace this process by `tune run`; a mistake in the command line is said before torch is loaded."""
    parser = config_parser(verb, description)
    if not one_process:
        parser.add_argument("--nproc-per-node", type=int, metavar="N", help="processes of the trainer, one a GPU")
    options = parser.parse_intermixed_args(arguments)
    name = config_name(options.config, recipe)
    ranks = None if one_process else options.nproc_per_node
    launcher = [] if ranks is None else ["--nproc_per_node", str(ranks)]
    command = tune("run", *launcher, recipe, "--config", name, *options.overrides)
    try:
        compose(name, options.overrides, recipe)
        os.execv(command[0], command)
    except (ConfigError, OSError) as error:
        sys.exit(f"{parser.prog}: {error}")
