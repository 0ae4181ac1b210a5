"""Counts what an agent does with its tools, in the texts of its turns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from agent_environments.agent_turns import AgentTurn
from agent_environments.tool_calls import CALL_OPENS, BadCall, parse_tool_calls, render_tool_response
from agent_environments.tools.answer import FAILED, UNKNOWN_TOOL, WRONG_ARGUMENTS

TOOL_FIGURES: dict[str, str] = {
    "tool_calls": "tool calls per rollout",
    "tool_calls_bad": "share of tool calls that could not be read",
    "tool_calls_unknown": "share of tool calls that named no tool",
    "tool_calls_wrong_arguments": "share of tool calls with arguments that the tool does not take",
    "tool_calls_failed": "share of tool calls whose tool failed or took too long",
    "turns_without_call": "share of agent turns without a tool call, an answer in text included",
}
"""Name -> meaning, of what :func:`tool_metrics` gives."""
_RESPONSE = render_tool_response("")[: -len("\n</tool_response>")]


@dataclass(frozen=True)
class ToolBehavior:
    """Counts of one rollout."""

    turns: int
    turns_without_call: int
    calls: int
    bad: int
    unknown: int
    wrong_arguments: int
    failed: int


def has_tools(messages: Sequence[Mapping[str, str]]) -> bool:
    """Whether the policy was offered tools in its system message."""
    return bool(messages) and messages[0]["role"] == "system" and CALL_OPENS in messages[0]["content"]


def tool_behavior(turns: Sequence[AgentTurn]) -> ToolBehavior:
    """Count one episode."""
    calls = [parse_tool_calls(turn.text) for turn in turns]
    observations = [turn.observation for turn in turns if turn.observation is not None]

    def answered(head: str) -> int:
        return sum(observation.count(_RESPONSE + head) for observation in observations)

    return ToolBehavior(
        turns=len(turns),
        turns_without_call=sum(not made for made in calls),
        calls=sum(map(len, calls)),
        bad=sum(isinstance(call, BadCall) for made in calls for call in made),
        unknown=answered(UNKNOWN_TOOL),
        wrong_arguments=answered(WRONG_ARGUMENTS),
        failed=answered(FAILED),
    )


def tool_metrics(episodes: Iterable[Sequence[AgentTurn]]) -> dict[str, float]:
    """The figures of :data:`TOOL_FIGURES` over the turns of episodes that had tools; {} if there are none.

    A share is left out where there is nothing that it could be a share of.
    """
    counts = [tool_behavior(turns) for turns in episodes]
    if not counts:
        return {}

    def total(name: str) -> int:
        return sum(getattr(count, name) for count in counts)

    shares = {
        "tool_calls_bad": ("bad", "calls"),
        "tool_calls_unknown": ("unknown", "calls"),
        "tool_calls_wrong_arguments": ("wrong_arguments", "calls"),
        "tool_calls_failed": ("failed", "calls"),
        "turns_without_call": ("turns_without_call", "turns"),
    }
    found = {name: total(part) / total(whole) for name, (part, whole) in shares.items() if total(whole)}
    return {"tool_calls": total("calls") / len(counts), **found}
