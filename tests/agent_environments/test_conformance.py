"""The counter holds to the protocol, and the test of that finds environments which do not."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_environments.conformance import NotConforming, check_conformance
from agent_environments.counter import CounterEnvironment, CounterPool
from agent_environments.guarded_environment import GuardedEnvironment
from agent_environments.protocol import EnvironmentCrashed, Grade
from support.adapter_support import word_spans
from support.episodes import begun_episode
from support.void_kinds import MADE_PLAIN, MADE_PLAIN_RESULTS, REFUSED, REFUSED_RESULTS

TASK = "reach5_1"


def pool_of(environment=CounterEnvironment):
    class Pool(CounterPool):
        async def acquire(self, episode_id):
            await super().acquire(episode_id)
            return environment(self)

    return Pool(word_spans)


async def test_the_counter_conforms():
    await check_conformance(CounterPool(word_spans), TASK)


class DiesOfSurrogates(CounterEnvironment):
    async def step(self, action):
        result = await super().step(action)
        action.encode()
        return result


class CallsItACrash(CounterEnvironment):
    async def step(self, action):
        if "abort" in action:
            raise EnvironmentCrashed("the world died")
        return await super().step(action)


class CannotGrade(CounterEnvironment):
    acted = False

    async def step(self, action):
        self.acted = True
        return await super().step(action)

    async def grade(self):
        if self.acted:
            raise OverflowError("too large to grade")
        return await super().grade()


class PaysForIt(CannotGrade):
    async def grade(self):
        return Grade(0.5, False, ungradable="broken") if self.acted else await CounterEnvironment.grade(self)


class PaysWithoutMeasure(CounterEnvironment):
    async def grade(self):
        return Grade(float("nan"), False)


class KeepsItsPlace(CounterEnvironment):
    async def close(self):
        pass


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        (DiesOfSurrogates, r"step\(.*UnicodeEncodeError.*the agent voids its episode"),
        (CallsItACrash, r"step\(.*EnvironmentCrashed.*the agent voids its episode"),
        (CannotGrade, r"grade\(\) raises OverflowError"),
        (PaysForIt, "an ungradable state is worth 0.5"),
        (PaysWithoutMeasure, r"Grade.reward is nan, which is not a number in \[0, 1\]"),
        (KeepsItsPlace, "worlds are still open"),
    ],
)
async def test_what_does_not_conform_is_found(environment, complaint):
    with pytest.raises(NotConforming, match=complaint):
        await check_conformance(pool_of(environment), TASK)


def hands_over(grade=None, result=None):
    class HandsOver(CounterEnvironment):
        async def step(self, action):
            return await super().step(action) if result is None else result

        async def grade(self):
            return await super().grade() if grade is None else grade

    return HandsOver


@pytest.mark.parametrize(
    "handed",
    [
        *({"grade": REFUSED[kind]} for kind in REFUSED if kind != "grade None"),
        *({"result": REFUSED_RESULTS[kind]} for kind in REFUSED_RESULTS if kind != "result None"),
    ],
)
async def test_what_cannot_be_written_down_is_found(handed):
    with pytest.raises(NotConforming):
        await check_conformance(pool_of(hands_over(**handed)), TASK)


@pytest.mark.parametrize(
    "handed",
    [
        *({"grade": MADE_PLAIN[kind]} for kind in MADE_PLAIN if kind != "ungradable and worth something"),
        *({"result": result} for kind, result in MADE_PLAIN_RESULTS.items() if "observation" not in kind),
    ],
)
async def test_what_the_node_makes_plain_conforms(handed):
    await check_conformance(pool_of(hands_over(**handed)), TASK, [""])


@pytest.mark.parametrize("environment", [DiesOfSurrogates, CannotGrade])
async def test_the_nodes_guard_mends_what_it_can(environment, caplog):
    with pytest.raises(NotConforming, match=r"the environment broke: .*test_conformance.py:\d+"):  # and voids nothing
        await check_conformance(
            pool_of(lambda pool: GuardedEnvironment(environment(pool))), TASK, ["```python\n\ud800\n```"]
        )


ODD_VALUES = st.one_of(
    st.integers(), st.floats(), st.text(), st.binary(), st.none(), st.lists(st.integers()), st.just("\ud800")
)
PROGRAMS = st.one_of(
    st.text(),
    st.lists(
        st.tuples(st.sampled_from(["add", "show", "finish", "__import__", "add.x"]), st.lists(ODD_VALUES, max_size=2)),
        max_size=6,
    ).map(lambda calls: "\n".join(f"{name}({', '.join(map(repr, values))})" for name, values in calls)),
)


@pytest.mark.slow
@settings(max_examples=300)
@given(st.lists(PROGRAMS, max_size=4))
async def test_random_programs_never_end_without_a_grade(programs):
    actions = [f"```python\n{program}\n```" for program in programs]
    pool = CounterPool(word_spans)
    async with begun_episode(pool, TASK) as environment:
        for action in actions:
            result = await environment.step(action)
            result.observation.encode()
            if result.done:
                break
        assert 0.0 <= (await environment.grade()).reward <= 1.0
