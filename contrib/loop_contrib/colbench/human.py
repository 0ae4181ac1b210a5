"""The human whom the agent asks: a model that knows his code, or a deterministic one for generated tasks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from agent_environments.protocol import Message
from loop_contrib.chat_model import ChatEndpoint, ChatModel
from loop_contrib.colbench.task import ColBenchTask
from loop_plumbing.sanitize import printable

MAX_CHARACTERS = 400
MAX_ANSWERS = 2
DOES_NOT_KNOW = "I don't know."
NO_RESPONSE = "No response."


class Human:
    """The human of a conversation, who answers one question at a time."""

    async def open(self) -> None:
        """Prepare the human. Raises EnvironmentCrashed if the human cannot answer."""

    async def answer(self, task: ColBenchTask, dialogue: Sequence[Message]) -> str:
        """Return the human's answer to the agent's question, which is the last message of the dialogue.

        Raises:
            EnvironmentCrashed: the human can answer no question at all.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Release all resources. May be called twice."""


KEYWORDS: Mapping[str, frozenset[str]] = {
    "field": frozenset({"field", "fields", "key", "column", "attribute"}),
    "limit": frozenset({"limit", "threshold", "cutoff", "minimum", "large"}),
    "boundary": frozenset({"exactly", "equal", "inclusive", "boundary"}),
    "default": frozenset({"missing", "default", "absent", "lacks"}),
    "rounding": frozenset({"round", "rounded", "rounding", "decimals", "digits", "precision"}),
    "unit": frozenset({"unit", "units", "hours", "minutes", "seconds"}),
    "tie": frozenset({"tie", "ties", "tied", "draw"}),
}
"""Topic -> words of a question about it."""


class ScriptedHuman(Human):
    """Recognizes particulars by a question's words and tells at most two. Deterministic; knows generated tasks only."""

    async def answer(self, task: ColBenchTask, dialogue: Sequence[Message]) -> str:
        words = re.findall(r"[a-z]+", dialogue[-1].content.lower())
        answers = {particular.topic: particular.answer for particular in task.particulars}
        asked = dict.fromkeys(topic for word in words for topic in answers if word in KEYWORDS[topic])
        return " ".join(answers[topic] for topic in list(asked)[:MAX_ANSWERS]) or DOES_NOT_KNOW


class EndpointHuman(Human):
    """A model plays the human. It knows the code and must never show it. It answers in at most two sentences. If the
    model has no answer, the human says "No response."
    """

    def __init__(self, endpoint: ChatEndpoint) -> None:
        self._model = ChatModel("human", endpoint)

    async def open(self) -> None:
        await self._model.open()

    async def answer(self, task: ColBenchTask, dialogue: Sequence[Message]) -> str:
        reply = await self._model.ask(prompt(task, dialogue))
        if not reply:
            return NO_RESPONSE
        return DOES_NOT_KNOW if shows_code(reply, task.reference) else printable(reply)[:MAX_CHARACTERS]

    async def close(self) -> None:
        await self._model.close()


def prompt(task: ColBenchTask, dialogue: Sequence[Message]) -> str:
    """Return the prompt for the model that plays the human. The agent never sees this prompt."""
    transcript = "\n\n".join(
        f"{'Assistant' if message.role == 'assistant' else 'You'}: {message.content}" for message in dialogue
    )
    return printable(
        f"You play a person who wants help from a programming assistant. Your request was:\n{task.description}\n\n"
        "You have this function in mind. Only you know it. Never show any of its code, and do not write code:\n"
        f"{task.reference}\n\nThe conversation so far:\n{transcript}\n\n"
        "Answer the assistant's last message as that person would, in at most two sentences. Say only what the "
        f'function tells. Where it does not tell, say "{DOES_NOT_KNOW}"'
    )


def shows_code(answer: str, reference: str) -> bool:
    """Return whether an answer contains a code fence or a whole line of the reference, also with other spaces."""
    squeezed = "".join(answer.split())
    lines = ("".join(line.split()) for line in reference.splitlines())
    return "```" in answer or any(len(line) >= 10 and line in squeezed for line in lines)
