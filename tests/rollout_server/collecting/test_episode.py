"""The episode loop by itself: a scripted policy client, the counter environment, every end and failure."""

import asyncio
import json
from dataclasses import replace

import pytest

from agent_environments.counter import CounterEnvironment, CounterPool
from agent_environments.protocol import EnvironmentCrashed, EnvironmentTimeout
from loop_formats.collection_request import CollectionRequest, Limits
from loop_formats.rollout import Rollout, Turn
from loop_plumbing.agent_timeout import paused_agent_timeout
from rollout_server.collecting import attempt as attempt_module
from rollout_server.collecting.collector import EpisodeKey
from rollout_server.collecting.episode import Episode, derive_seed
from rollout_server.collecting.policy_client import ContextFull, EpisodeFailed, PolicyTurn, SpokenRecord
from support.waiting import pass_time

ADD, FINISH = "```python\nadd(3)\n```", "```python\nfinish()\n```"
TASK = "reach3_1"


class ScriptedPolicyClient:
    """Says its lines; an exception among them is raised. ``hears`` may refuse what it is told. Notes all calls."""

    def __init__(self, lines, hears=lambda observation: None):
        self.lines, self.hears = iter(lines), hears
        self.calls: list[tuple] = []
        self.turns = 0

    @property
    def sampled_tokens(self):
        return 2 * self.turns

    def begin(self, episode_id, opening, after=()):
        self.calls.append(("begin", episode_id, [message.role for message in (*opening, *after)]))

    async def speak(self, seed):
        self.calls.append(("speak", seed))
        line = next(self.lines)
        if isinstance(line, Exception):
            raise line
        if line is None:
            await asyncio.Event().wait()
        if callable(line):
            line = await line()
        start = 1 + 3 * self.turns
        self.turns += 1
        return PolicyTurn(line, Turn(start, start + 2, 7, "stop", "s0", 0.25, 0.0, 0, cached_tokens=4))

    def hear(self, observation):
        self.calls.append(("hear", observation))
        self.hears(observation)

    def record(self):
        mask = [False, *([True, True, False] * self.turns)]
        logprobs = [-0.5 * sampled for sampled in mask]
        return [SpokenRecord(list(range(len(mask))), mask, logprobs, {"who": "script"})]

    def close(self):
        self.calls.append(("close",))

    def called(self, name):
        return [call[1:] for call in self.calls if call[0] == name]


class Faults(CounterEnvironment):
    """``faults`` maps a method's name to what it raises, or to an awaitable function that it calls first."""

    def __init__(self, pool):
        super().__init__(pool)
        self.faults = pool.faults

    async def _meet(self, name):
        fault = self.faults.get(name)
        if isinstance(fault, Exception):
            raise fault
        if fault is not None:
            await fault()

    async def start(self, task_id):
        await self._meet("start")
        return await super().start(task_id)

    async def step(self, action):
        await self._meet("step")
        return await super().step(action)

    async def grade(self):
        await self._meet("grade")
        return await super().grade()

    async def close(self):
        await self._meet("close")
        await super().close()


class FaultyPool(CounterPool):
    def __init__(self, **faults):
        super().__init__(token_spans=lambda text: [(i, i + 1) for i in range(len(text))])
        self.faults = faults

    async def acquire(self, episode_id):
        await super().acquire(episode_id)
        return Faults(self)


MEETS = Faults._meet.__code__.co_firstlineno + 3
SPEAKS = ScriptedPolicyClient.speak.__code__.co_firstlineno + 4


async def cancels_the_task_that_runs_it():
    asyncio.current_task().cancel()
    await asyncio.sleep(0)


async def ends_as_a_closed_coroutine_does():
    raise GeneratorExit


async def cancelled_task_of_its_own():
    """Lets out a cancellation that is nobody's but its own."""
    task = asyncio.create_task(forever())
    await asyncio.sleep(0)
    task.cancel()
    await task


async def forever():
    await asyncio.Event().wait()


def request(**limits):
    values = {"max_turns": 4, "max_tokens_per_turn": 64, "max_context": 1000, "episode_deadline_s": 600.0, **limits}
    return CollectionRequest(
        id="c1", tasks=[TASK], rollouts_per_task=3, policy_version=7, seed=5, limits=Limits(**values)
    )


def make(policy_client, pool=None, attempt=0, draw=0, **limits):
    pool = pool or FaultyPool()
    phases: list[tuple[str, float]] = []
    key = EpisodeKey(TASK, 2, attempt)
    episode = Episode(key, draw, request(**limits), pool, policy_client, lambda *phase: phases.append(phase))
    return episode, pool, phases


