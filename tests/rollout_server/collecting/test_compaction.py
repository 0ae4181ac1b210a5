"""Histories that are shortened in the node's own loop: what is left of them, what was served, and what is recorded."""

import asyncio
import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_environments.counter import CounterPool
from agent_environments.protocol import Message, StepResult
from agent_environments.tool_calls import ToolCall, render_tool_call, render_tool_response, tools_section
from loop_formats.branch import Exchange
from loop_formats.collection_request import CollectionRequest, Limits
from loop_formats.rollout import sequence_texts
from loop_recipes.engine.samples import Sample, credited
from loop_recipes.run.metrics import rollout_metrics
from model_families.chat.messages import ChatMessage, opening_messages
from rollout_server.collecting.compaction import (
    LEFT_OUT,
    SUMMARY_HEAD,
    SUMMARY_REQUEST,
    History,
    shortened,
    summarised,
)
from rollout_server.inference.router import Generation
from support.chat_tokenizers import write_formats
from support.random_turns import encoder
from support.scripted_policy import FakePolicy, cut_turn, play_episode

TASK = "reach3_1"
OPENING = [Message("system", "s"), Message("user", "u")]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
FORMATS = ["chatml", "qwen3-kept", "qwen3-stripped", "qwen3-off", "llama3"]


@pytest.fixture(scope="module")
def formats(tmp_path_factory):
    return write_formats(tmp_path_factory.mktemp("models"))


class Policy(FakePolicy):
    """Says ``speak(rng, prompt)``, within the limits, and keeps what was served."""

    def __init__(self, tokens, speak):
        self._tokens, self._encode, self._speak = tokens, encoder(tokens), speak
        self.served: list[tuple[list[int], Generation]] = []

    async def generate(self, *, token_ids, max_tokens, seed, stop_token_ids, **_):
        assert max_tokens > 0
        text = self._speak(random.Random(seed), self._tokens.decode(token_ids))
        turn = [*self._encode(text), self._tokens.turn_end]
        sampled = cut_turn(turn, stop_token_ids, max_tokens)
        self.served.append((list(token_ids), sampled))
        return sampled


class World(CounterPool):
    """Never ends; ``answers`` are its observations, again and again. With ``tools`` they are results of two calls."""

    def __init__(self, tokens, answers, tools=False):
        super().__init__(tokens.spans)
        self._answers, self._tools = answers, tools
        self.actions = []

    async def acquire(self, episode_id):
        environment, answers = await super().acquire(episode_id), itertools.cycle(self._answers)

        async def start(task_id):
            system = f"Add.\n\n{tools_section([ADD])}" if self._tools else "Add."
            return [Message("system", system), Message("user", "Go on and on.")]

        async def step(action):
            self.actions.append(action)
            answer = next(answers)
            return StepResult(render_tool_response(answer, "ok") if self._tools else answer, done=False)

        environment.start, environment.step = start, step
        return environment


def play(tokens, speak, world, compaction, **limits):
    """The rollouts of an episode, and what its policy was asked and said."""
    policy = Policy(tokens, speak)
    bounds = Limits(**{"max_turns": 14, "max_tokens_per_turn": 24, "compaction": compaction, **limits})
    request = CollectionRequest("c", [TASK], 1, 0, limits=bounds)
    return asyncio.run(play_episode(request, world, tokens, policy)), policy.served


def check(rollouts, served, tokens, limits):
    """Each sampled token is stored once, after what it was sampled after; ids and messages say the same."""
    stored = []
    for rollout in rollouts:
        rollout.validate()
        assert len(rollout.token_ids) <= limits
        for turn in rollout.turns:
            span = rollout.token_ids[turn.start : turn.end]
            stored.append((rollout.token_ids[: turn.start], span))
            read = tokens.read(rollout.token_ids[: turn.start], span, with_tools=True)
            assert rollout.messages[turn.message] == read.message
        first = rollout.turns[0]
        begun = [Message(m["role"], m["content"]) for m in rollout.messages[: first.message]]
        assert rollout.token_ids[: first.start] == rendered(tokens, begun, rollout)
    assert stored == [(prompt, generation.token_ids) for prompt, generation in served]
    assert sum(sum(rollout.mask) for rollout in rollouts) == sum(len(g.token_ids) for _, g in served)


