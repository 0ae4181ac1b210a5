"""Describes an environment, as plain data, to the programs that train on its rollouts, score them or show them.

The frame knows no environment by name: the groups of tasks, the names of scores and the figures of behaviour stand
here. A pool has it as its attribute ``description``, a :class:`Description`; a pool without it has the defaults. The
node serves it (``GET /v1/environment``), so a client needs no world, and a run keeps it in its folder.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, Protocol, cast

from agent_environments.agent_turns import AgentTurn
from loop_plumbing.breakage import error_line, raised_as
from loop_plumbing.plug_ins import plug_ins
from loop_plumbing.sanitize import sanitize
from loop_plumbing.trusted import VARIABLE, is_trusted, trust_module

logger = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, str]]
Counts = Mapping[str, int]


@dataclass(frozen=True)
class BehaviorFigure:
    """Define a figure of behaviour over a set of episodes: the sum of the count ``of``, minus the sum of ``less``,
    divided by the sum of the count ``per`` or, without ``per``, by the number of episodes that have the count ``of``.

    A report stores the figure under ``name``, ``metrics.jsonl`` under ``key``; tables and pictures show ``title``.
    ``source`` names who defined the figure. If the divisor is 0, the figure is ``empty``; for None a picture shows
    the text ``undefined``.
    """

    name: str
    title: str
    of: str
    less: str | None = None
    per: str | None = None
    empty: float | None = None
    undefined: str = "not defined"
    key: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        if not self.key:
            object.__setattr__(self, "key", self.name)

    def value(self, episodes: Sequence[Counts]) -> float | None:
        """Return the figure over the counts of some episodes; None if the figure is not defined for them."""
        counted = [counts for counts in episodes if self.of in counts]
        if not counted:
            return None
        total = sum(counts[self.of] - (counts[self.less] if self.less else 0) for counts in counted)
        whole = sum(counts[self.per] for counts in counted) if self.per else len(counted)
        return total / whole if whole else self.empty


class Behavior(Protocol):
    """Count what agents do, from the texts of their turns. A class without arguments, named by a :class:`Description`.

    A warning about the class's figures calls them ``name``.
    """

    name: str
    figures: Sequence[BehaviorFigure]

    def concerns(self, messages: Messages) -> bool:
        """Return whether there is anything to count in a conversation that begins with these messages."""

    def counts(self, turns: Sequence[AgentTurn]) -> dict[str, int]:
        """Return the counts of one episode, by the names that the figures use."""

    def calls(self, turns: Sequence[AgentTurn]) -> list[str]:
        """Return the calls that an agent made, in order; this sequence is used to compare the rollouts of one task."""


Sequences = Sequence[tuple[Messages, Sequence[AgentTurn]]]
"""The messages of each sequence of an episode, with its turns."""


def episode_counts(behavior: Behavior, sequences: Sequences) -> dict[str, int]:
    """Return the counts of an episode; {} if ``behavior`` concerns none of its sequences."""
    concerned = [turns for messages, turns in sequences if behavior.concerns(messages)]
    return behavior.counts([turn for turns in concerned for turn in turns]) if concerned else {}


@dataclass(frozen=True)
class Description:
    """Describe an environment for reports, viewers and recipes.

    Args:
        name: the environment's name in configs.
        score: the name of the share of tasks solved.
        group_score: the name of the share of groups all of whose tasks are solved.
        groups: the name of groups of tasks, in the plural.
        numbered: whether the world itself names its tasks ``<group>_<n>``, as AppWorld does. False if users choose the
            ids: then ``math_1`` does not name a group, and a task without a stated group is its own group.
        task_groups: task id -> group, for each task that states its group; the form of the ids does not matter.
        unfinished_solves: whether an episode that a limit ended, and not the agent, may count as solved.
        behavior: ``module:Class`` of each :class:`Behavior` whose figures are worth computing.
        environments: the environments of a mixture, by the name in front of the slash in their task ids. None: they are
            not known, and any name in front of a slash counts as an environment.
        identity: digests, by name, of what a score depends on besides the environment's name and options; see
            :func:`agent_environments.tools.identity.identity`.
    """

    name: str = ""
    score: str = "success"
    group_score: str = "group success"
    groups: str = "tasks"
    numbered: bool = False
    unfinished_solves: bool = False
    behavior: tuple[str, ...] = ()
    environments: Mapping[str, Description] | None = field(default_factory=dict)
    identity: Mapping[str, str] = field(default_factory=dict)
    task_groups: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Description:
        """Build a description from the output of ``dataclasses.asdict``; unknown keys are ignored.

        Raises:
            ValueError: the data is not a description.
        """
        with raised_as(ValueError, "not a description of an environment: ", TypeError, AttributeError):
            values = {known.name: data[known.name] for known in fields(cls) if known.name in data}
            members = values.get("environments")
            if members is not None:
                values["environments"] = {name: cls.from_dict(member) for name, member in members.items()}
            return cls(**{**values, "behavior": tuple(values.get("behavior", ()))})

    @property
    def grouped(self) -> bool:
        """Return whether a group may have several tasks."""
        members = (self.environments or {}).values()
        return self.numbered or bool(self.task_groups) or any(member.grouped for member in members)

    @property
    def whole_identity(self) -> dict[str, str]:
        """Return ``identity`` with the identities of a mixture's environments as ``<environment>/<name>`` -> digest."""
        members = (self.environments or {}).items()
        within = {f"{name}/{key}": digest for name, each in members for key, digest in each.whole_identity.items()}
        return {**self.identity, **within}

    def environment_of(self, task_id: str) -> str:
        """Return the name of a task's environment in a mixture; "" for a task outside a mixture."""
        name = environment_of(task_id)
        return name if self.environments is None or name in self.environments else ""

    def group_of(self, task_id: str) -> str:
        """Return the group of a task; the task's own id if the task is its own group."""
        description, prefix = self._member(task_id)
        own = task_id.removeprefix(prefix)
        if own in description.task_groups:
            return prefix + description.task_groups[own]
        group, _, number = own.rpartition("_")
        return prefix + group if description.numbered and group and number.isdecimal() else task_id

    def solved(self, task_id: str, success: bool, end_reason: str | None) -> bool:
        """Return whether the grader says success and the agent ended the episode itself (LOOP, appendix D)."""
        return success and (end_reason == "completed" or self._member(task_id)[0].unfinished_solves)

    def behaviors(self, task_id: str) -> list[Behavior]:
        """Return the counters of behaviour for a task's episodes, without those that this machine cannot import."""
        return [behavior for path in self._member(task_id)[0].behavior if (behavior := _behavior(path)) is not None]

    def counts(self, task_id: str, sequences: Sequences) -> dict[str, int]:
        """Return all counts of an episode of this task."""
        counts: dict[str, int] = {}
        for behavior in self.behaviors(task_id):
            counts |= episode_counts(behavior, sequences)
        return counts

    def calls(self, task_id: str, messages: Messages, turns: Sequence[AgentTurn]) -> list[str]:
        """Return the calls of an episode of this task, in order."""
        concerned = [behavior for behavior in self.behaviors(task_id) if behavior.concerns(messages)]
        return [call for turn in turns for behavior in concerned for call in behavior.calls([turn])]

    @property
    def figures(self) -> list[BehaviorFigure]:
        """All figures of this environment and its mixture's environments that this machine can import."""
        behaviors = [behavior for path in self._all_behavior() if (behavior := _behavior(path)) is not None]
        return [figure for behavior in behaviors for figure in behavior.figures]

    def with_behavior(self, *paths: str) -> Description:
        """Return a copy with the counters ``paths`` added, here and in all environments of a mixture."""
        members = self.environments
        if members is not None:
            members = {name: member.with_behavior(*paths) for name, member in members.items()}
        return replace(self, behavior=tuple(dict.fromkeys([*self.behavior, *paths])), environments=members)

    def check_environments(self, names: Iterable[str], task_ids: Sequence[str]) -> None:
        """Raise ValueError for the first of ``names`` that is not an environment of these tasks."""
        known = sorted(set(map(self.environment_of, task_ids)))
        for name in names:
            if name not in known:
                there = ", ".join(environment or "none" for environment in known)
                raise ValueError(f"{name} has no tasks; there are tasks of {there}")

    def _member(self, task_id: str) -> tuple[Description, str]:
        """Return the description of a task's environment, and the prefix of the task's id there."""
        name = environment_of(task_id)
        if not self.environments or name not in self.environments:
            return self, ""
        description, prefix = self.environments[name]._member(task_id.removeprefix(f"{name}/"))
        return description, f"{name}/{prefix}"

    def _all_behavior(self) -> list[str]:
        within = [path for member in (self.environments or {}).values() for path in member._all_behavior()]
        return list(dict.fromkeys([*self.behavior, *within]))


