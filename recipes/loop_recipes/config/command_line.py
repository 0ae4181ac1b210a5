"""torchtune's command line of a recipe, whose mistakes are one line and not a traceback."""

from __future__ import annotations

import functools
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from torchtune import config
from torchtune.config._utils import _merge_yaml_and_cli_args

from loop_recipes.config.files import load_config
from rollout_server.schema import ConfigError


def parse(recipe_main: Callable[[DictConfig], Any]) -> Callable[[], Any]:
    """torchtune's ``config.parse``, but a command line that it cannot read is one line and not a traceback."""
    parsed = config.parse(recipe_main)

    @functools.wraps(recipe_main)
    def checked() -> Any:
        recipe, *words = sys.argv
        try:
            _check_words(words)
        except ConfigError as error:
            sys.exit(f"{Path(recipe).stem}: {error}")
        return parsed()

    return checked


def overridden(base: DictConfig, words: Sequence[str]) -> DictConfig:
    """``base`` with ``words`` over it, merged as ``tune run`` merges its command line.

    Raises:
        ConfigError: a word that is neither ``key=value`` nor ``~key``, or leaves out a key that is not there.
    """
    _check_overrides(words)
    keys = cast(dict[str, Any], OmegaConf.to_container(base, resolve=False))
    try:
        return cast(DictConfig, _merge_yaml_and_cli_args(Namespace(**keys), list(words)))
    except ValueError as error:
        raise ConfigError(str(error).splitlines()[0]) from error


def _check_words(words: list[str]) -> None:
    """Of a command line; argparse itself says what is wrong with a missing ``--config``."""
    if "--config" in words[:-1]:
        place = words.index("--config")
        load_config(words[place + 1])
        words = words[:place] + words[place + 2 :]
    _check_overrides([word for word in words if word not in ("-h", "--help", "--config")])


def _check_overrides(words: Sequence[str]) -> None:
    for word in words:
        if not word.startswith("~") and (word.count("=") != 1 or word.startswith("-")):
            raise ConfigError(f"{word!r} is not understood; after --config come key=value, or ~key to leave one out")
