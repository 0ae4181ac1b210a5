"""An episode that a program plays: the node gives it a key, records the sampled tokens, and grades the episode."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

from agent_environments.guarded_environment import GuardedEnvironment
from agent_environments.program_protocol import Connection, Ended, ProgramEnvironment
from loop_formats.collection_request import CollectionRequest
from loop_formats.ids import segment_id
from loop_formats.rollout import REQUEST_REFUSED
from rollout_server.collecting.attempt import Attempt
from rollout_server.collecting.collector import EpisodeKey
from rollout_server.collecting.policy_client import EpisodeFailed
from rollout_server.collecting.policy_sampler import EpisodeServices, PolicySampler
from rollout_server.endpoint.session import ServedWorld, Session
from rollout_server.endpoint.sessions import Sessions
from rollout_server.inference.command import BASE_MODEL_NAME

SHOWN_OUTPUT = 600
"""Most characters of a program's output in an error."""
TURN_LIMIT_GRACE_S = 20.0
"""Seconds of its own in which a program must end after a turn was refused because it has had them all."""
logger = logging.getLogger(__name__)


class HarnessEpisode(Attempt):
    """A program's attempt at an episode. The attempt ends when the program ends, finishes it or is out of time.

    Raises (:meth:`run`):
        EpisodeFailed: also if the program ended before its first turn, since the policy cannot be judged then.
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

    async def _play(self, environment: GuardedEnvironment) -> str:
        harness = environment.inner
        if not isinstance(harness, ProgramEnvironment):
            raise TypeError("the environment of a harness episode is a harness")
        opening = await self._start_world(environment)
        limits = replace(self._limits, max_turns=self._request.max_turns(self.key.task_id))
        base = PolicySampler(self._request.sampling, self._request.limits, 0, BASE_MODEL_NAME, self._services)
        session = self._session = Session(
            self.rollout_id,
            self.seed,
            limits,
            self._agent_timeout,
            self._sampler,
            self._services.tokens,
            side_calls=harness.side_calls,
            base=base,
        )
        session.serve_world(ServedWorld(self.key.task_id, opening, harness, environment.step))
        self._key = self._sessions.open(session)
        pinned = self._request.policy_version if self._request.policy_mode == "pinned" else None
        connection = Connection(
            self._sessions.base_url, self._key, self.rollout_id, self._request.id, pinned, limits.max_turns
        )
        try:
            end_reason = await self._until_it_ends(session, harness, connection)
        finally:  # before it is graded: no call samples, and no step changes the world, meanwhile
            await self._sessions.close(self._key)
        if session.failure.done():
            raise session.failure.result()
        if not self.turns and session.refused == "context_limit":  # so would the next attempt's be
            raise EpisodeFailed(REQUEST_REFUSED, f"the program's first prompt does not fit: {self._why(session)}")
        if not self.turns:
            raise EpisodeFailed("environment_error", f"the harness ended without a turn: {self._why(session)}")
        return end_reason

    async def _until_it_ends(self, session: Session, harness: ProgramEnvironment, connection: Connection) -> str:
        end_reason = None
        running: asyncio.Task[Ended | None] | None = None
        try:
            async with self._agent_timeout.running():
                running = asyncio.create_task(harness.run(connection))
                await self._while_it_may_run(session, running, harness.grades_itself)
        except TimeoutError:
            end_reason = session.refused if session.refused == "turn_limit" else "deadline"
        finally:
            if running is not None and not running.done():
                running.cancel()
                await asyncio.wait([running])
        if not session.failure.done():  # a step that is cut leaves the world in a state that no agent can leave it in
            await session.steps_ended()
        ended = None if running is None or running.cancelled() else running.result()
        if ended is not None:
            self._notes["exit_status"] = ended.status
            if ended.status != 0 or not self.turns:
                self._notes["output"] = ended.output
                logger.info("%s: the harness ended with %s: %s", self.rollout_id, ended.status, ended.output[-300:])
        return end_reason or session.refused or "completed"

    @staticmethod
    async def _while_it_may_run(session: Session, running: asyncio.Task[Ended | None], grades_itself: bool) -> None:
        """Wait until the program ends, the attempt fails, or the program runs too long after its last turn."""
        out_of_turns = asyncio.create_task(session.out_of_turns())
        try:
            waits: list[asyncio.Future[Any]] = [running, session.failure, out_of_turns]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if out_of_turns.done():
                grace = None if grades_itself else TURN_LIMIT_GRACE_S
                await asyncio.wait(waits[:2], timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        finally:
            out_of_turns.cancel()

    def _why(self, session: Session) -> str:
        """Return the refusals, exit status and output of a program that never got a turn."""
        refused = [f"it was refused: {of['status']} {of['said']}" for of in session.notes()["refusals"]]
        status = [f"exit status {self._notes['exit_status']}"] if "exit_status" in self._notes else []
        printed = [f"it printed {self._notes['output'][-SHOWN_OUTPUT:]!r}"] if self._notes.get("output") else []
        return "; ".join([*status, *refused[:3], *printed])

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
