"""codex, as its npm package publishes it."""

from __future__ import annotations

import json

from agent_environments.harness.agents import Agent, Start
from agent_environments.program_protocol import Connection


def start(connection: Connection, prompt: str) -> Start:
    """Return how to start codex. Its config file names the policy's URL, since codex ignores ``OPENAI_BASE_URL``."""
    config = f"""\
model = "policy"
model_provider = "node"
[model_providers.node]
name = "node"
base_url = {json.dumps(connection.base_url)}
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
    options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return Start(["exec", *options, "--", prompt], files={".codex/config.toml": config})


AGENT = Agent(program="codex", install="npm install --global @openai/codex@0.169.0", least_context=10_000, start=start)
