"""The pool of environments whose agent is a program (:mod:`agent_environments.program_protocol`), by which a node tells
it from others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from agent_environments.protocol import EnvironmentPool

if TYPE_CHECKING:
    from agent_environments.program_protocol import Offer


@runtime_checkable
class ProgramPool(EnvironmentPool, Protocol):
    """A pool that lends :class:`~agent_environments.program_protocol.ProgramEnvironment`."""

    @property
    def runs_elsewhere(self) -> bool:
        """Return whether other machines start the programs and take an episode for each program."""

    async def take(self, task_id: str | None, timeout_s: float) -> Offer | None:
        """Return the oldest offered episode, of ``task_id`` or of any task (None); None if none is offered in time."""
