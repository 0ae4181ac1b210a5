"""Rewards that see a whole group: what they are given, what they may give, and what a wrong one costs."""

import math

import pytest

from agent_environments import groups
from agent_environments.groups import grade_group, grades_groups
from agent_environments.guarded_environment import GuardedEnvironment
from agent_environments.harness.pool import HarnessPool
from agent_environments.mixed import MixedPool
from agent_environments.protocol import EnvironmentCrashed, Grade, acquire
from agent_environments.tools import environment
from agent_environments.tools.environment import ToolPool
from agent_environments.tools.reward import reward
from support.adapter_support import word_spans
from support.episodes import begun_episode, open_pool
from support.in_process_tools import InProcessServer
from support.texts import texts_beside
from support.tool_modules import write

TEXTS = texts_beside(__file__)
HEAD = TEXTS["head"]
RIGHT = TEXTS["right"]
RANKS = TEXTS["ranks"]
MAJORITY = TEXTS["majority"]
BREVITY = TEXTS["brevity"]


@pytest.fixture(autouse=True)
def in_process(monkeypatch, alarm):
    monkeypatch.setattr(environment, "ForkServer", InProcessServer)


def pool_of(tmp_path, *parts):
    return ToolPool(word_spans, write(tmp_path, HEAD + "".join(parts)), max_worlds=1)


async def member(pool, answer, task="t_1"):
    played = GuardedEnvironment(await acquire(pool, "e", task))
    try:
        await played.start(task)
        await played.step(answer)
        return await played.grade_member()
    finally:
        await played.close()


async def graded(pool, answers, task="t_1"):
    """The rewards of the group, in order; the grades too."""
    await pool.open()
    try:
        members = [await member(pool, answer, task) for answer in answers]
        grades = await grade_group(pool, task, [each.group_input for each in members])
    finally:
        await pool.close()
    return [grade.reward for grade in grades], grades


@pytest.mark.parametrize(
    ("parts", "answers", "rewards"),
    [
        ([RANKS], ["a", "bbb", "cc"], [1.0, 0.0, 0.5]),
        ([RANKS], ["aa", "aa", "c"], [0.0, 0.0, 1.0]),  # ties
        ([RANKS], ["alone"], [0.0]),
        ([MAJORITY], ["42", "41", "42", "40"], [1.0, 0.0, 1.0, 0.0]),
        ([MAJORITY], ["42", "41"], [1.0, 0.0]),  # of a tie the first
        ([MAJORITY], ["42"], [1.0]),  # a group of one, as in an evaluation with one run of a task
        ([RIGHT, BREVITY], ["42", "42 it is", "41"], [1.0, (1.0 + 0.5 * 0.25) / 1.5, 0.0]),
        ([RIGHT, BREVITY], ["41", "40"], [0.0, 0.0]),  # none is solved
        (["\n@reward(group=True)\ndef few(answers, most):\n    return [len(answers) <= most] * len(answers)\n"],
         ["a", "b"], [1.0, 1.0]),  # a field of the task
        (["\n@reward(group=True, scale=[-1, 1])\ndef signed(answers):\n    return tuple(range(-1, 2))\n"],
         ["a", "b", "c"], [0.0, 0.5, 1.0]),
        (["\nimport numpy\n\n@reward(group=True)\ndef vector(answers):\n    return numpy.linspace(0, 1, 3)\n"],
         ["a", "b", "c"], [0.0, 0.5, 1.0]),
        (["\n@reward(group=True)\ndef turns(trajectories):\n"
          "    return [len(each) == 2 and each[1]['content'] == 'b' for each in trajectories]\n"],
         ["a", "b"], [0.0, 1.0]),
        ([RIGHT, "\n@reward(group=True, weight=0)\ndef size(answers):\n    return [len(answers)] * len(answers)\n"],
         ["42", "41"], [1.0, 0.0]),
        ([RIGHT.replace("@reward\n", "@reward(weight=0, scale=[0, 9])\n").replace("==", "<"),
          "\n@reward(group=True)\ndef best(rewards):\n    return [each['right'] for each in rewards]\n"],
         ["1", "9"], [1.0, 0.0]),
        (["\n@reward(group=True)\ndef whole(answers):\n    return [Grade(0.5, False) for _ in answers]\n"],
         ["a", "b"], [0.5, 0.5]),
    ],
)  # fmt: skip
async def test_each_of_a_group_gets_its_number(tmp_path, parts, answers, rewards):
    assert (await graded(pool_of(tmp_path, *parts), answers))[0] == pytest.approx(rewards)


async def test_the_parts_of_a_reward_are_in_the_record(tmp_path):
    _, grades = await graded(pool_of(tmp_path, RIGHT, BREVITY), ["42", "41"])
    assert [grade.rewards for grade in grades] == [{"right": 1.0, "brief": 1.0}, {"right": 0.0, "brief": 0.0}]
    assert [grade.success for grade in grades] == [True, False]


@pytest.mark.parametrize(("body", "why"), TEXTS["a_reward_that_gives_no_numbers_is_named_and_breaks_no_run"])
async def test_a_reward_that_gives_no_numbers_is_named_and_breaks_no_run(tmp_path, body, why):
    odd = f"\n@reward(group=True)\ndef odd(answers):\n    {body}\n"
    rewards, grades = await graded(pool_of(tmp_path, RIGHT, odd), ["a", "b", "c"])
    assert rewards == [0.0] * 3
    for grade in grades:
        assert why in grade.ungradable
        assert (grade.broke.where, grade.broke.what) == ("reward odd", grade.ungradable)
    as_metric = odd.replace("group=True", "group=True, weight=0")
    rewards, grades = await graded(pool_of(tmp_path, RIGHT, as_metric), ["42", "b", "c"])
    assert (rewards, grades[0].ungradable, grades[0].broke.where) == ([1.0, 0.0, 0.0], None, "reward odd")