def rendered(tokens, messages, rollout):
    """The ids of messages from scratch, in which earlier thinking is not."""
    opening = 3 if any(m.content.startswith(SUMMARY_HEAD) for m in messages[2:3]) else 2
    given, tools = opening_messages(messages[:opening])
    for message in messages[opening:]:
        if message.role == "assistant":
            given.append(ChatMessage("assistant", message.content))
        elif message.content == SUMMARY_REQUEST:
            given.append(ChatMessage("user", message.content))
        else:
            given += tokens.heard(message.content, tools)
    return tokens.opening(given, tools)


def acts(rng, prompt):
    return f"I go {rng.randrange(10)} and {rng.randrange(10)}"


@pytest.mark.parametrize("rule", ["drop", "summary"])
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_trained_is_what_was_served_each_token_once(formats, name, rule):
    tokens = formats[name]

    def speak(rng, prompt):
        thought = "<think>\nhm\n</think>\n\n" if name in ("qwen3-kept", "qwen3-stripped") else ""
        said = render_tool_call(ToolCall("add", {"n": rng.randrange(9)})) if rng.random() < 0.3 else acts(rng, prompt)
        return thought + said

    most = {"drop": 420, "summary": 700}[rule] - (0 if name in ("chatml", "llama3") else 180)
    world = World(tokens, ["seen " * 12, "and " * 20])
    rollouts, served = play(tokens, speak, world, rule, max_context=most, max_tokens_per_turn=48)
    check(rollouts, served, tokens, most)
    marked = [rollout for rollout in rollouts if "compaction" in rollout.extra]
    assert len(marked) >= 2
    assert {rollout.extra["compaction"] for rollout in marked} == {rule}
    assert "compaction" not in rollouts[0].extra
    assert rollouts[0].end_reason == "turn_limit"
    assert sum(len(rollout.turns) for rollout in rollouts) == 14
    assert [rollout.segment for rollout in rollouts] == list(range(len(rollouts)))
    assert {rollout.episode_id for rollout in rollouts} == {rollouts[0].rollout_id}
    assert len({rollout.reward for rollout in rollouts}) == 1
    summaries = [turn for rollout in rollouts for turn in rollout.turns if turn.summary]
    # Before the last turn there is none.
    assert len(summaries) in ((len(marked), len(marked) - 1) if rule == "summary" else (0,))
    assert len(world.actions) == 14 - len(summaries), "a summary is no action"
    texts = [turn.text for _, turns in sequence_texts(rollouts) for turn in turns]
    assert texts == world.actions
    again, served_again = play(
        tokens, speak, World(tokens, ["seen " * 12, "and " * 20]), rule, max_context=most, max_tokens_per_turn=48
    )
    assert served_again == served, "the same seeds, the same compaction"
    assert [rollout.messages for rollout in again] == [rollout.messages for rollout in rollouts]


def test_the_learner_takes_the_sequences_as_one_episode(formats):
    tokens = formats["chatml"]
    rollouts, served = play(tokens, acts, World(tokens, ["seen " * 12]), "summary", max_context=400)
    samples = [Sample.from_rollout(rollout) for rollout in rollouts]
    whole = credited(samples, 0.5)
    assert {sample.episode_tokens for sample in whole} == {sum(len(g.token_ids) for _, g in served)}
    assert {sample.episode_turns for sample in whole} == {14}
    figures = rollout_metrics(rollouts)
    assert (figures["rollouts"], figures["sequences"], figures["turns"]) == (1, len(rollouts), 14)


@pytest.mark.parametrize("name", ["chatml", "qwen3-kept", "llama3"])
def test_results_of_tools_are_left_out_as_results(formats, name):
    tokens = formats[name]

    def speak(rng, prompt):
        return "".join(render_tool_call(ToolCall("add", {"n": n})) for n in range(2)) if name != "llama3" else "{}"

    world = World(tokens, ["seen " * 30], tools=True)
    rollouts, served = play(tokens, speak, world, "drop", max_context=1800, max_tokens_per_turn=80)
    check(rollouts, served, tokens, 1800)
    left_out = render_tool_response(LEFT_OUT, LEFT_OUT)
    assert any(message["content"] == left_out for rollout in rollouts for message in rollout.messages)


@pytest.mark.parametrize("rule", ["drop", "summary"])
def test_an_observation_that_is_longer_than_the_context_is_left_out(formats, rule):
    tokens = formats["chatml"]
    world = World(tokens, ["seen", "word " * 200_000])
    rollouts, served = play(tokens, acts, world, rule, max_context=500, max_turns=6)
    check(rollouts, served, tokens, 500)
    assert rollouts[0].end_reason == "turn_limit"
    assert all(len(message["content"]) < 2_000 for rollout in rollouts[1:] for message in rollout.messages[:-1])
    assert sum(len(rollout.turns) for rollout in rollouts) == 6


