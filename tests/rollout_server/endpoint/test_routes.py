"""The endpoint as OpenAI's own client sees it: a node over real HTTP, its vLLM scripted."""

import asyncio
import itertools
import json
import threading
from types import SimpleNamespace

import aiohttp
import openai
import pytest

from agent_environments.protocol import EnvironmentCrashed, StepResult
from rollout_server.endpoint import calls as calls_module
from rollout_server.endpoint import session as session_module
from rollout_server.endpoint import wire
from rollout_server.endpoint.session import ServedWorld
from rollout_server.endpoint.wire import ApiError
from support.counter_node import TOKEN
from support.open_session import HELLO, OpenSession
from support.texts import texts_beside
from support.waiting import DEADLINE_S

TABLES = texts_beside(__file__)

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
async def opened(running):
    return OpenSession(running)


async def test_an_answer_is_what_was_sampled(running, opened):
    answer = await opened.ask()
    [segment] = opened.session.segments()
    [turn] = segment.turns
    assert running.vllm.requests[-1]["token_ids"] == segment.token_ids[: turn.start]
    said = answer.choices[0].message
    assert running.node.tokens.decode(segment.token_ids[turn.start : turn.end - 1]) == said.content
    assert (said.role, answer.model, answer.choices[0].finish_reason) == ("assistant", "gpt-4o", "stop")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (turn.start, turn.end - turn.start)


async def test_a_stream_says_the_same(opened):
    whole = await opened.ask()
    async with opened.client() as client:
        stream = await client.chat.completions.create(
            model="m", messages=HELLO, stream=True, stream_options={"include_usage": True}, seed=1
        )
        chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text.startswith("done\n```python")
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert opened.session.turns == 2


async def test_tool_calls_are_parsed_and_stream(running, opened):
    said = 'So.\n<tool_call>\n{"name": "add", "arguments": {"n": 3}}\n</tool_call>'
    running.vllm.speak = lambda rng: said
    answer = await opened.ask(tools=[ADD])
    [call] = answer.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"n": 3})
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("So.", "tool_calls")
    messages = [*HELLO, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    async with opened.client() as client:
        stream = await client.chat.completions.create(model="m", messages=messages, tools=[ADD], stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]
    [streamed] = [call for delta in deltas for call in delta.tool_calls or []]
    assert json.loads(streamed.function.arguments) == {"n": 3}
    [segment] = opened.session.segments()
    assert len(segment.turns) == 2


async def test_choices_are_branches_each_a_turn_with_a_seed_of_its_own(running, opened):
    answer = await opened.ask(n=3, logprobs=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    segments = opened.session.segments()
    assert [len(segment.turns) for segment in segments] == [1, 1, 1]
    assert len({body["sampling_params"]["seed"] for body in running.vllm.requests[-3:]}) == 3
    for choice, segment in zip(answer.choices, segments, strict=True):
        [turn] = segment.turns
        span = slice(turn.start, turn.end - 1)  # without the end of the turn
        assert running.node.tokens.decode(segment.token_ids[span]) == choice.message.content
        assert [token.logprob for token in choice.logprobs.content] == segment.sampler_logprobs[span]
        assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
    said = {"role": "assistant", "content": answer.choices[1].message.content}
    await opened.ask([*HELLO, said, {"role": "user", "content": "On."}])
    assert opened.session.turns == 4
    assert len(opened.session.segments()) == 3
    async with opened.client() as client:
        stream = await client.chat.completions.create(model="m", messages=HELLO, n=2, stream=True, logprobs=True)
        chunks = [chunk async for chunk in stream]
    assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1}
    small = OpenSession(running, max_turns=2)
    with pytest.raises(openai.BadRequestError, match="3 choices are 3 turns; the episode has 2 left"):
        await small.ask(n=3)


async def test_a_form_is_recorded_and_not_enforced(opened):
    answer = await opened.ask(response_format={"type": "json_object"})
    assert answer.choices[0].message.content.startswith("done")
    assert opened.session.notes()["not_applied"] == {"response_format": "{'type': 'json_object'}"}
    await opened.ask(response_format={"type": "text"})
    assert opened.session.notes()["calls"] == {"answered": 2, "not_applied.response_format": 1}


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/nothing", "/sessions/sk-x/v1/audio/speech"])
async def test_a_path_that_there_is_not_is_named_with_what_there_is(opened, path):
    for headers in ({}, {"Authorization": f"Bearer {opened.key}"}):
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.post(f"{opened.url}{path}", json={}) as answer,
        ):
            assert answer.status == 404
            assert "/v1/responses, /v1/messages" in (await answer.json())["error"]["message"]
    async with aiohttp.ClientSession() as http, http.get(f"{opened.url}/v1/chat/completions") as answer:
        assert answer.status == 405


