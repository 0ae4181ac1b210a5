"""A reward that asks a model: its answer counts, what it refuses is worth 0, and its absence is nobody's reward."""

import asyncio

import pytest

from agent_environments.guarded_environment import GuardedEnvironment
from agent_environments.protocol import EnvironmentCrashed
from agent_environments.tools.environment import ToolPool
from contrib_support.chat_endpoint import FakeChatEndpoint
from loop_contrib import chat_client, chat_model
from loop_contrib.judge.judge import Judge
from loop_plumbing import deadline
from support.adapter_support import word_spans
from support.texts import texts_beside
from support.tool_modules import write

TABLES = texts_beside(__file__)
JUDGED = TABLES["judged"]


@pytest.fixture
async def endpoint(monkeypatch):
    monkeypatch.setattr(chat_client, "FIRST_PAUSE_S", 0.0)  # the fork server's processes wait as users' do
    endpoint = FakeChatEndpoint()
    endpoint.reply = lambda body: "1"
    async with endpoint.served():
        yield endpoint


def options_of(endpoint):
    return {"url": endpoint.url, "model": "base", "api_key_env": None}


def texts_of(endpoint):
    return [body["messages"][0]["content"] for body in endpoint.bodies]


async def graded(tmp_path, endpoint, said):
    pool = ToolPool(word_spans, write(tmp_path, JUDGED), judge=options_of(endpoint))
    await pool.open()
    try:
        environment = GuardedEnvironment(await pool.acquire("e"))
        await environment.start("greet")
        assert (await environment.step(said)).done
        return await environment.grade()
    finally:
        await pool.close()


async def test_a_reward_asks_a_model(tmp_path, endpoint):
    grade = await graded(tmp_path, endpoint, "Hello!")
    assert (grade.reward, grade.success, grade.metrics) == (1.0, True, {"guarded": 1.0})
    assert texts_of(endpoint) == ["Say hello.", "Is this a polite answer to 'Say hello.', 0 or 1? Hello!", "Hello!"]


async def test_what_the_model_has_no_answer_to_is_worth_nothing(tmp_path, endpoint):
    endpoint.reply = lambda body: 400 if "hostile" in str(body) else "1"
    grade = await graded(tmp_path, endpoint, "hostile")
    assert (grade.reward, grade.success, grade.broke.where) == (0.0, False, "reward polite")
    assert "the judge has no answer to this text" in grade.ungradable


async def test_a_judge_who_is_away_loses_the_attempt_whatever_the_reward_makes_of_it(endpoint):
    judge = Judge(options_of(endpoint))
    assert await judge("Who are you?") == "1"
    judge.check()
    endpoint.reply = lambda body: 503
    with pytest.raises(EnvironmentCrashed, match=r"the judge does not answer: http.* answers 503"):
        await judge("And now?")
    with pytest.raises(EnvironmentCrashed, match="the judge does not answer"):
        judge.check()
    judge.check()


BUSY = {"429": 429, "503 that says when to come back": (503, {"Retry-After": "0"})}


@pytest.mark.parametrize("how", BUSY)
async def test_a_busy_judge_is_waited_for(endpoint, how):
    refused = [BUSY[how]] * 12
    endpoint.reply = lambda body: refused.pop() if refused else "1"
    judge = Judge(options_of(endpoint))
    assert await judge("Hello!") == "1"
    judge.check()
    assert len(endpoint.bodies) == 14


@pytest.mark.parametrize("greets", [True, False], ids=["from the second text on", "from the start"])
async def test_a_judge_who_is_busy_for_too_long_loses_the_attempt(endpoint, monkeypatch, greets):
    monkeypatch.setattr(chat_model, "PATIENCE", chat_client.Patience(tries=5, busy_s=0.0))
    endpoint.reply = lambda body: "1" if greets and len(endpoint.bodies) == 1 else 429
    judge = Judge(options_of(endpoint))
    with pytest.raises(EnvironmentCrashed, match=r"the judge .* answers 429"):
        await judge("Hello!")
    with pytest.raises(EnvironmentCrashed):
        judge.check()


async def silent(body):
    await asyncio.Event().wait()


async def test_a_silent_judge_loses_the_attempt_and_a_text_that_silences_one_does_not(endpoint):
    judge = Judge({**options_of(endpoint), "timeout_s": 0.3})
    assert await judge("Hello!") == "1"
    endpoint.reply = lambda body: silent(body) if "hostile" in str(body) else "1"
    with pytest.raises(ValueError, match="the judge has no answer to this text"):
        await judge("hostile")
    judge.check()
    endpoint.reply = silent
    with pytest.raises(EnvironmentCrashed, match="the judge does not answer"):
        await judge("Hello!")
    with pytest.raises(EnvironmentCrashed):
        judge.check()


async def test_what_the_judge_takes_is_bounded_for_an_episode(endpoint):
    endpoint.reply = silent
    judge = Judge(options_of(endpoint))
    judge.answer_within(0.0)
    with pytest.raises(EnvironmentCrashed, match="the judge does not answer in time, or is busy"):
        await judge("Hello!")


def test_what_the_judge_takes_is_no_part_of_a_rewards_own_time():
    deadline.install()

    async def asks():
        with deadline.paused(), deadline.paused():
            await asyncio.sleep(0.3)
        return "1"

    async def dawdles():
        await asks()
        await asyncio.sleep(600)

    assert deadline.call(asks, {}, 0.2) == "1"
    with pytest.raises(deadline.DeadlinePassed):
        deadline.call(dawdles, {}, 0.2)


async def test_a_judge_who_was_never_there_is_a_crash(tmp_path, endpoint):
    endpoint.reply = lambda body: 401
    with pytest.raises(EnvironmentCrashed, match=r"the judge does not answer: .* answers 401"):
        await graded(tmp_path, endpoint, "Hello!")


@pytest.mark.parametrize(("judge", "problem"), TABLES["what_is_wrong_with_a_judge_is_one_line"])
def test_what_is_wrong_with_a_judge_is_one_line(tmp_path, judge, problem):
    with pytest.raises(ValueError, match=problem):
        ToolPool(word_spans, write(tmp_path, JUDGED), judge=judge)
