"""Runs a recipe: ``loop train``, ``loop sft`` and ``loop eval`` are `tune run` with the recipe's name filled in."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from loop_formats.schema import ConfigError
from loop_recipes.config.arguments import config_parser
from loop_recipes.config.loop_config import LoopConfig
from loop_recipes.exit_status import exit_status
from loop_recipes.own_task import training
from loop_recipes.steps import StepFailed


def train(arguments: Sequence[str]) -> int | None:
    """Trains an agent with LOOP or another algorithm: `tune run loop_appworld --config CONFIG key=value ...`.

    loop train tiny_cpu output_dir=runs/mine
    loop train tiny_cpu world=babyai
    loop train qwen2_5_7b algorithm=grpo preset=on_policy --nproc-per-node 4

    Or trains a model on a file of functions (docs/your_own_task.md), and scores it before and after on tasks held out:

    loop train my_tools.py --model models/SmolLM2-135M-Instruct max_iterations=50
    loop train my_tools.py --model Qwen/Qwen3-0.6B
    """
    parser = _recipe_parser("train", train.__doc__)
    parser.add_argument("--model", metavar="MODEL", help="for FILE.py: the model's folder, or its name on the hub")
    options = parser.parse_intermixed_args(arguments)
    if not options.config.endswith(".py"):
        if options.model is not None:
            parser.error(f"--model is for a file of functions; say model.path={options.model}")
        from loop_recipes.verbs.tune_run import become, check_files  # a file of functions needs neither

        become(parser.prog, "loop_appworld", LoopConfig, options, check_files)
        return None
    if options.nproc_per_node is not None:
        parser.error("--nproc-per-node is for a config: `loop train` takes the train.yaml that this writes")
    return exit_status(
        parser.prog,
        lambda: "\n".join(training.show(training.train(options.config, options.model, *options.overrides))),
        (ConfigError, StepFailed, OSError),
    )


def sft(arguments: Sequence[str]) -> None:
    """Trains on stored rollouts or on chats: `tune run sft_appworld --config CONFIG key=value ...`.

    loop sft tiny_cpu 'rollouts.logs=[runs/rft_rollouts/solved]'
    """
    parser = _recipe_parser("sft", sft.__doc__)
    options = parser.parse_intermixed_args(arguments)
    from loop_recipes.config.sft_config import SftConfig  # other verbs do not need it
    from loop_recipes.verbs.tune_run import become, check_files

    become(parser.prog, "sft_appworld", SftConfig, options, check_files)


def evaluate(arguments: Sequence[str]) -> None:
    """Scores policies on held-out tasks: `tune run eval_appworld --config CONFIG key=value ...`.

    loop eval tiny_cpu run=runs/demo
    """
    parser = config_parser("eval", evaluate.__doc__)
    options = parser.parse_intermixed_args(arguments)
    from loop_recipes.evaluation.config import EvalConfig, find_policies  # no training needs them
    from loop_recipes.verbs.tune_run import become

    become(parser.prog, "eval_appworld", EvalConfig, options, lambda config: find_policies(config, str))


def _recipe_parser(verb: str, description: str | None) -> argparse.ArgumentParser:
    parser = config_parser(verb, description)
    parser.add_argument("--nproc-per-node", type=int, metavar="N", help="processes of the trainer, one a GPU")
    return parser
