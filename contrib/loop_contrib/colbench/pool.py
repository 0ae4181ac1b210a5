"""ColBench behind the environment protocol: ten rounds with a human, then tests of the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent_environments.description import Description
from agent_environments.extraction import extract_code
from agent_environments.protocol import (
    EnvironmentCrashed,
    Grade,
    Message,
    PoolStatus,
    Requirement,
    StepResult,
    TokenSpans,
)
from agent_environments.slots import Slots
from loop_contrib.chat_model import ChatEndpoint
from loop_contrib.colbench.grader import CodeGrader, GraderLimits, base_python
from loop_contrib.colbench.human import EndpointHuman, Human, ScriptedHuman
from loop_contrib.colbench.task import ColBenchTask
from loop_contrib.colbench.tasks import ColBenchTasks

ANSWER_MARK = "I WANT TO ANSWER:"

INSTRUCTIONS = (
    "You help a person who needs a Python function. The request leaves out what only this person knows: ask short "
    "questions about it, one or two things at a time. When you know enough, write a message that begins with "
    f'"{ANSWER_MARK}" and then has the code, and nothing else. You have {{rounds}} messages, the answer included.'
)


def code_of(answer: str) -> str:
    """Return the code of a final answer: its python blocks, or the whole answer if it has no such block."""
    plain = [line for line in answer.splitlines() if not line.strip().startswith("```")]
    return extract_code(answer) or "\n".join(plain).strip()


class ColBenchEnvironment:
    """An episode: a conversation between the agent and the human."""

    def __init__(self, pool: ColBenchPool) -> None:
        self._pool = pool
        self._task: ColBenchTask | None = None
        self._dialogue: list[Message] = []
        self._rounds = 0
        self._answer: str | None = None
        self._closed = False

    async def start(self, task_id: str) -> list[Message]:
        self._task = self._pool.all_tasks[task_id]
        self._dialogue = [Message("user", self._task.description)]
        return [Message("system", INSTRUCTIONS.format(rounds=self._pool.rounds)), *self._dialogue]

    async def step(self, action: str) -> StepResult:
        """Send a question to the human, or take the message as the final answer, as always with the last message.

        Raises:
            EnvironmentCrashed: the episode was not started or is over, or the human cannot answer.
        """
        if self._task is None or self._answer is not None:
            raise EnvironmentCrashed("there is nobody to talk to: the episode was not started, or is over")
        self._rounds += 1
        _, mark, answer = action.partition(ANSWER_MARK)
        if mark or self._rounds >= self._pool.rounds:
            self._answer = answer if mark else action
            return StepResult("", done=True)
        self._dialogue.append(Message("assistant", action))
        reply = await self._pool.human.answer(self._task, self._dialogue)
        self._dialogue.append(Message("user", reply))
        return StepResult(reply, done=False)

    async def grade(self) -> Grade:
        """Return the grade: which tests the answer passes. Without an answer it passes none.

        Raises:
            EnvironmentCrashed: the episode was never started, or the grader does not work.
        """
        if self._task is None:
            raise EnvironmentCrashed("nothing to grade: the episode was never started")
        calls = self._task.calls
        code = code_of(self._answer or "")
        passed = await self._pool.grader.passed(self._task, code) if code else [False] * len(calls)
        requirements = tuple(Requirement(call, good) for call, good in zip(calls, passed, strict=True))
        success = all(passed)
        share = sum(passed) / len(passed)
        return Grade(share if self._pool.partial_reward else float(success), success, requirements)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._pool.release()


class ColBenchPool:
    """Lends :class:`ColBenchEnvironment`.

    Args:
        tasks: the benchmark's JSONL file for each split; null generates tasks.
        seed: seed of the generated tasks.
        human: arguments of :class:`~loop_contrib.chat_model.ChatEndpoint` for a model that plays the human; null
            is the scripted human, who knows generated tasks only.
        rounds: number of messages that the agent may write.
        partial_reward: the reward is the share of tests passed, in place of 0 or 1.
        max_worlds: most conversations at a time.
        python: interpreter for answers and references; null is the one that this virtual environment was made from.
        sandbox_minimum: lowest level with which the pool opens: none, rlimits, seccomp.
        grader: the arguments of :class:`~loop_contrib.colbench.grader.GraderLimits`.

    Raises:
        ValueError: a file of tasks, or an option, is wrong; one line.
    """

    description = Description(behavior=("loop_contrib.colbench.behavior:QuestionBehavior",))

    def __init__(
        self,
        token_spans: TokenSpans,
        tasks: Mapping[str, str] | None = None,
        seed: int = 0,
        human: Mapping[str, Any] | None = None,
        rounds: int = 10,
        partial_reward: bool = False,
        max_worlds: int = 64,
        python: str | None = None,
        sandbox_minimum: str = "seccomp",
        grader: Mapping[str, Any] | None = None,
    ) -> None:
        if rounds < 1 or max_worlds < 1:
            raise ValueError("rounds and max_worlds must be at least 1")
        self.dataset = "colbench" if tasks else f"colbench-generated-seed{seed}"
        self.all_tasks = ColBenchTasks(tasks, seed)
        if human is None and not all(task.particulars for task in self.all_tasks.values()):
            raise ValueError(
                "the scripted human knows generated tasks only: set human: {url, model} to a chat endpoint"
            )
        self.human: Human = ScriptedHuman() if human is None else EndpointHuman(ChatEndpoint.of("human", human))
        self.grader = CodeGrader(python or base_python(), GraderLimits(**(grader or {})), sandbox_minimum)
        self.rounds = rounds
        self.partial_reward = partial_reward
        self._slots = Slots(max_worlds)

    async def open(self) -> None:
        """Open. Raises PermissionError if the sandbox is too weak, EnvironmentCrashed if the human cannot answer."""
        await self.grader.open()
        await self.human.open()

    def tasks(self, split: str) -> list[str]:
        return list(self.all_tasks.split(split))

    def check_tasks(self, task_ids: Sequence[str]) -> None:
        for task_id in task_ids:
            self.all_tasks[task_id]

    async def acquire(self, episode_id: str) -> ColBenchEnvironment:
        await self._slots.take()
        return ColBenchEnvironment(self)

    def release(self) -> None:
        """Take back a place. An environment calls this once, when it closes."""
        self._slots.give_back()

    def status(self) -> PoolStatus:
        return PoolStatus(self._slots.taken, self._slots.waiting, details={"sandbox": self.grader.level})

    async def close(self) -> None:
        self._slots.close()
        await self.human.close()
        await self.grader.close()
