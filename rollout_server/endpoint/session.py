"""The calls of an episode: from a request to ids, from sampled ids to an answer, within the episode's limits.

A request cannot change the sampling: its temperature and penalties are recorded and not applied, because training needs
tokens as the policy itself would sample them. So is a response format: to enforce it would be to sample from another
distribution. ``max_tokens`` and ``stop`` only end a turn earlier.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from agent_environments.program_protocol import Figures, ProgramEnvironment, SideCalls
from agent_environments.protocol import EnvironmentFault, EnvironmentTimeout, Message, StepResult
from loop_formats.collection_request import Limits, Sampling
from loop_formats.rollout import REQUEST_REFUSED
from loop_formats.schema import ConfigError, from_mapping
from loop_plumbing.agent_timeout import AgentTimeout
from model_families.chat.format import ChatFormat, ReadTurn
from model_families.chat.messages import Tools, as_texts, spoken_message
from rollout_server.collecting.attempt import derive_seed
from rollout_server.collecting.policy_client import EpisodeFailed
from rollout_server.collecting.policy_sampler import PolicySampler
from rollout_server.endpoint.calls import Calls
from rollout_server.endpoint.conversations import Conversations, PromptTokens, Segment
from rollout_server.endpoint.turn_end import before_stop, cut_at_stop, finish_reason
from rollout_server.endpoint.wire import (
    CONTEXT_EXCEEDED,
    RETRY_AFTER_S,
    Answer,
    ApiError,
    Asked,
    Choice,
    Recalled,
    episode_over,
)
from rollout_server.inference.router import Generation

NONCE_BYTES = 6
SIDE_CALLS_PER_TURN = 4
"""Most calls aside for each turn that an episode may have: their time is not the agent's, so nothing else ends them."""
COUNTED_BYTES = 1 << 20
"""Most bytes of a first request whose tokens are counted even if they are too many."""
MOST_REFUSALS, REFUSAL_CHARACTERS = 8, 300
"""Most different refusals that the record holds, and most characters of each: it holds them once a sequence."""
T = TypeVar("T")


@dataclass(frozen=True)
class ServedWorld:
    """The part of an episode's world that an outside agent may use. ``opening`` is the first messages, ``act`` the
    environment's step with the node's guards, and ``harness`` ends the episode."""

    task_id: str
    opening: list[Message]
    harness: ProgramEnvironment
    act: Callable[[str], Awaitable[StepResult]]


