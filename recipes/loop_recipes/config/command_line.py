"""The command line of a recipe, `tune run RECIPE --config CONFIG key=value ...`; a mistake in it is one line."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from loop_formats.schema import ConfigError, fields_of, require
from loop_plumbing.sanitize import show_all_text
from loop_recipes.config.files import compose, pin_models
from loop_recipes.config.loop_config import LoopConfig
from loop_recipes.terminal import fold_logs


def parse(section: type) -> Callable[[Callable[[DictConfig], Any]], Callable[[], Any]]:
    """Decorate a recipe's ``main(cfg)``. If called without arguments, it composes ``cfg`` from the command line.

    Args:
        section: the schema of ``cfg``.
    """

    def decorated(main: Callable[[DictConfig], Any]) -> Callable[[], Any]:
        @functools.wraps(main)
        def from_command_line() -> Any:
            show_all_text()
            fold_logs()
            recipe = Path(sys.argv[0]).stem
            parser = argparse.ArgumentParser(
                recipe, description=main.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
            )
            parser.add_argument("--config", required=True, help="a config of `tune ls`, or a YAML file")
            options, words = parser.parse_known_args()
            try:
                _check_keys(words, section, recipe)
                config = compose(options.config, words, recipe)
                pin_models(config)
            except ConfigError as error:
                sys.exit(f"{recipe}: {error}")
            return main(config)

        return from_command_line

    return decorated


def _check_keys(words: list[str], section: type, recipe: str) -> None:
    """Refuse keys of other recipes, which a config may hold but a command line of this recipe need not."""
    others = fields_of(LoopConfig).keys() - fields_of(section).keys()
    for word in words:
        key = word.lstrip("~").partition("=")[0].partition(".")[0]
        require(key not in others, f"{word}: {key} is a key of loop_appworld, not of {recipe}")
