"""Worlds that break where a coin fell wrong, in a call and a way that are drawn, and attempts in each kind of them."""

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_environments import guarded_environment, lost_worlds
from agent_environments.counter import CounterEnvironment, CounterPool
from agent_environments.harness.pool import HarnessPool
from agent_environments.lost_worlds import Loss, WorldLost
from agent_environments.protocol import EnvironmentFault, Grade, Message, StepResult, UnknownTask
from agent_environments.remote.episode import RemotePool
from agent_environments.remote.line import LineStuck, RequestFailed, WorldLine
from agent_environments.tool_calls import ToolCall, render_tool_call, tools_section
from loop_formats.collection_request import CollectionRequest, Limits
from model_families.chat.messages import ChatMessage
from rollout_server.collecting.collector import EpisodeKey
from rollout_server.collecting.policy_sampler import EpisodeServices
from rollout_server.endpoint.harness_episode import HarnessEpisode
from rollout_server.endpoint.sessions import Sessions
from rollout_server.endpoint.wire import ApiError, Asked
from rollout_server.metrics import NodeMetrics
from support.adapter_support import word_spans
from support.random_turns import encoder
from support.scripted_policy import FakePolicy, cut_turn, play_episode
from support.void_kinds import MADE_PLAIN, MADE_PLAIN_RESULTS, REFUSED, REFUSED_RESULTS
from support.waiting import DEADLINE_S

TASK = "reach3_1"
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
TWO_CALLS = "\n".join(render_tool_call(ToolCall("add", {"n": n})) for n in (1, 2))
FORMATS = ["chatml", "qwen3-kept", "qwen3-stripped", "qwen3-off", "llama3"]
ERRORS = {
    "an error": lambda: AttributeError("no answer"),
    "an exit": lambda: SystemExit(3),
    "an interrupt": lambda: KeyboardInterrupt(),
    "an end of a generator": lambda: GeneratorExit(),
    "an end of an iteration": lambda: StopAsyncIteration(),
    "several": lambda: BaseExceptionGroup("several", [KeyboardInterrupt()]),
    "too deep": lambda: RecursionError("maximum recursion depth exceeded"),
    "a cancellation": lambda: asyncio.CancelledError(),
    "no such task": lambda: UnknownTask("wrong"),
    "an unnamed fault": lambda: EnvironmentFault("wrong"),
    "a late answer": lambda: TimeoutError("wrong"),
    "no memory": lambda: MemoryError(),
}
FINE = object()
GRADES, RESULTS = REFUSED | MADE_PLAIN, REFUSED_RESULTS | MADE_PLAIN_RESULTS
LINES = {
    "it says so": lambda: RequestFailed("a bug"),
    "no such task": lambda: RequestFailed("a bug", UnknownTask.reason),
    "it ends": lambda: WorldLost("it ended", Loss.ENDED),
    "it is killed": lambda: WorldLost("it was killed", Loss.KILLED),
    "it is stuck": lambda: LineStuck("it is stuck"),
    "an empty answer": dict,
    "a list": lambda: [1],
    "a grade without a number": lambda: {"reward": "x", "success": False, "observation": "seen", "done": True},
    "nothing of a type": lambda: {"reward": [], "requirements": 3, "observation": 5, "done": None, "failed": {}},
}


@dataclass(frozen=True)
class Fault:
    """What breaks where the coin fell wrong: in the call ``where``, in the way ``how``."""

    where: str
    how: str

    async def meet(self, where):
        if where != self.where:
            return FINE
        if self.how == "hang":
            await asyncio.Event().wait()
        if self.how == "a cancellation of its own task":
            asyncio.current_task().cancel()
            await asyncio.sleep(0)
        if self.how in ERRORS:
            raise ERRORS[self.how]()
        return {**GRADES, **RESULTS}.get(self.how, FINE)


class Breaks(CounterEnvironment):
    """Right if the coin fell on heads; knows nothing of a coin before its first step."""

    async def start(self, task_id):
        await super().start(task_id)
        system = f"Toss.\n\n{tools_section([ADD])}"
        return [Message("system", system), Message("user", "Go on and on.")]

    async def step(self, action):
        if "heads" in action or "tails" in action:
            self.heads = "heads" in action
        if not self.heads and (wrong := await self._pool.fault.meet("step")) is not FINE:
            return wrong
        return StepResult("seen " * 40, done="over" in action)

    async def grade(self):
        if not self.heads and (wrong := await self._pool.fault.meet("grade")) is not FINE:
            return wrong
        return Grade(float(self.heads), self.heads)

    async def close(self):
        await super().close()
        await self._pool.fault.meet("close")


class BreakingPool(CounterPool):
    fault = Fault("", "")

    async def acquire(self, episode_id):
        await super().acquire(episode_id)
        return Breaks(self)


class BreakingLine(WorldLine):
    alive = True

    def __init__(self, pool):
        super().__init__(pool.losses)
        self._pool, self._heads = pool, None

    async def _round_trip(self, request):
        command = request.get("command", "")
        if "heads" in command or "tails" in command:
            self._heads = "heads" in command
        if request["op"] == self._pool.fault.where and not self._heads:
            wrong = LINES[self._pool.fault.how]()
            if isinstance(wrong, Exception):
                raise wrong
            return wrong
        step = {"observation": "seen " * 40, "done": "over" in command, "failed": False}
        grade = {"reward": float(bool(self._heads)), "success": bool(self._heads)}
        return {"step": step, "grade": grade}.get(request["op"], {"observation": "opening"})

    def kill(self):
        self.alive = False


