"""An environment whose episode is a program: the agent is somebody's own, unmodified.

The program gets the address of the policy (``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, and the same for Anthropic's
clients) and its task (``TASK_ID``). It has tools of its own, or acts in a world of ours, which the node opens for it
and serves over HTTP. An agent that an installed package knows is started by its name. An episode ends when the program
does, when the program says so, or at its deadline. The world's grader or a command grades it, and never the program,
unless the config accepts the program's reward.

Without a command the program runs elsewhere: it opens an episode over HTTP, and closes it.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from agent_environments.description import TOOLS_BEHAVIOR, Description, description_of
from agent_environments.groups import grades_groups
from agent_environments.harness.agents import TaskFiles, write_files
from agent_environments.harness.grading import EndedEpisode, GradedByCommand, GradedByWord, Grader
from agent_environments.harness.home import HOME, home_variables, make_home
from agent_environments.harness.program import run_program
from agent_environments.harness.starting import AgentStarter, Starter
from agent_environments.harness.words import resolved
from agent_environments.program_config import variables as environment_variables
from agent_environments.program_config import words
from agent_environments.program_protocol import Connection, Ended, Figures, Offer, SideCalls
from agent_environments.protocol import (
    Environment,
    EnvironmentCrashed,
    EnvironmentPool,
    Grade,
    GroupedEnvironment,
    Member,
    Message,
    PoolOfGroups,
    PoolStatus,
    PoolWithPreflight,
    StepResult,
    TokenSpans,
    UnknownTask,
    acquire,
    create_pool,
    is_harness,
    tasks_of_split,
)
from agent_environments.slots import Slots
from loop_plumbing.breakage import raised_as
from loop_plumbing.written_tree import remove

LEAVE_S = 10.0
"""Seconds that a program has to end once its episode is over."""


@dataclass(eq=False)
class _EpisodeOffer:
    task_id: str
    split: str | None
    connection: Connection
    pool: HarnessPool

    def give_back(self) -> None:
        self.pool.offer_again(self)


class HarnessEnvironment:
    """An episode of a program. Call ``start``, ``run`` and ``grade``; ``step`` acts in the world during ``run``."""

    def __init__(self, pool: HarnessPool, episode_id: str, world: Environment | None) -> None:
        self._pool = pool
        self._episode_id = episode_id
        self._world = world
        self._own = Path(tempfile.mkdtemp(prefix="harness-"))
        self._folder = self._own / "episode"
        self._folder.mkdir()
        self._task_id = ""
        self._finished = asyncio.Event()
        self._stated: float | None = None
        self._figures: Figures = {}
        self._closed = False

    async def start(self, task_id: str) -> list[Message]:
        """Prepare the program's folders and return the world's opening messages; [] without a world."""
        self._task_id = task_id
        if self._pool.starter is not None:
            await asyncio.to_thread(make_home, self._own, self._pool.home_template)
        if self._pool.task_files is not None:
            await asyncio.to_thread(self._pool.task_files.copy, task_id, self._folder)
        return [] if self._world is None else await self._world.start(task_id)

    async def run(self, connection: Connection) -> Ended | None:
        """Wait until the program ends, or ends the episode. Return None for a program that runs elsewhere."""
        starter = self._pool.starter
        if starter is None:
            split = self._pool.split_of(self._task_id)
            await self._pool.offer(_EpisodeOffer(self._task_id, split, connection, self._pool), self._finished)
            return None
        start = starter.start_of(self._task_id, connection)
        write_files(self._own / HOME, start.files)
        stop = asyncio.Event()
        variables = self._variables(connection, start.variables)
        running = run_program(start.command, variables, self._folder, stop=stop)
        program = asyncio.create_task(running, name=self._episode_id)
        finished = asyncio.create_task(self._finished.wait())
        try:
            await asyncio.wait([program, finished], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([program], timeout=LEAVE_S)
        except asyncio.CancelledError:  # the canceller still wants the program's last output
            if own := asyncio.current_task():
                own.uncancel()
        finally:
            finished.cancel()
            stop.set()
            try:
                await asyncio.wait([program])
            finally:
                program.cancel()
        with raised_as(EnvironmentCrashed, "the harness cannot be started: ", OSError):
            return program.result()

    @property
    def side_calls(self) -> Sequence[SideCalls]:
        """The rules for side calls in the config."""
        return self._pool.side_calls

    @property
    def grades_itself(self) -> bool:
        """Return whether the reward that the program states is the episode's reward."""
        return self._pool.grader.takes_word

    @property
    def has_world(self) -> bool:
        """Return whether the program acts in one of our worlds."""
        return self._world is not None

    async def step(self, action: str) -> StepResult:
        """Run an action in the world; the caller must wait for its end before the next action."""
        if self._world is None:
            raise UnknownTask("this harness has no world of ours to act in")
        result = await self._world.step(action)
        if result.done:
            self._finished.set()
        return result

    def finish(self, reward: float | None, figures: Figures = MappingProxyType({})) -> None:
        """End the episode at the program's request; the program's reward counts only if the config accepts it."""
        self._figures = figures
        if self._pool.grader.takes_word and reward is not None:
            self._stated = reward
        self._finished.set()

    async def grade(self) -> Grade:
        """Return the grader's grade with the program's figures; the grader's figure wins if both use the same name."""
        ended = EndedEpisode(self._task_id, self._folder, self._world, self._stated)
        return self._with_figures(await self._pool.grader.grade(ended))

    async def grade_member(self) -> Member:
        """Return the world's grade of this member of a group, with the figures that the program states."""
        assert isinstance(self._world, GroupedEnvironment), "its pool grades groups"
        member = await self._world.grade_member()
        return replace(member, grade=self._with_figures(member.grade))

    def _with_figures(self, grade: Grade) -> Grade:
        rewards = {**self._figures.get("rewards", {}), **grade.rewards}
        return replace(grade, rewards=rewards, metrics={**self._figures.get("metrics", {}), **grade.metrics})

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if self._world is not None:
                await self._world.close()
        finally:
            self._pool.release()
            await asyncio.to_thread(remove, self._own)

    def _variables(self, connection: Connection, of_agent: Mapping[str, str]) -> dict[str, str]:
        return {
            **home_variables(self._own),
            **of_agent,
            "ANTHROPIC_BASE_URL": connection.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": connection.api_key,
            **self._pool.variables,
            "OPENAI_BASE_URL": connection.base_url,
            "OPENAI_API_KEY": connection.api_key,
            "TASK_ID": self._task_id,
            "EPISODE_FOLDER": str(self._folder),
        }


