"""The fork server of a user's module, which imports it once; and the calls that the process of an episode answers."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import os
import socket
from collections.abc import Generator, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from agent_environments.plain_values import plain_grade
from agent_environments.protocol import EnvironmentCrashed, Grade
from agent_environments.tools.function_tool import FunctionTool
from agent_environments.tools.identity import tasks_digest
from agent_environments.tools.module import ToolModule, load_module
from agent_environments.tools.reward import NoGrade, Reward
from agent_environments.tools.right_answers import turns_of, written
from agent_environments.tools.tool import (
    DEADLINE_S,
    ToolError,
    WrongArguments,
    as_text,
    is_path_within,
    packed,
    unpacked,
)
from loop_plumbing import deadline, fork_server
from loop_plumbing.plug_ins import load_part


class ToolCalls:
    """Answer the calls to a tool process.

    Args:
        deadline_s: seconds for making, for resetting and for closing an instance.
        judge: the model that rewards may ask.
        instance: an instance that was made before the fork.
    """

    def __init__(self, module: ToolModule, deadline_s: float, judge: Any = None, instance: Any = None) -> None:
        self._module = module
        self._deadline_s = deadline_s
        self._judge = judge
        self._instance = instance
        self._imported_in = os.getcwd()
        self._solving: Generator[Any, Any, Any] | None = None

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to one request, whose ``op`` is the name of one of the methods below."""
        arguments = {name: value for name, value in request.items() if name != "op"}
        try:
            return {"result": getattr(self, request["op"])(**arguments)}
        except WrongArguments as error:
            return {"wrong": str(error)}
        except (ToolError, deadline.Raised, ValueError) as error:
            return {"raised": f"{error}{self._cure(error)}", "place": getattr(error, "place", "")}
        except deadline.DeadlinePassed as error:
            return {"late": str(error)}
        except EnvironmentCrashed as error:
            return {"crashed": str(error)}

    def _cure(self, error: Exception) -> str:
        """Return a hint if a missing file's relative path exists in the folder where the module was imported."""
        missing = error.__cause__
        if not isinstance(missing, FileNotFoundError) or not isinstance(missing.filename, str):
            return ""
        if os.path.isabs(missing.filename) or not os.path.exists(os.path.join(self._imported_in, missing.filename)):
            return ""
        return " (an episode has a folder of its own: begin the path with Path(__file__).parent)"

    def digests(self) -> dict[str, str]:
        """Return a mapping of task ids to digests."""
        return digests(self._module)

    def make(self) -> None:
        """Make an instance of the module's class."""
        assert self._module.instance_class is not None, "the node asks for one where there is a class"
        self._instance = deadline.call(self._module.instance_class, {}, self._deadline_s)

    def reset(self, task_id: str) -> str:
        """Put the instance into the task's first state; return the text that it shows, "" for nothing."""
        # A copy of its own: its changes must not reach the reward, or another episode.
        task = copy.deepcopy(self._module.tasks[task_id])
        reset = functools.partial(self._instance.reset, task)  # whatever it calls its parameter
        result = deadline.call(reset, {}, self._deadline_s)
        return "" if result is None else as_text(result)

    def call(
        self, tool: str, arguments: dict[str, Any], code_folder: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Call a tool; return its result as text, cut to what the agent reads, and the files of the agent's code that
        the tool changed."""
        function = self._module.tools[tool]
        assert isinstance(function, FunctionTool), "the node asks others itself"
        before = unpacked(code_folder or {})
        after = dict(before)
        text = function.run(arguments, self._instance, after)
        changed = {name: after.get(name) for name in {**before, **after} if before.get(name) != after.get(name)}
        for name, content in changed.items():
            if not isinstance(content, bytes | None) or not is_path_within(name):
                raise ToolError(f"code_folder[{name!r}] must be bytes, by a path within the folder")
        text = text if function.terminal else text[: function.max_characters + 1]
        return {"text": text, "changed": packed(changed)}

    def check(self, schema: dict[str, Any], arguments: dict[str, Any], within_s: float) -> None:
        """Check the arguments for a tool of an MCP server; the node itself calls the tool."""
        values = {"schema": schema, "arguments": arguments}
        deadline.call(_check_by_schema, values, within_s, through=(WrongArguments,))

    def reply(self, text: str) -> str | None:
        """Answer the text of a turn; None ends the episode."""
        assert self._module.reply is not None, "the node asks for one that is there"
        return self._module.reply.run(text, self._instance)

    def solve(self, task_id: str, answer: str) -> str | None:
        """Return the next turn of the module's own solution, after an answer; None after the last."""
        assert self._module.solve is not None, "the caller has checked that the module has one"
        observation: str | None = answer
        if self._solving is None:
            task = copy.deepcopy(self._module.tasks[task_id])
            self._solving = turns_of(deadline.call(functools.partial(self._module.solve, task), {}, DEADLINE_S))
            observation = None  # a generator that has not begun takes no answer
        turn: str | None = deadline.call(self._next_turn, {"answer": observation}, DEADLINE_S, through=(ValueError,))
        return turn

    def _next_turn(self, answer: str | None) -> str | None:
        try:
            return written(self._solving.send(answer)) if self._solving is not None else None
        except StopIteration:
            return None

    def grade(
        self,
        reward: str,
        task_id: str,
        answer: str,
        trajectory: list[dict[str, str]],
        judge_s: float,
        code_folder: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Return the fields of the grade that the named reward gives an episode.

        Args:
            judge_s: seconds that a judge has to answer.
            code_folder: the files that the agent's code left, name -> base64.
        """
        episode: dict[str, Any] = {"answer": answer, "trajectory": trajectory}
        episode["code_folder"] = unpacked(code_folder or {})
        episode |= {"instance": self._instance, "judge": self._judge}
        with self._judging(judge_s):
            grade = self._reward(reward).grade(self._task(task_id), **episode)
        return _fields(grade, self._reward(reward))

    def grade_group(
        self, reward: str, task_id: str, members: list[dict[str, Any]], judge_s: float
    ) -> list[dict[str, Any]]:
        """Return the fields of the grades that the named reward gives the members of a group, in their order.

        Args:
            members: ``answer``, ``trajectory`` and ``rewards`` of each episode.
            judge_s: seconds that a judge has to answer.
        """
        episodes = {
            "answers": [member["answer"] for member in members],
            "trajectories": [member["trajectory"] for member in members],
            "rewards": [member["rewards"] for member in members],
            "judge": self._judge,
        }
        with self._judging(judge_s):
            grades = self._reward(reward).grade_group(self._task(task_id), **episodes)
        return [_fields(grade, self._reward(reward)) for grade in grades]

    def _task(self, task_id: str) -> dict[str, Any]:
        """Return a copy of the task, so that a reward that changes the task affects no other reward."""
        return copy.deepcopy(dict(self._module.tasks[task_id]))

    def _reward(self, name: str) -> Reward:
        (match,) = (each for each in self._module.rewards if each.name == name)
        return match

    @contextlib.contextmanager
    def _judging(self, seconds: float) -> Iterator[None]:
        """Let a reward ask the judge within the block; at the end, raise the judge's failures."""
        if self._judge is not None:
            self._judge.answer_within(seconds)
        try:
            yield
        finally:
            if self._judge is not None:
                self._judge.check()

    def close(self) -> None:
        """Close the instance."""
        deadline.call(self._instance.close, {}, self._deadline_s)


def _fields(grade: Grade, given_by: Reward) -> dict[str, Any]:
    """Return a grade's fields as JSON can hold them; other values are refused, as for every environment."""
    try:
        return asdict(plain_grade(grade))
    except ValueError as error:
        raise NoGrade(f"reward {given_by.name} returned an invalid grade: {error}", given_by.place) from error


def _check_by_schema(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Raise WrongArguments if a schema does not allow the arguments.

    Matching a pattern of the schema may take for ever and blocks this process.
    """
    import jsonschema  # which most modules do without

    for error in jsonschema.validators.validator_for(schema)(schema).iter_errors(arguments):
        raise WrongArguments(f"{'.'.join(map(str, error.absolute_path)) or 'arguments'}: {error.message}")


def digests(module: ToolModule) -> dict[str, str]:
    """Return a mapping of task ids to digests of the tasks."""
    return {str(task["id"]): tasks_digest([task]) for task in module.tasks.all()}


def _is_async(decorated: object) -> bool:
    return inspect.iscoroutinefunction(getattr(decorated, "function", decorated))


def serve(config: Mapping[str, Any], control: socket.socket) -> None:
    """Import the module that ``config`` names, and fork until the owner hangs up."""

    def prepare() -> fork_server.Prepared:
        module = load_module(config["module"], config["tasks"], alone=True)
        judge = None
        if config["judge"] is not None:
            # And its HTTP client: other modules need none.
            judge = load_part("judge")(config["judge"])  # connects at its first text, in the process that asks
        if config["mcp"]:
            importlib.import_module("jsonschema")  # once, and not in each process
        if any(map(_is_async, (*module.tools.values(), *module.rewards, module.reply, module.solve))):
            importlib.import_module("asyncio")
        deadline.install()
        kind = module.instance_class
        forkable = getattr(kind, "forkable", False)
        instance = deadline.call(kind, {}, config["deadline_s"]) if kind is not None and forkable else None
        calls = ToolCalls(module, config["deadline_s"], judge, instance)
        ready = {
            "tasks": tasks_digest(module.tasks.all()),
            "makes": kind is not None and instance is None,
            "closes": hasattr(kind, "close"),
        }
        return fork_server.Prepared(fork_server.answers(lambda: calls.answer), ready)

    fork_server.serve(control, prepare)