class BreakingRemote(RemotePool):
    def __init__(self, fault):
        super().__init__("broken", word_spans, 4, 1000, 10.0, 100.0)
        self.fault = fault
        self._know({"train": [TASK]})

    async def lease(self):
        return BreakingLine(self)

    async def give_back(self, line):
        pass

    def opening(self, answer):
        return [Message("system", f"Toss.\n\n{tools_section([ADD])}"), Message("user", answer["observation"])]

    def command(self, message):
        return message


class Policy(FakePolicy):
    """Tosses in its first turn, then calls tools, two at once, and then is over."""

    def __init__(self, tokens, coin, cut):
        self._tokens, self._encode, self._coin, self._cut, self._turns = tokens, encoder(tokens), coin, cut, 0

    async def generate(self, *, token_ids, max_tokens, stop_token_ids, **_):
        self._turns += 1
        text = self._coin if self._turns == 1 else f"{TWO_CALLS}{' over' * (self._turns > 9)}"
        thinks = "<think>" * (bool(self._tokens.thinking_ends) and self._tokens.thinking != "off")
        turn = [*self._encode(thinks + "</think>" * (bool(thinks) and not self._cut) + text), self._tokens.turn_end]
        return cut_turn(turn, stop_token_ids, max_tokens)


async def program(pool, sessions, answers):
    """An agent elsewhere: asks for turns, acts in the world with each, and ends however that goes."""
    offer = await pool.take(None, DEADLINE_S)
    session = sessions.find(offer.connection.api_key)
    said = [ChatMessage("user", "Toss.")]
    try:
        for number in range(3):
            answer = await session.complete(Asked(tuple(said)), str(number), False, lambda: True)
            said += [answer.choices[0].spoken, ChatMessage("user", "Go on.")]
            if answers:
                await session.step(said[-2].content + " over" * (number == 2))
    except ApiError:
        pass
    session.world.harness.finish(None, {"rewards": {"a part": 1.0}})


async def attempt(kind, tokens, fault, coin, cut, compaction, monkeypatch, served=None):
    """The rollouts of one attempt; ``served(kind, pool)`` opens a client of the pool for a kind that is not here."""
    limits = Limits(max_turns=1 if cut else 12, max_tokens_per_turn=200, max_context=700, compaction=compaction)
    request = CollectionRequest("c", [TASK], 1, 0, limits=limits)
    pool = BreakingRemote(fault) if kind == "remote" else BreakingPool(tokens.spans)
    pool.fault = fault
    policy = Policy(tokens, coin, cut)
    if kind in ("own", "remote"):
        return await play_episode(request, pool, tokens, policy)
    if kind == "harness":
        name = f"{__name__}:BreakingPool"
        monkeypatch.setattr(BreakingPool, "fault", fault)
        harness, sessions = HarnessPool(tokens.spans, world={"name": name}), Sessions()
        services = EpisodeServices(harness, tokens, policy, policy, NodeMetrics())
        episode = HarnessEpisode(EpisodeKey(TASK, 0, 0), 0, request, "p", services, sessions)
        playing = asyncio.create_task(program(harness, sessions, answers=not cut))
        try:
            return await episode.run()
        finally:
            await playing
    async with served(kind, pool) as there:
        return await play_episode(request, there, tokens, policy)


def check_coins(kind, formats, served=None):
    """Whatever breaks where the coin fell wrong, each attempt ends in a grade: heads are worth 1 and tails 0."""
    of_a_class = st.one_of(
        st.builds(Fault, st.sampled_from(["step", "grade", "close"]), st.sampled_from(sorted(ERRORS))),
        st.builds(Fault, st.just("step"), st.sampled_from(sorted(RESULTS))),
        st.builds(Fault, st.just("grade"), st.sampled_from(sorted(GRADES))),
        st.builds(Fault, st.just("grade"), st.just("hang")),
    )
    of_a_line = st.builds(Fault, st.sampled_from(["step", "grade", "close"]), st.sampled_from(sorted(LINES)))

    @settings(max_examples=25, deadline=None)
    @given(
        fault=of_a_line if kind == "remote" else of_a_class,
        name=st.sampled_from(FORMATS),
        compaction=st.sampled_from([None] if kind == "harness" else [None, "drop", "summary"]),
        cut=st.booleans(),
        coins=st.lists(st.sampled_from(["heads", "tails"]), min_size=1, max_size=2, unique=True),
    )
    def tried(fault, name, compaction, cut, coins):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(lost_worlds, "PAUSE_S", 0.0)
            patched.setattr(guarded_environment, "GRADE_DEADLINE_S", 0.05 if fault.how == "hang" else 600.0)
            for coin in coins:
                played = attempt(kind, formats[name], fault, coin, cut, compaction, patched, served)
                rollouts = asyncio.run(played)
                unseen = cut and (kind == "harness" or formats[name].thinking in ("kept", "stripped"))
                right = coin == "heads" and not unseen
                assert {rollout.reward for rollout in rollouts} == {float(right)}
                assert {rollout.success for rollout in rollouts} == {right}

    tried()
