"""Tests that an environment follows :class:`EnvironmentPool`, and that agent code cannot void an episode of it.

    async def test_conforms():
        pool = MyPool(token_spans)
        await pool.open()
        try:
            await check_conformance(pool, "mine_1", [*HOSTILE_ACTIONS, "what is hostile in my world"])
        finally:
            await pool.close()

The environment is tried as it is, without the node's guard around it
(:mod:`agent_environments.guarded_environment`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from agent_environments.plain_values import plain_grade, plain_messages, plain_result
from agent_environments.protocol import (
    Environment,
    EnvironmentPool,
    EnvironmentTimeout,
    Grade,
    Message,
    StepResult,
    UnknownTask,
)
from loop_plumbing.breakage import error_line, raised_as
from loop_plumbing.separate_task import RaisedThere, in_separate_task


def _fenced(code: str) -> str:
    return f"```python\n{code}\n```"


HOSTILE_ACTIONS: tuple[str, ...] = (
    "",
    "no code at all",
    "```python",
    _fenced("for"),
    _fenced("\ud800 = '\udfff'"),
    _fenced("print('\\ud800')"),
    _fenced("x\x00y"),
    _fenced("(" * 5000),
    _fenced("-" * 100_000 + "1"),
    _fenced("show({[]: 1})"),
    _fenced("9" * 5000),
    _fenced("x = " + "'" + "y" * 1_000_000 + "'"),
    _fenced("print('z' * 10**7)"),
    _fenced("raise KeyboardInterrupt"),
    _fenced("raise SystemExit"),
    _fenced("def f(): f()\nf()"),
    _fenced("x = [0] * 10**11"),
    _fenced("__import__('os').abort()"),
    _fenced("__import__('posix')._exit(0)"),
    _fenced("class E(BaseException):\n    def __str__(self): raise E\nraise E"),
)
"""Actions that break careless code: parsers, encoders, limits, interpreters."""


class NotConforming(AssertionError):
    """An environment breaks the protocol; the message says how."""


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise NotConforming(what)


async def check_conformance(
    pool: EnvironmentPool, task_id: str, hostile_actions: Sequence[str] = HOSTILE_ACTIONS
) -> None:
    """Check that an open pool keeps the protocol.

    Args:
        task_id: a task whose untouched state can be graded.
        hostile_actions: first each action is played in its own episode, then all of them in one episode.

    Raises:
        NotConforming: the pool breaks the protocol.
    """
    _require(isinstance(pool, EnvironmentPool), f"{type(pool).__name__} lacks methods of EnvironmentPool")
    open_before = pool.status().open_worlds
    await _check_names(pool)
    _check_grade(await _play(pool, task_id, []), "doing nothing")
    for action in hostile_actions:
        _check_grade(await _play(pool, task_id, [action]), f"action {action[:80]!r}")
    _check_grade(await _play(pool, task_id, hostile_actions), "all actions in one episode")
    await _check_ends(pool, task_id)
    left = pool.status().open_worlds - open_before
    _require(left == 0, f"{left} worlds are still open after all episodes were closed")


async def _check_names(pool: EnvironmentPool) -> None:
    _require(isinstance(pool.dataset, str) and bool(pool.dataset), "dataset has no name")
    nonsense = "no such thing"
    for call in (lambda: pool.tasks(nonsense), lambda: pool.check_tasks([nonsense])):
        try:
            call()
        except UnknownTask:
            continue
        raise NotConforming("an unknown split or task must raise UnknownTask")


async def _play(pool: EnvironmentPool, task_id: str, actions: Sequence[str]) -> Grade:
    """Play ``actions`` in an episode and return its grade; only an EnvironmentTimeout may cut the episode short."""
    environment = await pool.acquire("conformance")
    try:
        _check_messages(await environment.start(task_id))
        for action in actions:
            try:
                result = await in_separate_task(partial(environment.step, action))
            except RaisedThere as raised:
                if isinstance(raised.error, EnvironmentTimeout):
                    break
                _refuse(f"step({action[:80]!r})", raised.error)
            _check_result(result, f"action {action[:80]!r}")
            if result.done:
                break
        try:
            return await in_separate_task(environment.grade)
        except RaisedThere as raised:
            _refuse("grade()", raised.error)
    finally:
        await environment.close()
        await environment.close()


def _refuse(call: str, error: BaseException) -> NoReturn:
    raise NotConforming(f"{call} raises {error_line(error)}: the agent voids its episode") from error


def _check_messages(messages: Sequence[Message]) -> None:
    _plain(plain_messages, messages, "start()")
    _require(
        bool(messages) and messages[-1].role == "user", "an episode must open with messages, the last one a user's"
    )
    for message in messages:
        _check_text(message.content, "an opening message")


def _check_text(text: str, what: str) -> None:
    with raised_as(NotConforming, f"{what} holds a lone surrogate, which no tokenizer takes: ", UnicodeEncodeError):
        text.encode()


def _check_result(result: StepResult, what: str) -> None:
    _plain(plain_result, result, what)
    _check_text(result.observation, f"the observation after {what}")
    _require(result.broke is None, f"{what}: the environment broke: {result.broke}")


def _check_grade(grade: Grade, what: str) -> None:
    _plain(plain_grade, grade, what)
    if grade.ungradable is not None:
        _require(grade.reward == 0.0 and not grade.success, f"{what}: an ungradable state is worth {grade.reward}")
    _require(grade.broke is None, f"{what}: the environment broke: {grade.broke}")


def _plain(rebuild: Callable[[Any], object], value: Any, what: str) -> None:
    """Check that the node can make ``value`` plain; values of numpy's types conform."""
    try:
        rebuild(value)
    except Exception as error:
        raise NotConforming(f"{what}: {error_line(error)}") from error


async def _check_ends(pool: EnvironmentPool, task_id: str) -> None:
    """Check that an episode can be closed before its start, and graded or closed after a step was cancelled."""
    await (await pool.acquire("conformance-unused")).close()
    for graded in (True, False):
        environment: Environment = await pool.acquire("conformance-cancelled")
        try:
            await environment.start(task_id)
            step = asyncio.ensure_future(environment.step(_fenced("while True: pass")))
            await asyncio.wait([step], timeout=0.1)
            step.cancel()
            await asyncio.gather(step, return_exceptions=True)
            if graded:
                _check_grade(await environment.grade(), "cancelled in the middle of a step")
        finally:
            await environment.close()
