"""Monte-Carlo values of turns: the mean return of n continuations from the state that a turn began in.

The value of turn t of a rollout estimates V(s_t), the return that the policy expects there before it acts; it is the
estimate of VinePPO (Kazemnejad et al. 2024, arXiv 2410.01679, section 4.2) with turns in place of reasoning steps. The
advantage of turn t is then V(s_t+1) - V(s_t), with the rollout's own reward behind its last turn.

The stored values: :mod:`loop_formats.turn_values`.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from loop_formats.branch import Branch
from loop_formats.collection_request import CollectionRequest
from loop_formats.rollout import Rollout
from loop_formats.run_files import append_to, sync
from loop_formats.turn_values import TurnValue, read_turn_values
from loop_recipes.rollouts.branching import HowToSample, continuation_request, read_continuations
from loop_recipes.rollouts.source import CollectionSource
from rollout_server.client import CollectionFailed

OPEN_AT_ONCE = 4
"""Rollouts whose continuations are asked for at a time, so that the node is busy while the last of one finish."""


@dataclass(frozen=True)
class ValuedRollout:
    """A rollout, the numbers of its turns to be valued, and how to sample the continuations of these turns."""

    rollout: Rollout
    turns: Sequence[int]
    how: HowToSample

    @classmethod
    def every(cls, rollout: Rollout, step: int, how: HowToSample) -> ValuedRollout:
        """Choose the first turn that the rollout sampled itself, and every ``step``-th turn after it."""
        before = rollout.turns_before
        return cls(rollout, range(before, before + len(rollout.turns), step), how)

    @property
    def request(self) -> CollectionRequest:
        return continuation_request([Branch.of(self.rollout, self.turns)], self.how)

    def missing(self, known: Sequence[TurnValue]) -> bool:
        """Return whether a turn lacks a value from this policy version and this number of continuations."""
        asked = self.how.continuations
        there = {
            (value.rollout_id, value.turn)
            for value in known
            if value.policy_version == self.how.policy_version and value.n + value.refused == asked
        }
        return any((self.rollout.rollout_id, turn) not in there for turn in self.turns)


def write_turn_values(
    source: CollectionSource,
    wanted: Sequence[ValuedRollout],
    file: Path,
    on_rollout: Callable[[ValuedRollout, list[TurnValue]], None] = lambda valued, values: None,
) -> list[str]:
    """Value every turn that ``file`` lacks, and append its value as soon as it is known. Return why rollouts failed.

    A rollout is left out if its continuations cannot be sampled, for example because its world always crashes.
    """
    known = read_turn_values(file)
    waiting = [valued for valued in wanted if valued.missing(known)]
    file.parent.mkdir(parents=True, exist_ok=True)
    failures = []
    with append_to(file) as out:
        for valued, request in _started_ahead(source, waiting):
            try:
                made = read_continuations(source, request)
            except CollectionFailed as error:
                failures.append(str(error))
                continue
            name, version = valued.rollout.rollout_id, valued.how.policy_version
            values = [
                TurnValue.of(name, turn, [r.reward for r in rollouts], made.refused[name, turn], version)
                for (_, turn), rollouts in made.rollouts.items()
            ]
            out.writelines(json.dumps(asdict(value)) + "\n" for value in values)
            out.flush()
            sync(out.fileno())
            on_rollout(valued, values)
    return failures


def _started_ahead(
    source: CollectionSource, waiting: Sequence[ValuedRollout]
) -> Iterator[tuple[ValuedRollout, CollectionRequest]]:
    """Yield each rollout with its started request. The requests of the next rollouts have been started too."""
    started: deque[tuple[ValuedRollout, CollectionRequest]] = deque()
    for valued in waiting:
        request = valued.request
        source.start(request)
        started.append((valued, request))
        if len(started) == OPEN_AT_ONCE:
            yield started.popleft()
    yield from started