class Session:
    """The state that belongs to one key.

    Args:
        seed: the episode's seed; call n is sampled with the seed of turn n, as in the node's own loop.
        agent_timeout: the time limit of the episode's agent; the clock stops during calls and runs during steps.
        record: keep the served tokens. If False, every call is encoded anew and nothing of it is kept.

    Attributes:
        calls: the calls under way, and the answers that retries may ask for.
        refused: why the last call was refused, one of :data:`loop_formats.rollout.END_REASONS`; None if it was not
            refused.
        failure: a future that is done once the attempt cannot go on.
    """

    def __init__(
        self,
        episode_id: str,
        seed: int,
        limits: Limits,
        agent_timeout: AgentTimeout,
        sampler: PolicySampler,
        tokens: ChatFormat,
        record: bool = True,
        side_calls: Sequence[SideCalls] = (),
        base: PolicySampler | None = None,
    ):
        """Open a session. Calls that match ``side_calls`` are answered (some rules: by ``base``) but not recorded."""
        self.episode_id = episode_id
        self.calls = Calls(keep_answers=record)
        self.refused: str | None = None
        self.failure: asyncio.Future[EpisodeFailed] = asyncio.get_running_loop().create_future()
        self._seed = seed
        self._limits = limits
        self._agent_timeout = agent_timeout
        self._sampler = sampler
        self._tokens = tokens
        self._conversations = Conversations(tokens)
        self._nonce = secrets.token_hex(NONCE_BYTES)
        """The beginning of the ids of turns and calls: ids of another session are unknown here."""
        self._side_calls, self._base = side_calls, base
        self._side_nonce, self._side_begun = secrets.token_hex(NONCE_BYTES), 0
        self._answered: dict[str, tuple[int, str | None, Tools]] = {}
        """Turn id -> the turn's place among the conversations, and the instructions and tools of its call."""
        self._record = record
        self._begun = 0
        self.sampled_tokens = 0
        self._not_applied: dict[str, Any] = {}
        self._refusals: Counter[tuple[int, str]] = Counter()
        self._counts: Counter[str] = Counter()
        self._world: ServedWorld | None = None
        self._stepping = asyncio.Lock()
        self._done = False
        self._out_of_turns = asyncio.Event()
        self._first_counted = False
        self._unread: str | None = None

    @property
    def turns(self) -> int:
        return self._conversations.turns

    @property
    def world(self) -> ServedWorld:
        """The episode's world. Raises ApiError if the session has no world."""
        if self._world is None:
            raise ApiError(404, "no_episode", "this key belongs to no episode")
        return self._world

    def serve_world(self, world: ServedWorld) -> None:
        """Let the agent also act in a world."""
        self._world = world

    async def step(self, action: str) -> StepResult:
        """Act in the episode's world, one step at a time. A step that ends the episode also ends the session's calls.

        Raises:
            ApiError: the session has no world, the episode is over, or the world is lost.
        """
        world = self.world
        if not world.harness.has_world:
            raise ApiError(404, "no_world", "this episode has no world of the node's; the harness brings its own tools")
        return await self.calls.outcome(self.calls.begin(self._step(world, action)))

    async def _step(self, world: ServedWorld, action: str) -> StepResult:
        if self._tokens.overfill([action], self._limits.max_context):  # a world may keep all actions
            raise ApiError(400, "invalid_request", f"the action has more than {self._limits.max_context} tokens")
        async with self._stepping:
            self._check_going_on()  # the step before may have ended the episode
            if not self.turns:
                # An agent could undo a step before the first turn by leaving: the attempt is repeated then.
                raise ApiError(400, "no_turn", "the policy has not spoken yet: ask it for a turn before you act")
            try:
                async with self._agent_timeout.running():
                    result = await world.act(action)
            except (TimeoutError, EnvironmentTimeout) as error:
                self._done, self.refused = True, "deadline"
                world.harness.finish(None)
                raise episode_over(str(error) or "the episode's deadline has passed") from error
            except EnvironmentFault as error:
                if not self.failure.done():
                    self.failure.set_result(EpisodeFailed(error.reason, str(error)))
                raise ApiError(503, error.reason, str(error)) from error
            self._done = self._done or result.done
            self._unread = result.observation
            return result

    def finish(self, reward: float | None, figures: Figures) -> None:
        """Finish the episode for its agent, and record ``figures``. Raises ApiError if the session has no episode."""
        self.world.harness.finish(reward, figures)
        self._done = True

    def _check_going_on(self) -> None:
        if self._done:
            raise episode_over("the episode has ended")

    async def out_of_turns(self) -> None:
        """Return once a turn was refused because all turns are used up, and no call is under way."""
        await self._out_of_turns.wait()
        await self.calls.all_ended()

    def segments(self) -> list[Segment]:
        """Return the served sequences. An observation after the last call ends the messages of the last sequence."""
        segments = self._conversations.segments()
        if segments and self._unread is not None:
            segments[-1].messages.append({"role": "user", "content": self._unread})
        return segments

    def notes(self) -> dict[str, Any]:
        """Return notes for the record: the last value of each setting that a client asked for in vain, counts of calls,
        and the messages of refusals."""
        edited = {f"edited.{kind}": turns for kind, turns in self._conversations.edits.items()}
        refusals = [{"status": of[0], "said": of[1], "times": times} for of, times in self._refusals.items()]
        calls = {**(self._counts + Counter(repeated=self.calls.repeated)), **edited}
        return {"calls": calls, "not_applied": self._not_applied, "refusals": refusals}

    def note_refusal(self, error: ApiError) -> None:
        """Keep the message of a refused request for the record."""
        self._counts[f"refused.{error.status}"] += 1
        refusal = error.status, str(error)[:REFUSAL_CHARACTERS]
        if refusal in self._refusals or len(self._refusals) < MOST_REFUSALS:
            self._refusals[refusal] += 1

    async def complete(self, asked: Asked, identity: str, retried: bool, listens: Callable[[], bool]) -> Answer:
        """Return the answer to a call, or the earlier answer to the same call (:meth:`.calls.Calls.answered`).

        Raises:
            ApiError: the refusal to send to the client.
        """
        return await self.calls.answered(identity, retried, listens, lambda: self._answer(asked))

    async def steps_ended(self) -> None:
        """Refuse later steps, and return once the present step has ended or the agent's time is used up."""
        self._done = True
        async with self._stepping:
            pass

    async def close(self) -> None:
        """End the calls and steps that are under way, and refuse later ones."""
        self._done = True
        await self.calls.close()

    async def _answer(self, asked: Asked) -> Answer:
        self._check_going_on()
        side = self._side_rule(asked) if self._record else None
        if side is None:
            self._check_turns_left(asked.choices)
        sampling = None if self._record else self._named_sampling(asked)
        try:
            prompt = await self._prompt(asked)
        except ApiError as error:
            if side is not None:
                self._side_begun += asked.choices
            elif error.code == CONTEXT_EXCEEDED:
                self.refused = "context_limit"
            raise
        if side is not None and prompt.goes_on_from is None:
            return await self._answer_aside(asked, side, prompt)
        self._check_turns_left(asked.choices)  # other calls may have begun meanwhile
        numbers = range(self._begun, self._begun + asked.choices)
        self._begun = numbers.stop
        seeds = [
            derive_seed(self._seed, number) if self._record else self._named_seed(asked, number) for number in numbers
        ]
        try:
            drawn = await self._drawn(self._sampler, asked, prompt, seeds, sampling)
        except EpisodeFailed as error:
            if not self.failure.done():
                self.failure.set_result(error)
            if error.reason == REQUEST_REFUSED:
                raise ApiError(400, "invalid_request", str(error)) from error
            raise ApiError(503, error.reason, str(error), RETRY_AFTER_S) from error
        self.refused = self._unread = None
        named = [f"{self._nonce}_{number}" for number in numbers]
        answer = self._compose(asked, prompt, named, drawn, self._record)
        if self._record:
            self._note(asked)
        self.sampled_tokens += answer.completion_tokens
        return answer

    def _side_rule(self, asked: Asked) -> SideCalls | None:
        """Return the rule that makes a call a side call, which is not part of the task; None for a call of the task."""
        if not self._side_calls or asked.text is not None:
            return None
        system = "\n".join(message.content for message in asked.messages if message.role == "system")
        tools = {tool["function"]["name"] for tool in asked.tools}
        return next((rule for rule in self._side_calls if rule.hold(asked.model, system, tools)), None)

    async def _answer_aside(self, asked: Asked, rule: SideCalls, prompt: PromptTokens) -> Answer:
        """Answer a side call: it is not a turn and not trained on, and its failure does not end the attempt."""
        numbers = range(self._side_begun, self._side_begun + asked.choices)
        if numbers.stop > SIDE_CALLS_PER_TURN * self._limits.max_turns:
            raise ApiError(400, "too_many_side_calls", f"the episode has had {self._side_begun} calls aside")
        self._side_begun = numbers.stop
        sampler = self._base if rule.by_base and self._base is not None else self._sampler
        sampling = self._named_sampling(asked)
        seeds = [self._named_seed(asked, number, "aside") for number in numbers]
        try:
            drawn = await self._drawn(sampler, asked, prompt, seeds, sampling)
        except EpisodeFailed as error:
            raise ApiError(503, error.reason, str(error), RETRY_AFTER_S) from error
        answer = self._compose(asked, prompt, [f"{self._side_nonce}_{number}" for number in numbers], drawn, keep=False)
        self._counts["aside"] += asked.choices
        self._counts["aside_tokens"] += answer.completion_tokens
        return answer

    async def _drawn(
        self,
        sampler: PolicySampler,
        asked: Asked,
        prompt: PromptTokens,
        seeds: Sequence[int],
        sampling: Sampling | None,
    ) -> list[tuple[int, Generation]]:
        """Sample all choices. Return the policy version and the tokens of each choice."""
        limit, stops = asked.token_limit, asked.stops
        with self._agent_timeout.paused():
            return await _together(
                sampler.sample(self.episode_id, prompt.token_ids, seed, limit, sampling, stops) for seed in seeds
            )

    def _compose(
        self,
        asked: Asked,
        prompt: PromptTokens,
        turn_ids: Sequence[str],
        drawn: Sequence[tuple[int, Generation]],
        keep: bool,
    ) -> Answer:
        """Return the answer with the sampled choices, and record the choices if ``keep``."""
        choices = [
            self._choice(asked, prompt, turn_id, version, generation, keep)
            for turn_id, (version, generation) in zip(turn_ids, drawn, strict=True)
        ]
        return Answer(
            model=asked.model,
            choices=tuple(choice for choice, _ in choices),
            prompt_tokens=len(prompt.token_ids),
            completion_tokens=sum(tokens for _, tokens in choices),
            cached_tokens=drawn[0][1].cached_tokens,
        )

    def _choice(
        self, asked: Asked, prompt: PromptTokens, turn_id: str, version: int, generation: Generation, keep: bool
    ) -> tuple[Choice, int]:
        """Read a generation as a turn; record it if ``keep``. Return the client's choice and its token count."""
        generation, stopped_by = cut_at_stop(self._tokens, generation, asked.stops)
        with_tools = bool(asked.tools) and not asked.compacts  # a summary is the whole text
        if asked.text is None:
            turn = self._tokens.read(prompt.token_ids, generation.token_ids, with_tools)
        else:
            turn = ReadTurn(self._tokens.decode(self._tokens.without_stop(generation.token_ids)))
        spoken = spoken_message(before_stop(turn.answer, asked.stops), with_tools, turn.reasoning)
        spoken = replace(spoken, call_ids=tuple(f"call_{turn_id}_{place}" for place in range(len(spoken.calls))))
        if keep:
            place = self._conversations.add(prompt, spoken, turn, version, generation, stopped_by)
            self._answered[turn_id] = place, asked.instructions, asked.tools
        choice = Choice(
            turn_id=turn_id,
            spoken=spoken,
            finish=finish_reason(spoken, generation),
            stopped_by=stopped_by,
            thinking_tokens=turn.thinking_tokens,
            tokens=self._token_logprobs(generation) if asked.logprobs else (),
        )
        return choice, len(generation.token_ids)

    def _token_logprobs(self, generation: Generation) -> tuple[tuple[str, float], ...]:
        token_ids = self._tokens.without_stop(generation.token_ids)
        return tuple(
            (self._tokens.decode([token]), logprob)
            for token, logprob in zip(token_ids, generation.logprobs, strict=False)
        )

    def recall(self, turn_id: str) -> Recalled | None:
        """Return the turn with this id; None if there is no such turn, or its prompt was plain text."""
        place, instructions, tools = self._answered.get(turn_id, (0, None, ()))
        messages = self._conversations.messages(place)
        if not messages:
            return None
        *before, spoken = messages[instructions is not None :]
        return Recalled(instructions, tuple(before), tools, spoken)

    def _named_seed(self, asked: Asked, number: int, *origin: str) -> int:
        """Return the seed of a choice that is not recorded: the call's own seed, if the call has one."""
        seed = asked.settings.get("seed")
        if type(seed) is not int or abs(seed) >= 2**63:
            return derive_seed(self._seed, number, *origin)
        return seed if asked.choices == 1 else derive_seed(seed, number)

    def _named_sampling(self, asked: Asked) -> Sampling:
        """Return the sampling settings of the call, completed with the settings of the key."""
        named = {name: asked.settings[name] for name in ("temperature", "top_p", "top_k") if name in asked.settings}
        try:
            return from_mapping(Sampling, {**asdict(self._sampler.sampling), **named})
        except ConfigError as error:
            raise ApiError(400, "invalid_request", str(error)) from error

    def _check_turns_left(self, turns: int) -> None:
        left = self._limits.max_turns - self._begun
        if left <= 0:
            self.refused = "turn_limit"
            self._out_of_turns.set()
            raise episode_over(f"the episode has had its {self._limits.max_turns} turns")
        if turns > left:
            raise ApiError(400, "invalid_request", f"n: {turns} choices are {turns} turns; the episode has {left} left")

    async def count(self, asked: Asked) -> int:
        """Return the number of tokens of a call's prompt. Raises ApiError if the prompt does not fit."""
        return len((await self.calls.outcome(self.calls.begin(self._prompt(asked)))).token_ids)

    async def _prompt(self, asked: Asked) -> PromptTokens:
        messages, tools, most = asked.messages, asked.tools, self._limits.max_context

        # A person has to know the length of the first, to give the program room; later ones are refused unencoded.
        to_count = not (self._begun or self._first_counted) and asked.size <= COUNTED_BYTES
        self._first_counted = True

        def encoded() -> PromptTokens | None:
            # Each of them has a token at least; to write them as text takes longer than to count them.
            if len(messages) + len(tools) + sum(len(message.calls) for message in messages) > most:
                return None
            texts = [text for _, text in as_texts(messages, tools)] if asked.text is None else [asked.text]
            if self._tokens.overfill(texts, most) and not to_count:
                return None
            if asked.text is not None:
                return self._conversations.text_prompt(asked.text)
            return self._conversations.prompt(messages, tools)

        try:
            prompt = await self.calls.beside(asked.size, encoded)
        except ValueError as error:  # the chat format has no form for it
            raise ApiError(400, "invalid_request", str(error)) from error
        if prompt is not None and not prompt.token_ids:  # vLLM would refuse it, which voids the attempt
            raise ApiError(400, "invalid_request", "the prompt holds no token")
        if prompt is None or len(prompt.token_ids) >= most:
            reason = f"This model's maximum context length is {most} tokens. However, your messages resulted in"
            count = f"more than {most}" if prompt is None else len(prompt.token_ids)
            raise ApiError(400, CONTEXT_EXCEEDED, f"{reason} {count} tokens.")
        return prompt

    def _note(self, asked: Asked) -> None:
        self._counts["answered"] += 1
        for name, value in asked.not_applied().items():
            self._counts[f"not_applied.{name}"] += 1
            self._not_applied[name] = value


async def _together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of all awaitables. The first failure cancels the others."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
