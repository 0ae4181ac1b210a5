"""Harbor's tasks behind the environment protocol: a shell in a container, and a grade in another one.

The tests of a task never run where its agent was. Its container is stopped from outside, the task's artifacts are taken
out of it, and a fresh container of the same image gets these and the tests. So a process, a program or a file that the
agent leaves elsewhere changes no grade. If a container has ended during the agent's turn, the grade is 0, because the
agent can end it. If a container is gone, which no agent can cause, the attempt is repeated.

Tests that must look at the agent's own system run there if the config says ``grade: shared``. Its agent can then forge
the reward, so the name of the dataset says it beside every score, and nothing can be trained on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import shutil
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Literal

from agent_environments.description import TOOLS_BEHAVIOR, Description
from agent_environments.program_config import variables as environment_variables
from agent_environments.protocol import (
    EnvironmentCrashed,
    Grade,
    Message,
    PoolStatus,
    StepResult,
    TokenSpans,
    ToolUse,
    UnknownTask,
)
from agent_environments.shared_grade import SHARED_GRADE, refuse_shared_grade
from agent_environments.slots import Slots
from agent_environments.tool_calls import BadCall, ToolCall, parse_tool_calls, render_tool_call, tools_section
from agent_environments.tools.answer import FAILED, WRONG_ARGUMENTS, joined_results, mistake_of
from agent_environments.tools.identity import digest
from agent_environments.tools.tasks import TaskTable
from loop_contrib.harbor.containers import Containers, Shell, TooLong, Unusable
from loop_contrib.harbor.inside import MOUNTED_FOLDER, make_entrance
from loop_contrib.harbor.tasks import HarborTask, read_folder
from loop_plumbing.sanitize import printable

INSTRUCTIONS = (
    "You work in a Linux container by its shell. When the task is done, write a message without a call: it ends the "
    "episode, and what you have left in {workdir} is tested."
)
SHELL = "shell"
_VERDICT_BYTES = 64 << 20
_PREPARE = (
    'rm -rf -- "$@"; mkdir -p /tests /logs/verifier /logs/agent /logs/artifacts; chmod "$0" /tests /logs/verifier'
)
_TEST = 'mkdir -p "$0"; cd "$0"; chmod +x /tests/test.sh; /tests/test.sh >/logs/verifier/test-stdout.txt 2>&1'


def schema(deadline_s: float) -> dict[str, object]:
    """Return the schema of the tool that the policy gets."""
    about = (
        "Run commands of bash, and read what they print, and an exit status that is not 0. Folder and variables stay "
        f"from one call to the next. A call may take {deadline_s:g} s; then all that runs is ended, and files stay."
    )
    command = {"type": "string", "description": "Commands of bash; they have no standard input."}
    parameters = {"type": "object", "properties": {"command": command}, "required": ["command"]}
    return {"type": "function", "function": {"name": SHELL, "description": about, "parameters": parameters}}


def reward_of(files: Mapping[str, bytes]) -> dict[str, float]:
    """Return name -> reward as the tests have written them; ``reward`` is one of the names.

    Args:
        files: name -> content of the files in ``/logs/verifier``. ``reward.json``, a mapping of numbers, is used first,
            then ``reward.txt``, one number.

    Raises:
        ValueError: neither file holds a reward from 0 to 1.
    """
    if "reward.json" in files:
        scores = json.loads(files["reward.json"], parse_int=float)
        if not isinstance(scores, dict) or not all(type(value) in (int, float) for value in scores.values()):
            raise ValueError("reward.json is not a mapping of numbers")
        if "reward" not in scores and len(scores) != 1:
            raise ValueError(f"reward.json has no 'reward': it has {', '.join(scores) or 'nothing'}"[:300])
        rewards = {"reward": scores.get("reward", next(iter(scores.values()))), **scores}
    elif "reward.txt" in files:
        rewards = {"reward": float(files["reward.txt"].decode())}
    else:
        raise ValueError("the tests wrote neither reward.txt nor reward.json")
    if not all(map(math.isfinite, rewards.values())) or not 0.0 <= rewards["reward"] <= 1.0:
        raise ValueError(f"the tests wrote the reward {rewards['reward']!r:.50}, which is not from 0 to 1")
    return {name: float(value) for name, value in rewards.items()}


class HarborEnvironment:
    """An episode: a container with a shell for the agent, and then a second container for the tests."""

    def __init__(self, pool: HarborPool) -> None:
        self._pool = pool
        self._containers = pool.containers
        self._task: HarborTask | None = None
        self._names: list[str] = []
        self._shell: Shell | None = None
        self._entrance: Path | None = None
        self._up: asyncio.Task[HarborTask] | None = None
        self._left_s = 0.0
        self._closed = False

    async def _begin(self, task: HarborTask, programs: bool = False) -> str:
        image, workdir = self._pool.images[task.id]
        name = self._containers.name()
        self._names.append(name)  # it may be there although its start fails
        mounted = None
        if programs:
            self._entrance = make_entrance(task, self._containers.client, name, workdir)
            mounted = self._entrance / MOUNTED_FOLDER
        await self._containers.begin(name, task, image, workdir, mounted)
        return name

    def bring_up(self, task: HarborTask) -> asyncio.Task[HarborTask]:
        """Begin to start the container and its shell, once; :meth:`start` waits for them."""
        self._up = self._up or asyncio.create_task(self._bring_up(task))
        return self._up

    async def _bring_up(self, task: HarborTask) -> HarborTask:
        await self._begin(task, self._pool.programs)
        self._left_s = task.agent_s
        if wrong := (await self._run("true", task))[1]:
            raise EnvironmentCrashed(f"task {task.id}: no shell starts in its container: {wrong}")
        return task

    async def start(self, task_id: str) -> list[Message]:
        """Start the episode's container and shell, or wait for them if they are starting already.

        Raises:
            EnvironmentCrashed: the back end cannot start them.
        """
        self._task = task = await asyncio.shield(self.bring_up(self._pool.task(task_id)))
        assert task.id == task_id, "an episode is acquired for its own task"
        if self._entrance is not None:
            return [Message("system", str(self._entrance)), Message("user", task.instruction)]
        instructions = INSTRUCTIONS.format(workdir=", ".join(self._pool.artifacts(task)))
        tools = tools_section([schema(self._pool.deadline_s)])
        return [Message("system", f"{instructions}\n\n{tools}"), Message("user", task.instruction)]

    async def step(self, action: str) -> StepResult:
        """Run the turn's calls, one after the other. A turn without a call ends the episode.

        Raises:
            EnvironmentCrashed: the episode was not started, or its container is gone.
        """
        if self._task is None:
            raise EnvironmentCrashed("the episode was not started")
        calls = parse_tool_calls(action)
        texts, uses, failed, over = [], [], False, not calls
        for call in calls:
            if (command := _command(call)) is None:
                texts.append(_mistake(call))
                failed = True
                continue
            text, wrong = await self._run(command, self._task)
            over = self._left_s <= 0.0 or (bool(wrong) and not await self._containers.is_running(self._names[0]))
            texts.append(f"{FAILED}{wrong}\n{text}".strip() if wrong else text)
            uses.append(ToolUse(SHELL, 1, int(bool(wrong)), wrong))
            failed = failed or bool(wrong)
            if over:
                break
        observation = joined_results(texts, *self._pool.cut) if texts else ""
        return StepResult(printable(observation), done=over, failed=failed, tools=tuple(uses))

    async def _run(self, command: str, task: HarborTask) -> tuple[str, str]:
        """Run a command. Return its output and a note on how the shell ended, "" if the shell still runs."""
        name, pool = self._names[0], self._pool
        if self._shell is None:
            self._shell = await Shell.begin(self._containers.client, name, task.user, pool.max_characters)
        limit_s, began = min(pool.deadline_s, self._left_s), time.monotonic()
        try:
            text, status = await self._shell.run(command, limit_s)
            text = text.removesuffix("\n")
            wrong = "" if status is not None else "the shell has ended; files stay"
        except TooLong as error:
            text, status, wrong = str(error), None, f"it took longer than {limit_s:g} s, and all that ran is ended"
            await self._shell.close()
            await self._containers.end_processes(name)
        self._left_s -= time.monotonic() - began
        if status is None:
            await self._shell.close()
            self._shell = None
        elif status != "0":
            text = f"{text}\n[exit status {status}]".lstrip()
        return text or ("" if wrong else "(nothing was printed)"), wrong

    async def grade(self) -> Grade:
        """Run the task's tests in a new container and return their reward; 0 if they give none.

        Raises:
            EnvironmentCrashed: the episode was not started, a container is gone, or no new one starts.
        """
        if self._task is None:
            raise EnvironmentCrashed("nothing to grade: the episode was never started")
        task, containers, agent = self._task, self._containers, self._names[0]
        if not await containers.is_running(agent):
            return Grade.of_ungradable("the agent ended its container")
        if self._shell is not None:
            await self._shell.close()
        with contextlib.ExitStack() as opened:
            try:
                left = []
                if not self._pool.shared:
                    await containers.stop(agent)
                    for path in self._pool.artifacts(task):
                        if (taken := await containers.take(agent, path, self._pool.artifacts_mb << 20)) is not None:
                            left.append(opened.enter_context(taken))
                rewards = await self._tested(task, left)
                grade = Grade(rewards["reward"], rewards["reward"] == 1.0, rewards=rewards)
            except (Unusable, ValueError, RecursionError) as error:
                grade = Grade.of_ungradable(str(error))
        # If somebody removed a container meanwhile, files may be missing: that is not the agent's doing.
        await containers.must("inspect", "-f", "{{.Id}}", *self._names)
        return grade

    async def _tested(self, task: HarborTask, left: Sequence[IO[bytes]]) -> dict[str, float]:
        """Run the tests and return their rewards. Raises ValueError if they write none, Unusable at the deadline, or if
        the agent's own container does not take them."""
        containers, workdir = self._containers, self._pool.images[task.id][1]
        shared = self._pool.shared
        grader = self._names[0] if shared else await self._begin(task)
        removed = ("/tests", "/logs/verifier") if shared else self._pool.artifacts(task)
        error = Unusable if shared else EnvironmentCrashed
        mode = "700" if task.verifier_user is None else "777"
        as_root = ("exec", "-u", "0", "-w", "/", grader, "bash", "-c")
        await containers.must(*as_root, _PREPARE, mode, *removed, error=error)
        for files in left:
            await containers.give(grader, files)
        await containers.must("cp", f"{task.folder / 'tests'}/.", f"{grader}:/tests", error=error)
        variables = [f"--env={name}={value}" for name, value in task.verifier_variables.items()]
        user = [] if task.verifier_user is None else ["-u", task.verifier_user]
        test = ("exec", "-w", "/", *variables, *user, grader, "bash", "-c", _TEST, workdir)
        try:
            await containers.call(*test, limit_s=task.verifier_s)
        except TooLong:
            raise Unusable(f"its tests took longer than {task.verifier_s:g} s") from None
        await containers.stop(grader)
        written = _files(await containers.take(grader, "/logs/verifier", _VERDICT_BYTES))
        try:
            return reward_of(written)
        except ValueError as error:
            lines = written.get("test-stdout.txt", b"").decode(errors="replace").strip().splitlines()
            raise ValueError(f"{error}" + (f"; they end with {lines[-1]!r:.200}" if lines else "")) from error

    async def close(self) -> None:
        """End the shell, remove the containers and give back the slot."""
        if not self._closed:
            self._closed = True
            try:
                await self.remove()
            finally:
                self._pool.release()

    async def remove(self) -> None:
        """End the shell and remove the containers. One that is being started starts first: of one whose start is cut
        short, podman may forget the processes."""
        if self._up is not None:
            await asyncio.gather(self._up, return_exceptions=True)
        try:
            if self._shell is not None:
                await self._shell.close()
            for name in self._names:
                await self._containers.remove(name)
        finally:
            if self._entrance is not None:
                shutil.rmtree(self._entrance)


