"""Where AgentGym's client takes a grade from: services that have grades, and services that have none."""

from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agent_environments.counter import CounterPool
from agent_environments.lost_worlds import WorldLost
from agent_environments.protocol import EnvironmentCrashed, create_pool
from loop_contrib.services.server import EnvironmentServer
from loop_contrib.services.service_pool import TOKEN_VARIABLE
from support.adapter_support import word_spans
from support.episodes import open_pool, play_steps
from support.texts import texts_beside

TABLES = texts_beside(__file__)

TASK = "reach12_1"
ACTION = "```python\nadd(9)\n```"


def client(server, **options):
    return create_pool("agentgym", {"url": str(server.make_url("")), "dataset": "mine", **options}, word_spans)


async def test_a_grade_that_is_not_found_is_asked_for_again(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "a-token")
    application = EnvironmentServer(CounterPool(lambda text: []), ("train",), "a-token").application()
    not_found = []

    @web.middleware
    async def proxy(request, handler):
        if request.path == "/grade" and not not_found:
            not_found.append(request)
            return web.Response(status=404, text="404 page not found")
        return await handler(request)

    application.middlewares.insert(0, proxy)
    async with TestServer(application) as server, open_pool(client(server)) as service:
        expected = await play_steps(CounterPool(word_spans), TASK, [ACTION])
        for _ in range(2):
            assert await play_steps(service, TASK, [ACTION]) == expected
        assert not_found


@asynccontextmanager
async def service_of(answer, **options):
    """A pool that plays with a server of two tasks, which answers all requests by ``answer``."""
    application = web.Application()
    application.add_routes([web.post(path, answer) for path in ("/create", "/reset", "/step")])
    async with (
        TestServer(application) as server,
        open_pool(client(server, splits={"train": (0, 2)}, **options)) as service,
    ):
        yield service


async def test_a_service_without_grades_has_the_reward_of_its_last_answer():
    async def answer(request):
        return web.json_response({"id": 1, "observation": "You see a ball.", "reward": 0.5, "done": False})

    async with service_of(answer) as service:
        for _ in range(2):
            assert (await play_steps(service, "item_0", ["look"]))[-1].reward == 0.5


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf"), "nan", "", "much", []], ids=str)
async def test_a_reward_that_is_no_finite_number_is_no_reward_of_0(reward):
    async def answer(request):
        return web.json_response({"id": 1})

    async with service_of(answer) as service:
        with pytest.raises(WorldLost, match="the service's reward is not a finite number: "):
            service.reward_of(reward, None)
        assert [service.reward_of(value, 0.25) for value in (None, True, 0.5, -3)] == [0.25, 1.0, 0.5, -3.0]


@pytest.mark.parametrize("done", [True, False])
async def test_an_episode_that_a_service_ends_without_any_reward_has_no_grade(done):
    """It would be a 0 like any other, that the rest of its group is compared with."""

    async def answer(request):
        return web.json_response({"id": 1, "observation": "You see a ball.", "done": done})

    async with service_of(answer) as service:
        grade = (await play_steps(service, "item_0", ["look"]))[-1]
    assert grade.reward == 0.0
    assert grade.ungradable == ("the service ended the episode without any reward" if done else None)


async def test_rewards_on_another_scale_are_told_of(caplog):
    """AgentGym's ScienceWorld gives what a step adds to a score of 100."""
    gains = iter([8, 0, 17, 0, 0.5])

    async def answer(request):
        gain = next(gains) if request.path == "/step" else 0
        return web.json_response({"id": 1, "observation": "The water boils.", "reward": gain, "done": False})

    async with service_of(answer) as service:
        rewards = [(await play_steps(service, "item_0", ["wait"]))[-1].reward for _ in range(5)]
    assert rewards == [1.0, 0.0, 1.0, 0.0, 0.5]
    (record,) = [record for record in caplog.records if "gave the reward" in record.getMessage()]
    assert "gave the reward 8, and all beyond 0 and 1 count as these: set scale" in record.getMessage()


@pytest.mark.parametrize(("options", "rewards", "reward"), TABLES["rewards_are_the_last_or_their_sum_on_a_scale"])
async def test_rewards_are_the_last_or_their_sum_on_a_scale(options, rewards, reward):
    given = iter(rewards)

    async def answer(request):
        gain = next(given) if request.path == "/step" else None
        return web.json_response({"id": 1, "observation": "You see a ball.", "reward": gain, "done": False})

    async with service_of(answer, **options) as service:
        grade = (await play_steps(service, "item_0", ["wait"] * len(rewards)))[-1]
    assert (grade.reward, grade.success) == (reward, reward == 1.0)


@pytest.mark.parametrize(("shown", "text"), TABLES["what_a_service_shows_becomes_a_text"])
async def test_what_a_service_shows_becomes_a_text(shown, text):
    """Its fields of our names are its own: TextArena's ``messages`` are no opening of ours."""

    async def answer(request):
        own = {"messages": [{"sender": 1}], "failed": "no", "reminder": None, "turn_reward": "much"}
        return web.json_response({"id": 1, "observation": shown, "reward": 0.5, "done": False, **own})

    async with service_of(answer) as service:
        environment = await service.acquire("e")
        assert [message.content for message in await environment.start("item_0")] == [text]
        step = await environment.step("look")
        assert (step.observation, step.failed, step.reward) == (text, False, None)
        await environment.close()


async def test_a_wrong_observation_field_is_told_at_once():
    async def answer(request):
        return web.json_response({"id": 1, "hint": "a", "done": False})

    async with service_of(answer) as service:
        environment = await service.acquire("e")
        with pytest.raises(
            EnvironmentCrashed, match="no 'observation': set observation_field to one of done, hint, id"
        ):
            await environment.start("item_0")
        await environment.close()
