"""Runs a recipe: ``loop train``, ``loop sft`` and ``loop eval`` are `tune run` with the recipe's name filled in."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from loop_formats.schema import ConfigError, Section
from loop_recipes.config.arguments import config_parser
from loop_recipes.config.files import compose, config_name, pin_models
from loop_recipes.config.loop_config import FROM_ITS_FOLDER, LoopConfig, read_config
from loop_recipes.exit_status import exit_status
from loop_recipes.own_task import training
from loop_recipes.steps import StepFailed, on_ranks, tune

if TYPE_CHECKING:
    from loop_recipes.config.sft_config import SftConfig


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
        _become(parser.prog, "loop_appworld", LoopConfig, options, _check_files)
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

    _become(parser.prog, "sft_appworld", SftConfig, options, _check_files)


def evaluate(arguments: Sequence[str]) -> None:
    """Scores policies on held-out tasks: `tune run eval_appworld --config CONFIG key=value ...`.

    loop eval tiny_cpu run=runs/demo
    """
    parser = config_parser("eval", evaluate.__doc__)
    options = parser.parse_intermixed_args(arguments)
    from loop_recipes.evaluation.config import EvalConfig, find_policies  # no training needs them

    _become(parser.prog, "eval_appworld", EvalConfig, options, lambda config: find_policies(config, str))


def _recipe_parser(verb: str, description: str | None) -> argparse.ArgumentParser:
    parser = config_parser(verb, description)
    parser.add_argument("--nproc-per-node", type=int, metavar="N", help="processes of the trainer, one a GPU")
    return parser


def _check_files(config: LoopConfig | SftConfig) -> None:
    """Raise ConfigError unless the files and folders of a training are there."""
    from loop_recipes.config.preflight import check_folders, check_rollout_node  # an evaluation has none of them

    if config.checkpointer is None and config.model.get("_component_") == FROM_ITS_FOLDER:
        check_folders(config)
    if not isinstance(config, LoopConfig):
        config.check_set()
    elif not config.rollout_node.launch:
        check_rollout_node(config)


def _become(
    program: str,
    recipe: str,
    section: type[Section],
    options: argparse.Namespace,
    check: Callable[[Section], object] = lambda config: None,
) -> None:
    """Replace this process by `tune run`; a mistake in the command line is reported before torch is loaded.

    Args:
        section: the schema of the config of ``recipe``.
        check: raises ConfigError if the config names a missing file or folder.
    """
    name = config_name(options.config, recipe)
    ranks = getattr(options, "nproc_per_node", None)
    launcher = [] if ranks is None else on_ranks(ranks)
    try:
        config = compose(name, options.overrides, recipe)
        models = pin_models(config)  # once, before there are ranks: each of them and the node find the same commit
        check(read_config(config, section))
        command = tune("run", *launcher, recipe, "--config", name, *options.overrides, *models)
        # Ctrl-C waits until loop_recipes/registration.py lets it through, which prints one line for it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        os.execv(command[0], command)
    except (ConfigError, OSError) as error:
        sys.exit(f"{program}: {error}")
