"""Pairs of turns that were sampled in the same state, and the file that keeps them.

Both turns follow the same token ids, so the chosen rollout's ids up to the turn's end and the rejected one's differ in
the turn alone. The rollouts stay in their collections' logs; a pair names them.

The same two turns may be in the file several times: the last line counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from loop_formats.rollout import Rollout
from loop_formats.run_files import COLLECTIONS, read_lines, write_rollouts, write_whole
from loop_plumbing.breakage import raised_as
from loop_plumbing.grouping import grouped

TURN_PAIRS = "turn_pairs"
"""The folder of the pairs and their rollouts, in the output folder of the command that made them."""
PAIRS_FILE = "pairs.jsonl"
"""The file beside the folder of the collections whose rollouts the pairs name."""


@dataclass(frozen=True)
class TurnIds:
    """The token ids of a turn, and the ids of the answer to it (none at the end of the sequence)."""

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
    """A turn as two rollouts sampled it; ``turn`` is its number in the episode, from 0.

    ``chosen_value`` is the mean return of the ``chosen_visits`` rollouts that took the chosen turn;
    ``rejected_value`` and ``rejected_visits`` are the same for the rejected turn.
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
        """Return a key that is equal for all pairs of the same two turns, whichever turn is chosen."""
        return frozenset((self.chosen, self.rejected)), self.turn


def read_pairs(path: Path) -> list[TurnPair]:
    """Read the pairs of a file. Of several pairs with the same two turns, keep one.

    Raises:
        ValueError: a complete line is not a pair; the message names the file.
    """
    with raised_as(ValueError, f"{path} holds a line that is not a pair: ", TypeError):
        pairs = [TurnPair(**line.record) for line in read_lines(path)]
    return list({pair.turns: pair for pair in pairs}.values())


def write_pairs(folder: Path, rollouts: Iterable[Rollout], pairs: Iterable[TurnPair]) -> None:
    """Write the rollouts that the pairs name, then replace the file of pairs in ``folder``."""
    pairs = list(pairs)
    folder.mkdir(parents=True, exist_ok=True)
    named = {name for pair in pairs for name in (pair.chosen, pair.rejected)}
    kept = sorted((each for each in rollouts if each.rollout_id in named), key=lambda each: each.rollout_id)
    for collection, members in grouped((each.collection_id, each) for each in kept).items():
        write_rollouts(folder / COLLECTIONS, collection, members)
    write_whole(folder / PAIRS_FILE, "".join(f"{json.dumps(asdict(pair))}\n" for pair in pairs))
