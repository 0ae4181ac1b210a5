"""A tree over the turns of one task's rollouts, searched by UCB: the collecting side of DPO-MCTS (LOOP, table 1).

Each rollout is a path from the root. The next one begins at the first state on the way down that has one turn only;
where there are two, the way goes by UCB1 (Auer et al. 2002):

    Q + exploration * sqrt(ln N / n)

Q is the mean return of the n rollouts through the turn, N the number of rollouts through its state.

Rollouts that sampled the same ids and were answered by the same ids went through one turn. So turns that differ
in value differ in ids, and luck after a turn makes no pair. A state whose second sample is the turn that
it has is closed. It gets a further turn only from a rollout that began above it, and then may have more than two.

No clock, no I/O: :mod:`loop_contrib.dpo_mcts.tree_search` samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from loop_contrib.turn_pairs import TurnIds, TurnPair

TURNS_OF_A_STATE = 2


@dataclass
class TreeState:
    """The state before turn ``turn``; ``above`` led here (None at the root). No rollout begins in a closed state."""

    turn: int
    above: TreeTurn | None = None
    sampled: list[TreeTurn] = field(default_factory=list)
    closed: bool = False

    @property
    def open(self) -> bool:
        """Return whether a rollout may begin in this state."""
        return not self.closed and len(self.sampled) < TURNS_OF_A_STATE

    @property
    def exhausted(self) -> bool:
        """Return whether no rollout can begin in this state or in a state below it."""
        return not self.open and all(turn.after is None or turn.after.exhausted for turn in self.sampled)


@dataclass
class TreeTurn:
    """A turn in ``state``, sampled first by rollout ``rollout_id``. ``after`` is None if the turn ended the episode."""

    rollout_id: str
    ids: TurnIds
    state: TreeState
    after: TreeState | None = None
    visits: int = 0
    total: float = 0.0

    @property
    def value(self) -> float:
        """Return the mean return of the rollouts that took this turn."""
        return self.total / self.visits


class TurnTree:
    """The rollouts of one task, as a tree of states and turns.

    Args:
        exploration: weight of UCB's second term, in units of the return.
    """

    def __init__(self, task_id: str, exploration: float = 1.0) -> None:
        self.task_id = task_id
        self.root = TreeState(0)
        self._exploration = exploration

    def select(self) -> TreeState | None:
        """Return the state in which the next rollout begins; None if no state is left."""
        state = self.root
        while not state.open:
            ways = [turn for turn in state.sampled if turn.after is not None and not turn.after.exhausted]
            if not ways:
                return None
            visits = sum(turn.visits for turn in state.sampled)
            best = max(ways, key=lambda turn: self._bound(turn, visits))
            assert best.after is not None, "ways lead on"
            state = best.after
        return state

    def _bound(self, turn: TreeTurn, visits: int) -> float:
        return turn.value + self._exploration * math.sqrt(math.log(visits) / turn.visits)

    def add(self, state: TreeState, rollout_id: str, turns: Sequence[TurnIds], reward: float) -> None:
        """Add a rollout that began at ``state`` and sampled ``turns`` (one or more). Back its return up to the root."""
        began = state
        for number, ids in enumerate(turns):
            turn = next((known for known in state.sampled if known.ids == ids), None)
            if turn is None:
                turn = TreeTurn(rollout_id, ids, state)
                state.sampled.append(turn)
            elif state is began:
                state.closed = True
            if number + 1 < len(turns):
                turn.after = turn.after or TreeState(state.turn + 1, above=turn)
                state = turn.after
        ancestor: TreeTurn | None = turn
        while ancestor is not None:
            ancestor.visits += 1
            ancestor.total += reward
            ancestor = ancestor.state.above

    def pairs(self, threshold: float) -> Iterator[TurnPair]:
        """Yield the best and the worst turn of every state as a pair, if their texts differ and their values differ by
        more than ``threshold``."""
        for state in self._states(self.root):
            if len(state.sampled) < TURNS_OF_A_STATE:
                continue
            chosen = max(state.sampled, key=lambda turn: turn.value)
            rejected = min(state.sampled, key=lambda turn: turn.value)
            if chosen.value - rejected.value > threshold and chosen.ids.sampled != rejected.ids.sampled:
                yield TurnPair(
                    task_id=self.task_id,
                    turn=state.turn,
                    chosen=chosen.rollout_id,
                    rejected=rejected.rollout_id,
                    chosen_value=chosen.value,
                    rejected_value=rejected.value,
                    chosen_visits=chosen.visits,
                    rejected_visits=rejected.visits,
                )

    def _states(self, state: TreeState) -> Iterator[TreeState]:
        yield state
        for turn in state.sampled:
            if turn.after is not None:
                yield from self._states(turn.after)
