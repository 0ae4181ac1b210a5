"""gemini-cli, as its npm package publishes it; it speaks Google's ``generateContent``."""

from __future__ import annotations

import json

from agent_environments.harness.agents import Agent, Start
from agent_environments.program_protocol import Connection


def start(connection: Connection, prompt: str) -> Start:
    """Return how to start gemini-cli. Its settings choose login by key; variables hold the key and the policy's URL."""
    settings = {"security": {"auth": {"selectedType": "gemini-api-key"}}}
    return Start(
        ["-m", "policy", "--approval-mode", "yolo", f"--prompt={prompt}"],
        {
            "GEMINI_API_KEY": connection.api_key,
            "GOOGLE_GEMINI_BASE_URL": connection.base_url.removesuffix("/v1"),
            "GEMINI_CLI_TRUST_WORKSPACE": "true",
        },
        {".gemini/settings.json": json.dumps(settings)},
    )


AGENT = Agent(
    program="gemini", install="npm install --global @google/gemini-cli@0.61.0", least_context=15_000, start=start
)
