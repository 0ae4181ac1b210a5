"""Questions of the package ``reasoning-gym`` as an environment: a dataset by its name, one answer an episode."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agent_environments.description import Description
from agent_environments.protocol import Message, TokenSpans
from agent_environments.tools.tasks import TaskTable
from loop_contrib.worlds.pool import WORKERS_FOLDER, WorldKind, WorldPool
from loop_plumbing.sanitize import printable


class ReasoningGymPool(WorldPool):
    """Lends questions of a dataset, each answered in one turn.

    Args:
        token_spans: the policy's tokenizer.
        python: an interpreter that has the package.
        dataset: the dataset's name in the package.
        size, seed: the number of tasks, and the seed that draws them.
        options: the dataset's options, such as its difficulty.
        instructions: name of a system prompt of the package, or a text. If this prompt mentions <answer> tags, the
            answer is the text in these tags, else the whole turn.
        sandbox_minimum: lowest level (agent_environments/sandbox) to open with, since some datasets evaluate answers.
        held_out: number of tasks that form the split ``held_out`` instead of ``train``.
        others: as for any world.
    """

    kind = WorldKind("reasoning_gym", WORKERS_FOLDER / "reasoning_gym_world.py", cure="install reasoning-gym there")
    description = Description()

    def __init__(
        self,
        token_spans: TokenSpans,
        python: str,
        dataset: str,
        size: int = 1000,
        seed: int = 0,
        options: Mapping[str, Any] | None = None,
        instructions: str = "default",
        sandbox_minimum: str = "seccomp",
        held_out: int | None = None,
        **others: Any,
    ) -> None:
        super().__init__(token_spans, python, **others)
        self.dataset = f"reasoning_gym {dataset}"
        self._held_out = held_out
        settings = {"dataset": dataset, "size": size, "seed": seed, "options": dict(options or {})}
        settings |= {"instructions": instructions, "sandbox_minimum": sandbox_minimum}
        self.arguments = (json.dumps(settings),)

    def _learn(self, answer: dict[str, Any]) -> None:
        table = TaskTable({split: [{"id": task} for task in tasks] for split, tasks in answer["splits"].items()})
        if self._held_out is not None:
            table.hold_out(self._held_out)
        self._know({split: table.split(split) for split in table.splits})

    def opening(self, answer: dict[str, Any]) -> list[Message]:
        return [Message("system", answer["instructions"]), Message("user", printable(answer["observation"]))]

    def command(self, message: str) -> str:
        return message

    def message(self, command: str) -> str:
        return command
