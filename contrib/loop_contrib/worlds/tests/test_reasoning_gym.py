"""Questions of reasoning-gym, in a stand-in of the package; and the package itself in drills, which need 0.1.25: in the
interpreter that REASONING_GYM_PYTHON names, or in one that they make.
"""

import asyncio
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent_environments.guarded_environment import GuardedEnvironment
from agent_environments.protocol import EnvironmentCrashed
from loop_contrib.worlds.pool import WorldKind
from loop_contrib.worlds.reasoning_gym import ReasoningGymPool
from support.adapter_support import word_spans
from support.interpreters import with_packages
from support.texts import texts_beside

TABLES = texts_beside(__file__)

FAKE = Path(__file__).parents[3] / "tests" / "contrib_support" / "fake_reasoning_gym"
ASK_THE_PACKAGE = TABLES["ask_the_package"]


@dataclass(frozen=True)
class FakeKind(WorldKind):
    def environment(self):
        return {"PYTHONPATH": str(FAKE)}


class FakePool(ReasoningGymPool):
    kind = FakeKind(ReasoningGymPool.kind.name, ReasoningGymPool.kind.worker, cure=ReasoningGymPool.kind.cure)


@pytest.fixture
async def opened():
    pools = []

    async def open_pool(kind=FakePool, **options):
        options = {"python": sys.executable, "dataset": "sums", "size": 4, **options}
        pools.append(kind(word_spans, **options))
        await pools[-1].open()
        return pools[-1]

    yield open_pool
    for pool in pools:
        await pool.close()


async def answered(pool, task, text):
    environment = GuardedEnvironment(await pool.acquire("e"))
    opening = await environment.start(task)
    result = await environment.step(text)
    grade = await environment.grade()
    await environment.close()
    return opening, result, grade


async def test_a_question_is_answered_in_one_turn_and_scored_by_its_dataset(opened):
    sums = await opened(seed=5, options={"step": 10})
    assert (sums.dataset, sums.tasks("train")) == ("reasoning_gym sums", [f"sums_{number}" for number in range(4)])
    (system, user), result, grade = await answered(sums, "sums_3", "It is <answer>36</answer>.")
    assert (system.content, user.content) == ("Answer within <answer></answer>.", "What is 35 + 1?")
    assert (result.done, grade.reward, grade.success) == (True, 1.0, True)
    for text, reward in (("<answer>37</answer>", 0.01), ("36", 0.0), ("", 0.0)):
        _, result, grade = await answered(sums, "sums_3", text)
        assert (result.done, grade.reward, grade.success, grade.broke) == (True, reward, False, None)
    assert await sums.expert("sums_0") == ["<answer>6</answer>"]


async def test_the_whole_turn_is_the_answer_where_no_tags_are_asked_for(opened):
    sums = await opened(seed=5, instructions="Be brief.")
    (system, _), _, grade = await answered(sums, "sums_3", " 9\n")
    assert (system.content, grade.reward) == ("Be brief.", 1.0)
    assert (await answered(sums, "sums_3", "<answer>9</answer>"))[2].reward == 0.01
    assert await sums.expert("sums_0") == ["6"]


async def test_tasks_are_held_out_each_for_itself(opened):
    sums = await opened(held_out=1)
    assert len(sums.tasks("train")) == 3
    assert sorted(sums.tasks("train") + sums.tasks("held_out")) == [f"sums_{number}" for number in range(4)]


@pytest.mark.fault("an answer that the environment was charged with")
@pytest.mark.parametrize(("dataset", "said"), TABLES["a_score_that_raises_on_an_answer_is_a_wrong_answer"])
async def test_a_score_that_raises_on_an_answer_is_a_wrong_answer(opened, dataset, said):
    pool = await opened(dataset=dataset)
    _, result, grade = await answered(pool, f"{dataset}_0", f"<answer>{said}</answer>")
    assert (result.done, grade.reward, grade.broke, grade.ungradable) == (True, 0.0, None, None)


async def test_a_task_whose_right_answer_has_no_score_either_is_told(opened, caplog):
    _, result, grade = await answered(await opened(dataset="unanswered"), "unanswered_0", "<answer>x</answer>")
    assert (result.done, grade.reward) == (True, 0.0)
    assert "ValueError: invalid literal" in grade.broke.what
    assert "reasoning_gym unanswered: 4 of the first 4 tasks have no right answer that scores 1" in caplog.text


async def test_what_pays_nonsense_is_named(opened, caplog):
    await opened()
    assert caplog.text == ""
    await opened(dataset="generous")
    told = "reasoning_gym generous: the answer {!r} has the full score in 4 of the first 4 tasks"
    assert [record.message for record in caplog.records] == [told.format(said) for said in ("qwnothing", "0", "nan")]


