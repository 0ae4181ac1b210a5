"""Claude Code, as its npm package publishes it."""

from __future__ import annotations

from agent_environments.harness.agents import Agent, Start
from agent_environments.program_protocol import Connection


def start(connection: Connection, prompt: str) -> Start:
    """Return how to start Claude Code. ``IS_SANDBOX`` lets root start it; the node sets its URL and its key."""
    names = ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_AUTOUPDATER", "IS_SANDBOX")
    return Start(
        ["-p", "--dangerously-skip-permissions", "--", prompt],
        {"ANTHROPIC_MODEL": "policy", **dict.fromkeys(names, "1")},
    )


AGENT = Agent(
    program="claude",
    install="npm install --global @anthropic-ai/claude-code@2.1.328",
    least_context=16_000,
    start=start,
)