@pytest.mark.parametrize("said", ["", "long " * 400])
def test_a_summary_may_be_empty_or_as_long_as_a_turn(formats, said):
    tokens = formats["chatml"]
    world = World(tokens, ["seen " * 12])
    speak = lambda rng, prompt: said if SUMMARY_REQUEST in prompt else acts(rng, prompt)  # noqa: E731
    rollouts, served = play(tokens, speak, world, "summary", max_context=420)
    check(rollouts, served, tokens, 420)
    assert rollouts[0].end_reason == "turn_limit"
    [first, second, *_] = rollouts
    summary = first.messages[-1]["content"]
    assert first.turns[-1].summary
    assert second.messages[2] == {"role": "user", "content": SUMMARY_HEAD + summary}
    assert summary == ("" if not said else summary)


def test_a_prompt_that_leaves_no_room_ends_the_episode_as_it_did(formats):
    tokens = formats["chatml"]
    speak = lambda rng, prompt: "go " * 24  # noqa: E731
    size = len(tokens.prompt([Message("system", "Add."), Message("user", "Go on and on.")]))
    world = World(tokens, ["seen " * 12])
    [rollout], _ = play(tokens, speak, world, "drop", max_context=size + 26)
    assert (rollout.end_reason, len(rollout.turns)) == ("context_limit", 1)


TEXTS = st.text(max_size=4)


@given(st.lists(st.tuples(TEXTS, st.one_of(TEXTS, st.just(LEFT_OUT))), min_size=1, max_size=12))
@settings(max_examples=60)
def test_ever_shorter_histories(pairs):
    """Own turns are kept in their order while only observations go; the newest turn is always there."""
    exchanges = [Exchange(*pair) for pair in pairs]
    history = History(OPENING, exchanges)
    shorter = list(shortened(history))
    *_, last = shorter
    assert last.exchanges == [Exchange(pairs[-1][0], LEFT_OUT)]
    assert len(shorter) <= 8 * len(exchanges).bit_length() + 1
    left = [sum(each.observation == LEFT_OUT for each in found.exchanges) for found in shorter]
    for found, count in zip(shorter, left, strict=True):
        assert found.opening == OPENING
        said = [each.action for each in found.exchanges]
        assert said == [action for action, _ in pairs][-len(said) :]
        kept = [each.observation for each in found.exchanges]
        assert Counter(kept) - Counter([LEFT_OUT] * len(kept)) <= Counter(observation for _, observation in pairs)
        assert count >= sum(observation == LEFT_OUT for _, observation in pairs[-len(said) :])
        assert len(said) < len(pairs) or count > sum(o == LEFT_OUT for _, o in pairs) or pairs[-1][1] == LEFT_OUT


def test_the_older_half_of_the_observations_goes_first():
    exchanges = [Exchange(str(n), str(n)) for n in range(8)]
    found = [[each.observation for each in history.exchanges] for history in shortened(History(OPENING, exchanges))]
    assert found[0] == [LEFT_OUT] * 4 + ["4", "5", "6", "7"]
    assert found[1] == [LEFT_OUT] * 6 + ["6", "7"]
    assert found[2] == [LEFT_OUT] * 7 + ["7"]
    assert found[3] == [LEFT_OUT] * 3 + ["7"]
    again = History(OPENING, [*(Exchange(str(n), LEFT_OUT) for n in range(4)), *exchanges[4:]])
    first = next(shortened(again))
    assert [each.observation for each in first.exchanges] == [LEFT_OUT] * 6 + ["6", "7"]


def test_a_summary_takes_the_place_of_an_earlier_one():
    history = History([*OPENING, Message("user", "old")], [Exchange("a", "b"), Exchange("c", "d")])
    first, second = summarised(OPENING, history, "new")
    begun = [*OPENING, Message("user", f"{SUMMARY_HEAD}new")]
    assert (first.opening, first.exchanges) == (begun, [Exchange("c", "d")])
    assert second.after == [Message("assistant", "c"), Message("user", LEFT_OUT)]


@pytest.mark.parametrize(("rule", "most"), [("drop", 100), ("summary", 200)])
def test_limits_leave_room_for_a_turn(rule, most):
    with pytest.raises(ValueError, match=f"compaction keeps {most} tokens free .* max_context is {most}"):
        Limits(max_tokens_per_turn=100, max_context=most, compaction=rule)
    assert Limits(max_tokens_per_turn=100, max_context=most + 1, compaction=rule).non_null()["compaction"] == rule
    assert "compaction" not in Limits().non_null()
