"""mini-swe-agent, as its Python package publishes it."""

from __future__ import annotations

from agent_environments.harness.agents import Agent, Start
from agent_environments.program_protocol import Connection


def start(connection: Connection, prompt: str) -> Start:
    """Return how to start mini-swe-agent so that it asks the user nothing. A model without a known price is allowed."""
    return Start(
        ["-y", "--exit-immediately", "-m", "openai/policy", f"--task={prompt}"],
        {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"},
    )


AGENT = Agent(program="mini", install="uv tool install mini-swe-agent==2.4.6", least_context=3_000, start=start)
