"""Chooses who demonstrates the environment of a config."""

from __future__ import annotations

from loop_formats.schema import ConfigError, require
from loop_plumbing.breakage import error_line
from loop_plumbing.plug_ins import load, plug_ins
from loop_recipes.warm_start.appworld import AppWorldDemonstrator
from loop_recipes.warm_start.config import WarmStartConfig
from loop_recipes.warm_start.demonstrator import Demonstrator
from rollout_server.config import EnvironmentConfig


def demonstrator_of(config: WarmStartConfig) -> Demonstrator:
    """Return AppWorld's reference solutions, or an installed package's expert for the environment.

    Raises:
        ConfigError: the environment has no expert, or AppWorld has no practice world, or another environment has one.
    """
    environment, world = config.environment, config.practice_world
    if environment.name == "appworld":
        if world is None:
            raise ConfigError("practice_world must be given for environment.name appworld")
        return AppWorldDemonstrator(environment, world)
    require(world is None, f"practice_world is for environment.name appworld, not {environment.name}")
    return added_demonstrator(environment)


def added_demonstrator(environment: EnvironmentConfig) -> Demonstrator:
    """Load the demonstrator that an installed package has for an environment: an entry point of the group
    ``torchtune_loop.demonstrators``. It is a class or a function, and is called with the environment's section.

    Raises:
        ConfigError: no package has a demonstrator for the environment.
    """
    known = plug_ins("demonstrators")
    if environment.name not in known:
        names = ", ".join(["appworld", *sorted(known)])
        raise ConfigError(
            f"environment.name: {environment.name!r} has no expert to learn from; there is one for {names}"
        )
    try:
        make = load(known[environment.name])
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"environment.name: the expert of {environment.name} cannot be imported: {error_line(error)}"
        ) from error
    return make(environment)
