"""The content of a run's lists: a summary of each line of a log, sums of summaries, and the names of collections."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import takewhile
from typing import Any

import msgspec

from loop_formats.ids import CollectionName
from loop_formats.rollout import BranchOf
from loop_plumbing.grouping import grouped

ASKS_CHARACTERS = 160


class _ListedTurn(msgspec.Struct, frozen=True, gc=False):
    start: int
    end: int
    policy_version: int
    failed: bool


class ListedMessage(msgspec.Struct, frozen=True, gc=False):
    """A message: its role and text, and the thinking before it."""

    role: str
    content: str
    reasoning: str = ""


class Listed(msgspec.Struct, frozen=True, gc=False):
    """The fields of a rollout's record that lists, search and sums need; msgspec skips all other fields.

    ``mask`` and ``sampler_logprobs`` are [s].
    """

    rollout_id: str
    episode_id: str
    task_id: str
    index: int
    segment: int
    segments: int
    reward: float
    success: bool
    end_reason: str
    seconds: float
    temperature: float
    ungradable: str | None
    branch_of: BranchOf | None
    turns: list[_ListedTurn]
    messages: list[ListedMessage]
    mask: list[bool]
    sampler_logprobs: list[float]


_decoder = msgspec.json.Decoder(Listed)


def read_listed(line: bytes) -> Listed:
    """Read a rollout's line for a list.

    Raises:
        ValueError: the line is not a rollout; the message names the place of the error.
    """
    try:
        try:
            return _decoder.decode(line)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:  # half a surrogate pair in what an agent wrote, or damage
            return msgspec.convert(json.loads(line), Listed)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from error


def summary_of(rollout: Listed, cursor: int) -> dict[str, Any]:
    """Return a rollout's fields for a list."""
    sampled = sum(turn.end - turn.start for turn in rollout.turns)
    return {
        "cursor": cursor,
        "id": rollout.rollout_id,
        "episode": rollout.episode_id,
        "task": rollout.task_id,
        "branch_of": rollout.branch_of and asdict(rollout.branch_of),
        **{key: getattr(rollout, key) for key in ("index", "segment", "segments", "reward", "success", "end_reason")},
        **{key: getattr(rollout, key) for key in ("seconds", "temperature", "ungradable")},
        "turns": len(rollout.turns),
        "messages": len(rollout.messages),
        "tokens": len(rollout.mask),
        "sampled": sampled,
        "versions": sorted({turn.policy_version for turn in rollout.turns}),
        "failed_turns": sum(turn.failed for turn in rollout.turns),
        "mean_logprob": sum(rollout.sampler_logprobs) / max(sampled, 1),  # of tokens not sampled it is 0
        "asks": question_of(rollout.messages),
    }


KINDS = ("training", "dev", "evaluation", "continuation")
"""The kinds of collections, in the order of the page's lists."""


def kind_of(parsed: CollectionName) -> str:
    if parsed.is_training:
        return "training"
    return "dev" if parsed.dev else "continuation" if parsed.branch else "evaluation"


def name_of(parsed: CollectionName) -> str:
    """Return a collection's name for the page and the command line; it may not be unique."""
    if parsed.dev:
        return f"dev tasks after iteration {parsed.iteration}"
    if parsed.branch:
        return f"continuations of {parsed.name}"
    if not parsed.is_training:
        return f"{parsed.policy}, T={parsed.temperature}" if parsed.temperature else parsed.name
    round_ = f", round {parsed.refill + 1}" if parsed.refill else ""
    group = "" if parsed.group is None else f", group {parsed.group}"
    share = f", share {parsed.share.replace('of', ' of ')}" if parsed.share else ""
    return f"iteration {parsed.iteration}{round_}{group}{share}"


def question_of(messages: Sequence[ListedMessage]) -> str:
    """Return a task's question: the last message before the agent's first message. Of a long message only the last line
    is used, because shared text comes first."""
    before = list(takewhile(lambda message: message.role != "assistant", messages))
    text = before[-1].content.strip() if before else ""
    question = text if len(text) <= ASKS_CHARACTERS else text.splitlines()[-1]
    return cut(" ".join(question.split()), ASKS_CHARACTERS)


def cut(text: str, most: int) -> str:
    """Return ``text`` in at most ``most`` characters, the last of them "…" if it goes on."""
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"


def group_of(entry: dict[str, Any]) -> tuple[Any, ...]:
    """Return a key that is equal for rollouts with the same initial state: the task, and the rollout and turn that they
    continue."""
    origin = entry["branch_of"]
    return (entry["task"], *((origin["rollout_id"], origin["turns"]) if origin else ()))


def episodes(summaries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one entry for each episode: the entry of the first sequence, with the turns, tokens and so on of all
    sequences, and their ``cursors``."""
    return [_whole(sequences) for sequences in grouped((entry["episode"], entry) for entry in summaries).values()]


def _whole(sequences: Sequence[dict[str, Any]]) -> dict[str, Any]:
    sums = {key: sum(entry[key] for entry in sequences) for key in ("turns", "messages", "tokens", "failed_turns")}
    sampled = max(sum(entry["sampled"] for entry in sequences), 1)
    return {
        **sequences[0],
        **sums,
        "cursors": [entry["cursor"] for entry in sequences],
        "gap": max((entry["gap"] for entry in sequences if entry["gap"] is not None), default=None),
        "mean_logprob": sum(entry["mean_logprob"] * entry["sampled"] for entry in sequences) / sampled,
    }


TEXTS = ("task", "end_reason", "ungradable", "note", "asks")
NUMBERS = ("reward", "success", "advantage", "gap", "mean_logprob")
COUNTS = ("index", "segments", "turns", "messages", "tokens", "failed_turns", "cursors")


def columns(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return {"columns", "named", "texts"} for the page's list. A column has the values in the order of ``entries``;
    the columns in ``named`` have indices into ``texts``. A browser reads this ten times as fast."""
    texts: dict[str, int] = {}
    named = {
        key: [None if entry[key] is None else texts.setdefault(entry[key], len(texts)) for entry in entries]
        for key in TEXTS
    }
    plain = {key: [entry[key] for entry in entries] for key in (*NUMBERS, *COUNTS)}
    return {"columns": named | plain, "named": TEXTS, "texts": list(texts)}


def totals(summaries: list[dict[str, Any]]) -> dict[str, float] | None:
    """Return the number, mean reward and mean success of episodes; None if there are no episodes."""
    summaries = [entry for entry in summaries if entry["segment"] == 0]
    if not summaries:
        return None
    count = len(summaries)
    return {
        "rollouts": count,
        "reward": sum(entry["reward"] for entry in summaries) / count,
        "success": sum(entry["success"] for entry in summaries) / count,
    }
