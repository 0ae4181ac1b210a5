"""Describes an environment, as plain data, to the programs that train on its rollouts, score them or show them.

The frame knows no environment by name: how tasks are grouped, what scores are called and which figures of behaviour
there are stands here. A pool has it as its attribute ``description``, a :class:`Description`; a pool without it has the
defaults. The node serves it (``GET /v1/environment``), so a client needs no world, and a run keeps it in its folder.
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

_NUMBERED = r"(.+)_\d+"
"""``group_pattern`` in the folders of earlier versions, for ``numbered``."""


@dataclass(frozen=True)
class BehaviorFigure:
    """A figure of behaviour: over a set of episodes, the sum of the count ``of`` (less that of ``less``), divided by
    the sum of the count ``per``, or by the number of episodes that have the count.

    ``name`` is its key in a report, ``key`` in ``metrics.jsonl``; ``title`` stands in tables and pictures; ``source``
    names who defined it. Where there is nothing to divide by, it is ``empty``, and a picture says ``undefined`` for
    None.
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
        """Return the figure over the counts of some episodes; None where it is not defined."""
        counted = [counts for counts in episodes if self.of in counts]
        if not counted:
            return None
        total = sum(counts[self.of] - (counts[self.less] if self.less else 0) for counts in counted)
        whole = sum(counts[self.per] for counts in counted) if self.per else len(counted)
        return total / whole if whole else self.empty


class Behavior(Protocol):
    """Counts what agents do, in the texts of their turns. A class without arguments; a :class:`Description` names it.

    ``name`` stands for its figures in a warning.
    """

    name: str
    figures: Sequence[BehaviorFigure]

    def concerns(self, messages: Messages) -> bool:
        """Return whether there is anything to count in a conversation that begins so."""

    def counts(self, turns: Sequence[AgentTurn]) -> dict[str, int]:
        """Return the counts of one episode, by the names that the figures use."""

    def calls(self, turns: Sequence[AgentTurn]) -> list[str]:
        """Return the calls that an agent made, in order: the sequence by which rollouts of one task are compared."""


Sequences = Sequence[tuple[Messages, Sequence[AgentTurn]]]
"""The messages of each sequence of an episode, with its turns."""


def episode_counts(behavior: Behavior, sequences: Sequences) -> dict[str, int]:
    """Return the counts of an episode; {} where none of its sequences is of concern."""
    concerned = [turns for messages, turns in sequences if behavior.concerns(messages)]
    return behavior.counts([turn for turns in concerned for turn in turns]) if concerned else {}


@dataclass(frozen=True)
class Description:
    """An environment as others need to know it.

    Args:
        name: the environment's, as configs name it.
        score: the name of the share of tasks solved.
        group_score: the name of the share of groups all of whose tasks are solved.
        groups: the name of groups of tasks, in the plural.
        numbered: the world names its tasks ``<group>_<n>`` itself, as AppWorld does. An id that a user chose, such as
            ``math_1``, does not name a group; where none is named, a task is a group of its own.
        task_groups: the groups of tasks that state one, by task id, whatever the ids of these look like.
        unfinished_solves: an episode that the agent did not end itself, but ran into a limit, may have solved its task.
        behavior: ``module:Class`` of each :class:`Behavior` whose figures are worth computing.
        environments: those of a mixture, by the name in front of its tasks; None where that is not known, and a name
            in front of a slash is taken for one.
        identity: the further basis of a score besides the environment's name and options, as digests by name; see
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
        """Return the inverse of ``dataclasses.asdict``; keys it does not know are ignored.

        Raises:
            ValueError: the data is not a description.
        """
        with raised_as(ValueError, "not a description of an environment: ", TypeError, AttributeError):
            values = {known.name: data[known.name] for known in fields(cls) if known.name in data}
            members = values.get("environments")
            if members is not None:
                values["environments"] = {name: cls.from_dict(member) for name, member in members.items()}
            values.setdefault("numbered", data.get("group_pattern") == _NUMBERED)
            return cls(**{**values, "behavior": tuple(values.get("behavior", ()))})

    @property
    def grouped(self) -> bool:
        """Return whether a group may have several tasks."""
        members = (self.environments or {}).values()
        return self.numbered or bool(self.task_groups) or any(member.grouped for member in members)

    @property
    def whole_identity(self) -> dict[str, str]:
        """The identity with those of a mixture's environments, ``<environment>/<name>`` -> digest."""
        members = (self.environments or {}).items()
        within = {f"{name}/{key}": digest for name, each in members for key, digest in each.whole_identity.items()}
        return {**self.identity, **within}

    def environment_of(self, task_id: str) -> str:
        """Return the name of a task's environment in a mixture; "" for any other task."""
        name = environment_of(task_id)
        return name if self.environments is None or name in self.environments else ""

    def group_of(self, task_id: str) -> str:
        """Return the group of a task; a task's own id where it is its own group."""
        description, prefix = self._member(task_id)
        own = task_id.removeprefix(prefix)
        if own in description.task_groups:
            return prefix + description.task_groups[own]
        group, _, number = own.rpartition("_")
        return prefix + group if description.numbered and group and number.isdecimal() else task_id

    def solved(self, task_id: str, success: bool, end_reason: str | None) -> bool:
        """Return whether an episode is solved: the grader says so, and the agent ended it itself (LOOP, appendix D)."""
        return success and (end_reason == "completed" or self._member(task_id)[0].unfinished_solves)

    def behaviors(self, task_id: str) -> list[Behavior]:
        """Return the counters of behaviour that concern a task's episodes, as far as this machine has them."""
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
        """All figures of this environment, or of a mixture's environments, as far as this machine has them."""
        behaviors = [behavior for path in self._all_behavior() if (behavior := _behavior(path)) is not None]
        return [figure for behavior in behaviors for figure in behavior.figures]

    def with_behavior(self, *paths: str) -> Description:
        """Return the same with further figures, in all environments of a mixture."""
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

    What follows it may hold a slash too: the environment may be a mixture itself, or a service's.
    """
    name, slash, _ = task_id.partition("/")
    return name if slash else ""


def description_of(name: str, pool: object) -> Description:
    """Return the description of an environment, under the name that a config gives it.

    Args:
        pool: whose attribute ``description`` it is; need not be open.

    Raises:
        ValueError: the environment's description is wrong; names the environment.
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
    """Have the counters in the modules of an environment imported where they are named, because this process's own
    config names that environment.

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
    """Return whether the project, an installed package or the reader names this counter. A description is data, which
    anybody may have written: that it names a counter is not a reason to import it."""
    return path in {*OWN_BEHAVIOR, *plug_ins("behavior").values()} or is_trusted(path)


@lru_cache(maxsize=64)
def _behavior(path: str) -> Behavior | None:
    """Build a counter from ``module:Class``; None, with one warning, where it may not be imported or is not installed
    here."""
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
