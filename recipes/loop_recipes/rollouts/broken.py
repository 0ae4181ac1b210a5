"""What the terminal is told of a collection that went wrong: environments that broke, which may end a run, and rollouts
all of which earned the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from agent_environments.description import Description
from loop_formats.rollout import Rollout, sequence_texts

SURE_CALLS = 3
"""Calls of a tool, all of which raised, that are no more the agent's bad luck."""
SHOWN_REPLIES = 3
SHOWN_CHARACTERS = 120  # of each


class EnvironmentBroke(RuntimeError):
    """The environment, and not the agent, is what failed; the message says where."""


def broken_rollouts(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Those of episodes whose environment broke; the first sequence of each."""
    return [rollout for rollout in rollouts if rollout.broke is not None and rollout.segment == 0]


def broken_lines(rollouts: Sequence[Rollout]) -> list[str]:
    """For the terminal, one line each: that the environment broke, how often and in what; tools that always raise."""
    broken = broken_rollouts(rollouts)
    lines = [_line(rollouts)] if broken else []
    calls, raised, what = Counter[str](), Counter[str](), dict[str, str]()
    for use in (use for rollout in rollouts if rollout.segment == 0 for use in rollout.tools):
        calls[use["tool"]] += use["calls"]
        raised[use["tool"]] += use["raised"]
        what[use["tool"]] = what.get(use["tool"]) or use["what"]
    useless = [tool for tool in sorted(calls) if raised[tool] == calls[tool] >= SURE_CALLS]
    return [*lines, *(f"all {calls[tool]} calls of tool {tool} raised: {what[tool]}" for tool in useless)]


def hopeless_lines(rollouts: Sequence[Rollout], description: Description) -> list[str]:
    """For the terminal, one line each: that all rollouts earned the same, be it nothing or everything, and that none of
    those who could call a tool, or whatever the environment reads, did; with the last replies of three of them. []
    where there is something to learn from.
    """
    first = [rollout for rollout in rollouts if rollout.segment == 0]
    if len(earned := {rollout.reward for rollout in first}) != 1:
        return []
    replies = [reply for rollout in first if (reply := _last_reply(rollout))]
    shown = " | ".join(map(repr, list(dict.fromkeys(replies))[:SHOWN_REPLIES]))
    told = f"the reward of all {len(first)} rollouts is {earned.pop():g}, so nothing can be learned of them"
    ends = [turn.finish_reason for rollout in first for turn in rollout.turns]
    cut = f" ({ends.count('length')} of {len(ends)} turns ran into max_tokens_per_turn)" if "length" in ends else ""
    lines = [f"{told}{cut}; they end with: {shown}"]
    called = [calls for rollout in first if (calls := _calls(rollout, description)) is not None]
    if called and not any(called):
        lines.append(f"no reply of {len(first)} rollouts holds a call that could be read; they end with: {shown}")
    return lines


def _last_reply(rollout: Rollout) -> str:
    said = [message["content"] for message in rollout.messages if message["role"] == "assistant"]
    text = " ".join(said[-1].split()) if said else ""
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."


def _calls(rollout: Rollout, description: Description) -> bool | None:
    """Whether it holds a call that could be read; None where its agent was not asked for one."""
    try:
        ((messages, turns),) = sequence_texts([rollout])
        concerned = any(behavior.concerns(messages) for behavior in description.behaviors(rollout.task_id))
        return bool(description.calls(rollout.task_id, messages, turns)) if concerned else None
    except Exception:  # of an environment's own class; the warning about its figures says so
        return True


def check_broken(rollouts: Sequence[Rollout], max_share: float) -> None:
    """Refuse to train on what a broken environment left.

    Raises:
        EnvironmentBroke: it broke in a larger share of the episodes than ``max_share``; one line.
    """
    broken = broken_rollouts(rollouts)
    if len(broken) > max_share * sum(rollout.segment == 0 for rollout in rollouts):
        files = ", ".join(sorted({f"collections/{rollout.collection_id}.jsonl" for rollout in broken}))
        raise EnvironmentBroke(
            f"{_line(rollouts)}; that is more than collection.max_broken_share ({max_share:g}): mend it, "
            f"remove {files} and .meta.jsonl from the node's folder, and start again"
        )


def break_line(breaks: Sequence[Mapping[str, str]], rollouts: int) -> str:
    """Say how often the environment broke, and where and in what it did most often.

    Args:
        breaks: the ``broke`` of the episodes in which it did, at least one.
        rollouts: how many episodes there were.
    """
    kinds = Counter((each["where"], each["what"]) for each in breaks)
    (where, what), count = kinds.most_common(1)[0]
    often = "" if count == len(breaks) else f", in {count} of them"
    return f"the environment broke in {len(breaks)} of {rollouts} rollouts{often} in {where}: {what}"


def _line(rollouts: Sequence[Rollout]) -> str:
    breaks = [rollout.broke for rollout in broken_rollouts(rollouts) if rollout.broke is not None]
    return break_line(breaks, sum(rollout.segment == 0 for rollout in rollouts))
