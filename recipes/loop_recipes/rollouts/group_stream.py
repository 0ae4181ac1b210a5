"""Decides which groups of a stream start, end early, and go to an iteration: no clock, no I/O.

A group is the rollouts of a task that was drawn once. The node works on groups in the order in which they were opened,
and waits for no iteration. An iteration takes the first ``tasks`` groups that are whole; the others go on, and are
taken later. While the next iteration's groups are whole already, no group starts: it would only get older until the
trainer comes to it. No group gets too old: only as many are open as the iterations that may still use them take. Where
an iteration would leave more groups than later ones can take before they are too old, it takes these first, whole or at
their floor.

The simulation of ``benchmarks/scheduling.py`` drives this same class.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LONG_MEDIANS = 5.0
"""A group that has run for so many medians of an episode's time is not waited for once it has reached its floor."""
ENOUGH_EPISODES, REMEMBERED_EPISODES = 20, 500
"""The fewest episodes for a median, and the number of last episodes that it is taken over."""


@dataclass
class Group:
    """An open group: no iteration has taken it, and it is not lost.

    Attributes:
        number: its number in the run, from 0.
        oldest: a policy version; no turn of the group was sampled by an older one.
        finished, lost: numbers of rollouts.
        seconds: since its first episode started; 0 before.
        ended: true if no rollout of the group runs, and none will.
    """

    number: int
    oldest: int
    finished: int = 0
    lost: int = 0
    seconds: float = 0.0
    ended: bool = False


@dataclass
class GroupStream:
    """The open groups of a run.

    Args:
        tasks: groups that an iteration takes.
        rollouts: number of rollouts in a group. An iteration stops waiting when each group has ``floor`` rollouts and
            all its groups together have the share ``fraction``.
        lag: the most versions that a turn may be behind the newest when it is taken.
        every: number of updates between two served versions.
        pinned: true if a group is sampled by the version that stood when it was opened.
    """

    tasks: int
    rollouts: int
    floor: int
    fraction: float
    lag: int
    every: int = 1
    pinned: bool = False
    opened: int = 0
    groups: dict[int, Group] = field(default_factory=dict)
    durations: list[float] = field(default_factory=list)

    def due(self, updating: bool = False) -> int:
        """Return how many groups to open now, so that one iteration's groups wait but none becomes too old; none while
        the next iteration's groups have ended.

        Args:
            updating: true if an iteration has taken its groups, and its version is still to come.
        """
        groups = self.groups.values()
        if sum(group.ended for group in groups) >= self.tasks:
            return 0
        waiting = sum(not group.seconds and not group.ended for group in groups)
        return max(0, min(self.tasks - waiting, self.most_open(updating) - len(groups)))

    def most_open(self, updating: bool = False) -> int:
        """Return how many groups can be used before they are too old, if each iteration takes ``tasks`` groups."""
        return (self.lag - self.every + 2 - updating) * self.tasks

    def open(self, version: int) -> int:
        """Record a new group, opened while ``version`` is the newest served version; return the group's number."""
        number, self.opened = self.opened, self.opened + 1
        self.groups[number] = Group(number, version)
        return number

    def note(self, reports: Iterable[Group], version: int) -> None:
        """Record the node's reports about open groups; ``version`` is the newest served version."""
        for now in reports:
            waits = not now.seconds and not now.finished and not now.ended
            now.oldest = version if waits and not self.pinned else self.groups[now.number].oldest
            self.groups[now.number] = now

    def late(self) -> list[Group]:
        """Return the groups to end now: groups that have run long and have reached their floor."""
        if len(self.durations) < ENOUGH_EPISODES:
            return []
        most = LONG_MEDIANS * statistics.median(self.durations)
        return [group for group in self.groups.values() if not group.ended and group.seconds > most and self._at(group)]

    def choose(self, version: int, taken: Collection[int] = ()) -> list[Group] | None:
        """Return the groups that an iteration takes while ``version`` is the newest; None if it must wait.

        Args:
            taken: the groups that the iteration already took, in a process that died.
        """
        due = self._due_now(version)
        usable = [group for number, group in self.groups.items() if group.ended or number in due or number in taken]
        order = sorted(usable, key=lambda each: (each.number not in taken, each.number not in due, each.number))
        chosen = order[: self.tasks]
        wanted = self.fraction * sum(self.rollouts - group.lost for group in chosen)
        enough = sum(group.finished for group in chosen) >= math.ceil(wanted - 1e-9)
        there = all(group.ended for group in chosen) or (enough and all(map(self._at, chosen)))
        return chosen if len(chosen) == self.tasks and there else None

    def _due_now(self, version: int) -> set[int]:
        """Return the groups that must be taken now. If they waited, some group would become too old, because the
        iterations until then could not take all."""
        due: set[int] = set()
        for later in range(self.lag + 1):
            until = [group for group in self.groups.values() if group.oldest + self.lag <= version + later]
            left = sorted(
                (group for group in until if group.number not in due),
                key=lambda group: (not group.ended, not self._at(group), -group.finished, group.number),
            )
            due |= {group.number for group in left[: max(0, len(until) - later * self.tasks - len(due))]}
        return due

    def take(self, groups: Sequence[Group], durations: Iterable[float] = ()) -> None:
        """Note that groups are taken, or lost, and the seconds of their episodes."""
        self.durations = [*self.durations, *durations][-REMEMBERED_EPISODES:]
        for group in groups:
            del self.groups[group.number]

    def _at(self, group: Group) -> bool:
        """Return whether a group has reached its floor."""
        return group.ended or group.finished >= min(self.floor, self.rollouts - group.lost)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data."""
        groups = [vars(group) for group in self.groups.values()]
        return {"opened": self.opened, "groups": groups, "durations": self.durations}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of :meth:`state_dict`."""
        self.opened, self.durations = int(state["opened"]), list(state["durations"])
        self.groups = {fields["number"]: Group(**fields) for fields in state["groups"]}
