"""Keys of no episode: a node that serves its models to whoever holds one, and records nothing."""

import asyncio

import aiohttp
import openai
import pytest

from model_families.chat.messages import ChatMessage
from rollout_server.endpoint import calls as calls_module
from rollout_server.endpoint.session import Session
from rollout_server.endpoint.wire import Asked
from support.counter_node import TOKEN
from support.open_session import HELLO, OpenSession


async def test_a_key_of_no_episode_serves_the_model_it_names_and_records_nothing(running):
    await running.call(running.client.publish_policy, 1, running.node.policies._live[0].folder)
    running.vllm.loaded["base"] = running.node.root
    token = {"Authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession(headers=token) as http:
        for model, served in (("base", "base"), ("policy-v0", "policy-v0000"), ("policy", "policy-v0001")):
            asked = {"model": model, "sampling": {"temperature": 0.0}}
            async with http.post(f"{running.url}/v1/keys", json=asked) as answer:
                opened = await answer.json()
            async with openai.AsyncOpenAI(**opened, max_retries=0) as client:
                for _ in range(2):
                    await client.chat.completions.create(model="m", messages=HELLO)
                sent = running.vllm.requests[-1]
                assert sent["model"].startswith(served)
                assert sent["sampling_params"]["temperature"] == 0.0
                await client.chat.completions.create(model="m", messages=HELLO, temperature=0.5, seed=11)
                wished = running.vllm.requests[-1]["sampling_params"]
                assert (wished["temperature"], wished["top_p"], wished["seed"]) == (0.5, 1.0, 11)
                with pytest.raises(openai.BadRequestError, match="temperature"):
                    await client.chat.completions.create(model="m", messages=HELLO, temperature=-1)
                session = running.node.endpoint.sessions.find(opened["api_key"])
                assert (session.turns, session.segments(), session.calls.made) == (0, [], {})
                async with http.delete(f"{running.url}/v1/keys/{opened['api_key']}") as answer:
                    assert answer.status == 200
                with pytest.raises(openai.AuthenticationError):
                    await client.chat.completions.create(model="m", messages=HELLO)
        for asked, status in (
            ({"model": "policy-v7"}, 404),
            ({"model": "gpt"}, 400),
            ({"max_context": 1025}, 400),
            *(({"sampling": {"temperature": value}}, 400) for value in (2.5, -1, 0.005)),
            *(({"sampling": {"top_p": value}}, 400) for value in (0, 1.1)),
            *(({"sampling": {"top_k": value}}, 400) for value in (0.5, -2, 2**40)),
        ):
            async with http.post(f"{running.url}/v1/keys", json=asked) as answer:
                assert answer.status == status
        async with http.delete(f"{running.url}/v1/keys/sk-guess") as answer:
            assert answer.status == 404
    assert not len(running.node.endpoint.sessions)
    await running.call(running.client.retire_policy, 0)
    assert running.node.policies.versions() == [1]


@pytest.mark.fault("a bound of a key of no episode acts on another setting")
@pytest.mark.parametrize(("asked", "bound"), [({}, 1024), ({"max_context": 40}, 40)])
async def test_a_keys_bounds_are_those_that_it_was_given(running, asked, bound):
    """None of them is another's, at the bound itself; no bound of the thinking is made of them."""
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as http:
        settings = {"model": "policy-v0", "max_tokens_per_turn": 17, **asked}
        async with http.post(f"{running.url}/v1/keys", json=settings) as answer:
            opened = await answer.json()
    limits = running.node.endpoint.sessions.find(opened["api_key"])._limits
    assert (limits.max_tokens_per_turn, limits.max_context, limits.max_thinking_tokens) == (17, bound, None)
    async with openai.AsyncOpenAI(**opened, max_retries=0) as client:
        word = running.node.tokens.decode(running.node.tokens.encode_text("counter")[:1])
        for length, most in ((bound - 1, 1), (bound - 20, 17)):
            await client.completions.create(model="m", prompt=word * length, max_tokens=99)
            assert running.vllm.requests[-1]["sampling_params"]["max_tokens"] == most
        with pytest.raises(openai.BadRequestError, match=f"context length is {bound} tokens"):
            await client.completions.create(model="m", prompt=word * bound)


async def test_a_key_of_no_episode_ends_with_its_time(running):
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as http:
        asked = {"model": "policy-v0", "seconds": 0.1}
        async with http.post(f"{running.url}/v1/keys", json=asked) as answer:
            assert answer.status == 200
        while len(running.node.endpoint.sessions):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await running.call(running.client.retire_policy, 0)
    assert running.node.policies.versions() == []


async def test_of_answers_that_reached_nobody_a_key_keeps_the_latest(running):
    """A key of no episode may live for days, and each call holds its request."""
    most = calls_module.MAX_CALLS_AT_ONCE
    own = OpenSession(running, max_turns=4 * most).session
    session = Session("k", 7, own._limits, own._agent_timeout, own._sampler, running.node.tokens, record=False)
    for number in range(3 * most):
        request = Asked(conversation=(ChatMessage("user", f"{number}"),))
        await session.complete(request, f"call {number}", False, lambda: False)
    assert len(session.calls.made) <= most + 1
    asked = len(running.vllm.requests)
    await session.complete(request, f"call {number}", True, lambda: True)
    assert len(running.vllm.requests) == asked, "a retry finds the latest"