TOOLS_BEHAVIOR = "agent_environments.tools.behavior:ToolBehavior"

OWN_BEHAVIOR = ("appworld_adapter.behavior:AppWorldBehavior", TOOLS_BEHAVIOR)
"""The counters of the project's own environments."""

DEFAULT_DESCRIPTION = Description(
    groups="groups of tasks", numbered=True, behavior=(TOOLS_BEHAVIOR,), environments=None
)
"""The description of a folder of rollouts that holds none of its environment."""


def environment_of(task_id: str) -> str:
    """Return the name in front of the id of a mixture's task; "" for an id without a slash.

    The rest of the id may hold a slash too, because the environment may itself be a mixture or a service.
    """
    name, slash, _ = task_id.partition("/")
    return name if slash else ""


def description_of(name: str, pool: object) -> Description:
    """Return an environment's description, with ``name`` replaced by the name that a config gives the environment.

    Args:
        pool: the object whose attribute ``description`` is read; the pool need not be open.

    Raises:
        ValueError: the description is wrong; the message names the environment.
    """
    try:
        described = getattr(pool, "description", Description())
    except Exception as error:
        raise ValueError(f"environment {name!r} does not describe itself: {error_line(error)}") from error
    if not isinstance(described, Description):
        raise ValueError(f"environment {name!r}: its description is {type(described).__name__}, not a Description")
    trust_environment({"name": name})
    return replace(described, name=name)


