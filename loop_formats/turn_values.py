"""The values of turns beside a run: a line for each turn whose value was estimated.

``<run>/turn_values/<collection>.jsonl`` has one line per turn, the fields of :class:`TurnValue`, and is only ever added
to. If a turn has several lines, the last one counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loop_formats.run_files import read_lines
from loop_plumbing.breakage import raised_as

TURN_VALUES = "turn_values"
"""The folder of the values in a run's folder."""


@dataclass(frozen=True)
class TurnValue:
    """The value of the state before turn ``turn`` (from 0, of the episode) under one policy version.

    ``value`` is the mean return of ``n`` continuations and ``stderr`` its standard error, None for too few of them;
    ``refused`` more could not be played, because the world's answers differed from those in the rollout.
    """

    rollout_id: str
    turn: int
    value: float | None
    stderr: float | None
    n: int
    refused: int
    policy_version: int

    @classmethod
    def of(cls, rollout_id: str, turn: int, rewards: Sequence[float], refused: int, policy_version: int) -> TurnValue:
        count = len(rewards)
        return cls(
            rollout_id,
            turn,
            value=statistics.fmean(rewards) if count else None,
            stderr=statistics.stdev(rewards) / count**0.5 if count > 1 else None,
            n=count,
            refused=refused,
            policy_version=policy_version,
        )


def values_file(run: Path, collection_id: str) -> Path:
    """Return the file that holds the values of a collection's turns."""
    return run / TURN_VALUES / f"{collection_id}.jsonl"


def read_turn_values(file: Path) -> list[TurnValue]:
    """Return the values in all lines of a file, [] where there is no file.

    Raises:
        ValueError: a line is not a turn's value; the message names the file.
    """
    with raised_as(ValueError, f"{file} holds a line that is not a turn's value: ", TypeError):
        return [TurnValue(**line.record) for line in read_lines(file)] if file.is_file() else []
