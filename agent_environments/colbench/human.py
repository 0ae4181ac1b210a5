"""The human whom the agent asks: a model told the code he has in mind, or a deterministic one for generated tasks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp

from agent_environments.chat_client import ChatClient, NoCompletion, url_problem
from agent_environments.colbench.tasks import ColBenchTask
from agent_environments.observation import printable
from agent_environments.protocol import EnvironmentCrashed, Message
from agent_environments.secret import read_secret

MAX_CHARACTERS = 400
MAX_ANSWERS = 2
DOES_NOT_KNOW = "I don't know."
NO_RESPONSE = "No response."
TRIES = 5
"""For one answer, from an endpoint that is busy or away."""


class Human(Protocol):
    """Answers one question at a time."""

    async def open(self) -> None:
        """Make ready; raises EnvironmentCrashed if he cannot answer."""
        ...

    async def answer(self, task: ColBenchTask, dialogue: Sequence[Message]) -> str:
        """Return his answer to the last message of the dialogue, the agent's question.

        Raises:
            EnvironmentCrashed: he cannot answer, whatever is asked.
        """
        ...

    async def close(self) -> None:
        """Release all. May be called twice."""
        ...


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


class ScriptedHuman:
    """Says what a question's words ask for, of at most two particulars; deterministic, and for generated tasks only."""

    async def open(self) -> None:
        """Nothing to make ready."""

    async def answer(self, task: ColBenchTask, dialogue: Sequence[Message]) -> str:
        words = re.findall(r"[a-z]+", dialogue[-1].content.lower())
        answers = {particular.topic: particular.answer for particular in task.particulars}
        asked = dict.fromkeys(topic for word in words for topic in answers if word in KEYWORDS[topic])
        return " ".join(answers[topic] for topic in list(asked)[:MAX_ANSWERS]) or DOES_NOT_KNOW

    async def close(self) -> None:
        """Nothing to release."""


@dataclass(frozen=True)
class HumanEndpoint:
    """A chat endpoint that plays the human: ``POST <url>/chat/completions``."""

    url: str
    """Without ``/chat/completions``."""
    model: str
    """The name of the model there."""
    api_key_env: str | None = "OPENAI_API_KEY"
    """The environment variable that holds the key; null sends none."""
    timeout_s: float = 120.0
    """Seconds until one answer must be there."""
    request: Mapping[str, Any] = field(default_factory=dict)
    """Merged into the body of every request."""

    def __post_init__(self) -> None:
        if (problem := url_problem(self.url)) is not None:
            raise ValueError(f"human: url {problem}")
        if self.api_key_env is not None and not read_secret(self.api_key_env):
            raise ValueError(f"human: set the environment variable {self.api_key_env}, or api_key_env to null")


class EndpointHuman:
    """A model that is told the code and never to show it; temperature 0, two sentences.

    A question that the endpoint refuses, or breaks over, is answered by "No response.": a request that does not depend
    on the agent then shows whether the endpoint is there at all.
    """

    def __init__(self, endpoint: HumanEndpoint) -> None:
        self._endpoint = endpoint
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        key = read_secret(self._endpoint.api_key_env) if self._endpoint.api_key_env is not None else ""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = aiohttp.ClientTimeout(total=self._endpoint.timeout_s)
        self._session = aiohttp.ClientSession(headers=headers, timeout=timeout)
        try:
            await self._say_hello()
        except EnvironmentCrashed:
            await self.close()
            raise

    async def answer(self, task: ColBenchTask, dialogue: Sequence[Message]) -> str:
        try:
            said = await self._ask(prompt(task, dialogue))
        except NoCompletion:
            said = ""
        if not said:
            await self._say_hello()
            return NO_RESPONSE
        return DOES_NOT_KNOW if shows_code(said, task.reference) else printable(said)[:MAX_CHARACTERS]

    async def _say_hello(self) -> None:
        """Raises EnvironmentCrashed if the endpoint does not answer a plain greeting either."""
        try:
            said = await self._ask("Say hello.")
        except NoCompletion as error:
            raise EnvironmentCrashed(f"the human does not answer: {error}") from error
        if not said:
            raise EnvironmentCrashed(f"the human at {self._endpoint.url} does not answer: he says nothing")

    async def _ask(self, text: str) -> str:
        """Return his answer; raises NoCompletion."""
        if self._session is None:
            raise EnvironmentCrashed("the human is not there: the pool is not open")
        client = ChatClient(self._session, self._endpoint.url)
        body = {"model": self._endpoint.model, "temperature": 0, "messages": [{"role": "user", "content": text}]}
        return (await client.complete({**body, **self._endpoint.request}, TRIES)).text.strip()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def prompt(task: ColBenchTask, dialogue: Sequence[Message]) -> str:
    """Return the prompt of the model that plays the human; the agent sees nothing of it."""
    said = "\n\n".join(
        f"{'Assistant' if message.role == 'assistant' else 'You'}: {message.content}" for message in dialogue
    )
    return printable(
        f"You play a person who wants help from a programming assistant. Your request was:\n{task.description}\n\n"
        "You have this function in mind. Only you know it. Never show any of its code, and do not write code:\n"
        f"{task.reference}\n\nThe conversation so far:\n{said}\n\n"
        "Answer the assistant's last message as that person would, in at most two sentences. Say only what the "
        f'function tells. Where it does not tell, say "{DOES_NOT_KNOW}"'
    )


def shows_code(said: str, reference: str) -> bool:
    """Whether an answer holds a fence or a whole line of the reference, be it spaced in another way."""
    squeezed = "".join(said.split())
    lines = ("".join(line.split()) for line in reference.splitlines())
    return "```" in said or any(len(line) >= 10 and line in squeezed for line in lines)
