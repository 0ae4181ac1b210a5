"""A reward that asks a model: its answer counts, what it refuses is worth 0, and its absence is nobody's reward."""

import pytest

from agent_environments import chat_client
from agent_environments.no_voiding import NoVoiding
from agent_environments.protocol import EnvironmentCrashed
from agent_environments.tools.environment import ToolPool
from agent_environments.tools.judge import Judge
from support.adapter_support import word_spans
from support.chat_endpoint import FakeChatEndpoint
from support.tool_modules import write

JUDGED = """
from agent_environments.tools import reward

@reward
async def polite(question, answer, judge):
    return float(await judge(f"Is this a polite answer to {question!r}, 0 or 1? {answer}"))

@reward(weight=0)
async def guarded(answer, judge):
    try:
        return len(await judge(answer))
    except Exception:
        return -1.0

TASKS = [{"id": "greet", "question": "Say hello."}]
"""


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
        environment = NoVoiding(await pool.acquire("e"))
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


async def test_a_judge_who_was_never_there_is_a_crash(tmp_path, endpoint):
    endpoint.reply = lambda body: 401
    with pytest.raises(EnvironmentCrashed, match=r"the judge does not answer: .* answers 401"):
        await graded(tmp_path, endpoint, "Hello!")


@pytest.mark.parametrize(
    ("judge", "problem"),
    [
        (None, "reward polite asks a judge: name its url and model under environment.judge"),
        ({"url": "nowhere", "model": "m", "api_key_env": None}, "judge: url 'nowhere' must begin with http"),
        ({"url": "http://localhost/v1"}, "judge: .* missing 1 required positional argument: 'model'"),
        ({"url": "http://localhost/v1", "model": "m", "api_key_env": "NO_SUCH_KEY"}, "judge: set .* NO_SUCH_KEY"),
    ],
)
def test_what_is_wrong_with_a_judge_is_one_line(tmp_path, judge, problem):
    with pytest.raises(ValueError, match=problem):
        ToolPool(word_spans, write(tmp_path, JUDGED), judge=judge)