async def play(policy_client, pool=None, **limits):
    """The rollout; whatever happened, the world and the policy client were let go of."""
    episode, pool, _ = make(policy_client, pool, **limits)
    try:
        [rollout] = await episode.run()
        return rollout
    finally:
        assert pool.status().open_worlds == 0
        assert policy_client.called("close") == [()]


async def failure(policy_client, pool=None, **limits):
    with pytest.raises(EpisodeFailed) as raised:
        await play(policy_client, pool, **limits)
    return raised.value.reason, str(raised.value)


async def test_a_completed_episode_is_recorded_whole():
    policy_client = ScriptedPolicyClient([ADD, FINISH])
    episode, _, phases = make(policy_client, attempt=4, draw=1)
    [rollout] = await episode.run()
    assert (rollout.rollout_id, rollout.collection_id) == (f"c1/{TASK}/2.4", "c1")
    assert (rollout.task_id, rollout.index, rollout.attempt, rollout.dataset) == (TASK, 2, 4, "counter")
    assert (rollout.end_reason, rollout.reward, rollout.success, len(rollout.requirements)) == ("completed", 1, True, 4)
    assert [message["role"] for message in rollout.messages] == ["system", *["user", "assistant"] * 2, "user"]
    assert [(turn.start, turn.end) for turn in rollout.turns] == [(1, 3), (4, 6)]
    assert {(t.policy_version, t.server, t.sampling_seconds, t.cached_tokens) for t in rollout.turns} == {
        (7, "s0", 0.25, 4)
    }
    [record] = policy_client.record()
    assert (rollout.token_ids, rollout.mask) == (record.token_ids, record.mask)
    assert (rollout.sampler_logprobs, rollout.extra) == (record.sampler_logprobs, {"who": "script"})
    assert rollout.temperature == 1.0
    assert episode.sampled_tokens == 4
    assert [name for name, _ in phases] == ["node", "environment", "node", "environment", "grade"]


async def test_seeds_depend_on_collection_task_index_attempts_and_turn():
    policy_client = ScriptedPolicyClient([ADD, FINISH])
    episode, _, _ = make(policy_client, attempt=4, draw=1)
    [rollout] = await episode.run()
    assert rollout.seed == derive_seed(5, TASK, 2, 1) == 845_395_600
    assert policy_client.called("speak") == [(derive_seed(rollout.seed, 0),), (derive_seed(rollout.seed, 1),)]


async def test_the_policy_client_hears_what_a_next_turn_follows_on():
    policy_client = ScriptedPolicyClient([ADD, ADD])
    rollout = await play(policy_client, max_turns=2)
    assert policy_client.called("begin") == [(f"c1/{TASK}/2.0", ["system", "user"])]
    assert policy_client.called("hear") == [(rollout.messages[3]["content"],)], (
        "the last observation has no turn after it"
    )


async def test_a_turn_whose_code_raised_is_marked():
    rollout = await play(ScriptedPolicyClient(["```python\nadd(99)\n```", FINISH]))
    assert [turn.failed for turn in rollout.turns] == [True, False]


@pytest.mark.parametrize("earned", [0.25, -3])
async def test_what_the_environment_gives_for_a_turn_is_recorded_with_it(monkeypatch, earned):
    step = CounterEnvironment.step

    async def paying(self, action):
        result = await step(self, action)
        return result if result.done else replace(result, reward=earned)

    monkeypatch.setattr(CounterEnvironment, "step", paying)
    rollout = await play(ScriptedPolicyClient([ADD, FINISH]))
    assert [turn.reward for turn in rollout.turns] == [float(earned), None]
    assert Rollout.from_dict(json.loads(rollout.to_json())) == rollout
    assert rollout.reward == 1.0, "beside the grade"


async def test_turn_limit():
    rollout = await play(ScriptedPolicyClient([ADD] * 9), max_turns=3)
    assert (rollout.end_reason, len(rollout.turns)) == ("turn_limit", 3)


@pytest.mark.parametrize("where", ["hear", "speak"])
async def test_context_limit_keeps_the_turns_before(where):
    def full(observation):
        raise ContextFull("no room")

    heard = (
        ScriptedPolicyClient([ADD] * 9, full)
        if where == "hear"
        else ScriptedPolicyClient([ADD, ContextFull("no room")])
    )
    rollout = await play(heard)
    assert (rollout.end_reason, len(rollout.turns), len(rollout.messages)) == ("context_limit", 1, 4)