async def test_models(opened):
    async with opened.client() as client:
        assert [model.id async for model in client.models.list()] == ["policy"]
        assert (await client.models.retrieve("policy")).id == "policy"


async def test_the_key_may_stand_in_the_path(opened):
    async with opened.client(base_url=f"{opened.url}/sessions/{opened.key}/v1", api_key="none") as client:
        await client.chat.completions.create(model="m", messages=HELLO)
    assert opened.session.turns == 1


async def test_a_key_opens_its_own_session_and_nothing_else(running, opened):
    for key in ("sk-", "sk-guess", TOKEN, opened.key[:-1], opened.key + "x", "ü"):
        async with opened.client(base_url=f"{opened.url}/sessions/{key}/v1") as client:
            with pytest.raises(openai.AuthenticationError, match="Incorrect API key"):
                await client.chat.completions.create(model="m", messages=HELLO)
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {opened.key}"}) as http:
        for path in ("/metrics", "/v1/status", "/v1/tasks?split=train", "/v1/collections/c/rollouts"):
            async with http.get(f"{opened.url}{path}") as answer:
                assert answer.status == 401
    await running.node.endpoint.sessions.close(opened.key)
    with pytest.raises(openai.AuthenticationError):
        await opened.ask()


async def test_sampling_is_the_policys_and_the_wish_is_recorded(running, opened):
    await opened.ask(temperature=0.1, top_p=0.5, seed=3, tools=[ADD], tool_choice="required", max_tokens=5)
    sampling = running.vllm.requests[-1]["sampling_params"]
    assert (sampling["temperature"], sampling["top_p"], sampling["max_tokens"]) == (1.0, 1.0, 5)
    notes = opened.session.notes()
    assert notes["not_applied"] == {"temperature": 0.1, "top_p": 0.5, "seed": 3, "tool_choice": "required"}
    assert notes["calls"] == {"answered": 1, **{f"not_applied.{name}": 1 for name in notes["not_applied"]}}


@pytest.mark.parametrize(("wish", "why"), TABLES["what_cannot_be_done_is_refused"])
async def test_what_cannot_be_done_is_refused(opened, wish, why):
    with pytest.raises(openai.BadRequestError, match=why):
        await opened.ask(**wish)
    assert opened.session.turns == 0


async def test_a_full_context_has_openais_code(running):
    opened = OpenSession(running, max_context=20)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 20 tokens") as refused:
        await opened.ask([{"role": "user", "content": "word " * 20_000}])
    assert refused.value.code == "context_length_exceeded"
    assert opened.session.refused == "context_limit"


async def test_after_its_last_turn_an_episode_is_over(running):
    opened = OpenSession(running, max_turns=1)
    await opened.ask()
    with pytest.raises(openai.APIStatusError, match="has had its 1 turns") as refused:
        await opened.ask()
    assert (refused.value.status_code, refused.value.code) == (410, "episode_over")
    assert opened.session.refused == "turn_limit"


async def test_a_stop_text_ends_the_turn_there(running, opened):
    running.vllm.speak = lambda rng: "Action: add\nObservation: I make it up\n"
    answer = await opened.ask(stop=["\nObservation:", "never"])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Action: add", "stop")
    [segment] = opened.session.segments()
    [turn] = segment.turns
    kept = running.node.tokens.decode(segment.token_ids[turn.start : turn.end])
    assert kept.startswith("Action: add\nObservation:")
    assert "make" not in kept
    assert turn.finish_reason == "cut"
    messages = [*HELLO, {"role": "assistant", "content": "Action: add"}, {"role": "user", "content": "3"}]
    await opened.ask(messages)
    [segment] = opened.session.segments()
    assert len(segment.turns) == 2


@pytest.mark.fault("an agent's stop texts do not stop the engine, and ids end turns that the chat format does not know")
async def test_vllm_is_told_what_ends_a_turn(running, opened):
    """An agent's stop texts, and no id but the format's: the folder's own may be others."""
    await opened.ask(stop=["\nObservation:"])
    await opened.ask()
    told = [body["sampling_params"] for body in running.vllm.requests]
    assert [(each["stop"], each["detokenize"]) for each in told] == [(["\nObservation:"], True), ([], False)]
    assert all(each["ignore_eos"] and each["stop_token_ids"] == [*running.node.tokens.stop_ids] for each in told)
    assert not any(each["skip_special_tokens"] for each in told), "a stop text is sought in the text as we read it"


