"""The consequences of a lost world: the rule by which every environment that plays elsewhere brings worlds back.

A world that is lost is replaced, and the commands of its episode are run again in another one. Only a loss that a
command can have caused counts against it: the loss of its own world, while it ran there and while its neighbours live.
The machine causes all others: a refused connection, a service or server that ends, losses of several worlds at once.
The node waits with growing pauses until they are over; at last the attempt fails
(:class:`~agent_environments.protocol.EnvironmentCrashed`); no episode is worth 0 for it.

One loss alone may be chance. :data:`LOSSES_PER_COMMAND` that count are the command's doing: the episode ends, and a
state that is lost is ungradable. So an agent cannot void its episode by a command that ends its own world, or has its
connection cut, each time.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import TypeVar

from agent_environments.protocol import EnvironmentCrashed
from loop_plumbing import running_time
from loop_plumbing.agent_timeout import paused_agent_timeout
from loop_plumbing.forked_process import ProcessEnded

LOSSES_PER_COMMAND = 5
"""Losses that count, over one command. If chance alone cuts one request in a hundred, one in 10^10 loses so many."""
PAUSE_S = 1.0
"""Seconds before a world is requested again, the second time that it is lost; twice as long each time after that."""
LONGEST_PAUSE_S = 15.0
NEAR_S = 5.0
"""Seconds within which the losses of two worlds have one cause: a busy event loop may notice them that far apart."""
EARLY_LOSSES = 2
"""Losses over one command that are evidence for its neighbours. Later ones are not: else the episodes of many agents
that have their worlds lost on purpose, and together, would excuse each other for ever."""
REMEMBERED = 1024

T = TypeVar("T")


class Loss(StrEnum):
    """The ways in which a world is lost."""

    ENDED = "ended"
    """Its process ended by itself while it worked for the episode. No neighbour has a part in that: it counts."""
    KILLED = "killed"
    """Its process got a SIGKILL, as from a kernel without memory. It counts if its neighbours live."""
    CUT = "cut"
    """The connection ended, or did not carry an answer. It counts if its neighbours live."""
    NO_ROOM = "no_room"
    """Its state found no room on the disk. It counts if its neighbours live."""
    GONE = "gone"
    """It had ended before it was asked. It never counts."""
    REFUSED = "refused"
    """It could not be started, or went with its server. It never counts, and nor do others' losses at that time."""


class WorldLost(Exception):
    """A world is gone, or could not be started."""

    def __init__(self, why: str, loss: Loss) -> None:
        super().__init__(why)
        self.loss = loss


async def answered(exchange: Awaitable[T], where: str) -> T:
    """Return a forked process's answer; raises WorldLost, whose text begins with ``where``, if the process is gone."""
    try:
        return await exchange
    except ProcessEnded as error:
        raise WorldLost(f"{where}: {error}", Loss.KILLED if error.killed else Loss.ENDED) from error
    except EnvironmentCrashed as error:
        raise WorldLost(f"{where}: {error}", Loss.REFUSED) from error


class CommandsDoing(Exception):
    """Too many worlds were lost over one command: the agent is responsible, and the command's effect is gone."""


class Losses:
    """Record the worlds that a pool has lost. ``counts`` maps each kind of loss to the number of such losses."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._lately: deque[tuple[float, object]] = deque(maxlen=REMEMBERED)
        self._closed = asyncio.Event()

    def note(self, whose: object) -> None:
        """Note a loss that the machine may have caused, together with other losses at about the same time."""
        self._lately.append((running_time.now(), whose))

    def alone(self, whose: object, at: float) -> bool:
        """Return whether no other episode lost a world at about the time ``at``."""
        return not any(abs(when - at) <= NEAR_S and other != whose for when, other in self._lately)

    async def pause(self, seconds: float) -> None:
        """Sleep for ``seconds``; raises EnvironmentCrashed as soon as the pool closes."""
        try:
            await asyncio.wait_for(self._closed.wait(), seconds)
        except TimeoutError:
            return
        raise EnvironmentCrashed("the pool is closed")

    def close(self) -> None:
        """End all pauses at once. May be called twice."""
        self._closed.set()


class Recovery:
    """Repeat one request of an episode each time that a world is lost during the request.

    Args:
        losses: the losses of the episode's pool.
        whose: an object that identifies the episode.
        patience_s: seconds after the first loss in which another try may begin.
    """

    def __init__(self, losses: Losses, whose: object, patience_s: float) -> None:
        self._losses = losses
        self._whose = whose
        self._patience_s = patience_s
        self._times = 0
        self._began = 0.0
        self._ended: list[str] = []
        self._doubtful: list[tuple[float, str]] = []
        """Times and causes of the losses that count unless neighbours were lost too."""

    @property
    def under_way(self) -> bool:
        """Return whether a world was lost during this request."""
        return self._times > 0

    @property
    def suspect(self) -> bool:
        """Return whether the command is suspected: a world ended by itself, or two worlds were lost over the command
        while no other episode lost a world.
        """
        return bool(self._ended) or len(self._against()) > 1

    def _against(self) -> list[str]:
        """Return the causes of the losses that count against the command."""
        return self._ended + [why for at, why in self._doubtful if self._losses.alone(self._whose, at)]

    async def run(self, once: Callable[[], Awaitable[T]]) -> T:
        """Call ``once`` until it does not raise WorldLost, and return its result.

        Raises:
            CommandsDoing: too many losses count against the command.
            EnvironmentCrashed: the machine kept losing worlds until the patience was over, or the pool closed.
        """
        while True:
            try:
                return await once()
            except WorldLost as lost:
                with paused_agent_timeout():
                    await self._lost(lost)

    async def _lost(self, lost: WorldLost) -> None:
        """Record a loss, then wait until it is time to try again."""
        now = running_time.now()
        self._times += 1
        self._began = now if self._times == 1 else self._began
        self._losses.counts[lost.loss.value] += 1
        match lost.loss:
            case Loss.ENDED:
                self._ended.append(str(lost))
            case Loss.REFUSED:
                self._losses.note(None)
            case Loss.KILLED | Loss.CUT | Loss.NO_ROOM:
                self._doubtful.append((now, str(lost)))
                if len(self._doubtful) <= EARLY_LOSSES:
                    self._losses.note(self._whose)
        if self._doubtful and len(self._ended) + len(self._doubtful) >= LOSSES_PER_COMMAND:
            await self._losses.pause(PAUSE_S)  # until neighbours that lost theirs have seen it
        if len(against := self._against()) >= LOSSES_PER_COMMAND:
            raise CommandsDoing(f"{len(against)} worlds were lost over one command: {'; '.join(against)}") from lost
        if now - self._began > self._patience_s:
            if self.suspect:
                raise CommandsDoing(f"worlds were lost over one command: {'; '.join(against)}") from lost
            raise EnvironmentCrashed(f"no world lasted for {self._patience_s:g} s; the last: {lost}") from lost
        if lost.loss is not Loss.ENDED and self._times > 1:  # the first may be all that there is
            await self._losses.pause(min(LONGEST_PAUSE_S, PAUSE_S * 2.0 ** (self._times - 2)))
