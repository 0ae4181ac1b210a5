"""An episode that somebody's own program plays: the node gives it a key, records what it samples, and grades."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

from agent_environments.no_voiding import NoVoiding
from agent_environments.program_protocol import Connection, Ended, ProgramEnvironment
from loop_formats.collection_request import CollectionRequest
from loop_formats.ids import segment_id
from rollout_server.collecting.attempt import Attempt
from rollout_server.collecting.collector import EpisodeKey
from rollout_server.collecting.policy_sampler import EpisodeServices, PolicySampler
from rollout_server.collecting.speaker import EpisodeFailed
from rollout_server.endpoint.session import Session, World
from rollout_server.endpoint.sessions import Sessions

SHOWN_OUTPUT = 600
"""Most characters of a program's output in an error."""
logger = logging.getLogger(__name__)


class HarnessEpisode(Attempt):
    """One attempt of a program. It ends when the program does, or says so, or when its own time is used up.

    Raises (:meth:`run`):
        EpisodeFailed: also for a program that ended before its first turn: there is nothing to judge the policy by.
    """

    def __init__(
        self,
        key: EpisodeKey,
        draw: int,
        request: CollectionRequest,
        pinned_model: str | None,
        services: EpisodeServices,
        sessions: Sessions,
    ):
        super().__init__(key, draw, request, services.pool, services.metrics.phase)
        self._services = services
        self._sampler = PolicySampler(request.sampling, request.limits, request.policy_version, pinned_model, services)
        self._sessions = sessions
        self._session: Session | None = None
        self._key = ""
        self._notes: dict[str, Any] = {}

    @property
    def sampled_tokens(self) -> int:
        return 0 if self._session is None else self._session.sampled_tokens

    @property
    def turns(self) -> int:
        return 0 if self._session is None else self._session.turns

    async def _play(self, environment: NoVoiding) -> str:
        harness = environment.inner
        if not isinstance(harness, ProgramEnvironment):
            raise TypeError("the environment of a harness episode is a harness")
        opening = await self._start_world(environment)
        limits = replace(self._limits, max_turns=self._request.max_turns(self.key.task_id))
        session = self._session = Session(
            self.rollout_id, self.seed, limits, self._own_time, self._sampler, self._services.tokens
        )
        session.serve_world(World(self.key.task_id, opening, harness, environment.step))
        self._key = self._sessions.open(session)
        pinned = self._request.policy_version if self._request.policy_mode == "pinned" else None
        connection = Connection(
            self._sessions.base_url, self._key, self.rollout_id, self._request.id, pinned, limits.max_turns
        )
        try:
            end_reason = await self._until_it_ends(session, harness, connection)
        finally:  # nothing is sampled, and nothing changes the world, while it is graded
            await self._sessions.close(self._key)
        if session.failure.done():
            raise session.failure.result()
        if not self.turns:
            raise EpisodeFailed("environment_error", f"the harness ended without a turn: {self._why(session)}")
        return end_reason

    async def _until_it_ends(self, session: Session, harness: ProgramEnvironment, connection: Connection) -> str:
        running = asyncio.ensure_future(self._run_program(harness, connection))
        try:
            waits: list[asyncio.Future[Any]] = [running, session.failure]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                return "completed"  # it is not: the attempt has failed
            ended = running.result()
        except TimeoutError:
            self._notes["exit_status"] = None
            return "deadline"
        finally:
            if not running.done():
                running.cancel()
                await asyncio.wait([running])
        if ended is not None:
            self._notes["exit_status"] = ended.status
            if ended.status != 0:
                self._notes["output"] = ended.output
                logger.info("%s: the harness ended with %s: %s", self.rollout_id, ended.status, ended.output[-300:])
        return session.refused or "completed"

    def _why(self, session: Session) -> str:
        """What is known of a program that never had a turn."""
        refused = [f"it was refused: {of['status']} {of['said']}" for of in session.notes()["refusals"]]
        status = [f"exit status {self._notes['exit_status']}"] if "exit_status" in self._notes else []
        printed = [f"it printed {self._notes['output'][-SHOWN_OUTPUT:]!r}"] if self._notes.get("output") else []
        return "; ".join([*status, *refused[:3], *printed])

    async def _run_program(self, harness: ProgramEnvironment, connection: Connection) -> Ended | None:
        async with self._own_time.running():
            return await harness.run(connection)

    def _sequences(self) -> list[dict[str, Any]]:
        assert self._session is not None, "it was played"
        segments = self._session.segments()
        extra = {"harness": {**self._session.notes(), **self._notes}}
        return [
            {
                **vars(segment),
                "rollout_id": segment_id(self.rollout_id, number),
                "episode_id": self.rollout_id,
                "segment": number,
                "segments": len(segments),
                "extra": extra,
            }
            for number, segment in enumerate(segments)
        ]

    async def _let_go(self) -> None:
        await self._sessions.close(self._key)
        self._services.router.release(self.rollout_id)
