"""Supervised data for the warm start: scripts that are played in the real environment, as conversations.

Each turn goes through the environment's pool, so every observation, error messages included, is the environment's own
answer. The turns come from a :class:`~loop_recipes.warm_start.demonstrator.Demonstrator`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agent_environments.protocol import EnvironmentPool, Message
from loop_formats.ids import rollout_id
from loop_formats.run_files import write_whole
from loop_recipes.bar import Bar
from model_families.chat.format import ChatFormat


@dataclass(frozen=True)
class Demonstration:
    """A played script: the opening messages, then (action, observation) steps; the last observation is unused.

    ``flaw`` is the deliberate flaw in the script, None for a correct script.
    """

    task_id: str
    flaw: str | None
    reward: float
    success: bool
    opening: tuple[Message, ...]
    steps: tuple[tuple[str, str], ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> Demonstration:
        data = json.loads(line)
        opening = tuple(Message(**message) for message in data.pop("opening"))
        return cls(opening=opening, steps=tuple((action, answer) for action, answer in data.pop("steps")), **data)

    def rewritten(self, changed: Callable[[str], str]) -> Demonstration:
        """Return the same conversation with ``changed`` applied to every message."""
        return replace(
            self,
            opening=tuple(Message(message.role, changed(message.content)) for message in self.opening),
            steps=tuple((changed(action), changed(observation)) for action, observation in self.steps),
        )


@dataclass(frozen=True)
class Script:
    """The turns of one episode, decided before it begins.

    ``turns`` are taken in order; ``message(task, observation, turn)`` gives the agent's message for a turn, where
    ``task`` is the message that opened the episode and ``observation`` the last one (in the first turn: ``task``). By
    default the turn itself is the message.
    """

    task_id: str
    flaw: str | None
    turns: tuple[Any, ...]
    message: Callable[[str, str, Any], str] = lambda task, observation, turn: str(turn)


async def play(pool: EnvironmentPool, script: Script, episode_id: str) -> Demonstration:
    """Play one script in an open pool."""
    environment = await pool.acquire(episode_id)
    try:
        opening = await environment.start(script.task_id)
        task = observation = opening[-1].content
        steps = []
        for turn in script.turns:
            action = script.message(task, observation, turn)
            result = await environment.step(action)
            observation = result.observation
            steps.append((action, observation))
            if result.done:
                break
        grade = await environment.grade()
    finally:
        await environment.close()
    return Demonstration(script.task_id, script.flaw, grade.reward, grade.success, tuple(opening), tuple(steps))


async def collect(pool: EnvironmentPool, scripts: Sequence[Script], at_once: int) -> list[Demonstration]:
    """Play all scripts, ``at_once`` at a time, in a pool that is opened and closed here."""
    episodes_at_once = asyncio.Semaphore(at_once)
    await pool.open()
    try:
        with Bar(total=len(scripts), doing="demonstrations") as bar:

            async def in_place(index: int, script: Script) -> Demonstration:
                async with episodes_at_once:
                    demonstration = await play(pool, script, rollout_id("demonstration", script.task_id, index, 0))
                bar.update()
                return demonstration

            return list(await asyncio.gather(*(in_place(index, script) for index, script in enumerate(scripts))))
    finally:
        await pool.close()


def save(demonstrations: Iterable[Demonstration], path: Path) -> None:
    """Write one JSON object per line; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(f"{demonstration.to_json()}\n" for demonstration in demonstrations))


def load(path: Path) -> list[Demonstration]:
    return [Demonstration.from_json(line) for line in path.read_text().splitlines()]


@dataclass(frozen=True)
class Example:
    """A conversation as it would be served. ``token_ids`` [s] int64; ``mask`` [s] is true where the agent speaks."""

    token_ids: Tensor
    mask: Tensor


def render(demonstration: Demonstration, tokens: ChatFormat) -> Example:
    """Encode with the rollout node's chat format; the mask covers each action and its ``<|im_end|>``."""
    token_ids, spans = tokens.scripted(demonstration.opening, demonstration.steps)
    mask = [False] * len(token_ids)
    for start, end in spans:
        mask[start:end] = [True] * (end - start)
    return Example(torch.tensor(token_ids), torch.tensor(mask))
