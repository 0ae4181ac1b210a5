"""Tools, reply and reward of a user's module as an environment."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from agent_environments.description import TOOLS_BEHAVIOR, Description
from agent_environments.observation import truncate
from agent_environments.program_config import inherited
from agent_environments.program_config import variables as environment_variables
from agent_environments.protocol import (
    Broke,
    EnvironmentCrashed,
    Grade,
    Member,
    Message,
    PoolStatus,
    StepResult,
    TokenSpans,
)
from agent_environments.tool_calls import parse_tool_calls, tools_section
from agent_environments.tools.answer import NO_CALL, CallAnswer, answer, joined_results
from agent_environments.tools.identity import digest, identity
from agent_environments.tools.instances import InstancePool, Lease
from agent_environments.tools.module import ToolModule, load_module
from agent_environments.tools.reward import JUDGE_PATIENCE_S, Reward, grade_of, together
from agent_environments.tools.right_answers import field_answers
from agent_environments.tools.tool import DEADLINE_S, CodeSession, packed
from loop_plumbing import running_time
from loop_plumbing.breakage import Raised, error_line, raised_as
from loop_plumbing.deadline import DeadlinePassed
from loop_plumbing.forked_process import ForkServer, ProcessEnded
from loop_plumbing.names import explain_type_error
from loop_plumbing.plug_ins import load_part
from loop_plumbing.sanitize import printable

logger = logging.getLogger(__name__)

_PROGRAM = """
import json, socket, sys
config = json.loads(sys.stdin.readline())
sys.path[:] = config["path"]
from agent_environments.tools.forked import serve
from loop_plumbing import running_time
serve(config, socket.socket(fileno=int(sys.argv[1])))
"""


class ToolEnvironment:
    """An episode: the agent calls tools, or writes text, until it has an answer.

    A turn's calls are made one by one, in order, and answered together. A terminal tool ends the episode. A turn
    without a call is answered by the module's reply, which may end the episode. If the module has no reply, such a turn
    ends the episode and its text is the answer; but if the module has a terminal tool, the turn is a mistake.
    """

    def __init__(
        self, module: ToolModule, lease: Lease, code: CodeSession | None, max_tokens: int, token_spans: TokenSpans
    ) -> None:
        self._module = module
        self._lease = lease
        self._code = code
        self._tools = {**module.tools, **{tool.name: tool for tool in (code.tools if code else ())}}
        if code is not None:
            self._tools = {name: tool.in_folder(code) for name, tool in self._tools.items()}
        self._cut: dict[str, Any] = {"max_tokens": max_tokens, "token_spans": token_spans}
        self._task_id = ""
        self._answer = ""
        self._trajectory: list[dict[str, str]] = []
        self._judge_until = 0.0
        self._ends_by_tool = any(tool.terminal for tool in module.tools.values())

    async def start(self, task_id: str) -> list[Message]:
        module = self._module
        self._task_id = task_id
        question = [str(module.tasks[task_id].get("question", ""))]
        if self._code is not None:
            self._code.give(module.tasks[task_id].get("files", {}))
        if module.instance_class is not None:
            question.append(await self._lease.reset(task_id))
        tools = tools_section([tool.schema for tool in module.tools.values()]) if module.tools else ""
        opening = [Message("system", _paragraphs([module.instructions, tools])), Message("user", _paragraphs(question))]
        messages = [message for message in opening if message.content or message.role == "user"]
        self._trajectory = [{"role": message.role, "content": message.content} for message in messages]
        return messages

    async def step(self, action: str) -> StepResult:
        self._note("assistant", action)
        calls = parse_tool_calls(action) if self._module.tools else []
        if not calls:
            return await self._reply(action)
        answers: list[CallAnswer] = []
        for call in calls:
            answers.append(await answer(call, self._tools, self._lease))
            last = answers[-1]
            self._answer = last.ended_with or ""
            if last.over or last.ended_with is not None:
                break
        observation = joined_results([item.text for item in answers], **self._cut)
        self._note("user", observation)
        return StepResult(
            observation,
            done=answers[-1].over or answers[-1].ended_with is not None,
            failed=any(item.failed for item in answers),
            tools=tuple(item.use for item in answers if item.use is not None),
        )

    async def right_turn(self, answer: str) -> str | None:
        """Return the next turn of the module's ``solve`` for this task, after an answer; None after the last.

        Raises:
            Raised, DeadlinePassed, ProcessEnded: ``solve`` raised, took too long, or ended its process.
        """
        process = await self._lease.process()
        turn: str | None = await process.ask("solve", DEADLINE_S, task_id=self._task_id, answer=answer)
        return turn

    async def _reply(self, text: str) -> StepResult:
        """Answer a turn that calls no tool."""
        if not self._ends_by_tool:
            self._answer = as_answer(text)
        reply = self._module.reply
        if reply is not None:
            process = await self._lease.process()
            with self._lease.at_work(f"reply {reply.name}"):
                reply_text = await process.ask("reply", DEADLINE_S, text=text)
        else:
            reply_text = NO_CALL if self._ends_by_tool else None
        if reply_text is None:
            return StepResult("", done=True)
        observation = truncate(printable(reply_text), **self._cut)
        self._note("user", observation)
        return StepResult(observation, done=False, empty_action=reply is None)

    def _note(self, role: str, content: str) -> None:
        self._trajectory.append({"role": role, "content": content})

    async def grade(self) -> Grade:
        """Return the grade of this episode; a reward for groups sees a group of this one episode."""
        grades, ungradable = await self._own_grades()
        if ungradable is not None:
            return ungradable
        if not self._module.grades_groups:
            return replace(together(grades), broke=_first_break(grades))
        from agent_environments.tools.group import group_grades  # most rewards see an episode alone

        process = await self._lease.process()
        [grade] = await group_grades(process, self._module.rewards, self._task_id, [self._group_input(grades)])
        return replace(grade, broke=_first_break(grades) or grade.broke)

    async def grade_member(self) -> Member:
        """Return the episode as a group's member: what rewards for groups need, and the grades of the other rewards."""
        grades, ungradable = await self._own_grades()
        if ungradable is not None:
            return Member(ungradable)
        return Member(Grade(0.0, False, broke=_first_break(grades)), self._group_input(grades))

    def _group_input(self, own: Sequence[tuple[Reward, Grade]]) -> dict[str, Any]:
        """Return the episode and the grades ``own`` as plain data for the rewards that see a group."""
        grades = {reward.name: asdict(grade) for reward, grade in own}
        return {"answer": self._answer, "trajectory": list(self._trajectory), "own": grades}

    async def _own_grades(self) -> tuple[list[tuple[Reward, Grade]], Grade | None]:
        """Return the grades by the rewards that see only this episode. If such a grade is ungradable and counts, or is
        read by a reward of the group, also return it as the episode's grade; else None."""
        read_by_group = any(each.takes_rewards for each in self._module.rewards)
        self._judge_until = running_time.now() + JUDGE_PATIENCE_S
        grades: list[tuple[Reward, Grade]] = []
        for reward in self._module.rewards:
            if reward.group:
                continue
            grade = await self._graded_by(reward)
            if grade.ungradable is not None and (read_by_group or reward.weight > 0.0):
                return grades, grade
            grades.append((reward, grade))
        return grades, None

    async def _graded_by(self, reward: Reward) -> Grade:
        lease = self._lease
        process = await lease.process()
        if lease.lost and reward.takes_instance:
            return Grade.of_ungradable("the instance is gone: a tool that was called ended its process")
        judge_s = max(0.0, self._judge_until - running_time.now()) if reward.takes_judge else 0.0
        episode = {"task_id": self._task_id, "answer": self._answer, "trajectory": self._trajectory, "judge_s": judge_s}
        if reward.takes_code_folder and self._code is not None:
            episode["code_folder"] = packed(await self._code.left_files())
        try:
            answered = await process.ask("grade", reward.deadline_s + judge_s, reward=reward.name, **episode)
            return grade_of(answered)
        except (Raised, DeadlinePassed, ProcessEnded, ValueError) as error:
            what = error_line(error)
            logger.error("reward %s gives no grade: %s", reward.name, what)
            return Grade.of_ungradable(what, Broke(f"reward {reward.name}", what))

    async def close(self) -> None:
        await self._lease.end()
        if self._code is not None:
            await self._code.close()


