"""The sequences of an episode as one thread: where each begins, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any


def thread_of(records: Iterable[tuple[int, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the ``thread`` of :meth:`RunData.rollout` for the sequences of an episode, with their cursors."""
    thread: list[dict[str, Any]] = []
    earlier: list[list[dict[str, str]]] = []
    turns = 0
    for cursor, record in records:
        shared, begins = sequence_beginning(record["messages"], earlier)
        rule = record["extra"].get("compaction")
        begins = f"its history was too long (compaction: {rule})" if rule else begins
        thread.append({"cursor": cursor, "shared": shared, "begins": begins, "turns": turns})
        earlier.append(record["messages"])
        turns += len(record["turns"])
    return thread


def sequence_beginning(
    messages: Sequence[Mapping[str, str]], earlier: Sequence[Sequence[Mapping[str, str]]]
) -> tuple[int, str]:
    """Return how many messages a sequence shares with one of the episode's ``earlier`` sequences, and the reason why
    the sequence begins; (0, "") for the first."""
    if not earlier:
        return 0, ""
    texts = [(message["role"], message["content"]) for message in messages]
    shared, other = max(((_in_common(texts, each), each) for each in earlier), key=lambda pair: pair[0])
    if shared == len(other) or shared == len(texts):
        return shared, "the same history was encoded anew"
    if texts[shared][0] == other[shared]["role"] == "assistant":
        return shared, "another answer to the same messages"
    if any(role == "assistant" for role, _ in texts[:shared]):
        return shared, "its history was changed"
    return shared, "a conversation of its own, such as a sub-agent's"


def _in_common(texts: Sequence[tuple[str, str]], other: Sequence[Mapping[str, str]]) -> int:
    pairs = zip(texts, ((message["role"], message["content"]) for message in other), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