class HarnessPool:
    """Run at most ``max_worlds`` programs at a time, one for each episode.

    Args:
        command: starts the program; ``{python}`` is this interpreter, and relative paths of existing files become
            absolute. Without it, and without ``agent``, the program runs elsewhere.
        agent: in place of a command, the name of an agent that an installed package knows how to start.
        agent_program: the path of that agent's program, if it is not at its usual place.
        task_files: a folder with one folder per task, whose content is copied into the program's working folder. An
            agent that is started by its name gets the ``prompt.md`` of its task's folder.
        world: ``name`` and options of one of our environments, in which the program acts.
        tasks: task ids by split; only without ``world``.
        dataset: the name printed with every score; only without ``world``.
        grade_command: a command whose last line is ``{"reward": ...}``; only without ``world``. It runs after the
            program, in the folder where the node was started; ``EPISODE_FOLDER`` is the program's folder.
        accept_reward: whether the program's own reward counts; only if nothing else grades.
        variables: more environment variables of the program.
        prefix: a command under which the program runs, such as a sandbox.
        home_template: a folder that is copied into the home folder of each episode's program.
        side_calls: rules for calls that are answered but not trained on; each rule holds the fields of a
            :class:`~agent_environments.program_protocol.SideCalls`.

    Raises:
        ValueError: the config states no way of grading, or no tasks.
    """

    def __init__(
        self,
        token_spans: TokenSpans,
        command: Sequence[str] | None = None,
        agent: str | None = None,
        agent_program: str | None = None,
        task_files: str | None = None,
        world: Mapping[str, Any] | None = None,
        tasks: Mapping[str, Sequence[str]] | None = None,
        dataset: str = "harness",
        grade_command: Sequence[str] | None = None,
        accept_reward: bool = False,
        variables: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        home_template: str | None = None,
        side_calls: Sequence[Mapping[str, Any]] = (),
        max_worlds: int = 16,
    ) -> None:
        if world is None and not tasks:
            raise ValueError("a harness needs tasks: give `world`, or `tasks` by split")
        if (world is not None) + (grade_command is not None) + accept_reward != 1:
            raise ValueError("one of `world`, `grade_command` and `accept_reward` says who grades")
        if agent is not None and (command is not None or world is not None or task_files is None):
            raise ValueError(
                f"harness: agent {agent} needs `tasks` and `task_files`, and no `command` or `world`: it works on the "
                "files of a task"
            )
        if agent_program is not None and agent is None:
            raise ValueError("harness: agent_program is the program of an `agent`, and none is named")
        before = words("harness: prefix", prefix)
        self.task_files = None if task_files is None else TaskFiles(task_files)
        self.starter: Starter | None = None
        if agent is not None and self.task_files is not None:
            self.starter = AgentStarter(agent, agent_program, before, self.task_files)
        elif command is not None:
            self.starter = Starter([*before, *resolved(words("harness: command", command))], self.task_files)
        self.grader = Grader() if world is not None else GradedByWord()
        if grade_command is not None:
            self.grader = GradedByCommand(words("harness: grade_command", grade_command))
        self.variables = environment_variables("harness: variables", variables or {})
        self.side_calls = read_side_calls("harness: side_calls", side_calls)
        self.home_template = None if home_template is None else Path(home_template).expanduser().absolute()
        self._tasks = {split: words(f"harness: tasks.{split}", ids) for split, ids in (tasks or {}).items()}
        self._splits = {task_id: split for split, ids in self._tasks.items() for task_id in ids}
        self._world: EnvironmentPool | None = None
        if world is not None:
            if is_harness(world["name"]):
                raise ValueError("the world of a harness cannot be a harness")
            options = dict(world)
            self._world_name = options.pop("name")
            self._world = create_pool(self._world_name, options, token_spans)
        self.dataset = dataset if self._world is None else self._world.dataset
        self._slots = Slots(max_worlds)
        self._offers: list[Offer] = []
        self._offered = asyncio.Event()

    @property
    def description(self) -> Description:
        """The world's description, or an empty one, with the figures of tool calls, as programs may call tools."""
        own = Description() if self._world is None else description_of(self._world_name, self._world)
        return own.with_behavior(TOOLS_BEHAVIOR)

    @property
    def least_context(self) -> int:
        """The number of context tokens that the agent needs; 0 if unknown."""
        return 0 if self.starter is None else self.starter.least_context

    async def open(self) -> None:
        """Open the world.

        Raises:
            FileNotFoundError, ValueError: the program, the template of its home folder or a task's files are missing,
                so that every episode would be lost or be worth nothing.
        """
        await asyncio.to_thread(self._check_machine)
        if self._world is not None:
            await self._world.open()
            self.dataset = self._world.dataset

    def preflight(self, split: str | Sequence[str]) -> list[str] | None:
        """See :class:`~agent_environments.protocol.PoolWithPreflight`; None if only an open world knows the tasks."""
        self._check_machine()
        if self._world is not None:
            return self._world.preflight(split) if isinstance(self._world, PoolWithPreflight) else None
        if isinstance(split, str):
            return self.tasks(split)
        self.check_tasks(split)
        return list(split)

    def _check_machine(self) -> None:
        if self.home_template is not None and not self.home_template.is_dir():
            raise FileNotFoundError(f"harness: home_template: there is no folder {self.home_template}")
        self.grader.check()
        task_ids = [task_id for ids in self._tasks.values() for task_id in ids]
        if self.starter is not None:
            self.starter.check(task_ids, self.variables.get("PATH"))
        elif self.task_files is not None:
            for task_id in task_ids:
                self.task_files.of(task_id)

    def tasks(self, split: str) -> list[str]:
        if self._world is not None:
            ids = self._world.tasks(split)
            self._splits.update(dict.fromkeys(ids, split))
            return ids
        return tasks_of_split(self._tasks, split)

    def check_tasks(self, task_ids: Sequence[str]) -> None:
        if self._world is not None:
            self._world.check_tasks(task_ids)
            return
        known = {task_id for ids in self._tasks.values() for task_id in ids}
        for task_id in task_ids:
            if task_id not in known:
                raise UnknownTask(f"no task {task_id!r} in dataset {self.dataset}")

    def split_of(self, task_id: str) -> str | None:
        """Return the split that lists a task; None if the world's tasks have not been read yet."""
        return self._splits.get(task_id)

    def grades_groups(self, task_id: str) -> bool:
        """Return whether the world grades all rollouts of a task at once."""
        return self._world is not None and grades_groups(self._world, task_id)

    async def grade_group(self, task_id: str, inputs: Sequence[Mapping[str, Any]]) -> list[Grade]:
        """Return the world's grade of each member of a group."""
        assert isinstance(self._world, PoolOfGroups), "it grades groups"
        return await self._world.grade_group(task_id, inputs)

    @property
    def runs_elsewhere(self) -> bool:
        """Return whether other machines start the programs."""
        return self.starter is None

    async def acquire(self, episode_id: str) -> HarnessEnvironment:
        return await self._acquire(episode_id, lambda world: world.acquire(episode_id))

    async def acquire_for(self, episode_id: str, task_id: str) -> HarnessEnvironment:
        """Acquire an environment as :meth:`acquire` does; in a mixture, wait for a slot of the task's environment."""
        return await self._acquire(episode_id, lambda world: acquire(world, episode_id, task_id))

    async def _acquire(
        self, episode_id: str, world_of: Callable[[EnvironmentPool], Awaitable[Environment]]
    ) -> HarnessEnvironment:
        await self._slots.take()
        world = None
        try:
            world = None if self._world is None else await world_of(self._world)
            return HarnessEnvironment(self, episode_id, world)
        except BaseException:
            self.release()
            if world is not None:
                await world.close()
            raise

    def release(self) -> None:
        self._slots.give_back()

    async def offer(self, offer: Offer, finished: asyncio.Event) -> None:
        """Offer the episode to programs on other machines; return once a program has finished the episode."""
        self.offer_again(offer)
        try:
            await finished.wait()
        finally:
            if offer in self._offers:
                self._offers.remove(offer)

    def offer_again(self, offer: Offer) -> None:
        """Put an episode at the end of the queue of offered episodes."""
        self._offers.append(offer)
        self._offered.set()

    async def take(self, task_id: str | None, timeout_s: float) -> Offer | None:
        """Return the oldest offered episode, of ``task_id`` or of any task (None); None if none is offered in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    for offer in self._offers:
                        if task_id in (None, offer.task_id):
                            self._offers.remove(offer)
                            return offer
                    self._offered.clear()
                    await self._offered.wait()
        except TimeoutError:
            return None

    def status(self) -> PoolStatus:
        inner = PoolStatus() if self._world is None else self._world.status()
        waiting = self._slots.waiting + inner.waiting
        return PoolStatus(self._slots.taken, waiting, inner.restarts, inner.details, inner.losses)

    async def close(self) -> None:
        self._slots.close()
        if self._world is not None:
            await self._world.close()


def read_side_calls(key: str, value: Any) -> tuple[SideCalls, ...]:
    """Return the rules for calls that are not trained on.

    Raises:
        ValueError: a rule has no condition, or an unknown key or value; the message names ``key`` and the cure.
    """
    if not isinstance(value, list | tuple):
        raise ValueError(f"{key} must be a list of rules, not {value!r}")
    return tuple(_rule(f"{key}[{number}]", rule) for number, rule in enumerate(value))


def _rule(key: str, rule: Any) -> SideCalls:
    conditions = ("model", "system", "tools")
    if not isinstance(rule, Mapping) or not set(rule) <= {*conditions, "by_base"} or not set(rule) & set(conditions):
        raise ValueError(
            f"{key} must hold model, system or tools, and by_base if the base model is to answer: {rule!r}"
        )
    by_base, texts = rule.get("by_base", False), {name: rule[name] for name in ("model", "system") if name in rule}
    if not isinstance(by_base, bool):
        raise ValueError(f"{key}.by_base must be true or false, not {by_base!r}")
    if not all(isinstance(text, str) and text for text in texts.values()):
        raise ValueError(f"{key}: model and system must be texts: {rule!r}")
    tools = frozenset(words(f"{key}.tools", rule["tools"])) if "tools" in rule else None
    return SideCalls(**texts, tools=tools, by_base=by_base)
