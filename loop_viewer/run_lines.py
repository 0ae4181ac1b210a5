"""Reads a run's metrics, token statistics and turn values for the page: a line that cannot be read costs that line."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import compress
from pathlib import Path
from typing import Any

from loop_formats.places import METRICS_FILE
from loop_formats.turn_values import TurnValue
from loop_viewer.sound_lines import json_object, sound_lines
from loop_viewer.summaries import read_listed

MOST = 1e300


def read_numbers(run: Path, damage: list[str]) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl, if the file exists. None stands for a number that is not finite (such
    as the ratio of a now almost impossible rollout) or too large for a float, because browsers' JSON has neither.
    ``damage`` names the lines that cannot be read; they are left out."""
    file = run / METRICS_FILE
    lines = sound_lines(file, "line of metrics", _numbers, damage) if file.is_file() else ()
    return [line for _, line in lines if line is not None]


def _numbers(text: bytes) -> dict[str, Any]:
    line = json_object(text)
    if not isinstance(line.get("iteration"), int):
        raise ValueError("it has no iteration")
    finite = {key: not isinstance(value, int | float) or abs(value) < MOST for key, value in line.items()}
    return {key: value if finite[key] else None for key, value in line.items()}


def turn_value(text: bytes) -> TurnValue:
    """Read a line of turn values."""
    return TurnValue(**json_object(text))


def _statistic(text: bytes) -> dict[str, Any]:
    """Read a line of token statistics."""
    record = json_object(text)
    learner = [float(value) for value in record["old_logprobs"]]
    return {
        **{key: record[key] for key in ("rollout_id", "ratios", "clipped")},
        "advantage": float(record["advantage"]),
        "old_logprobs": learner,
        "advantages": record.get("advantages", [record["advantage"]] * len(learner)),
        "entropies": record.get("entropies"),
    }


@lru_cache(maxsize=4)
def read_statistics(files: tuple[tuple[Path, int], ...], log: Path) -> tuple[dict[str, dict[str, Any]], Sequence[str]]:
    """Return rollout id -> token statistics and largest gap to the sampler, and the unreadable lines. The result is
    cached until a file's time of change differs."""
    damage: list[str] = []
    rollouts = (rollout for _, rollout in sound_lines(log, "rollout", read_listed, []) if rollout is not None)
    logprobs = {each.rollout_id: list(compress(each.sampler_logprobs, each.mask)) for each in rollouts}
    result = {}
    for file, _ in files:
        for _line, record in sound_lines(file, "rollout's token statistics", _statistic, damage):
            if record is None:
                continue
            sampler = logprobs.get(record["rollout_id"], [])
            gaps = (abs(a - b) for a, b in zip(record["old_logprobs"], sampler, strict=False))
            result[record["rollout_id"]] = {**record, "gap": max(gaps, default=None)}
    return result, damage
