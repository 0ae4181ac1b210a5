"""Environments that broke during a collection: what the terminal is told of it, and when it ends a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from loop_formats.rollout import Rollout

SURE_CALLS = 3
"""Calls of a tool, all of which raised, that are no more the agent's bad luck."""


class EnvironmentBroke(RuntimeError):
    """The environment, and not the agent, is what failed; the message says where."""


def broken_rollouts(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Those of episodes whose environment broke; the first sequence of each."""
    return [rollout for rollout in rollouts if rollout.broke is not None and rollout.segment == 0]


def broken_lines(rollouts: Sequence[Rollout]) -> list[str]:
    """For the terminal, one line each: that the environment broke, how often and in what; tools that always raise."""
    broken = broken_rollouts(rollouts)
    lines = [_line(broken, rollouts)] if broken else []
    calls, raised, what = Counter[str](), Counter[str](), dict[str, str]()
    for use in (use for rollout in rollouts if rollout.segment == 0 for use in rollout.tools):
        calls[use["tool"]] += use["calls"]
        raised[use["tool"]] += use["raised"]
        what[use["tool"]] = what.get(use["tool"]) or use["what"]
    useless = [tool for tool in sorted(calls) if raised[tool] == calls[tool] >= SURE_CALLS]
    return [*lines, *(f"all {calls[tool]} calls of tool {tool} raised: {what[tool]}" for tool in useless)]


def check_broken(collection_id: str, rollouts: Sequence[Rollout], max_share: float) -> None:
    """Refuse to train on what a broken environment left.

    Raises:
        EnvironmentBroke: it broke in a larger share of the episodes than ``max_share``; one line.
    """
    broken = broken_rollouts(rollouts)
    if len(broken) > max_share * sum(rollout.segment == 0 for rollout in rollouts):
        raise EnvironmentBroke(
            f"{_line(broken, rollouts)}; that is more than collection.max_broken_share ({max_share:g}): mend it, "
            f"remove collections/{collection_id}.jsonl and .meta.jsonl from the node's folder, and start again"
        )


def _line(broken: Sequence[Rollout], rollouts: Sequence[Rollout]) -> str:
    kinds = Counter((rollout.broke["where"], rollout.broke["what"]) for rollout in broken if rollout.broke is not None)
    (where, what), count = kinds.most_common(1)[0]
    episodes = sum(rollout.segment == 0 for rollout in rollouts)
    often = "" if count == len(broken) else f", in {count} of them"
    return f"the environment broke in {len(broken)} of {episodes} rollouts{often} in {where}: {what}"