async def test_a_stop_text_is_not_handed_on_where_the_prompt_ends_inside_a_character(running, opened):
    """vLLM would give the prompt's end back, and end at a stop text in it."""
    ids = running.node.tokens.encode_text("\U0001f980")
    assert len(ids) > 1
    for prompt, handed in ((ids[:-1], []), (ids, ["x"])):
        await opened.session._sampler.sample("e", prompt, 1, 4, stops=["x"])
        assert running.vllm.requests[-1]["sampling_params"]["stop"] == handed


async def test_the_same_request_again_is_another_sample_and_a_retry_is_not(opened, monkeypatch):
    clock = itertools.count(1_700_000_000)
    monkeypatch.setattr(wire, "time", SimpleNamespace(time=lambda: float(next(clock))))
    first = await opened.ask()
    async with opened.client() as client:
        retry = await client.chat.completions.create(
            model="gpt-4o", messages=HELLO, extra_headers={"X-Stainless-Retry-Count": "1"}
        )
        keyed = [
            await client.chat.completions.create(
                model="gpt-4o", messages=HELLO, extra_headers={"Idempotency-Key": "one"}
            )
            for _ in range(2)
        ]
    assert retry == first, "to the second in which it was made"
    assert keyed[0].id == keyed[1].id != first.id
    assert (await opened.ask()).id not in (first.id, keyed[0].id)
    assert opened.session.turns == 3


async def test_who_hangs_up_gets_the_same_answer_when_he_asks_again(running, opened):
    may_answer = asyncio.Event()
    running.vllm.answers = lambda body: may_answer.is_set()
    asked = asyncio.create_task(opened.ask())
    while not running.vllm.requests:  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.01)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    [call] = opened.session.calls.made.values()
    while not call.lost:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    again = asyncio.create_task(opened.ask())
    may_answer.set()
    await again
    assert len(running.vllm.requests) == opened.session.turns == 1


@pytest.mark.parametrize(
    ("status", "told", "reason"),
    [(400, openai.BadRequestError, "request_refused"), (500, openai.InternalServerError, "server_error")],
)
async def test_an_error_of_the_server_ends_the_attempt(running, opened, status, told, reason):
    running.vllm.fault = lambda body: status
    with pytest.raises(told, match=f"HTTP {status}"):
        await opened.ask()
    assert (await opened.session.failure).reason == reason


async def test_a_flood_of_calls_is_refused_and_the_others_are_exact(running, opened, monkeypatch):
    monkeypatch.setattr(calls_module, "MAX_CALLS_AT_ONCE", 4)
    other = OpenSession(running)
    may_answer = asyncio.Event()
    running.vllm.answers = lambda body: may_answer.is_set()
    calls = [asyncio.create_task(opened.ask([{"role": "user", "content": str(n)}])) for n in range(40)]
    refused = []
    for call in asyncio.as_completed(calls):
        with pytest.raises(openai.RateLimitError) as raised:
            await call
        refused.append(raised.value)
        if len(refused) == 36:
            break
    assert all(error.response.headers["Retry-After"] for error in refused)
    may_answer.set()
    await other.ask()
    await asyncio.gather(*calls, return_exceptions=True)
    assert (opened.session.turns, other.session.turns) == (4, 1)


async def test_a_refused_call_is_another_sample_when_it_is_tried_again(running, opened, monkeypatch):
    monkeypatch.setattr(calls_module, "MAX_CALLS_AT_ONCE", 2)
    may_answer = asyncio.Event()
    running.vllm.answers = lambda body: may_answer.is_set()
    async with opened.client(max_retries=5) as client:  # OpenAI's own retries, with their header
        create = client.chat.completions.create
        calls = [asyncio.create_task(create(model="gpt-4o", messages=HELLO)) for _ in range(4)]
        async with asyncio.timeout(DEADLINE_S):
            while opened.session.calls.refused < 2:  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.01)
        may_answer.set()
        answers = await asyncio.gather(*calls)
    assert len({answer.id for answer in answers}) == opened.session.turns == 4
    assert opened.session.calls.refused == 0


async def test_calls_end_with_their_session(running, opened):
    running.vllm.answers = lambda body: False
    call = asyncio.create_task(opened.ask())
    while not running.vllm.requests:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await running.node.endpoint.sessions.close(opened.key)
    with pytest.raises(openai.APIStatusError, match="the episode is over"):
        await call
    running.vllm.answers = lambda body: True


class SlowWorld:
    """What a session asks of a harness; its steps never end."""

    has_world = True

    def __init__(self):
        self.begun, self.ended = asyncio.Event(), asyncio.Event()

    async def step(self, action):
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()