def _first_break(grades: Sequence[tuple[Reward, Grade]]) -> Broke | None:
    return next((grade.broke for _, grade in grades if grade.broke is not None), None)


def as_answer(text: str) -> str:
    """Return a turn's text as the answer: white space at both ends is removed, but not the first line's indentation,
    which the body of a function needs.
    """
    text = re.sub(r"\A(\s*\n)+", "", text).rstrip()
    return text if text.startswith(("  ", "\t")) else text.lstrip()


def _paragraphs(paragraphs: Sequence[str]) -> str:
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


class ToolPool:
    """Lends :class:`ToolEnvironment`.

    Args:
        module: the user's module: path of a Python file, or a dotted module path.
        tasks: a JSONL file, or one file per split, in place of the module's ``TASKS``.
        dataset: the name printed with every score; the module's own unless given.
        max_worlds: the largest number of episodes at a time. Each has its own process, and its own instance if stateful
            tools or the reply need one.
        instance_deadline_s: seconds for making, for resetting and for closing an instance.
        observation_max_tokens: a reply, or the results of a turn's calls together, are cut to this many tokens.
        mcp: MCP servers whose tools are also offered: name -> the other arguments of
            :class:`~loop_contrib.mcp_tools.mcp_server.McpServer`.
        judge: the model that rewards may ask, the arguments of :class:`~loop_contrib.chat_model.ChatEndpoint`.
        code: ``python`` or ``shell``, or the options of :class:`~loop_contrib.code_tool.python_tool.CodeLimits`; the
            agent may then run code in a box of its own.
        variables: environment variables for the module's functions, beside those that every program inherits. The
            functions see no other variables of the node, because those may hold keys.
        held_out: how many groups of the tasks without a split form the split ``held_out`` and leave ``train``.

    Raises:
        ValueError: something is wrong with the module or the tasks; the message is one line.
    """

    description = Description(behavior=(TOOLS_BEHAVIOR,))

    def __init__(
        self,
        token_spans: TokenSpans,
        module: str,
        tasks: object = None,
        dataset: str | None = None,
        max_worlds: int = 64,
        instance_deadline_s: float = 60.0,
        observation_max_tokens: int = 3000,
        mcp: Mapping[str, Mapping[str, Any]] | None = None,
        held_out: int | None = None,
        judge: Mapping[str, Any] | None = None,
        code: object = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        if max_worlds < 1 or observation_max_tokens < 1:
            raise ValueError("max_worlds and observation_max_tokens must be at least 1")
        self.module = load_module(module, tasks)
        self._source = Path(module).read_text(errors="replace") if module.endswith(".py") else ""
        self._variables = inherited() | environment_variables("variables", variables or {})
        asking = [reward.name for reward in self.module.rewards if reward.takes_judge]
        if judge is not None:
            self._variables |= load_part("judge").variables_of(judge)
        elif asking:
            raise ValueError(
                f"reward {asking[0]} asks a judge: say which in the environment's section (judge: {{url: ..., model: "
                "...}), or after the file as node.environment.judge.url=URL node.environment.judge.model=NAME"
            )
        self._code = None if code is None else load_part("code")(code)
        if self._code is not None:
            self._join_code(self._code)
        elif reading := self.module.reading_code_folder:
            raise ValueError(
                f"{reading[0]} reads code_folder: say `code: python` in the environment's section, or after the "
                "file as node.environment.code=python"
            )
        if held_out is not None:
            self.module.tasks.hold_out(held_out)
        self.dataset = dataset or self.module.name
        self._identity = identity(module, self.module.tasks.all())
        self._describe()
        config = {"module": module, "tasks": tasks, "deadline_s": instance_deadline_s, "mcp": bool(mcp)}
        config["judge"] = None if judge is None else dict(judge)
        # An episode has a folder of its own, from where other paths would lead elsewhere.
        config["path"] = [*map(os.path.abspath, sys.path)]
        command = (sys.executable, "-P", "-c", _PROGRAM)
        server = ForkServer("tool", command, config, EnvironmentCrashed, self._variables)
        self._instances = InstancePool(server, self.module, max_worlds, instance_deadline_s)
        self._cut = (observation_max_tokens, token_spans)
        self._servers = _mcp_servers(mcp) if mcp else []

    def _join_code(self, code: Any) -> None:
        """Offer the tools of the agent's code, and check the files that tasks give it."""
        self.module = self.module.with_tools(code.session().tools)
        for task in self.module.tasks.all():
            with raised_as(ValueError, f"task {task['id']}: "):
                code.check_files(task)

    async def open(self) -> None:
        if self._code is not None:
            await self._code.open()
        for server in self._servers:
            self.module = self.module.with_tools(await server.open())
        self._describe()
        if warning := self._hidden_variable(r"""(?<=["'])\w+(?=["'])""", self._source):
            logger.warning("%s: %s", self.module.name, warning)
        try:
            await self._instances.open()
        except EnvironmentCrashed as error:
            warning = self._hidden_variable(r"\w+", str(error))
            raise EnvironmentCrashed(f"{error}; {warning}") if warning else error from None

    def _describe(self) -> None:
        """Set the description: the groups of tasks, and the digests of code, tasks and tool schemas behind a score."""
        schemas = [tool.schema for tool in self.module.tools.values()]
        groups = self.module.tasks.groups
        self.description = replace(
            self.description,
            groups="groups of tasks" if groups else "tasks",
            task_groups=groups,
            identity={**self._identity, "tools": digest(schemas)},
        )

    def _hidden_variable(self, pattern: str, text: str) -> str | None:
        """Return a hint on the first word in a text that names a variable of the node that the module cannot see."""
        hidden = os.environ.keys() - self._variables.keys()
        name = next((word for word in re.findall(pattern, text) if word in hidden), None)
        cure = f"set node.environment.variables.{name}='${{oc.env:{name}}}'"
        return name and f"its functions do not see the node's variable {name}: {cure}"

    def splits(self) -> list[str]:
        return self.module.tasks.splits

    def tasks(self, split: str) -> list[str]:
        return self.module.tasks.split(split)

    def field_answers(self, task_id: str) -> list[tuple[str, str]]:
        """Return (field, turn) for each field of a task that may be its right answer; the turn gives this answer."""
        return field_answers(self.module.rewards, self.module.tools.values(), self.module.tasks[task_id])

    def check_tasks(self, task_ids: Sequence[str]) -> None:
        for task_id in task_ids:
            self.module.tasks[task_id]

    async def acquire(self, episode_id: str) -> ToolEnvironment:
        lease = await self._instances.acquire()
        return ToolEnvironment(self.module, lease, None if self._code is None else self._code.session(), *self._cut)

    def grades_groups(self, task_id: str) -> bool:
        """Return whether a reward of the module sees all episodes of a task at once."""
        return self.module.grades_groups

    async def grade_group(self, task_id: str, inputs: Sequence[Mapping[str, Any]]) -> list[Grade]:
        """Return the grades of a task's episodes, computed in a process in which none of the episodes ran."""
        from agent_environments.tools.group import group_grades  # most rewards see an episode alone

        lease = await self._instances.acquire()
        try:
            return await group_grades(await lease.process(), self.module.rewards, task_id, inputs)
        finally:
            await lease.end()

    def status(self) -> PoolStatus:
        return self._instances.status()

    async def close(self) -> None:
        others = [*self._servers, *([] if self._code is None else [self._code])]
        await asyncio.gather(self._instances.close(), *(server.close() for server in others))


def _mcp_servers(sections: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    server = load_part("mcp")
    made = []
    if not isinstance(sections, Mapping):
        raise ValueError(f"mcp must be a mapping, such as {{files: {{command: [...]}}}}, not {sections!r}")
    for name, section in sections.items():
        if not isinstance(section, Mapping):
            raise ValueError(f"mcp.{name} must be a mapping, such as {{command: [...]}}, not {section!r}")
        try:
            made.append(server(name, **section))
        except TypeError as error:
            raise ValueError(f"mcp.{name} {explain_type_error(error, server, 'name', section)}") from error
    return made
