"""Pairs of turns that were sampled in the same state, and the file that keeps them.

Both turns follow the same token ids, so the chosen rollout's ids up to the turn's end and the rejected one's differ in
the turn alone. The rollouts stay in their collections' logs; a pair names them.

The same two turns may be in the file several times, with the values of earlier and later searches: the last line
counts.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType

from loop_formats.ids import paired_turn_id
from loop_formats.rollout import Rollout
from loop_formats.run_files import COLLECTIONS, append_to, read_lines, write_rollouts
from loop_formats.schema import ConfigError, require
from loop_recipes.algorithm.losses import PolicyLoss
from loop_recipes.config.loop_config import UpdateConfig
from loop_recipes.config.sft_config import SftConfig
from loop_recipes.engine.samples import Sample
from loop_recipes.rollouts.fixed_set import SampleMaker

TURN_PAIRS = "turn_pairs"
"""The folder of the pairs and their rollouts, in the output folder of the command that made them."""
PAIRS_FILE = "pairs.jsonl"
"""Beside the folder of the collections whose rollouts the pairs name."""


@dataclass(frozen=True)
class TurnIds:
    """The token ids of a turn, and those that answered it (none where the sequence ends)."""

    said: tuple[int, ...]
    answer: tuple[int, ...]


def turns_of(rollout: Rollout) -> list[TurnIds]:
    """The turns that ``rollout`` sampled itself."""
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
    """The pairs of a file, each two turns once.

    Raises:
        ValueError: a whole line is no pair; names the file.
    """
    try:
        pairs = [TurnPair(**line.record) for line in read_lines(path)]
    except TypeError as error:
        raise ValueError(f"{path} holds a line that is no pair: {error}") from error
    return list({pair.turns: pair for pair in pairs}.values())


def write_named(folder: Path, rollouts: Iterable[Rollout], pairs: Iterable[TurnPair]) -> None:
    """Write those of the rollouts that a pair names into the logs of their collections, in ``folder/collections``.

    To be called before the pairs are written: what they name must be there.
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

    Pairs that it was told of are on disk when :meth:`add` returns. A last line that a crash cut short is cut off when
    the file is opened again.

    Raises:
        ValueError: a whole line is no pair; names the file.
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
        os.fsync(self._file.fileno())
        self._pairs |= {pair.turns: pair for pair in new}
        return len(new)

    def __enter__(self) -> PairBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


class TurnPairs(SampleMaker):
    """Trains on pairs of turns alone, each turn after all that came before it. It needs a loss on pairs.

    The turns of a pair are a group by themselves, and the return of each is its value. So ``ReturnPairs`` finds the
    pair again, if its values differ by more than its own threshold too.

    Args:
        file: of pairs, which ``loop method trees`` or ``rank-turns`` wrote; ``rollouts.logs`` holds their rollouts.
    """

    reads_branches = True

    def __init__(self, file: str) -> None:
        self._file = Path(file)
        self._pairs: list[TurnPair] = []

    def check(self, config: SftConfig, loss: PolicyLoss) -> None:
        require(
            loss.compares,
            f"samples: {config.loss['_component_']} compares no pairs; give "
            "loss._component_=loop_recipes.algorithm.preferences.DPO, or leave samples out",
        )

    def see(self, rollouts: Sequence[Rollout]) -> None:
        file = self._file
        require(file.is_file(), f"samples.file: {file} does not exist; loop method trees writes such a file")
        try:
            self._pairs = read_pairs(file)
        except ValueError as error:
            raise ConfigError(f"samples.file: {error}") from error
        require(self._pairs, f"samples.file: {file} holds no pair; search more iterations, or with a lower threshold")
        known = {rollout.rollout_id: rollout for rollout in rollouts}
        for pair in self._pairs:
            for name in (pair.chosen, pair.rejected):
                require(name in known, f"samples.file: {file} names rollout {name}, which is not in rollouts.logs")
                own = pair.turn - known[name].turns_before
                sampled = 0 <= own < len(known[name].turns)
                require(sampled, f"samples.file: {file}: rollout {name} did not sample turn {pair.turn}")

    def samples(self, rollouts: Sequence[Rollout], update: UpdateConfig, model_dir: str) -> list[Sample]:
        length, known = update.max_tokens_per_rollout, {rollout.rollout_id: rollout for rollout in rollouts}
        samples: list[Sample] = []
        for number in range(len(self._pairs)):
            turns = self._turns_of(number, known)
            if length is None or max(turn.tokens for turn in turns) <= length:
                samples += turns
        require(samples, f"update.max_tokens_per_rollout is {length}, and no pair of turns is so early")
        return samples

    def _turns_of(self, number: int, rollouts: Mapping[str, Rollout]) -> list[Sample]:
        pair = self._pairs[number]
        turns = []
        for name, value in ((pair.chosen, pair.chosen_value), (pair.rejected, pair.rejected_value)):
            turn = Sample.from_rollout(rollouts[name]).only_turn(pair.turn - rollouts[name].turns_before)
            turn_name = paired_turn_id(number, name, pair.turn)
            turns.append(
                replace(turn, rollout_id=turn_name, episode_id=turn_name, task_id=f"pair {number}", reward=value)
            )
        return turns

    def sources(self, samples: Sequence[Sample]) -> set[str]:
        made = {sample.rollout_id for sample in samples}
        found: set[str] = set()
        for number, pair in enumerate(self._pairs):
            if paired_turn_id(number, pair.chosen, pair.turn) in made:
                found |= {pair.chosen, pair.rejected}
        return found

    def identity(self) -> list[str]:
        return [str(pair) for pair in self._pairs]
