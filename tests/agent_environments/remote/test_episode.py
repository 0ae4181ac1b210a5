"""Which losses of lines count against a command, on lines that are lost when the test says so."""

import itertools

import pytest

from agent_environments import lost_worlds as rule
from agent_environments import plain_values
from agent_environments.guarded_environment import GuardedEnvironment
from agent_environments.lost_worlds import LOSSES_PER_COMMAND, Loss, WorldLost
from agent_environments.protocol import EnvironmentCrashed, EnvironmentTimeout, Message
from agent_environments.remote import episode as episodes
from agent_environments.remote.episode import RemotePool
from agent_environments.remote.line import RequestFailed, WorldLine
from support.adapter_support import word_spans

ANSWER = {"observation": "seen", "done": False, "failed": False}
GRADED = {"reward": 0.5, "success": False}
FIGURES = {"rewards": {"form": 0.5}, "metrics": {"steps": 3.0}}
MACHINES_DOING = RequestFailed("the world died", EnvironmentCrashed.reason)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(rule, "PAUSE_S", 0.0)


class ScriptedLine(WorldLine):
    """Meets the next of its fates at each request; after those it answers."""

    alive = True

    def __init__(self, pool, fates):
        super().__init__(pool.losses)
        self._pool, self._fates = pool, fates

    async def _round_trip(self, request):
        self._pool.asked.append(request.get("command", request["op"]))
        fate = self._fates.pop(0) if self._fates else None
        if isinstance(fate, Exception):
            raise fate
        if fate is not None:
            return fate
        return {"step": ANSWER, "grade": GRADED}.get(request["op"], {"observation": "opening"})

    def kill(self):
        self.alive = False


class ScriptedPool(RemotePool):
    """Its n-th line meets the n-th list of fates; an exception in place of a list: there is no line."""

    def __init__(self, *fates):
        super().__init__("scripted", word_spans, 4, 100, 10.0, 100.0)
        self.fates, self.asked, self.is_there = iter(fates), [], True
        self._know({"train": ["a_1"]})

    async def lease(self):
        fate = next(self.fates, [])
        if isinstance(fate, Exception):
            raise fate
        return ScriptedLine(self, list(fate))

    async def give_back(self, line):
        pass

    async def answers(self):
        return self.is_there

    def opening(self, answer):
        return [Message("user", answer["observation"])]

    def command(self, message):
        return message


def cut(kind=Loss.CUT):
    return WorldLost(f"lost by {kind}", kind)


REFUSED = cut(Loss.REFUSED)


async def play(pool, *commands):
    environment = GuardedEnvironment(await pool.acquire("episode"))
    await environment.start("a_1")
    return environment, [await environment.step(command) for command in commands]


@pytest.mark.parametrize("kind", [Loss.ENDED, Loss.KILLED, Loss.CUT])
async def test_a_command_that_has_its_line_lost_each_time_while_neighbours_live_is_worth_nothing(kind):
    pool = ScriptedPool(*[[None, None, cut(kind)]] * LOSSES_PER_COMMAND)
    environment, results = await play(pool, "one", "two")
    assert (results[1].done, results[1].failed) == (True, True)
    grade = await environment.grade()
    assert (grade.reward, grade.success) == (0.0, False)
    assert f"{LOSSES_PER_COMMAND} worlds were lost over one command: lost by {kind}" in grade.ungradable
    assert pool.asked.count("two") == LOSSES_PER_COMMAND
    status = pool.status()
    assert (status.losses, status.details) == ({kind: LOSSES_PER_COMMAND}, {"replays": LOSSES_PER_COMMAND - 1})


async def test_a_service_that_is_away_for_a_while_is_waited_for():
    pool = ScriptedPool([None, cut()], *[REFUSED] * 20, [cut()], [REFUSED])
    environment, _ = await play(pool, "one")
    assert (await environment.grade()).reward == 0.5
    assert pool.status().losses == {Loss.CUT: 1, Loss.REFUSED: 22}


@pytest.mark.parametrize("fates", [[[cut()], [cut()]], [REFUSED] * 7], ids=["cut", "refused"])
async def test_a_start_is_tried_again(fates):
    environment, _ = await play(ScriptedPool(*fates), "one")
    assert (await environment.grade()).reward == 0.5


