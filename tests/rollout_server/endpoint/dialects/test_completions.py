"""Text completions: a prompt that begins with a text that was served goes on from its ids."""

import openai
import pytest
from openai.types import Completion

from support.open_session import OpenSession


@pytest.fixture
async def opened(running):
    running.vllm.speak = lambda rng: "a thought\nObservation: mine\n"
    return OpenSession(running)


async def ask(opened, prompt, **options):
    """The choice, read strictly."""
    async with opened.client() as client:
        raw = await client.completions.with_raw_response.create(model="m", prompt=prompt, **options)
    return Completion.model_validate_json(raw.text).choices[0]


async def test_the_prompt_is_text_and_nothing_else(running, opened):
    choice = await ask(opened, "Once <|im_end|> upon", logprobs=1)
    [segment] = opened.session.segments()
    [turn] = segment.turns
    tokens = running.node.tokens
    assert segment.token_ids[: turn.start] == tokens.encode_text("Once <|im_end|> upon")
    assert tokens.turn_end not in segment.token_ids[: turn.start]
    assert choice.text == "a thought\nObservation: mine\n"
    assert choice.logprobs.token_logprobs == segment.sampler_logprobs[turn.start : turn.end - 1]
    assert "".join(choice.logprobs.tokens) == choice.text


async def test_a_text_that_goes_on_is_one_sequence(opened):
    """A loop that stops at its own word, and puts it back with what it found."""
    text = "Question: 1?\n"
    for number in range(3):
        choice = await ask(opened, text, stop=["Observation:"])
        assert (choice.text, choice.finish_reason) == ("a thought\n", "stop")
        text += f"{choice.text}Observation: {number}\n"
    [segment] = opened.session.segments()
    assert len(segment.turns) == 3
    assert [message["role"] for message in segment.messages] == ["user", "assistant"] * 3
    cut = await ask(opened, text, max_tokens=2)
    assert cut.finish_reason == "length"
    await ask(opened, text + cut.text)
    [segment] = opened.session.segments()
    assert len(segment.turns) == 5


async def test_a_text_that_was_changed_or_ended_begins_another_sequence(opened):
    first = await ask(opened, "One.")
    await ask(opened, "One." + first.text + "Two.")  # the policy had ended its turn there
    cut = await ask(opened, "One.", max_tokens=2)
    await ask(opened, "One!" + cut.text)
    assert len(opened.session.segments()) == 4


async def test_a_stream_says_the_same(opened):
    whole = await ask(opened, "One.")
    async with opened.client() as client:
        stream = await client.completions.create(model="m", prompt="One.", stream=True)
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text


async def test_a_prompt_without_a_token_is_refused_and_voids_nothing(opened):
    """vLLM would refuse it, which is a failure of the attempt: the agent could have it repeated at will."""
    with pytest.raises(openai.BadRequestError, match="no token"):
        await ask(opened, "")
    assert not opened.session.failure.done()


@pytest.mark.parametrize("options", [{"echo": True}, {"suffix": "x"}, {"best_of": 3}, {"n": 99}])
async def test_what_cannot_be_done_is_refused(opened, options):
    with pytest.raises(openai.BadRequestError):
        await ask(opened, "x", **options)
    with pytest.raises(openai.BadRequestError, match="prompt"):
        await ask(opened, [1, 2])
