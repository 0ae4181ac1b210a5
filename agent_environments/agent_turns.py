"""The turns of the agent in the texts of a rollout.

Not every assistant message is a turn of the agent: a prompt may hold a worked example, a harness may write in the
agent's name, and where an episode has several sequences, a turn that they share belongs to the first of them only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent_environments.extraction import code_blocks
from agent_environments.observation import FAILURE_HEAD


@dataclass(frozen=True)
class AgentTurn:
    """Hold the agent's text in one turn and the environment's answer; None if the environment gave no answer."""

    text: str
    observation: str | None

    @property
    def blocks(self) -> list[str]:
        """Return the contents of the python blocks in the agent's text, in order."""
        return code_blocks(self.text)

    @property
    def failed(self) -> bool:
        """Return whether the environment answered with an execution error."""
        return self.observation is not None and self.observation.startswith(FAILURE_HEAD)


def agent_turns(messages: Sequence[Mapping[str, str]], places: Sequence[int]) -> list[AgentTurn]:
    """Return the agent's turns with their observations.

    Args:
        messages: the whole conversation, opening messages included, as {"role", "content"}.
        places: for each turn, the index in ``messages`` of its assistant message.

    Raises:
        ValueError: a place holds no assistant message.
    """
    turns = []
    for place in places:
        if not (0 <= place < len(messages) and messages[place]["role"] == "assistant"):
            raise ValueError(f"message {place} is not an assistant message")
        answer = messages[place + 1] if place + 1 < len(messages) else None
        observation = answer["content"] if answer is not None and answer["role"] == "user" else None
        turns.append(AgentTurn(messages[place]["content"], observation))
    return turns