_BEHAVIOR_HAS = ("name", "figures", "concerns", "counts", "calls")


def trust_environment(section: Mapping[str, Any]) -> None:
    """Allow descriptions to import counters from an environment's modules, because this process's own config names
    the environment.

    Args:
        section: ``name`` of the environment and its options, in which other environments may be named.
    """
    name = section.get("name")
    if isinstance(name, str) and ":" in name:
        trust_module(name)
    environments = section.get("environments")
    members = [*environments.values()] if isinstance(environments, Mapping) else []
    for inner in (section.get("world"), *members):
        if isinstance(inner, Mapping):
            trust_environment(inner)
    _behavior.cache_clear()


def _may_be_imported(path: str) -> bool:
    """Return whether the project, an installed package or the reader names this counter. Anybody may have written a
    description, so a counter that only a description names must not be imported."""
    return path in {*OWN_BEHAVIOR, *plug_ins("behavior").values()} or is_trusted(path)


@lru_cache(maxsize=64)
def _behavior(path: str) -> Behavior | None:
    """Build a counter from ``module:Class``. Log one warning and return None if the class may not be imported or is
    not installed."""
    module, _, attribute = path.partition(":")
    if not _may_be_imported(path):
        safe_path = sanitize(path, 200)
        cure = f"if you trust it, set {VARIABLE}={sanitize(module, 200)}"
        logger.warning("the figures of %s are left out: only a file of the run names it; %s", safe_path, cure)
        return None
    try:
        counter: Any = getattr(importlib.import_module(module), attribute)
        if not inspect.isclass(counter) or not all(hasattr(counter, name) for name in _BEHAVIOR_HAS):
            raise TypeError(f"{path} is not a class of counters")
        return cast(Behavior, counter())
    except (Exception, SystemExit) as error:
        logger.warning("the figures of %s cannot be had here, and are left out: %s", path, error_line(error))
        return None
