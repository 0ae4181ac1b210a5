"""A policy that makes its failures unspeakable, in a class and in tools: it earns what an honest one earns.

It tosses a coin. Where it was wrong, the grader (or the answer to its action, or a tool) does what would void the
episode if it were only found when the rollout is written down.
"""

import asyncio
import json
import random
from dataclasses import asdict

import pytest

from agent_environments.counter import CounterEnvironment, CounterPool
from agent_environments.guarded_environment import STEP_BROKE, GuardedEnvironment
from agent_environments.protocol import Broke, EnvironmentCrashed, Grade, Message, StepResult, ToolUse, create_pool
from agent_environments.tools.environment import ToolPool
from support.adapter_support import word_spans
from support.tool_modules import call, write
from support.void_kinds import MADE_PLAIN, MADE_PLAIN_RESULTS, REFUSED, REFUSED_RESULTS

pytestmark = pytest.mark.slow

TASK = "reach12_1"
GRADES = {**REFUSED, **MADE_PLAIN}
RESULTS = {**REFUSED_RESULTS, **MADE_PLAIN_RESULTS}


async def raises(error):
    raise error


async def cancels_its_own_task():
    asyncio.current_task().cancel()
    await asyncio.sleep(0)


async def recurses():
    await recurses()


RAISES = {
    "an error": lambda: raises(IndexError("no such")),
    "an exit": lambda: raises(SystemExit(3)),
    "an interrupt": lambda: raises(KeyboardInterrupt()),
    "an end of a generator": lambda: raises(GeneratorExit()),
    "an end of an iteration": lambda: raises(StopAsyncIteration()),
    "several": lambda: raises(BaseExceptionGroup("several", [KeyboardInterrupt()])),
    "too deep": recurses,
    "a cancellation": lambda: raises(asyncio.CancelledError()),
    "a cancellation of its own task": cancels_its_own_task,
}
KINDS = [
    *(("grade", kind) for kind in GRADES),
    *(("step", kind) for kind in RESULTS),
    *((where, kind) for where in ("raising grade", "raising step") for kind in RAISES),
]


class CoinEnvironment(CounterEnvironment):
    """``<coin> <where>/<kind>``: right or wrong, and what happens where it was wrong."""

    wrong = False
    how = ("", "")

    async def step(self, action):
        coin, how = action.split(" ", 1)
        self.how = tuple(how.split("/"))
        self.wrong = coin == "wrong"
        if self.wrong and self.how[0] == "step":
            return RESULTS[self.how[1]]
        if self.wrong and self.how[0] == "raising step":
            await RAISES[self.how[1]]()
        return StepResult("noted", done=True)

    async def grade(self):
        if not self.wrong:
            return Grade(1.0, True)
        if self.how[0] == "grade":
            return GRADES[self.how[1]]
        if self.how[0] == "raising grade":
            await RAISES[self.how[1]]()
        return Grade(0.0, False)


class CoinPool(CounterPool):
    async def acquire(self, episode_id):
        await super().acquire(episode_id)
        return CoinEnvironment(self)


def tosses():
    """Twice through all kinds, right and wrong by chance."""
    chance = random.Random(0)
    return [(chance.choice(["right", "wrong"]), f"{where}/{kind}") for where, kind in KINDS * 2]


async def played(environment, action):
    """The grade as a record holds it."""
    try:
        await environment.start(TASK)
        result = await environment.step(action)
        assert result.observation.encode().decode() == result.observation
        record = json.loads(json.dumps(asdict(await environment.grade()), allow_nan=False))
        assert json.dumps(record).encode()
        return record
    finally:
        await environment.close()


def check_honest(records, coins):
    right = [coin == "right" for coin in coins]
    assert [record["reward"] for record in records] == [float(each) for each in right]
    assert [record["success"] for record in records] == right
    assert asyncio.current_task().cancelling() == 0


async def test_a_coin_earns_a_coins_worth_of_a_class():
    pool = CoinPool(word_spans)
    records = [await played(GuardedEnvironment(await pool.acquire("")), f"{coin} {how}") for coin, how in tosses()]
    check_honest(records, [coin for coin, _ in tosses()])
    broke = [record["broke"] for record, (coin, how) in zip(records, tosses(), strict=True) if coin == "wrong"]
    said = [how.split("/")[1] for coin, how in tosses() if coin == "wrong"]
    assert broke.count(None) == sum(kind in {**MADE_PLAIN, **MADE_PLAIN_RESULTS} for kind in said)


