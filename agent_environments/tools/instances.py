"""Tool processes: one for each episode, forked from one that has imported the module, and ended with the episode.

If the module has a class, the process holds the episode's instance. An instance of a class with ``forkable = True`` is
made once, before the fork; other instances are made in each process. Nothing of an episode reaches the next one: not
the module's memory, its folder, its variables, its tasks or the programs that it started.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

from agent_environments.protocol import EnvironmentCrashed, EnvironmentTimeout, PoolStatus
from agent_environments.slots import Slots
from agent_environments.tools.forked import digests
from agent_environments.tools.identity import tasks_digest
from agent_environments.tools.module import ToolModule
from loop_plumbing.breakage import Raised, error_line
from loop_plumbing.deadline import DeadlinePassed
from loop_plumbing.forked_process import ForkedProcess, ForkServer, ProcessEnded

logger = logging.getLogger(__name__)

SLOW_INSTANCE_S = 0.5
"""Seconds for making an instance, above which a warning states them."""


def _message_of(error: Exception) -> str:
    """Return an error's message, with file and line where the user's own code raised it."""
    return error_line(error) if isinstance(error, Raised) else str(error)


class Lease:
    """Lend one episode a process, and a new process if the old one has ended, until :meth:`end`."""

    def __init__(self, pool: InstancePool, process: ForkedProcess) -> None:
        self._pool = pool
        self._process = process
        self._ended = False
        self.lost = False
        """True once the instance that the episode had is gone, with its process."""
        self.holds_instance = False
        """True once the process holds an instance, without which the episode cannot go on."""

    async def process(self) -> ForkedProcess:
        """Wait until the episode's process makes no other call and return it; if it has ended, return a new process.

        Raises:
            EnvironmentCrashed: no process can be forked.
        """
        await self._process.idle()
        if not self._process.alive:
            self.lost = self.holds_instance
            self._process = await self._pool.fork_again()
        return self._process

    async def reset(self, task_id: str) -> str:
        """Put the instance into the task's first state; return the text that it shows, "" for nothing.

        Raises:
            EnvironmentCrashed: the reset failed; the reset of another instance may succeed.
        """
        try:
            text: str = await (await self.process()).ask("reset", self._pool.deadline_s, task_id=task_id)
        except (Raised, DeadlinePassed, ProcessEnded) as error:
            raise EnvironmentCrashed(f"the instance's reset failed on task {task_id}: {_message_of(error)}") from error
        self.holds_instance = True
        return text

    @contextlib.contextmanager
    def at_work(self, what: str) -> Iterator[None]:
        """Let ``what`` work on the instance within the block; after a timeout the instance may be half changed.

        Raises:
            EnvironmentTimeout: the work took too long, or the instance is gone.
        """
        if self.lost:
            raise EnvironmentTimeout("the instance is gone, with its process")
        try:
            yield
        except DeadlinePassed as error:
            raise EnvironmentTimeout(f"{what} {error}") from error

    async def end(self) -> None:
        """End the process; may be called twice."""
        if not self._ended:
            self._ended = True
            await self._pool.take_back(self._process)


class InstancePool:
    """Lend a process, with an instance, to each of at most ``size`` episodes at a time.

    Args:
        server: forks the processes.
        module: the module that this process has imported. The server's import must have given the same tasks; else the
            question would come from one random draw of tasks, and the reward's right answer from another.
        size: the number of episodes at a time.
        deadline_s: seconds for making, for resetting and for closing an instance (by ``close()``, if it has one).
    """

    def __init__(self, server: ForkServer, module: ToolModule, size: int, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._module = module
        self._tasks = tasks_digest(module.tasks.all())
        self._replaced = 0
        """Processes that ended before their episode."""
        self._made_in_s = 0.0
        self._server = server
        self._slots = Slots(size)

    def status(self) -> PoolStatus:
        """Return how many episodes have a process or wait for a process, and how many processes were replaced."""
        return PoolStatus(open_worlds=self._slots.taken, waiting=self._slots.waiting, restarts=self._replaced)

    async def open(self) -> None:
        """Start the server, and check that an instance can be made.

        Raises:
            EnvironmentCrashed: the instance cannot be made, or the server's import of the module gave other tasks.
        """
        process = await self._fork()
        if process.ready["makes"] and self._made_in_s > SLOW_INSTANCE_S:
            logger.warning(
                "an instance of %s takes %.1f s to make, in each episode: write forkable = True in its class where one "
                "that is made before the fork does as well",
                *(self._module.name, self._made_in_s),
            )
        await self._end(process)

    async def acquire(self) -> Lease:
        """Wait for a free slot, then start a process for one episode.

        Raises:
            EnvironmentCrashed: the process could not be started, or the pool is closed.
        """
        await self._slots.take()
        try:
            return Lease(self, await self._fork())
        except BaseException:
            self._slots.give_back()
            raise

    async def fork_again(self) -> ForkedProcess:
        """Fork a process in place of one that has ended.

        Raises:
            EnvironmentCrashed: the process could not be made.
        """
        self._replaced += 1
        return await self._fork()

    async def take_back(self, process: ForkedProcess) -> None:
        """End an episode's process and free the episode's slot."""
        try:
            await self._end(process)
        finally:
            self._slots.give_back()

    async def close(self) -> None:
        """Refuse waiting episodes, and end every process."""
        self._slots.close()
        await self._server.close()

    async def _fork(self) -> ForkedProcess:
        process = await self._server.fork()
        try:
            if process.ready["tasks"] != self._tasks:
                raise EnvironmentCrashed(self._difference(await process.ask("digests", self.deadline_s)))
            if process.ready["makes"]:
                began = time.monotonic()
                await process.ask("make", self.deadline_s)
                self._made_in_s = time.monotonic() - began
        except BaseException as error:
            process.kill()
            if isinstance(error, Raised | DeadlinePassed | ProcessEnded):
                raise EnvironmentCrashed(f"an instance could not be made: {_message_of(error)}") from error
            raise
        return process

    def _difference(self, theirs: dict[str, str]) -> str:
        """Return a line that names a task that differs between the server's import and ours."""
        ours = digests(self._module)
        different = [task for task in ours if theirs.get(task) != ours[task]] or sorted(theirs.keys() - ours)
        return (
            f"{self._module.name} gives other tasks at each import: {len(different)} of {len(ours)} differ, the first "
            f"is {different[0]!r}; draw them with a fixed seed, random.Random(0), and sort the items of a set"
        )

    async def _end(self, process: ForkedProcess) -> None:
        try:
            if process.alive and process.ready["closes"]:
                process.interrupt()
                await process.ask("close", self.deadline_s)
        except (Raised, DeadlinePassed, ProcessEnded, EnvironmentCrashed) as error:
            logger.warning("closing an instance failed: %s", _message_of(error))
        finally:
            process.kill()