@pytest.mark.parametrize("commands", [(), ("one",)], ids=["at the start", "in a step"])
async def test_without_an_end_of_losses_the_attempt_has_failed(commands):
    pool = ScriptedPool(*[[None, cut()]] * len(commands), *itertools.repeat(REFUSED, 10**6))
    pool.start_timeout_s = 0.001
    with pytest.raises(EnvironmentCrashed, match=r"no world lasted for 0.001 s; the last: lost by refused"):
        await play(pool, *commands)


async def test_a_world_that_comes_back_as_another_after_a_cut_is_the_machines_failure():
    environment, _ = await play(ScriptedPool([None, None, cut()], [None, {**ANSWER, "observation": "else"}]), "one")
    with pytest.raises(EnvironmentCrashed, match="a world was lost, and its world answers differently"):
        await environment.step("two")


async def test_a_world_that_ended_by_itself_and_comes_back_as_another_is_worth_nothing():
    fates = [None, None, cut(Loss.ENDED)], [None, {**ANSWER, "observation": "else"}]
    environment, results = await play(ScriptedPool(*fates), "one", "two")
    assert results[1].done
    assert "lost over this command, and its world answers differently" in (await environment.grade()).ungradable


@pytest.mark.parametrize("fates", [[None, MACHINES_DOING], [None, None, MACHINES_DOING]], ids=["step", "grade"])
async def test_what_the_other_side_calls_the_machines_doing_is_that(fates):
    with pytest.raises(EnvironmentCrashed, match="the world died"):
        await (await play(ScriptedPool(fates), "one"))[0].grade()


async def test_a_line_that_is_lost_over_the_grade_is_replaced():
    pool = ScriptedPool([None, None, cut()], [None, None, cut()], [None, None, cut()])
    environment, _ = await play(pool, "one")
    assert (await environment.grade()).reward == 0.5


async def test_a_grade_that_the_machine_keeps_back_is_its_failure(monkeypatch):
    monkeypatch.setattr(episodes, "GRADE_PATIENCE_S", 0.05)
    monkeypatch.setattr(rule, "PAUSE_S", 30.0)
    environment, _ = await play(ScriptedPool([None, None, cut()], *[REFUSED] * 100), "one")
    with pytest.raises(EnvironmentCrashed, match=r"its world was not brought back within 0.05 s"):
        await environment.grade()


@pytest.mark.parametrize("is_there", [True, False])
async def test_a_command_without_an_answer_is_to_blame_if_others_get_one(is_there, monkeypatch):
    async def stuck(self, request):
        raise TimeoutError

    pool = ScriptedPool()
    pool.is_there = is_there
    environment, _ = await play(pool, "one")
    with monkeypatch.context() as patch:
        patch.setattr(ScriptedLine, "_round_trip", stuck)
        pool.start_timeout_s = 0.0
        with pytest.raises(EnvironmentTimeout if is_there else EnvironmentCrashed):
            await environment.step("two")


async def test_what_a_world_grades_is_bounded():
    many = [{"text": "x" * 5000, "passed": True}] * 5000
    graded = {**GRADED, "requirements": many, "ungradable": "y" * 5000}
    environment, _ = await play(ScriptedPool([None, None, graded]), "one")
    grade = await environment.grade()
    assert len(grade.requirements) == plain_values.MOST_ITEMS
    texts = [grade.ungradable, *(requirement.text for requirement in grade.requirements)]
    assert {len(text) for text in texts} == {plain_values.MOST_CHARACTERS}


async def test_the_parts_of_a_reward_and_other_figures_come_along_a_bounded_number_of_them():
    endless = {f"figure{number}": 1.0 for number in range(2 * plain_values.MOST_ITEMS)}
    environment, _ = await play(ScriptedPool([None, None, GRADED | FIGURES]), "one")
    grade = await environment.grade()
    assert {"rewards": grade.rewards, "metrics": grade.metrics} == FIGURES
    environment, _ = await play(ScriptedPool([None, None, GRADED | {"metrics": endless}]), "one")
    assert len((await environment.grade()).metrics) == plain_values.MOST_ITEMS