async def test_a_finished_episode_is_complete_even_on_its_last_turn_and_token():
    def full(observation):
        raise ContextFull("no room")

    assert (await play(ScriptedPolicyClient([FINISH], full), max_turns=1)).end_reason == "completed"
    assert (await play(ScriptedPolicyClient([ADD], full), max_turns=1)).end_reason == "turn_limit"


async def longer_than_the_episode_may_take():
    await pass_time(1000.0)


@pytest.mark.parametrize("slow", ["start", "policy_client", "grade"])
async def test_what_is_slow_without_the_agents_doing_ends_no_episode(slow):
    async def slowly():
        await longer_than_the_episode_may_take()
        return ADD

    lines = [slowly, slowly, FINISH] if slow == "policy_client" else [ADD, ADD, FINISH]
    faults = {} if slow == "policy_client" else {slow: longer_than_the_episode_may_take}
    rollout = await play(ScriptedPolicyClient(lines), FaultyPool(**faults))
    assert (rollout.end_reason, len(rollout.turns)) == ("completed", 3)


async def test_a_world_that_is_brought_back_in_a_step_takes_none_of_the_agents_time():
    async def bring_back():
        with paused_agent_timeout():
            await longer_than_the_episode_may_take()

    rollout = await play(ScriptedPolicyClient([ADD, FINISH]), FaultyPool(step=bring_back))
    assert (rollout.end_reason, len(rollout.turns)) == ("completed", 2)


async def test_the_steps_of_an_episode_share_its_time():
    """The third takes longer than what the two before it have left."""
    pool = FaultyPool(step=lambda: pass_time(250.0))
    rollout = await play(ScriptedPolicyClient([ADD] * 9), pool, max_turns=9)
    assert (rollout.end_reason, len(rollout.turns)) == ("deadline", 3)


@pytest.mark.parametrize("fault", [EnvironmentTimeout("the code ran too long"), TimeoutError()])
async def test_a_step_out_of_time_ends_the_episode_with_its_turn(fault):
    rollout = await play(ScriptedPolicyClient([ADD]), FaultyPool(step=fault))
    assert (rollout.end_reason, len(rollout.messages)) == ("deadline", 3)
    assert [turn.failed for turn in rollout.turns] == [True]


async def test_a_step_is_bounded_by_the_episodes_deadline():
    rollout = await play(ScriptedPolicyClient([ADD]), FaultyPool(step=forever), episode_deadline_s=0.05)
    assert rollout.end_reason == "deadline"
    assert rollout.turns[0].environment_seconds > 0.0


@pytest.mark.parametrize(
    ("lines", "faults", "reason", "message"),
    [
        ([EpisodeFailed("server_error", "no server is ready")], {}, "server_error", "no server is ready"),
        ([ContextFull("the prompt fills it")], {}, "environment_error", "the prompt fills it"),
        ([ADD, EpisodeFailed("bad_logprob", "NaN")], {}, "bad_logprob", "NaN"),
        ([], {"start": EnvironmentCrashed("gone")}, "environment_crashed", "gone"),
        ([ADD], {"step": EnvironmentCrashed()}, "environment_crashed", "EnvironmentCrashed"),
        ([FINISH], {"grade": EnvironmentCrashed("the grader died")}, "environment_crashed", "the grader died"),
        ([ValueError("bug")], {}, "environment_error", f"ValueError: bug ({__file__}:{SPEAKS})"),
    ],
)
async def test_an_attempt_that_failed_says_why(lines, faults, reason, message):
    assert await failure(ScriptedPolicyClient(lines), FaultyPool(**faults)) == (reason, message)


async def test_a_step_that_breaks_the_environment_ends_in_a_grade():
    rollout = await play(ScriptedPolicyClient([ADD]), FaultyPool(step=TypeError("not even text")))
    assert (rollout.end_reason, rollout.turns[0].failed, rollout.ungradable) == ("completed", True, None)
    assert "The environment broke while it ran this code" in rollout.messages[-1]["content"]
    assert rollout.broke == {"where": "step", "what": f"TypeError: not even text ({__file__}:{MEETS})"}
    assert Rollout.from_dict(json.loads(rollout.to_json())) == rollout


class Unheard(BaseException):
    """None of those that are caught by name."""


