"""Becomes `tune run` of a recipe, once the command line and the files that it names are checked without torch."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from loop_formats.schema import ConfigError, Section
from loop_recipes.config.files import compose, config_name, pin_models
from loop_recipes.config.loop_config import FROM_ITS_FOLDER, LoopConfig, read_config
from loop_recipes.steps import on_ranks, tune

if TYPE_CHECKING:
    from loop_recipes.config.sft_config import SftConfig


def become(
    program: str,
    recipe: str,
    section: type[Section],
    options: argparse.Namespace,
    check: Callable[[Section], object],
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


def check_files(config: LoopConfig | SftConfig) -> None:
    """Raise ConfigError unless the files and folders of a training are there."""
    from loop_recipes.config.preflight import check_folders, check_rollout_node  # an evaluation has none of them

    if config.checkpointer is None and config.model.get("_component_") == FROM_ITS_FOLDER:
        check_folders(config)
    if not isinstance(config, LoopConfig):
        config.check_set()
    elif not config.rollout_node.launch:
        check_rollout_node(config)
