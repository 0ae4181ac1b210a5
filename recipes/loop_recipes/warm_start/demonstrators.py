"""Chooses who demonstrates the environment of a config."""

from __future__ import annotations

from loop_formats.schema import ConfigError, require
from loop_recipes.warm_start.appworld import AppWorldDemonstrator
from loop_recipes.warm_start.colbench import ColBenchDemonstrator
from loop_recipes.warm_start.config import WarmStartConfig
from loop_recipes.warm_start.demonstrator import Demonstrator
from loop_recipes.warm_start.expert import ExpertDemonstrator
from loop_recipes.warm_start.mixed import MixedDemonstrator
from rollout_server.config import EnvironmentConfig


def demonstrator_of(config: WarmStartConfig) -> Demonstrator:
    """AppWorld's reference solutions, ColBench's particulars, another world's expert, or a mixture of these two.

    Raises:
        ConfigError: an environment without an expert, AppWorld without a practice world, or another with one.
    """
    environment, world = config.environment, config.practice_world
    if environment.name == "appworld":
        if world is None:
            raise ConfigError("practice_world must be given for environment.name appworld")
        return AppWorldDemonstrator(environment, world)
    require(world is None, f"practice_world is for environment.name appworld, not {environment.name}")
    return _without_practice(environment)


def _without_practice(environment: EnvironmentConfig) -> Demonstrator:
    match environment.name:
        case "mixed":
            return MixedDemonstrator(environment, _without_practice)
        case "colbench":
            return ColBenchDemonstrator(environment)
    return ExpertDemonstrator(environment)
