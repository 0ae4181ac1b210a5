"""The multi-turn tasks of BFCL v4 (``bfcl-eval``), as far as they differ from other worlds of tools.

A task has the functions of its own services, and a turn without a call is an answer to the user, who may ask for more.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from agent_environments.description import TOOLS_BEHAVIOR, Description
from agent_environments.protocol import Message
from agent_environments.tool_calls import tools_section
from loop_contrib.worlds.pool import WORKERS_FOLDER, WorldKind, WorldPool
from loop_contrib.worlds.tool_world import ToolWorldPool
from loop_plumbing.sanitize import printable

ANSWER = "Done."
"""The text of the expert's turns without a call."""


class BfclPool(ToolWorldPool):
    """Lends requests of a user (``bfcl-eval``). A request takes several calls to some of eight stateful services."""

    kind = WorldKind(
        "bfcl",
        WORKERS_FOLDER / "bfcl_world.py",
        cure="install bfcl-eval without what it depends on (--no-deps), and mpmath there",
    )
    description = Description(groups="scenarios", behavior=(TOOLS_BEHAVIOR,))

    def _learn(self, answer: dict[str, Any]) -> None:
        super()._learn(answer)
        scenarios = {task: task.rpartition("_")[2] for tasks in answer["splits"].values() for task in tasks}
        self.description = replace(self.description, task_groups=scenarios)

    def opening(self, answer: dict[str, Any]) -> list[Message]:
        system = Message("system", f"{answer['instructions']}\n\n{tools_section(answer['tools'])}")
        return [system, Message("user", printable(answer["observation"]))]

    def command(self, message: str) -> str:
        return super().command(message) or json.dumps([])

    def message(self, command: str) -> str:
        return super().message(command) or ANSWER

    def observation_text(self, observation: str) -> str:
        results = json.loads(observation)
        if isinstance(results, str):
            return WorldPool.observation_text(self, results)
        return super().observation_text(observation)
