"""The terminal's lines about a collection that went wrong: broken environments, which may end a run, and equal rewards
of all rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from agent_environments.description import Description
from loop_formats.rollout import Rollout, sequence_texts

SURE_CALLS = 3
"""Calls of a tool, all of which raised, that are not just the agent's bad luck."""
SHOWN_REPLIES = 3
SHOWN_CHARACTERS = 120  # of each


class EnvironmentBroke(RuntimeError):
    """The environment failed, not the agent; the message names the place."""


def broken_rollouts(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Return the first sequence of each episode in which the environment broke."""
    return [rollout for rollout in rollouts if rollout.broke is not None and rollout.segment == 0]


def broken_lines(rollouts: Sequence[Rollout]) -> list[str]:
    """Return lines for the terminal: how often and by which error the environment broke; tools that always raise."""
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
    """Return lines for the terminal if all rollouts have the same reward, [] otherwise. The lines name the reward, show
    three of the last replies, and warn if no reply has a call although the environment expects calls."""
    first = [rollout for rollout in rollouts if rollout.segment == 0]
    if len(earned := {rollout.reward for rollout in first}) != 1:
        return []
    replies = [reply for rollout in first if (reply := _last_reply(rollout))]
    endings = " | ".join(map(repr, list(dict.fromkeys(replies))[:SHOWN_REPLIES]))
    verdict = f"the reward of all {len(first)} rollouts is {earned.pop():g}, so nothing can be learned of them"
    ends = [turn.finish_reason for rollout in first for turn in rollout.turns]
    cut = f" ({ends.count('length')} of {len(ends)} turns ran into max_tokens_per_turn)" if "length" in ends else ""
    lines = [f"{verdict}{cut}; they end with: {endings}"]
    called = [calls for rollout in first if (calls := _calls(rollout, description)) is not None]
    if called and not any(called):
        lines.append(f"no reply of {len(first)} rollouts holds a call that could be read; they end with: {endings}")
    return lines


def _last_reply(rollout: Rollout) -> str:
    replies = [message["content"] for message in rollout.messages if message["role"] == "assistant"]
    text = " ".join(replies[-1].split()) if replies else ""
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."


def _calls(rollout: Rollout, description: Description) -> bool | None:
    """Return whether the rollout has a readable call; None if the agent was not asked for calls."""
    try:
        ((messages, turns),) = sequence_texts([rollout])
        concerned = any(behavior.concerns(messages) for behavior in description.behaviors(rollout.task_id))
        return bool(description.calls(rollout.task_id, messages, turns)) if concerned else None
    except Exception:  # of an environment's own class; the warning about its figures reports it
        return True


def check_broken(rollouts: Sequence[Rollout], max_share: float) -> None:
    """Refuse to train on rollouts of a broken environment.

    Raises:
        EnvironmentBroke: the environment broke in a larger share of the episodes than ``max_share``.
    """
    broken = broken_rollouts(rollouts)
    if len(broken) > max_share * sum(rollout.segment == 0 for rollout in rollouts):
        files = ", ".join(sorted({f"collections/{rollout.collection_id}.jsonl" for rollout in broken}))
        raise EnvironmentBroke(
            f"{_line(rollouts)}; that is more than collection.max_broken_share ({max_share:g}): mend it, "
            f"remove {files} and .meta.jsonl from the node's folder, and start again"
        )


def break_line(breaks: Sequence[Mapping[str, str]], rollouts: int) -> str:
    """Return a line: how often the environment broke, and the most frequent place and error.

    Args:
        breaks: the ``broke`` fields of the broken episodes, at least one.
        rollouts: the number of episodes.
    """
    kinds = Counter((each["where"], each["what"]) for each in breaks)
    (where, what), count = kinds.most_common(1)[0]
    often = "" if count == len(breaks) else f", in {count} of them"
    return f"the environment broke in {len(breaks)} of {rollouts} rollouts{often} in {where}: {what}"


def _line(rollouts: Sequence[Rollout]) -> str:
    breaks = [rollout.broke for rollout in broken_rollouts(rollouts) if rollout.broke is not None]
    return break_line(breaks, sum(rollout.segment == 0 for rollout in rollouts))