def _command(call: ToolCall | BadCall) -> str | None:
    """Return the shell command in a tool call; None if it is not a call of the shell."""
    if isinstance(call, BadCall) or call.name != SHELL or call.arguments.keys() != {"command"}:
        return None
    command = call.arguments["command"]
    return command if isinstance(command, str) and "\0" not in command else None


def _mistake(call: ToolCall | BadCall) -> str:
    if isinstance(call, BadCall) or call.name != SHELL:
        return mistake_of(call, [SHELL])[:500]
    return f"{WRONG_ARGUMENTS}{SHELL}: it takes one argument, command, a text"


def _files(taken: IO[bytes] | None) -> dict[str, bytes]:
    """Return name -> content of the plain files in the top folder of a tar file."""

    def plain_files() -> Iterator[tuple[str, bytes]]:
        with tarfile.open(fileobj=taken) as members:
            for member in members:
                if member.isreg() and (content := members.extractfile(member)) is not None:
                    yield member.name.rpartition("/")[2], content.read()

    if taken is None:
        return {}
    with taken:
        return dict(plain_files())


class HarborPool:
    """Lends :class:`HarborEnvironment`.

    Args:
        tasks: a folder that is a task in Harbor's form or holds such tasks; or a mapping of split -> such a folder.
        backend: ``podman`` or ``docker``.
        variables: what ``${NAME}`` in the tasks' files stands for; nothing of this machine is read.
        held_out: number of tasks of a single folder that form the split ``held_out`` instead of ``train``.
        deadline_s: longest time of one command of the agent.
        max_characters: length of a command's output; the middle of a longer output is dropped.
        observation_max_tokens: length of the results of a turn's calls together.
        artifacts_mb: most data that an agent may leave for grading.
        programs: True if the agent is a program that runs in the container (:mod:`loop_contrib.harbor.inside`).
        grade: ``separate``: tests run in a fresh container; or ``shared``: where the agent worked, for evaluation only.
        max_worlds: most episodes at a time. Each has one container, and a second during grading. The containers of half
            as many waiting episodes start ahead.

    Raises:
        ValueError: a task or an option is wrong; one line.
    """

    def __init__(
        self,
        token_spans: TokenSpans,
        tasks: str | Mapping[str, str],
        backend: str = "podman",
        variables: Mapping[str, str] | None = None,
        held_out: int | None = None,
        deadline_s: float = 120.0,
        max_characters: int = 8000,
        observation_max_tokens: int = 3000,
        artifacts_mb: int = 256,
        programs: bool = False,
        grade: Literal["separate", "shared"] = "separate",
        max_worlds: int = 8,
    ) -> None:
        if min(deadline_s, max_characters, observation_max_tokens, artifacts_mb, max_worlds) <= 0:
            raise ValueError(
                "deadline_s, max_characters, observation_max_tokens, artifacts_mb and max_worlds must be above 0"
            )
        if grade not in ("separate", "shared"):
            raise ValueError(f"grade is separate or shared, not {grade!r}")
        self.shared = grade == "shared"
        self.containers = Containers(backend)
        self._table: TaskTable = read_folder(tasks, environment_variables("variables", variables or {}))
        if held_out is not None:
            self._table.hold_out(held_out)
        self.dataset = f"harbor ({SHARED_GRADE})" if self.shared else "harbor"
        all_tasks = {row["id"]: row["task"].digest() for row in self._table.all()}
        self.description = Description(behavior=(TOOLS_BEHAVIOR,), identity={"tasks": digest(all_tasks)})
        self.images: dict[str, tuple[str, str]] = {}
        """Image and working folder of each task."""
        self.deadline_s, self.max_characters, self.artifacts_mb = deadline_s, max_characters, artifacts_mb
        self.cut = (observation_max_tokens, token_spans)
        self.programs = programs
        self._slots = Slots(max_worlds)
        self._next = Slots(max(1, max_worlds // 2))
        """The episodes that come next: their containers start while others run."""

    async def open(self) -> None:
        """Look for the back end, remove containers of ended processes, and make the missing images.

        Raises:
            FileNotFoundError, EnvironmentCrashed, ValueError: as :class:`~loop_contrib.harbor.containers.Containers`.
        """
        await self.containers.open()
        for row in self._table.all():
            task: HarborTask = row["task"]
            image = await self.containers.image(task)
            self.images[task.id] = (image, await self.containers.workdir(task, image))

    def splits(self) -> list[str]:
        return self._table.splits

    def tasks(self, split: str) -> list[str]:
        return self._table.split(split)

    def check_tasks(self, task_ids: Sequence[str]) -> None:
        for task_id in task_ids:
            self.task(task_id)

    def preflight(self, split: str | Sequence[str]) -> list[str]:
        """Check task ids before the pool is opened for training, and return them.

        Raises:
            ValueError: the grade is shared.
            FileNotFoundError: there is no back end.
        """
        refuse_shared_grade(self.dataset)
        self.containers.find()
        if isinstance(split, str):
            return self.tasks(split)
        self.check_tasks(split)
        return list(split)

    def task(self, task_id: str) -> HarborTask:
        """Return a task. Raises UnknownTask."""
        task: HarborTask = self._table[task_id]["task"]
        return task

    def artifacts(self, task: HarborTask) -> Sequence[str]:
        """Return the paths in the agent's container that are graded."""
        return task.artifacts or (self.images[task.id][1],)

    async def expert(self, task_id: str) -> list[str]:
        """Return the commands of the task's own solution. Raises UnknownTask if it has no solution for a shell."""
        try:
            return self.task(task_id).solution()
        except (FileNotFoundError, UnicodeDecodeError) as error:
            raise UnknownTask(f"task {task_id}: {error}") from error

    def message(self, command: str) -> str:
        """Return the message with which an agent gives this command."""
        return render_tool_call(ToolCall(SHELL, {"command": command}))

    async def acquire(self, episode_id: str) -> HarborEnvironment:
        await self._slots.take()
        return HarborEnvironment(self)

    async def acquire_for(self, episode_id: str, task_id: str) -> HarborEnvironment:
        """Wait for a slot. The containers of the episodes that come next start meanwhile; each is of one episode."""
        task, environment = self.task(task_id), HarborEnvironment(self)
        await self._next.take()
        try:
            environment.bring_up(task)
            await self._slots.take()
        except BaseException:
            await environment.remove()
            raise
        finally:
            self._next.give_back()
        return environment

    def release(self) -> None:
        """Take back a place. An environment calls this once, when it closes."""
        self._slots.give_back()

    def status(self) -> PoolStatus:
        """Return the counters, the episodes per core, and the mean peak memory of the latest episodes."""
        details = {"episodes_per_core": self._slots.taken / len(os.sched_getaffinity(0))}
        if peaks := self.containers.peaks_mb:
            details["episode_mb"] = sum(peaks) / len(peaks)
        return PoolStatus(self._slots.taken, self._slots.waiting + self._next.waiting, details=details)

    async def close(self) -> None:
        """Refuse all waiting episodes, and remove all containers of this process."""
        self._next.close()
        self._slots.close()
        with contextlib.suppress(FileNotFoundError, EnvironmentCrashed):  # where it never opened
            await self.containers.close()