@pytest.mark.attack
@pytest.mark.fault("one answer takes the reward from all others of its group")
@pytest.mark.parametrize(("body", "why"), TEXTS["an_answer_that_breaks_a_reward_of_the_group_costs_its_own_rollout"])
async def test_an_answer_that_breaks_a_reward_of_the_group_costs_its_own_rollout(tmp_path, body, why):
    length = "\n@reward(weight=0)\ndef length(answer):\n    assert answer\n    return len(answer)\n"
    odd = f"\n@reward(group=True)\ndef odd({'rewards' if 'rewards' in body else 'answers'}):\n    {body}\n"
    pool = pool_of(tmp_path, *([length] if "rewards" in body else []), odd)
    await pool.open()
    members = [await member(pool, answer) for answer in ("42", "", "42")]
    inputs = [each.group_input for each in members if each.group_input is not None]
    grades = await grade_group(pool, "t_1", inputs)
    await pool.close()
    lost = members[1].grade if len(inputs) == 2 else grades.pop(1)
    assert (why in lost.ungradable, lost.broke is not None, lost.reward) == (True, True, 0.0)
    assert [(grade.ungradable, grade.broke) for grade in grades] == [(None, None)] * 2


async def test_an_episode_that_cannot_be_graded_is_no_member(tmp_path):
    async with open_pool(pool_of(tmp_path, RIGHT.replace("return", "assert answer; return"), MAJORITY)) as pool:
        found = [await member(pool, answer) for answer in ("42", "", "41")]
    assert [each.group_input is None for each in found] == [False, True, False]
    assert found[1].grade.broke.where == "reward right"


async def test_an_episode_by_itself_is_a_group_of_one(tmp_path):
    async with open_pool(pool_of(tmp_path, RIGHT, MAJORITY)) as pool, begun_episode(pool, "t_1") as played:
        await played.step("41")
        grade = await played.grade()
    assert (grade.reward, grade.rewards) == (0.5, {"right": 0.0, "majority": 1.0})


async def test_the_pool_of_a_mixture_and_of_a_harness_ask_their_own(tmp_path):
    module = write(tmp_path, HEAD + RANKS)
    section = {"name": "tools", "module": module, "max_worlds": 1}
    mixed = MixedPool(word_spans, {"mine": section, "counter": {"name": "counter"}})
    assert grades_groups(mixed, "mine/t_1")
    assert not grades_groups(mixed, "counter/reach3_1")
    assert (await graded(mixed, ["a", "bbb", "cc"], "mine/t_1"))[0] == [1.0, 0.0, 0.5]
    harness = HarnessPool(word_spans, ["true"], world=section)
    assert grades_groups(harness, "t_1")
    await harness.open()
    async with begun_episode(harness, "t_1") as played:
        await played.step("a")
        played.finish(None, {"metrics": {"steps": 3.0}})
        ended = await played.grade_member()
    assert ended.grade.metrics == {"steps": 3.0}
    assert (await grade_group(harness, "t_1", [ended.group_input] * 2))[0].reward == 0.0
    await harness.close()


class Failing:
    """A pool whose grader does what a test says."""

    def __init__(self, *does):
        self.does = list(does)

    async def open(self): ...

    def tasks(self, split): ...

    def check_tasks(self, task_ids): ...

    async def acquire(self, episode_id): ...

    def status(self): ...

    async def close(self): ...

    dataset = "failing"

    def grades_groups(self, task_id):
        return True

    async def grade_group(self, task_id, seen):
        does = self.does.pop(0)
        if isinstance(does, Exception):
            raise does
        return does


GOOD = [Grade(1.0, True), Grade(0.0, False)]


@pytest.mark.parametrize(
    ("does", "why"),
    [
        ([EnvironmentCrashed("gone"), GOOD], None),
        ([EnvironmentCrashed("gone")] * groups.TRIES, "gone"),
        ([RuntimeError("odd")], "RuntimeError: odd"),
        ([GOOD[:1]], "a group of 2 was given 1 grades"),
        ([[Grade(math.nan, False), *GOOD[:1]]], "Grade.reward is nan"),
    ],
)
async def test_a_pool_that_grades_no_group_leaves_it_ungradable(does, why):
    grades = await grade_group(Failing(*does), "t_1", [{}, {}])
    if why is None:
        assert grades == GOOD
    else:
        assert all(why in grade.ungradable and grade.broke.where == "grade" for grade in grades)


def test_a_function_may_take_its_time(alarm):
    @reward(group=True)
    async def later(answers, judge):
        return [judge] * len(answers)

    grades = later.grade_group({}, answers=["a", "b"], trajectories=[[], []], rewards=[{}, {}], judge=1.0)
    assert [grade.reward for grade in grades] == [1.0, 1.0]


@pytest.mark.fault("a parameter of a reward without the name that was meant")
@pytest.mark.parametrize(("source", "why"), TEXTS["a_file_whose_reward_cannot_be_called_is_refused"])
def test_a_file_whose_reward_cannot_be_called_is_refused(tmp_path, source, why):
    with pytest.raises(ValueError, match=why):
        pool_of(tmp_path, source)
