"""The default agent of openhands-sdk, a library: a program of ours plays it under an interpreter that has it."""

from __future__ import annotations

from pathlib import Path

from agent_environments.harness.agents import Agent, Start
from agent_environments.program_protocol import Connection

PROGRAM = Path(__file__).with_name("workers") / "openhands_agent.py"
ENVIRONMENT = ".venv-openhands"


def start(connection: Connection, prompt: str) -> Start:
    """Return how to start the program. It reads the environment variables that the node sets."""
    return Start([str(PROGRAM), prompt], {"OPENHANDS_SUPPRESS_BANNER": "1"})


AGENT = Agent(
    program=f"{ENVIRONMENT}/bin/python",
    install=f"uv venv --python 3.12 {ENVIRONMENT} && uv pip install --python {ENVIRONMENT} "
    "openhands-sdk==1.58.0 openhands-tools==1.58.0",
    least_context=11_000,
    start=start,
)
