"""The base of pools of remote episodes: tasks, places and counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent_environments.lost_worlds import Losses
from agent_environments.observation import observation as cut_observation
from agent_environments.protocol import PoolStatus, TokenSpans, UnknownTask, tasks_of_split
from agent_environments.remote.episode import EpisodeHost, EpisodeRules, RemoteEnvironment
from agent_environments.slots import Slots

NO_COMMAND = "There is no command in this message."


class RemotePool(EpisodeHost):
    """Lends remote episodes, first come, first served. Subclasses say where they are played.

    Args:
        dataset: the name printed with every score.
        token_spans: the policy's tokenizer, for cutting observations.
        max_worlds: episodes at a time.
        observation_max_tokens: an observation is cut to this many tokens.
        step_timeout_s: time for one command, and for a grade.
        start_timeout_s: time for the other side, and for a task there, to start, and for a lost world to come back.
    """

    no_command = NO_COMMAND

    def __init__(
        self,
        dataset: str,
        token_spans: TokenSpans,
        max_worlds: int,
        observation_max_tokens: int,
        step_timeout_s: float,
        start_timeout_s: float,
    ) -> None:
        if max_worlds < 1 or observation_max_tokens < 1 or min(step_timeout_s, start_timeout_s) <= 0:
            raise ValueError("max_worlds and observation_max_tokens must be at least 1, time-outs above 0")
        self.dataset = dataset
        self.rules = EpisodeRules(token_spans, observation_max_tokens, float(step_timeout_s), float(start_timeout_s))
        self.replays = 0
        self.losses = Losses()
        self._slots = Slots(max_worlds)
        self._splits: Mapping[str, list[str]] = {}
        self._known: frozenset[str] = frozenset()
        self._open: set[RemoteEnvironment] = set()
        self._restarts = 0
        self._closing = False

    async def open(self) -> None:
        """Reach the other side, and learn its tasks (:meth:`_know`)."""
        raise NotImplementedError

    async def answers(self) -> bool:
        return True

    def observation_text(self, observation: str) -> str:
        """Return an observation cut to the tokens that the policy may see."""
        return cut_observation(observation, None, self.rules.observation_max_tokens, self.rules.token_spans)

    async def _close_lines(self) -> None:
        """Cut all lines."""
        raise NotImplementedError

    def _know(self, splits: Mapping[str, list[str]]) -> None:
        self._splits = splits
        self._known = frozenset(task for tasks in splits.values() for task in tasks)

    def tasks(self, split: str) -> list[str]:
        return tasks_of_split(self._splits, split)

    def check_tasks(self, task_ids: Sequence[str]) -> None:
        for task_id in task_ids:
            if task_id not in self._known:
                raise UnknownTask(f"no task {task_id!r} in dataset {self.dataset}")

    async def acquire(self, episode_id: str) -> RemoteEnvironment:
        await self._slots.take()
        environment = self._environment()
        self._open.add(environment)
        return environment

    def _environment(self) -> RemoteEnvironment:
        """Return an episode that nobody has started yet."""
        return RemoteEnvironment(self)

    def release(self, environment: RemoteEnvironment) -> None:
        """Give back the slot of an environment that closes, which calls this once."""
        self._open.discard(environment)
        self._slots.give_back()

    def status(self) -> PoolStatus:
        """Return counters for the node's metrics page."""
        losses = dict(self.losses.counts)
        return PoolStatus(len(self._open), self._slots.waiting, self._restarts, self._details(), losses)

    def _details(self) -> dict[str, Any]:
        return {"replays": self.replays}

    async def close(self) -> None:
        """End all episodes and lines. May be called twice."""
        self._closing = True
        self.losses.close()
        self._slots.close()
        await self._close_lines()
        for environment in list(self._open):
            await environment.close()
