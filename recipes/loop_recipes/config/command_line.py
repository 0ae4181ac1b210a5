"""torchtune's command line of a recipe, whose mistakes are one line and not a traceback."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torchtune import config

from loop_formats.schema import ConfigError
from loop_recipes.config.files import load_config, overridden


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


def _check_words(words: list[str]) -> None:
    """Of a command line; argparse itself says what is wrong with a missing ``--config``."""
    config = OmegaConf.create()
    if "--config" in words[:-1]:
        place = words.index("--config")
        config = load_config(words[place + 1])
        words = words[:place] + words[place + 2 :]
    overridden(config, [word for word in words if word not in ("-h", "--help", "--config")])
