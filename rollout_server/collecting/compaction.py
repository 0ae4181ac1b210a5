"""The rules by which the node's own loop shortens a history that leaves no room for a turn (``limits.compaction``).

A shorter history begins a new sequence of the same episode. It has the opening and the newest turn in every case. With
"drop" it also has the agent's other turns, and only the oldest observations are left out. With "summary" a summary by
the agent takes the place of everything between. Both leave out the agent's thoughts of earlier turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from agent_environments.protocol import Message
from agent_environments.tool_calls import render_tool_response, split_tool_responses
from loop_formats.branch import Exchange

LEFT_OUT = "(This answer was left out to save room.)"
"""The text in the place of an observation."""
SUMMARY_REQUEST = (
    "There is no room to go on with this conversation. Summarise it: what you did, what you found out that is still "
    "needed, and what is left to do. You will go on from the task, your summary, and your last turn with its answer."
)
SUMMARY_HEAD = "Your summary of what came before:\n\n"


@dataclass(frozen=True)
class History:
    """The messages that a sequence begins with: an ``opening``, then turns and their observations."""

    opening: Sequence[Message]
    exchanges: Sequence[Exchange]

    @property
    def after(self) -> list[Message]:
        """The messages after the opening."""
        pairs = ((Message("assistant", each.action), Message("user", each.observation)) for each in self.exchanges)
        return [message for pair in pairs for message in pair]


def shortened(history: History) -> Iterator[History]:
    """Yield shorter and shorter histories.

    The observations are removed first: the older half, then half of the rest, and so on down to the newest. If that is
    not enough, turns are removed in the same way. If the newest observation itself is too long, it is removed too.
    """
    *older, newest = history.exchanges
    yield from _less(history, newest)
    without = _without(newest)
    yield replace(history, exchanges=[*older, without])
    yield from _less(history, without)


def _less(history: History, newest: Exchange) -> Iterator[History]:
    older = history.exchanges[:-1]
    places = [place for place, each in enumerate(older) if each != _without(each)]
    for count in _halves(len(places) + 1):
        first = places[1 - count] if count > 1 else len(older)
        yield replace(history, exchanges=[*map(_without, older[:first]), *older[first:], newest])
    bare = [_without(each) for each in older]
    for count in _halves(len(older) + 1):
        yield replace(history, exchanges=[*bare[len(older) + 1 - count :], newest])


def _halves(count: int) -> Iterator[int]:
    while count > 1:
        count //= 2
        yield count


def summarised(opening: Sequence[Message], history: History, summary: str) -> Iterator[History]:
    """Yield histories with a summary after the task's ``opening``; the first also has the newest observation."""
    newest = history.exchanges[-1]
    beginning = [*opening, Message("user", SUMMARY_HEAD + summary)]
    yield History(beginning, [newest])
    yield History(beginning, [_without(newest)])


def _without(exchange: Exchange) -> Exchange:
    """Return the turn without the text of its observation; there is still one tool result for each call."""
    results = split_tool_responses(exchange.observation)
    return replace(
        exchange, observation=LEFT_OUT if results is None else render_tool_response(*[LEFT_OUT] * len(results))
    )
