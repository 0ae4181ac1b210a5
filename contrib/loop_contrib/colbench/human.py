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
    """Answers one question at a time."""

    async def open(self) -> None:
        """Make ready; raises EnvironmentCrashed if he cannot answer."""

    async def answer(self, task: ColBenchTask, dialogue: Sequence[Message]) -> str:
        """Return his answer to the last message of the dialogue, the agent's question.

        Raises:
            EnvironmentCrashed: he cannot answer, whatever is asked.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Release all. May be called twice."""


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
    """Says what a question's words ask for, of at most two particulars; deterministic, and for generated tasks only."""

    async def answer(self, task: ColBenchTask, dialogue: Sequence[Message]) -> str:
        words = re.findall(r"[a-z]+", dialogue[-1].content.lower())
        answers = {particular.topic: particular.answer for particular in task.particulars}
        asked = dict.fromkeys(topic for word in words for topic in answers if word in KEYWORDS[topic])
        return " ".join(answers[topic] for topic in list(asked)[:MAX_ANSWERS]) or DOES_NOT_KNOW


class EndpointHuman(Human):
    """A model that knows the code and must never show it. It answers in at most two sentences, or with "No response."
    where it has no answer.
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
    """Return the prompt of the model that plays the human; the agent sees nothing of it."""
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
    """Return whether an answer holds a fence or a whole line of the reference, be it spaced in another way."""
    squeezed = "".join(answer.split())
    lines = ("".join(line.split()) for line in reference.splitlines())
    return "```" in answer or any(len(line) >= 10 and line in squeezed for line in lines)
