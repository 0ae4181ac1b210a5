"""Plays the default agent of openhands-sdk in the working folder: ``openhands_agent.py PROMPT``."""

from __future__ import annotations

import os
import sys

from openhands.sdk import LLM, Conversation
from openhands.tools.preset.default import get_default_agent
from pydantic import SecretStr


def play(prompt: str) -> None:
    """Play one episode. If it fails, this program ends with a status other than 0."""
    llm = LLM(
        model="openai/policy",
        base_url=os.environ["OPENAI_BASE_URL"],
        api_key=SecretStr(os.environ["OPENAI_API_KEY"]),
        usage_id="agent",
    )
    agent = get_default_agent(llm=llm, cli_mode=True)
    conversation = Conversation(agent=agent, workspace=os.getcwd())
    conversation.send_message(prompt)
    conversation.run()


if __name__ == "__main__":
    play(sys.argv[1])
