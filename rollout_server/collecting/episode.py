"""An episode: start a world, let the policy client and the environment take turns until it ends, grade, close.

A branch first replays, in its new world, the actions of the rollout that it continues. If the history grows too long,
``limits.compaction`` decides how a new sequence begins.

This is the protocol of training, of a checkpoint's evaluation and of an endpoint's: only the policy client
differs. Limits and end reasons are here; world, deadline, grade and record are those of every
:class:`~rollout_server.collecting.attempt.Attempt`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from typing import Any

from agent_environments.guarded_environment import GuardedEnvironment
from agent_environments.protocol import Environment, EnvironmentPool, EnvironmentTimeout, Message, StepResult
from loop_formats.branch import BranchStart, Exchange
from loop_formats.collection_request import CollectionRequest
from loop_formats.ids import segment_id
from loop_formats.rollout import Turn
from loop_plumbing.agent_timeout import AgentTimeout
from rollout_server.collecting.attempt import Attempt, derive_seed
from rollout_server.collecting.collector import EpisodeKey
from rollout_server.collecting.policy_client import BranchRefused, ContextFull, EpisodeFailed, PolicyClient, PolicyTurn

SHOWN_CHARACTERS = 60
CUT_IN_THINKING = "Your turn ended before your thinking did, so there is no answer in it. Think less, then answer."
"""The observation after such a turn. The environment does not get the turn: there is nothing in it to act on."""


@dataclass(frozen=True)
class _NotedTurn:
    """A turn, the number of its sequence, and the history that contains the turn."""

    sequence: int
    history: list[dict[str, str]]
    turn: Turn


class Episode(Attempt):
    """An attempt in which a policy client and an environment take turns.

    Args: all arguments of :class:`Attempt`, and
        policy_client: the agent.
        start: the point of a stored rollout from which the episode continues; None begins at the task's opening.
    """

    def __init__(
        self,
        key: EpisodeKey,
        draw: int,
        request: CollectionRequest,
        pool: EnvironmentPool,
        policy_client: PolicyClient,
        on_phase: Callable[[str, float], None] = lambda phase, seconds: None,
        start: BranchStart | None = None,
    ):
        # The origin is part of a branch's seed, so that it never repeats the draws of that rollout itself.
        origin = () if start is None else (start.origin.rollout_id, start.origin.turns)
        super().__init__(key, draw, request, pool, on_phase, origin)
        self._start = start
        self._turns_before = 0 if start is None else start.origin.turns
        self._policy_client = policy_client
        self._turns: list[_NotedTurn] = []
        self._opening: Sequence[Message] = ()
        self._before = 0
        """Messages of the history that stand before its first turn."""
        self._messages: list[dict[str, str]] = []
        """The history; where it is shortened, another one takes its place."""
        self._answered = 0.0

    @property
    def sampled_tokens(self) -> int:
        return self._policy_client.sampled_tokens

    @property
    def turns(self) -> int:
        return len(self._turns)

    async def _play(self, environment: GuardedEnvironment) -> str:
        opening = await self._start_world(environment)
        # Without a turn there is nothing to judge the agent by: the attempt has failed, it is not a short episode.
        try:
            return await self._converse(environment, opening)
        except ContextFull as error:
            if not self._turns:
                raise EpisodeFailed("environment_error", str(error)) from error
            return "context_limit"

    async def _converse(self, environment: Environment, opening: Sequence[Message]) -> str:
        self._answered, self._opening = time.monotonic(), opening
        replayed: list[Message] = []
        if self._start is not None:
            replayed = await self._replay(environment, opening, self._start)
            self._answered = time.monotonic()
        self._begin(opening, replayed)
        while True:
            spoken = await self._speak()
            step_began = time.monotonic()
            try:
                async with self._agent_timeout.running():
                    result = await self._step(environment, spoken)
            except (TimeoutError, EnvironmentTimeout):
                self._note_turn(spoken, time.monotonic() - step_began, failed=True)
                return "deadline"
            self._answered = time.monotonic()
            self._note_turn(spoken, self._answered - step_began, result.failed, result.reward)
            self._messages.append({"role": "user", "content": result.observation})
            if result.done:
                return "completed"
            if self._turns_left == 0:
                return "turn_limit"
            await self._hear(result.observation)

    def _begin(self, opening: Sequence[Message], after: Sequence[Message]) -> None:
        """Begin the first or a further sequence. Raises ContextFull if the messages of this sequence are too long."""
        self._policy_client.begin(self.rollout_id, opening, after)
        self._before, self._messages = len(opening), [asdict(message) for message in (*opening, *after)]

    @property
    def _turns_left(self) -> int:
        return self._request.max_turns(self.key.task_id) - self._turns_before - len(self._turns)

    async def _speak(self) -> PolicyTurn:
        """Return the agent's next turn, and add it to the messages."""
        spoken = await self._policy_client.speak(derive_seed(self.seed, self._turns_before + len(self._turns)))
        self._on_phase("node", time.monotonic() - self._answered - spoken.turn.sampling_seconds)
        thought = {"reasoning": spoken.reasoning} if spoken.reasoning else {}
        self._messages.append({"role": "assistant", "content": spoken.text, **thought})
        return spoken

    async def _hear(self, observation: str) -> None:
        """Give the newest observation to the policy client; if the history is too long, begin a new sequence.

        Raises:
            ContextFull: no history that ``limits.compaction`` allows is short enough.
        """
        try:
            return self._policy_client.hear(observation)
        except ContextFull:
            if self._limits.compaction is None:
                raise
        from rollout_server.collecting.compaction import History, shortened, summarised  # few runs need it

        texts = [message["content"] for message in self._messages]
        exchanges = [Exchange(*texts[place : place + 2]) for place in range(self._before, len(texts), 2)]
        history = History([Message(**message) for message in self._messages[: self._before]], exchanges)  # type: ignore[arg-type]
        # A summary of nothing, or that no turn would follow, is not worth a turn.
        if self._limits.compaction == "summary" and len(exchanges) > 1 and self._turns_left > 1:
            candidates = summarised(self._opening, history, await self._summarise())
        else:
            candidates = shortened(history)
        for shorter in candidates:
            with suppress(ContextFull):
                return self._begin(shorter.opening, shorter.after)
        raise ContextFull(f"no shorter history fits max_context {self._limits.max_context}")

    async def _summarise(self) -> str:
        """Return the agent's summary of the history, without the newest observation, which may not fit."""
        from rollout_server.collecting.compaction import SUMMARY_REQUEST

        self._policy_client.ask(SUMMARY_REQUEST)
        self._messages[-1] = {"role": "user", "content": SUMMARY_REQUEST}
        spoken = await self._speak()
        self._note_turn(spoken, 0.0, failed=False, summary=True)
        self._answered = time.monotonic()
        return spoken.text

    @staticmethod
    async def _step(environment: Environment, spoken: PolicyTurn) -> StepResult:
        if spoken.turn.cut_in_thinking:
            return StepResult(CUT_IN_THINKING, done=False, failed=True, empty_action=True)
        return await environment.step(spoken.text)

    async def _replay(self, environment: Environment, opening: Sequence[Message], start: BranchStart) -> list[Message]:
        """Replay stored turns until the world has the state of the branch's point. Return the messages of these turns.

        Raises:
            BranchRefused: the world's answer differs from the stored answer, or takes longer than an action may.
        """
        if list(opening) != start.branch.opening:
            raise BranchRefused(f"the opening differs from that of {start.branch.rollout_id}")
        began, messages = time.monotonic(), []
        replay_timeout = AgentTimeout(self._limits.episode_deadline_s)  # as the agent of these turns had it
        try:
            for turn, exchange in enumerate(start.exchanges):
                messages += [Message("assistant", exchange.action), Message("user", exchange.observation)]
                if exchange.observation == CUT_IN_THINKING and not exchange.action:
                    continue
                try:
                    async with replay_timeout.running():
                        result = await environment.step(exchange.action)
                except EnvironmentTimeout as error:
                    rollout_id = start.branch.rollout_id
                    raise BranchRefused(f"turn {turn} of {rollout_id} now takes too long: {error}") from error
                if result.done or result.observation != exchange.observation:
                    raise BranchRefused(_difference(start.branch.rollout_id, turn, exchange.observation, result))
        except TimeoutError:
            raise EpisodeFailed("environment_timeout", "the turns were not replayed before the deadline") from None
        finally:
            self._on_phase("environment", time.monotonic() - began)
        return messages

    def _note_turn(
        self,
        spoken: PolicyTurn,
        environment_seconds: float,
        failed: bool,
        reward: float | None = None,
        summary: bool = False,
    ) -> None:
        turn = replace(
            spoken.turn,
            environment_seconds=environment_seconds,
            failed=failed,
            message=len(self._messages) - 1,
            reward=reward,
            summary=summary,
        )
        self._turns.append(_NotedTurn(spoken.sequence, self._messages, turn))
        self._on_phase("environment", environment_seconds)

    def _sequences(self) -> list[dict[str, Any]]:
        origin = self._start.origin if self._start is not None else None
        records = self._policy_client.record()
        fields: list[dict[str, Any]] = []
        before = self._turns[0].history
        for number, record in enumerate(records):
            noted_turns = [each for each in self._turns if each.sequence == number]
            turns, history = [each.turn for each in noted_turns], noted_turns[0].history
            own = {turn.message for turn in turns}
            # Up to the answer to its last turn; thoughts in turns of other sequences are not in this one's ids.
            messages = [
                message if place in own else {key: text for key, text in message.items() if key != "reasoning"}
                for place, message in enumerate(history[: turns[-1].message + 2])
            ]
            compaction = {} if history is before else {"compaction": self._limits.compaction}
            before = history
            fields.append(
                {
                    **vars(record),
                    "extra": {**record.extra, **compaction},
                    "turns": turns,
                    "messages": messages,
                    "branch_of": origin,
                    "rollout_id": segment_id(self.rollout_id, number),
                    "episode_id": self.rollout_id,
                    "segment": number,
                    "segments": len(records),
                }
            )
        return fields

    async def _let_go(self) -> None:
        self._policy_client.close()


def _difference(rollout_id: str, turn: int, recorded: str, result: StepResult) -> str:
    """Return one line that says how the world's answer differs from the stored answer."""
    if result.observation == recorded:
        return f"turn {turn} of {rollout_id} now ends the episode"
    same = takewhile(lambda pair: pair[0] == pair[1], zip(recorded, result.observation, strict=False))
    at = sum(1 for _ in same)
    was, now = (repr(text[at : at + SHOWN_CHARACTERS]) for text in (recorded, result.observation))
    return f"turn {turn} of {rollout_id} is answered otherwise from character {at} on: {now}, recorded {was}"