def leaving(end):
    async def leave():
        raise end("bye")

    return leave


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (leaving(SystemExit), "SystemExit: bye ("),
        (leaving(KeyboardInterrupt), "KeyboardInterrupt: bye ("),
        (leaving(Unheard), "Unheard: bye ("),
        (cancelled_task_of_its_own, "CancelledError ("),
        (cancels_the_task_that_runs_it, "CancelledError ("),
        (ends_as_a_closed_coroutine_does, "GeneratorExit ("),
    ],
)
async def test_what_looks_like_the_end_of_an_episode_or_of_the_program_ends_in_a_grade(fault, said, caplog):
    """An environment that runs the agent's code in the node's own process lets out what that raises."""
    rollout = await play(ScriptedPolicyClient([ADD]), FaultyPool(step=fault))
    assert (rollout.end_reason, rollout.turns[0].failed, rollout.ungradable) == ("completed", True, None)
    assert rollout.broke["where"] == "step"
    rollout = await play(ScriptedPolicyClient([FINISH]), FaultyPool(grade=fault))
    assert (rollout.end_reason, rollout.reward) == ("completed", 0.0)
    assert rollout.ungradable.startswith(said)
    assert rollout.broke == {"where": "grade", "what": rollout.ungradable}
    reason, message = await failure(ScriptedPolicyClient([]), FaultyPool(start=fault))
    assert reason == "environment_crashed"
    assert message.startswith(f"the environment broke as it started {TASK}: ")
    episode, _, _ = make(ScriptedPolicyClient([FINISH]), FaultyPool(close=fault))
    assert (await episode.run())[0].end_reason == "completed"
    assert caplog.text.count("closing the episode failed") == 1


@pytest.mark.parametrize("fault", [TimeoutError("too slow"), EnvironmentTimeout("too slow"), KeyError("too slow")])
async def test_a_state_that_breaks_the_grader_is_worth_nothing(fault):
    rollout = await play(ScriptedPolicyClient([FINISH]), FaultyPool(grade=fault))
    assert (rollout.end_reason, rollout.reward, rollout.success) == ("completed", 0.0, False)
    assert "too slow" in rollout.ungradable


async def test_a_world_that_does_not_start_in_time_is_a_failure(monkeypatch):
    monkeypatch.setattr(attempt_module, "START_DEADLINE_S", 0.05)
    policy_client = ScriptedPolicyClient([])
    reason, message = await failure(policy_client, FaultyPool(start=forever))
    assert (reason, message) == ("environment_timeout", "the world did not start within 0.05 s")
    assert not policy_client.called("begin")


async def test_waiting_for_a_world_has_a_deadline_of_its_own(monkeypatch):
    monkeypatch.setattr(attempt_module, "ACQUIRE_DEADLINE_S", 0.05)
    pool = FaultyPool()
    pool.acquire = lambda episode_id: asyncio.Event().wait()
    reason, message = await failure(ScriptedPolicyClient([]), pool)
    assert (reason, message) == ("environment_timeout", "no environment was free within 0.05 s")


async def test_a_rollout_that_breaks_an_invariant_never_leaves_the_episode():
    policy_client = ScriptedPolicyClient([FINISH])
    record = policy_client.record
    policy_client.record = lambda: [replace(record()[0], mask=[True, False, False, True])]
    reason, message = await failure(policy_client)
    assert reason == "environment_error"
    assert "the mask is not the union" in message


async def test_a_world_that_does_not_close_costs_no_rollout(monkeypatch, caplog):
    monkeypatch.setattr(attempt_module, "CLOSE_DEADLINE_S", 0.05)
    for close in (forever, EnvironmentCrashed("gone")):
        episode, _, _ = make(ScriptedPolicyClient([FINISH]), FaultyPool(close=close))
        assert (await episode.run())[0].end_reason == "completed"
    assert caplog.text.count("closing the episode failed") == 2


@pytest.mark.parametrize("slow", ["world", "agent"])
async def test_an_aborted_episode_is_closed_to_the_end(slow):
    """Cancelled while the agent thinks, and twice more while it closes: its collection ends, then the node."""
    closing, may_close = asyncio.Event(), asyncio.Event()

    async def slowly():
        closing.set()
        await may_close.wait()

    policy_client = ScriptedPolicyClient([ADD, None])
    episode, pool, _ = make(policy_client, FaultyPool(close=slowly) if slow == "world" else None)
    if slow == "agent":
        let_go = episode._let_go

        async def let_go_slowly():
            await slowly()
            await let_go()

        episode._let_go = let_go_slowly
    task = asyncio.create_task(episode.run())
    while len(policy_client.called("speak")) < 2:  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0)
    assert episode.sampled_tokens == 2
    task.cancel()
    await closing.wait()
    for _ in range(2):
        assert pool.status().open_worlds == 1
        task.cancel()
        await asyncio.sleep(0)
    may_close.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pool.status().open_worlds == 0
    assert policy_client.called("close") == [()]