COIN_TOOLS = """
import asyncio

from agent_environments.test_no_voiding_kinds import GRADES, RAISES
from agent_environments.tools import reward, tool


@tool
async def act(coin: str, kind: str) -> str:
    "Toss."
    if coin == "wrong" and kind in RAISES:
        await RAISES[kind]()
    return "tossed"


@tool(terminal=True)
def finish(coin: str, kind: str) -> str:
    "The end."
    return coin + "/" + kind


@reward
async def graded(answer: str):
    coin, kind = answer.split("/")
    if coin == "right":
        return 1.0
    if kind in RAISES:
        await RAISES[kind]()
    return GRADES[kind]


TASKS = [{"id": "coin_1", "question": "Heads or tails?"}]
"""


async def test_a_coin_earns_a_coins_worth_of_tools(tmp_path):
    source = COIN_TOOLS.replace("agent_environments.test_no_voiding_kinds", __name__)
    pool = ToolPool(word_spans, write(tmp_path, source, "coin_tools"))
    await pool.open()
    kinds = [*GRADES, *RAISES] * 2
    chance = random.Random(1)
    coins = [chance.choice(["right", "wrong"]) for _ in kinds]
    records = []
    for coin, kind in zip(coins, kinds, strict=True):
        environment = GuardedEnvironment(await pool.acquire(""))
        await environment.start("coin_1")
        answered = await environment.step(call("act", coin=coin, kind=kind))
        assert answered.failed == (coin == "wrong" and kind in RAISES)
        assert (await environment.step(call("finish", coin=coin, kind=kind))).done
        records.append(json.loads(json.dumps(asdict(await environment.grade()), allow_nan=False)))
        await environment.close()
    await pool.close()
    check_honest(records, coins)
    for coin, kind, record in zip(coins, kinds, records, strict=True):
        refused = coin == "wrong" and (kind in RAISES or kind in REFUSED) and kind != "grade a number"  # a fine reward
        assert (record["broke"] is not None) == refused, kind
        if kind in RAISES and coin == "wrong":
            assert record["broke"]["where"] == "reward graded"
            acted = next(use for use in record["tools"] if use["tool"] == "act")
            assert (acted["calls"], acted["raised"], acted["what"] != "") == (1, 1, True)


async def test_what_broke_first_is_in_the_grade_with_the_users_file_and_line():
    pool = CoinPool(word_spans)
    environment = GuardedEnvironment(await pool.acquire(""))
    await environment.start(TASK)
    result = await environment.step("no coin")  # "no", "coin": the kind is none
    assert not result.broke
    result = await environment.step("nonsense")
    line = CoinEnvironment.step.__code__.co_firstlineno + 1
    what = f"ValueError: not enough values to unpack (expected 2, got 1) ({__file__}:{line})"
    assert result == StepResult(STEP_BROKE, done=True, failed=True, broke=Broke("step", what))
    assert (await environment.grade()).broke == Broke("step", what)
    await environment.close()


class UsesTools(CounterEnvironment):
    async def step(self, action):
        return StepResult("", done=False, tools=(ToolUse("add", 2, 1, action), ToolUse("show", 1, 0)))


async def test_the_uses_of_tools_are_added_up():
    pool = CounterPool(word_spans)
    await pool.acquire("")
    environment = GuardedEnvironment(UsesTools(pool))
    await environment.start(TASK)
    for action in ("first", "second"):
        await environment.step(action)
    assert (await environment.grade()).tools == (ToolUse("add", 4, 2, "first"), ToolUse("show", 2, 0))
    await environment.close()


class BreaksAtStart(CounterEnvironment):
    async def start(self, task_id):
        return [Message("user", None)]


async def test_before_the_first_step_it_is_the_environments_fault(caplog):
    pool = CounterPool(word_spans)
    await pool.acquire("")
    with pytest.raises(EnvironmentCrashed, match=r"broke as it started .*: ValueError: an opening message is no text"):
        await GuardedEnvironment(BreaksAtStart(pool)).start(TASK)


async def test_the_pool_of_a_mixture_says_what_broke():
    section = {"name": f"{__name__}:CoinPool"}
    pool = create_pool("mixed", {"environments": {"coins": section}}, word_spans)
    await pool.open()
    environment = GuardedEnvironment(await pool.acquire(""))
    await environment.start(f"coins/{TASK}")
    await environment.step("wrong raising step/an error")
    assert (await environment.grade()).broke.what.startswith("IndexError: no such (")
    await environment.close()
    await pool.close()
