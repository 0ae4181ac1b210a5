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
    """The address at which the policy answers one episode, and the episode's identity.

    ``policy_version`` is None if each turn is sampled from the newest version. The policy answers at most
    ``max_turns`` turns.
    """

    base_url: str
    api_key: str
    episode_id: str
    collection: str
    policy_version: int | None
    max_turns: int

    @property
    def url_with_key(self) -> str:
        """Return the policy's address with the key in it, for clients that send no key."""
        return f"{self.base_url.removesuffix('/v1')}/sessions/{self.api_key}/v1"


@dataclass(frozen=True)
class Ended:
    """The end of a command. ``status`` is None if we had to end it; ``output`` holds the last bytes that it printed.

    For a command that gives an answer, ``answer`` is the whole last line of its standard output.
    """

    status: int | None
    output: str
    answer: str = ""


@dataclass(frozen=True)
class SideCalls:
    """A rule for a program's model calls beside its task, such as a call for a title or a commit message.

    Such side calls are answered, but they do not count as turns and are not trained on. A call is a side call if all
    stated conditions hold: it names this ``model``; its system prompt begins with the text ``system`` (the policy may
    have written the rest); it offers exactly the tools with the names ``tools``. A call that continues from a turn is
    always a turn. If ``by_base`` is true, the base model answers the side call, not the policy.
    """

    model: str | None = None
    system: str | None = None
    tools: frozenset[str] | None = None
    by_base: bool = False

    def hold(self, model: str, system: str, tools: Set[str]) -> bool:
        """Return whether a call fulfils all conditions of this rule."""
        return (
            self.model in (None, model)
            and (self.system is None or system.lstrip().startswith(self.system.lstrip()))
            and self.tools in (None, tools)
        )


class Offer(Protocol):
    """An episode that a program on another machine may take."""

    task_id: str
    split: str | None
    connection: Connection

    def give_back(self) -> None:
        """Offer the episode to another program, because the program that took it has gone."""


@runtime_checkable
class ProgramEnvironment(Environment, Protocol):
    """An episode of a program. Call ``start``, ``run`` and ``grade``; ``step`` acts in the world during ``run``."""

    @property
    def has_world(self) -> bool:
        """Return whether the program acts in one of our worlds."""

    @property
    def side_calls(self) -> Sequence[SideCalls]:
        """The rules for calls that do not belong to the task; the first rule that holds applies."""

    @property
    def grades_itself(self) -> bool:
        """Return whether the program states the episode's reward in :meth:`run`, which then keeps its whole time."""

    async def run(self, connection: Connection) -> Ended | None:
        """Wait until the program ends, or ends the episode. Return None for a program that runs elsewhere.

        To end the program, cancel the task that awaits ``run``; ``run`` may still return how the program ended.
        """

    def finish(self, reward: float | None, figures: Figures = MappingProxyType({})) -> None:
        """End the episode at the program's request, with the reward and the figures that the program states."""
