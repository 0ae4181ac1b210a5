"""A policy that tosses a coin, and a world that breaks, in each way, where it fell wrong."""

import asyncio
import json
import random
from dataclasses import asdict

from agent_environments.counter import CounterEnvironment, CounterPool
from agent_environments.protocol import Grade, StepResult
from support.void_kinds import MADE_PLAIN, MADE_PLAIN_RESULTS, REFUSED, REFUSED_RESULTS

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
