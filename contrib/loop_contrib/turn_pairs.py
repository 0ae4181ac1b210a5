"""Pairs of turns that were sampled in the same state, and the file that keeps them.

Both turns follow the same token ids, so the chosen rollout's ids up to the turn's end and the rejected one's differ in
the turn alone. The rollouts stay in their collections' logs; a pair names them.

The same two turns may be in the file several times, with the values of earlier and later searches: the last line
counts.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from loop_formats.rollout import Rollout
from loop_formats.run_files import COLLECTIONS, append_to, read_lines, sync, write_rollouts
from loop_plumbing.breakage import raised_as

TURN_PAIRS = "turn_pairs"
"""The folder of the pairs and their rollouts, in the output folder of the command that made them."""
PAIRS_FILE = "pairs.jsonl"
"""The file beside the folder of the collections whose rollouts the pairs name."""


@dataclass(frozen=True)
class TurnIds:
    """The token ids of a turn, and those that answered it (none where the sequence ends)."""

    sampled: tuple[int, ...]
    answer: tuple[int, ...]


def turns_of(rollout: Rollout) -> list[TurnIds]:
    """Return the turns that ``rollout`` sampled itself."""
    ends = [turn.start for turn in rollout.turns[1:]] + [len(rollout.token_ids)]
    ids = rollout.token_ids
    return [
        TurnIds(tuple(ids[turn.start : turn.end]), tuple(ids[turn.end : end]))
        for turn, end in zip(rollout.turns, ends, strict=True)
    ]


@dataclass(frozen=True)
class TurnPair:
    """Turn ``turn`` (from 0, of the episode) as two rollouts sampled it.

    ``chosen_value`` and ``rejected_value`` are the mean returns of the ``chosen_visits`` and ``rejected_visits``
    rollouts that went through each.
    """

    task_id: str
    turn: int
    chosen: str
    rejected: str
    chosen_value: float
    rejected_value: float
    chosen_visits: int
    rejected_visits: int

    @property
    def turns(self) -> tuple[frozenset[str], int]:
        """The same for all pairs of these two turns, whichever of them is chosen."""
        return frozenset((self.chosen, self.rejected)), self.turn


def read_pairs(path: Path) -> list[TurnPair]:
    """Read the pairs of a file, each two turns once.

    Raises:
        ValueError: a whole line is not a pair; names the file.
    """
    with raised_as(ValueError, f"{path} holds a line that is not a pair: ", TypeError):
        pairs = [TurnPair(**line.record) for line in read_lines(path)]
    return list({pair.turns: pair for pair in pairs}.values())


def write_named(folder: Path, rollouts: Iterable[Rollout], pairs: Iterable[TurnPair]) -> None:
    """Write those of the rollouts that a pair names into the logs of their collections, in ``folder/collections``.

    To be called before the pairs are written: the rollouts that they name must be there.
    """
    named = {name for pair in pairs for name in (pair.chosen, pair.rejected)}
    by_collection: defaultdict[str, list[Rollout]] = defaultdict(list)
    for rollout in sorted(rollouts, key=lambda rollout: rollout.rollout_id):
        if rollout.rollout_id in named:
            by_collection[rollout.collection_id].append(rollout)
    for collection, members in by_collection.items():
        write_rollouts(folder / COLLECTIONS, collection, members)


class PairBuffer:
    """A file of pairs that is only ever added to, one JSON line each; a context manager.

    Pairs are on disk when :meth:`add` returns. A last line that a crash cut short is cut off when
    the file is opened again.

    Raises:
        ValueError: a whole line is not a pair; names the file.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = append_to(path)
        self._pairs = {pair.turns: pair for pair in read_pairs(path)}

    @property
    def pairs(self) -> list[TurnPair]:
        """All that is kept."""
        return list(self._pairs.values())

    def add(self, pairs: Iterable[TurnPair]) -> int:
        """Keep pairs that are new, or whose values are; returns how many."""
        new = [pair for pair in pairs if self._pairs.get(pair.turns) != pair]
        self._file.writelines(json.dumps(asdict(pair)) + "\n" for pair in new)
        self._file.flush()
        sync(self._file.fileno())
        self._pairs |= {pair.turns: pair for pair in new}
        return len(new)

    def __enter__(self) -> PairBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