async def test_every_draw_of_a_task_is_the_same(opened):
    async def questions(pool):
        said = {}
        for task in reversed(pool.tasks("train")):
            (_, user), *_ = await answered(pool, task, "")
            said[task] = user.content
        assert await pool.expert(pool.tasks("train")[2]) == [f"<answer>{said['drawn_2']}</answer>"]
        return said

    pool = await opened(dataset="drawn")
    first = await questions(pool)
    assert len(set(first.values())) == 4
    assert await questions(pool) == first
    assert await questions(await opened(dataset="drawn")) == first  # as after a restart
    assert await questions(await opened(dataset="drawn", seed=1)) != first


@pytest.mark.parametrize(("options", "shown"), TABLES["options_that_are_objects_are_written_as_json"])
async def test_options_that_are_objects_are_written_as_json(opened, options, shown):
    (_, user), *_ = await answered(await opened(dataset="shown", options=options), "shown_0", "")
    assert user.content == shown


HOSTILE = TABLES["hostile"]


@pytest.mark.parametrize("code", HOSTILE)
async def test_an_answer_that_is_evaluated_reaches_nothing(opened, tmp_path, code):
    file = tmp_path / "left"
    _, result, grade = await answered(await opened(), "sums_0", f"<answer>eval {code.format(file=str(file))}</answer>")
    assert (result.done, grade.reward) == (True, 0.0)
    assert not file.exists()


async def test_an_answer_that_changes_the_dataset_changes_it_for_itself_alone(opened):
    pool = await opened()
    change = "setattr(type(self), 'score_answer', lambda *_, **__: 1.0) or 0.5"
    assert (await answered(pool, "sums_0", f"<answer>eval {change}</answer>"))[2].reward == 0.5
    assert (await answered(pool, "sums_0", "<answer>wrong</answer>"))[2].reward == 0.01


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            {"dataset": "products"},
            "there is no dataset 'products'; there are boxes, drawn, generous, shown, sums, unanswered$",
        ),
        ({"dataset": "sum"}, "there is no dataset 'sum'; there are sums$"),
        (
            {"options": {"stride": 1}},
            "SumsConfig has no option 'stride'; there are size, seed, step, order, since, parts",
        ),
        ({"options": {"parts": [{"nam": "a"}]}}, "Part has no option 'nam'; there are name, weight$"),
        ({"kind": ReasoningGymPool}, "No module named 'reasoning_gym'; install reasoning-gym there"),
    ],
)
async def test_what_the_package_does_not_have_is_one_line(opened, options, why):
    with pytest.raises(EnvironmentCrashed, match=why):
        await opened(**options)


@pytest.fixture(scope="module")
def real():
    return with_packages("REASONING_GYM_PYTHON", "reasoning-gym==0.1.25")


@pytest.mark.drill
@pytest.mark.parametrize("name", ["chain_sum", "leg_counting", "spell_backward"])
async def test_questions_and_scores_are_the_packages_own(opened, real, name):
    wrong = ["-1", "none"]
    command = (real, "-c", ASK_THE_PACKAGE, name, "5", json.dumps(wrong))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    said = json.loads((await process.communicate())[0])
    pool = await opened(ReasoningGymPool, python=real, dataset=name, size=5, seed=42)
    for task, (question, answer), scores in zip(pool.tasks("train"), said["entries"], said["scores"], strict=True):
        for text, score in zip([answer, *wrong], scores, strict=True):
            (_, user), _, grade = await answered(pool, task, f"<answer>{text}</answer>")
            assert (user.content, grade.reward) == (question, pytest.approx(score))
        assert scores[0] == 1.0


@pytest.mark.drill
async def test_each_dataset_has_the_same_tasks_twice_and_a_grade_for_nonsense(opened, real):
    """In all 105 of the package but composite, which takes no defaults; five of them have no right answers."""
    names = "import json; from reasoning_gym.factory import DATASETS; print(json.dumps(sorted(DATASETS)))"
    process = await asyncio.create_subprocess_exec(real, "-c", names, stdout=asyncio.subprocess.PIPE)
    datasets = json.loads((await process.communicate())[0])
    assert len(datasets) == 106
    unscored = set()
    for name in set(datasets) - {"composite"}:
        pool = await opened(ReasoningGymPool, python=real, dataset=name, size=4, seed=42)
        asked = []
        for _ in range(2):
            (_, user), result, grade = await answered(pool, f"{name}_3", "<answer>qwnothing</answer>")
            asked.append(user.content)
            assert result.done, name
        assert asked[0] == asked[1], name
        if grade.broke is not None:
            unscored.add(name)
        await pool.close()
    assert unscored <= {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
