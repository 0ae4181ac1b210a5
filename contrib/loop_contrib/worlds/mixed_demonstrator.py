"""Demonstrations of several environments as one, for a policy that is trained in a mixture of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from agent_environments.description import environment_of
from loop_formats.schema import ConfigError, require
from loop_plumbing.breakage import raised_as
from loop_recipes.warm_start.demonstration import Demonstration, Script
from loop_recipes.warm_start.demonstrator import Demonstrator
from loop_recipes.warm_start.demonstrators import added_demonstrator
from rollout_server.config import EnvironmentConfig


class MixedDemonstrator:
    """Demonstrates several environments, each by its own demonstrator with an equal share of the scripts.

    A habit is taught in the environments whose demonstrator knows the habit. Task ids name their environment.

    Args:
        environment: named ``mixed``, with the config of :class:`~agent_environments.mixed.MixedPool`.

    Raises:
        ConfigError: there are no environments, or one of them has no demonstrator.
    """

    def __init__(self, environment: EnvironmentConfig) -> None:
        self.environment = environment
        sections = environment.options.get("environments") or {}
        require(bool(sections), "environment.environments must name at least one environment")
        self._members: dict[str, Demonstrator] = {}
        self._splits = {name: section.get("splits") or {} for name, section in sections.items()}
        for name, section in sections.items():
            key = f"environment.environments.{name}"
            require("name" in section, f"{key}.name must be given")
            with raised_as(ConfigError, f"{key}: ", ConfigError):
                options = {key: value for key, value in section.items() if key not in ("name", "splits")}
                self._members[name] = added_demonstrator(EnvironmentConfig(section["name"], options))

    @property
    def flaws(self) -> list[str]:
        return list(dict.fromkeys(chain.from_iterable(member.flaws for member in self._members.values())))

    def prepare(self) -> None:
        for member in self._members.values():
            member.prepare()

    def sources(self) -> list[Path]:
        return [*chain.from_iterable(member.sources() for member in self._members.values()), Path(__file__)]

    def scripts(
        self, split: str, count: int, seed: int, flawed_share: float = 0.0, habits: Sequence[str] = ()
    ) -> list[Script]:
        parts = []
        for name, member in self._members.items():
            known = [habit for habit in habits if habit in member.flaws]
            if habits and not known:
                continue
            own_split = self._splits[name].get(split, split)
            if own_split is not None:
                parts.append((name, member, own_split, known))
        require(bool(parts), f"demonstrations: no environment of the mixture has split {split!r} and one of the habits")
        shares = [count // len(parts) + (number < count % len(parts)) for number in range(len(parts))]
        scripts = [
            replace(script, task_id=f"{name}/{script.task_id}")
            for (name, member, own_split, known), share in zip(parts, shares, strict=True)
            for script in member.scripts(own_split, share, seed, flawed_share, known)
        ]
        return random.Random(f"mixture {seed}").sample(scripts, len(scripts))

    def renamed(self, demonstration: Demonstration, rng: random.Random) -> Demonstration:
        return self._member(demonstration.task_id).renamed(demonstration, rng)

    def texts(self, demonstration: Demonstration) -> list[str]:
        return self._member(demonstration.task_id).texts(demonstration)

    def group(self, task_id: str) -> str:
        name = environment_of(task_id)
        return f"{name}/{self._member(task_id).group(task_id.removeprefix(f'{name}/'))}"

    def _member(self, task_id: str) -> Demonstrator:
        return self._members[environment_of(task_id)]
