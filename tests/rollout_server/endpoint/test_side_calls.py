"""Calls that are no part of the task: answered, not recorded, counted apart."""

import openai
import pytest

from agent_environments.program_protocol import SideCalls
from rollout_server.endpoint import session as session_module
from support.open_session import HELLO, OpenSession

TITLE = [{"role": "system", "content": "You write a title."}, {"role": "user", "content": "Hello."}]
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("look", "add")]


@pytest.mark.fault("a title is trained on with the episode's reward")
@pytest.mark.parametrize(
    ("rule", "aside", "turns"),
    [
        (SideCalls(system="You write a title"), [{"messages": TITLE}], [{}]),
        (SideCalls(system="You write a title"), [{"messages": [*HELLO, *TITLE]}], [{"messages": HELLO + TITLE[1:]}]),
        (SideCalls(model="small"), [{"model": "small"}, {"model": "small", "messages": TITLE}], [{"model": "small-2"}]),
        (SideCalls(tools=frozenset()), [{}, {"messages": TITLE}], [{"tools": TOOLS}]),
        (SideCalls(tools=frozenset({"add", "look"})), [{"tools": TOOLS}], [{}, {"tools": TOOLS[:1]}]),
        (SideCalls(model="small", system="You"), [{"model": "small", "messages": TITLE}], [{"messages": TITLE}]),
    ],
)
async def test_a_rule_takes_out_what_it_names_and_nothing_else(running, rule, aside, turns):
    opened = OpenSession(running, [rule])
    async with opened.client() as client:
        for asked in (*aside, *turns):
            answer = await client.chat.completions.create(**{"model": "m", "messages": HELLO, **asked})
            assert answer.choices[0].message.content
    calls = opened.session.notes()["calls"]
    assert (opened.session.turns, calls["aside"], calls["answered"]) == (len(turns), len(aside), len(turns))
    assert sum(len(segment.turns) for segment in opened.session.segments()) == len(turns)
    assert calls["aside_tokens"] > 0
    assert opened.session.sampled_tokens == sum(sum(segment.mask) for segment in opened.session.segments())


@pytest.mark.attack
@pytest.mark.fault("a text in a file takes turns out of training, and past their limit")
async def test_no_word_of_a_file_and_no_turn_that_goes_on_from_another_is_aside(running):
    opened = OpenSession(running, [SideCalls(system="You write a title"), SideCalls(model="small")], max_turns=4)
    prompt = {"role": "system", "content": "You mend code. Notes:\nYou write a title"}
    said = (await opened.ask([prompt, *HELLO])).choices[0].message
    history = [prompt, *HELLO, said, {"role": "user", "content": "On."}]
    await opened.ask([{"role": "system", "content": f"Mend.\n{TITLE[0]['content']}"}, *HELLO])
    async with opened.client() as client:
        await client.chat.completions.create(model="small", messages=history)
        await client.chat.completions.create(model="small", messages=[prompt, *HELLO])
    assert (opened.session.turns, opened.session.notes()["calls"]["aside"]) == (3, 1)


async def test_without_a_rule_every_call_is_a_turn(opened_without_rules):
    await opened_without_rules.ask(TITLE)
    assert opened_without_rules.session.turns == 1


@pytest.fixture
async def opened_without_rules(running):
    return OpenSession(running)


async def test_the_base_model_answers_where_a_rule_says_so(running):
    opened = OpenSession(running, [SideCalls(system="You write a title", by_base=True), SideCalls(system="You write")])
    await opened.ask(TITLE, temperature=0.25)
    asked = running.vllm.requests[-1]
    assert (asked["model"], asked["sampling_params"]["temperature"]) == ("base", 0.25)
    await opened.ask([{"role": "system", "content": "Another title. You write a title."}, *HELLO])
    await opened.ask()
    assert all(body["model"].startswith("policy-v") for body in running.vllm.requests[-2:])


async def test_a_side_call_takes_no_turn_changes_no_seed_and_is_not_gone_on_from(running):
    alone, beside = (
        OpenSession(running, max_turns=2),
        OpenSession(running, [SideCalls(system="You write a title")], max_turns=2),
    )
    for opened in (alone, beside):
        if opened is beside:
            await opened.ask(TITLE)
        said = (await opened.ask()).choices[0].message
        if opened is beside:
            await opened.ask(TITLE)
        await opened.ask([*HELLO, said, {"role": "user", "content": "On."}])
    assert [segment.token_ids for segment in alone.session.segments()] == [
        segment.token_ids for segment in beside.session.segments()
    ]
    with pytest.raises(openai.APIStatusError, match="has had its 2 turns"):
        await beside.ask()
    assert await beside.ask(TITLE)
    assert beside.session.refused == "turn_limit"


async def test_side_calls_have_a_bound_and_their_failures_end_no_attempt(running, monkeypatch):
    monkeypatch.setattr(session_module, "SIDE_CALLS_PER_TURN", 1)
    opened = OpenSession(running, [SideCalls(system="You write a title")], max_turns=2)
    running.vllm.fault = lambda body: 400
    with pytest.raises(openai.InternalServerError, match="HTTP 400"):
        await opened.ask(TITLE)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await opened.ask([TITLE[0], {"role": "user", "content": "word " * 5000}])
    assert (opened.session.failure.done(), opened.session.refused) == (False, None)
    running.vllm.fault = lambda body: None
    with pytest.raises(openai.BadRequestError, match="has had 2 calls aside"):
        await opened.ask(TITLE)
    await opened.ask()
