"""The further protocol of environments whose agent is a program: the node gives it the policy's address, and waits
until it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from agent_environments.protocol import Environment

Figures = Mapping[str, Mapping[str, float]]
"""``rewards`` and ``metrics`` of a :class:`~agent_environments.protocol.Grade`, each by name."""


@dataclass(frozen=True)
class Connection:
    """The address at which the policy answers, for one episode, and which episode that is.

    ``policy_version`` is None where each turn is sampled from the newest version. ``max_turns`` is how many the policy
    answers.
    """

    base_url: str
    api_key: str
    episode_id: str
    collection: str
    policy_version: int | None
    max_turns: int

    @property
    def url_with_key(self) -> str:
        """The address for clients that send no key."""
        return f"{self.base_url.removesuffix('/v1')}/sessions/{self.api_key}/v1"


@dataclass(frozen=True)
class Ended:
    """The end of a command. ``status`` is None where it had to be ended; ``output`` are the last bytes it printed.

    For a command that gives an answer, ``answer`` is the last line of its standard output, whole.
    """

    status: int | None
    output: str
    answer: str = ""


@dataclass(frozen=True)
class SideCalls:
    """A rule for calls of a program that do not belong to its task, such as for a title or a commit message.

    They are answered, but do not count as turns, and nothing is trained on them. A call is one of these if all stated
    conditions hold: the ``model`` that it names, a text that its ``system`` prompt begins with (the policy may have
    written what follows), the names of exactly the ``tools`` that it offers. A call that continues from a turn is
    always a turn. ``by_base``: the base model answers it, not the policy.
    """

    model: str | None = None
    system: str | None = None
    tools: frozenset[str] | None = None
    by_base: bool = False

    def hold(self, model: str, system: str, tools: Set[str]) -> bool:
        """Return whether a call is one of these."""
        return (
            self.model in (None, model)
            and (self.system is None or system.lstrip().startswith(self.system.lstrip()))
            and self.tools in (None, tools)
        )


class Offer(Protocol):
    """An episode for a program elsewhere."""

    task_id: str
    split: str | None
    connection: Connection

    def give_back(self) -> None:
        """Offer the episode to another program, because the one that took it has gone."""


@runtime_checkable
class ProgramEnvironment(Environment, Protocol):
    """An episode of a program: ``start``, then ``run``, with ``step`` while it runs if there is a world; ``grade``."""

    @property
    def has_world(self) -> bool:
        """Return whether there is a world of ours to act in."""

    @property
    def side_calls(self) -> Sequence[SideCalls]:
        """The rules for calls that do not belong to the task; the first that holds counts."""

    @property
    def grades_itself(self) -> bool:
        """Return whether the program states the episode's reward in :meth:`run`, which then keeps its whole time."""

    async def run(self, connection: Connection) -> Ended | None:
        """Run until the program has ended, or has ended the episode; None for a program that runs elsewhere.

        To end the program, cancel the task that this runs in: it may still return how the program ended.
        """

    def finish(self, reward: float | None, figures: Figures = MappingProxyType({})) -> None:
        """End the episode, because the program says so, with the reward and the figures that it states."""
