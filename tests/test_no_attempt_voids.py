"""Whatever breaks once the policy has had a turn, the attempt ends in a grade: a coin earns what a coin is worth.

The policy tosses a coin. Where it fell wrong, the world breaks in a way that is drawn, in a call that is drawn: in each
kind of environment, in histories that are shortened, and in turns that no environment is shown.
"""

import asyncio
import random

import pytest

from agent_environments.guarded_environment import STEP_BROKE, GuardedEnvironment
from agent_environments.protocol import Broke, EnvironmentCrashed, Message, StepResult, ToolUse, create_pool
from agent_environments.tools.environment import ToolPool
from rollout_server.collecting.policy_client import EpisodeFailed
from rollout_server.collecting.sampling_client import SamplingClient
from support.adapter_support import word_spans
from support.breaking_worlds import (
    ERRORS,
    GRADES,
    RESULTS,
    TASK,
    BreakingPool,
    Breaks,
    Fault,
    attempt,
    check_coins,
)
from support.chat_tokenizers import write_formats
from support.episodes import begun_episode, open_pool
from support.texts import texts_beside
from support.tool_modules import call, write
from support.void_kinds import MADE_PLAIN, MADE_PLAIN_RESULTS, REFUSED

PLAIN = {**MADE_PLAIN, **MADE_PLAIN_RESULTS}
RAISED = [*(kind for kind in ERRORS if kind != "a late answer"), "a cancellation of its own task"]
KINDS = [*(("grade", kind) for kind in [*GRADES, *RAISED]), *(("step", kind) for kind in [*RESULTS, *RAISED])]


@pytest.fixture(scope="module")
def formats(tmp_path_factory):
    return write_formats(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("kind", ["own", "harness", "remote"])
def test_a_coin_earns_a_coins_worth_whatever_breaks_where_it_fell_wrong(formats, kind):
    check_coins(kind, formats)


async def test_each_kind_of_wrong_is_told_or_made_plain_and_earns_nothing(formats, monkeypatch):
    for where, how in KINDS:
        [rollout] = await attempt("own", formats["chatml"], Fault(where, how), "tails", False, None, monkeypatch)
        assert (rollout.reward, rollout.success) == (0.0, False), how
        assert (rollout.broke is None) == (how in PLAIN), how
    assert asyncio.current_task().cancelling() == 0


async def test_only_an_attempt_without_a_turn_is_repeated(formats, monkeypatch):
    for where, coin in (("start", "heads"), ("start", "tails")):
        monkeypatch.setattr(BreakingPool, "fault", Fault(where, "an error"))

        async def start(self, task_id):
            raise AttributeError("no world")

        monkeypatch.setattr(Breaks, "start", start)
        with pytest.raises(EpisodeFailed, match="no world"):
            await attempt("own", formats["chatml"], Fault(where, "an error"), coin, False, None, monkeypatch)


async def test_what_the_node_itself_breaks_over_after_a_turn_ends_the_episode_in_a_grade(formats, monkeypatch):
    def hear(self, observation):
        raise ValueError("the format has no form for this")

    monkeypatch.setattr(SamplingClient, "hear", hear)
    for coin in ("heads", "tails"):
        [rollout] = await attempt("own", formats["chatml"], Fault("", ""), coin, False, None, monkeypatch)
        assert rollout.reward == float(coin == "heads")
        assert rollout.broke["where"] == "node"
        assert rollout.broke["what"].startswith("ValueError: the format has no form for this")


COIN_TOOLS = texts_beside(__file__)["coin_tools"]


async def test_a_coin_earns_a_coins_worth_of_tools(tmp_path):
    async with open_pool(ToolPool(word_spans, write(tmp_path, COIN_TOOLS, "coin_tools"))) as pool:
        chance = random.Random(1)
        for kind in [*GRADES, *RAISED] * 2:
            coin = chance.choice(["right", "wrong"])
            async with begun_episode(pool, "coin_1", guarded=True) as environment:
                raised = coin == "wrong" and kind in RAISED
                assert (await environment.step(call("act", coin=coin, kind=kind))).failed == raised
                assert (await environment.step(call("finish", coin=coin, kind=kind))).done
                grade = await environment.grade()
            assert (grade.reward, grade.success) == (float(coin == "right"), coin == "right"), kind
            refused = raised or (coin == "wrong" and kind in REFUSED and kind != "grade a number")  # a fine reward
            assert (grade.broke is not None) == refused, kind
            if raised:
                assert grade.broke.where == "reward graded"
                acted = next(use for use in grade.tools if use.tool == "act")
                assert (acted.calls, acted.raised, acted.what != "") == (1, 1, True)


class Scripted(Breaks):
    """What it does comes with the action, or as it starts."""

    async def start(self, task_id):
        return [Message("user", None)] if task_id == "broken" else await super().start(task_id)

    async def step(self, action):
        if action == "nonsense":
            raise ValueError("no such action")
        return StepResult("", done=False, tools=(ToolUse("add", 2, 1, action), ToolUse("show", 1, 0)))


@pytest.fixture
async def scripted():
    pool = BreakingPool(word_spans)
    await pool.acquire("")
    environment = GuardedEnvironment(Scripted(pool))
    yield environment
    await environment.close()


async def test_what_broke_first_is_in_the_grade_with_the_users_file_and_line(scripted):
    await scripted.start(TASK)
    assert not (await scripted.step("heads")).broke
    what = f"ValueError: no such action ({__file__}:{Scripted.step.__code__.co_firstlineno + 2})"
    assert await scripted.step("nonsense") == StepResult(STEP_BROKE, done=True, failed=True, broke=Broke("step", what))
    assert (await scripted.grade()).broke == Broke("step", what)


async def test_the_uses_of_tools_are_added_up(scripted):
    await scripted.start(TASK)
    scripted.inner.heads = True
    for action in ("first", "second"):
        await scripted.step(action)
    assert (await scripted.grade()).tools == (ToolUse("add", 4, 2, "first"), ToolUse("show", 2, 0))


async def test_before_the_first_step_it_is_the_environments_fault(scripted):
    with pytest.raises(EnvironmentCrashed, match=r"as it started .*: ValueError: an opening message is not a text"):
        await scripted.start("broken")


async def test_the_pool_of_a_mixture_says_what_broke(monkeypatch):
    monkeypatch.setattr(BreakingPool, "fault", Fault("step", "an error"))
    section = {"name": "support.breaking_worlds:BreakingPool"}
    async with (
        open_pool(create_pool("mixed", {"environments": {"coins": section}}, word_spans)) as pool,
        begun_episode(pool, f"coins/{TASK}", guarded=True) as environment,
    ):
        await environment.step("tails")
        assert (await environment.grade()).broke.what.startswith("AttributeError: no answer (")