async def test_steps_end_with_their_session(running, opened):
    """Nothing changes a world while it is graded: not a step under way, not one whose request came just before."""
    world = SlowWorld()
    opened.session.serve_world(ServedWorld("reach3_1", [], world, world.step))
    await opened.ask()
    step = asyncio.create_task(opened.session.step("add(3)"))
    await world.begun.wait()
    await running.node.endpoint.sessions.close(opened.key)
    assert world.ended.is_set()
    with pytest.raises(ApiError, match="the episode is over"):
        await step
    with pytest.raises(ApiError, match="the episode has ended"):
        await opened.session.step("add(3)")


async def test_nothing_is_done_in_a_world_before_the_policys_first_turn(opened):
    """An episode without a turn is repeated: a program that acted and left would see one world after another."""
    world = SlowWorld()
    opened.session.serve_world(ServedWorld("reach3_1", [], world, world.step))
    with pytest.raises(ApiError, match="the policy has not spoken yet") as refused:
        await opened.session.step("add(3)")
    assert (refused.value.status, refused.value.code) == (400, "no_turn")
    assert not world.begun.is_set()


class EndingWorld:
    """Its first step ends the episode, once it may; there is no world for another."""

    has_world = True

    def __init__(self):
        self.begun, self.may_end = asyncio.Event(), asyncio.Event()

    async def step(self, action):
        if self.begun.is_set():
            raise EnvironmentCrashed("this episode has no world")
        self.begun.set()
        await self.may_end.wait()
        return StepResult("done", done=True)


async def test_a_step_that_waits_for_the_one_that_ends_the_episode_is_refused_as_any_after_it(opened):
    """It would reach a world that is gone, which is a failure, and void the attempt."""
    world = EndingWorld()
    opened.session.serve_world(ServedWorld("reach3_1", [], world, world.step))
    await opened.ask()
    ending = asyncio.create_task(opened.session.step("finish()"))
    await world.begun.wait()
    again = asyncio.create_task(opened.session.step("finish()"))
    await asyncio.sleep(0)  # it has begun
    world.may_end.set()
    assert (await ending).done
    for late in (again, opened.session.step("finish()")):
        with pytest.raises(ApiError, match="the episode has ended") as refused:
            await late
        assert refused.value.status == 410
    assert not opened.session.failure.done()


async def test_a_call_that_is_refused_while_another_is_sampled_leaves_the_number_of_that_one(opened, monkeypatch):
    """Two calls of one number would have one seed, and one id. The long one is read beside the loop."""
    encoding, may_encode = asyncio.Event(), threading.Event()
    overfill, loop = opened.session._tokens.overfill, asyncio.get_running_loop()

    def slow(texts, most):
        if len(texts[0]) > 1000:
            loop.call_soon_threadsafe(encoding.set)
            may_encode.wait(DEADLINE_S)
        return overfill(texts, most)

    monkeypatch.setattr(opened.session._tokens, "overfill", slow)
    refused = asyncio.create_task(opened.ask([{"role": "user", "content": "long " * 5000}]))
    await asyncio.wait_for(encoding.wait(), DEADLINE_S)
    first = await opened.ask()
    may_encode.set()
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await refused
    second = await opened.ask()
    assert [answer.id.rpartition("_")[2] for answer in (first, second)] == ["0", "1"]


@pytest.mark.fault("a refusal is nowhere in the record")
async def test_every_refusal_is_noted_in_its_words(opened):
    for content in ("word " * 5000, [{"type": None}]):
        with pytest.raises(openai.BadRequestError):
            await opened.ask([{"role": "user", "content": content}])
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {opened.key}"}) as http:
        for method, path in (("POST", "/v1/embeddings"), ("GET", "/v1/responses"), ("GET", "/v1/responses")):
            async with http.request(method, f"{opened.url}{path}") as answer:
                assert answer.status in (404, 405)
        async with http.post(f"{opened.url}/v1/messages", data=b"{") as answer:
            assert answer.status == 400
    async with aiohttp.ClientSession() as http, http.get(f"{opened.url}/sessions/{opened.key}/v1/files") as answer:
        assert answer.status == 404
    notes = opened.session.notes()
    assert notes["calls"] == {"refused.400": 3, "refused.404": 2, "refused.405": 2}
    said = {(refusal["status"], refusal["said"][:38]): refusal["times"] for refusal in notes["refusals"]}
    assert [times for (status, _), times in said.items() if status == 405] == [2]
    assert {"This model's maximum context length is", "GET /v1/files is not served here; what"} <= {
        words for _, words in said
    }
    assert opened.key not in json.dumps(notes)
    for number in range(20):
        opened.session.note_refusal(ApiError(400, "x", str(number) * 1000))
    assert len(opened.session.notes()["refusals"]) == session_module.MOST_REFUSALS
    assert opened.session.notes()["calls"]["refused.400"] == 23
