"""Counts an agent's tool calls and their errors in the texts of its turns."""

from __future__ import annotations

from collections.abc import Sequence

from agent_environments.agent_turns import AgentTurn
from agent_environments.description import BehaviorFigure, Messages
from agent_environments.tool_calls import CALL_OPENS, BadCall, parse_tool_calls, render_tool_response
from agent_environments.tools.answer import FAILED, UNKNOWN_TOOL, WRONG_ARGUMENTS

_RESPONSE = render_tool_response("")[: -len("\n</tool_response>")]


def _share(name: str, title: str, per: str = "tool_calls") -> BehaviorFigure:
    return BehaviorFigure(name, title, name, per=per)


class ToolBehavior:
    """Count what the figures of tool calls are computed from."""

    name = "tool calls"
    figures = (
        BehaviorFigure("tool_calls", "tool calls per rollout", "tool_calls"),
        _share("tool_calls_bad", "share of tool calls that could not be read"),
        _share("tool_calls_unknown", "share of tool calls that named no tool"),
        _share("tool_calls_wrong_arguments", "share of tool calls with arguments that the tool does not take"),
        _share("tool_calls_failed", "share of tool calls whose tool failed or took too long"),
        _share(
            "turns_without_call", "share of turns without a tool call, an answer in text included", per="tool_turns"
        ),
    )

    def concerns(self, messages: Messages) -> bool:
        """Return whether the policy was offered tools in its system message."""
        return bool(messages) and messages[0]["role"] == "system" and CALL_OPENS in messages[0]["content"]

    def counts(self, turns: Sequence[AgentTurn]) -> dict[str, int]:
        """Return the counts of one episode."""
        calls = [parse_tool_calls(turn.text) for turn in turns]
        observations = [turn.observation for turn in turns if turn.observation is not None]

        def answered(head: str) -> int:
            return sum(observation.count(_RESPONSE + head) for observation in observations)

        return {
            "tool_turns": len(turns),
            "turns_without_call": sum(not made for made in calls),
            "tool_calls": sum(map(len, calls)),
            "tool_calls_bad": sum(isinstance(call, BadCall) for made in calls for call in made),
            "tool_calls_unknown": answered(UNKNOWN_TOOL),
            "tool_calls_wrong_arguments": answered(WRONG_ARGUMENTS),
            "tool_calls_failed": answered(FAILED),
        }

    def calls(self, turns: Sequence[AgentTurn]) -> list[str]:
        """Return the names of the tools that an agent called."""
        calls = [call for turn in turns for call in parse_tool_calls(turn.text)]
        return [call.name for call in calls if not isinstance(call, BadCall)]
