"""What lists say of a run: a summary of each line of a log, sums of summaries, and the names of collections."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import takewhile
from typing import Any

from loop_formats.ids import CollectionName
from loop_formats.rollout import BranchOf

ASKS_CHARACTERS = 160
_NUMBERS = re.compile(rb'"(token_ids|mask|sampler_logprobs)"\s*:\s*\[([^\]]*)\]')
"""The long arrays of a rollout's line. They are nine tenths of it, and a list needs no more than their sums."""
_BELOW_ZERO = re.compile(r"(?:^|,)\s*(-[^,]+)")


def without_numbers(line: bytes) -> Any:
    """Parse a rollout's line, its long arrays as the texts between their brackets."""
    return json.loads(_NUMBERS.sub(rb'"\1":"\2"', line))


def summary_of(record: dict[str, Any], cursor: int) -> dict[str, Any]:
    """Return what a list says of a rollout, whose line was read by :func:`without_numbers`."""
    turns = record["turns"]
    sampled = sum(turn["end"] - turn["start"] for turn in turns)
    return {
        "cursor": cursor,
        "id": record["rollout_id"],
        "episode": record["episode_id"],
        "task": record["task_id"],
        "branch_of": record["branch_of"] and asdict(BranchOf(**record["branch_of"])),
        "index": record["index"],
        "segment": record["segment"],
        "segments": record["segments"],
        "reward": float(record["reward"]),
        "success": record["success"],
        "end_reason": record["end_reason"],
        "turns": len(turns),
        "tokens": record["token_ids"].count(",") + bool(record["token_ids"].strip()),
        "sampled": sampled,
        "versions": sorted({turn["policy_version"] for turn in turns}),
        "failed_turns": sum(turn["failed"] for turn in turns),
        "mean_logprob": _sum(record["sampler_logprobs"]) / max(sampled, 1),
        "seconds": record["seconds"],
        "temperature": record["temperature"],
        "tampered": record["tampered"],
        "ungradable": record["ungradable"],
        "asks": question_of(record["messages"]),
    }


def _sum(logprobs: str) -> float:
    """Return the sum of log-probs by the text between their brackets; those of tokens that were not sampled are 0."""
    return sum(map(float, _BELOW_ZERO.findall(logprobs)))


KINDS = ("training", "dev", "evaluation", "continuation")
"""Of collections, in the order of the page's lists."""


def kind_of(parsed: CollectionName) -> str:
    if parsed.is_training:
        return "training"
    return "dev" if parsed.dev else "continuation" if parsed.branch else "evaluation"


def name_of(parsed: CollectionName) -> str:
    """Return what the page and the command line call a collection, as long as it is the only one of that name."""
    if parsed.dev:
        return f"dev tasks after iteration {parsed.iteration}"
    if parsed.branch:
        return f"continuations of {parsed.name}"
    if not parsed.is_training:
        return parsed.name
    round_ = f", round {parsed.refill + 1}" if parsed.refill else ""
    share = f", share {parsed.share.replace('of', ' of ')}" if parsed.share else ""
    return f"iteration {parsed.iteration}{round_}{share}"


def question_of(messages: Sequence[Mapping[str, str]]) -> str:
    """Return what a task asks: the last message before the agent's first, or of a long one its last line, since what
    tasks share comes before what tells them apart."""
    before = list(takewhile(lambda message: message["role"] != "assistant", messages))
    text = before[-1]["content"].strip() if before else ""
    said = text if len(text) <= ASKS_CHARACTERS else text.splitlines()[-1]
    return " ".join(said.split())[:ASKS_CHARACTERS].rstrip()


def group_of(entry: dict[str, Any]) -> tuple[Any, ...]:
    """Return a key for rollouts that began in the same state: their task, and the rollout and turn that they
    continue."""
    origin = entry["branch_of"]
    return (entry["task"], *((origin["rollout_id"], origin["turns"]) if origin else ()))


def totals(summaries: list[dict[str, Any]]) -> dict[str, float] | None:
    """Over episodes."""
    summaries = [entry for entry in summaries if entry["segment"] == 0]
    if not summaries:
        return None
    count = len(summaries)
    return {
        "rollouts": count,
        "reward": sum(entry["reward"] for entry in summaries) / count,
        "success": sum(entry["success"] for entry in summaries) / count,
    }
