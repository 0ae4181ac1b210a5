"""Thinking in its three modes, in whole episodes: what is trained is what was served, and each token once."""

import asyncio
import dataclasses

import pytest

from agent_environments.counter import CounterPool
from agent_environments.protocol import Message, StepResult
from agent_environments.tool_calls import (
    ToolCall,
    parse_tool_calls,
    render_tool_call,
    render_tool_response,
    tools_section,
)
from loop_formats.branch import Branch
from loop_formats.collection_request import CollectionRequest, Limits, Sampling
from loop_formats.rollout import Rollout
from loop_recipes.run.metrics import rollout_metrics
from model_families.chat import open_chat
from rollout_server.collecting.episode import CUT_IN_THINKING
from rollout_server.collecting.policy_sampler import EpisodeServices, PolicySampler
from rollout_server.inference.router import Generation
from rollout_server.metrics import NodeMetrics
from support.chat_tokenizers import write_llama3, write_qwen3
from support.random_policy import write_tokenizer
from support.scripted_policy import FakePolicy, play_episode

TASK = "reach3_1"
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
THINK = "<think>\nI could ```python\nadd(100)\n``` but no.\n</think>\n\n"
TURNS = [f"{THINK}```python\nadd({n})\n```" for n in (1, 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_qwen3(tmp_path_factory.mktemp("qwen3"), words=8_000)


class Router(FakePolicy):
    """Says ``turns`` one after the other; keeps what was served, as vLLM cuts it at limits and stop tokens."""

    def __init__(self, tokens, turns):
        self.turns = [[*tokens._control.encode(turn), tokens.turn_end] for turn in turns]
        self.served, self.asked = [], []

    async def generate(self, *, token_ids, max_tokens, stop_token_ids, seed, **_):
        turn = self.turns[0]
        stop = next(place for place, token in enumerate(turn) if token in stop_token_ids)
        sampled, left = turn[: min(stop + 1, max_tokens)], turn[min(stop + 1, max_tokens) :]
        self.asked.append((max_tokens, seed))
        self.served.append((list(token_ids), sampled))
        cut = sampled[-1] not in stop_token_ids
        if left and not cut:
            self.turns[0] = left  # the answer is asked for next
        else:
            self.turns.pop(0)
        logprobs = [-0.25] * len(sampled)
        return Generation(sampled, logprobs, "length" if cut else "stop", "s", cached_tokens=0, seconds=0.1)


class Acting(CounterPool):
    """Keeps the actions that environments were given."""

    def __init__(self, tokens):
        super().__init__(tokens.spans)
        self.actions = []

    async def acquire(self, episode_id):
        environment = await super().acquire(episode_id)
        step = environment.step

        async def noted(action):
            self.actions.append(action)
            return await step(action)

        environment.step = noted
        return environment


class Adding(CounterPool):
    """An environment of one tool, in the texts of all environments; keeps the calls that it was given."""

    def __init__(self, tokens):
        super().__init__(tokens.spans)
        self.calls = []

    async def acquire(self, episode_id):
        environment = await super().acquire(episode_id)

        async def start(task_id):
            return [Message("system", f"Add.\n\n{tools_section([ADD])}"), Message("user", "Go.")]

        async def step(action):
            calls = parse_tool_calls(action)
            self.calls.append(calls)
            return StepResult(
                render_tool_response(*[f"{call.arguments['n']} <|eot_id|>" for call in calls]), done=False
            )

        environment.start, environment.step = start, step
        return environment


def play(tokens, turns, start=None, pool=None, **limits):
    """The rollouts of an episode, its router and its pool."""
    router, pool = Router(tokens, turns), pool or Acting(tokens)
    bounds = Limits(**{"max_turns": len(turns) + (start.origin.turns if start else 0), "max_context": 4000, **limits})
    request = CollectionRequest("c", [TASK], 1, 0, limits=bounds)
    return asyncio.run(play_episode(request, pool, tokens, router, start)), router, pool


def check(rollouts, router):
    """Every request was served the beginning of a sequence, and each sampled token is trained once."""
    trained = []
    for rollout in rollouts:
        rollout.validate()
        for turn in rollout.turns:
            trained.append((rollout.token_ids[: turn.start], rollout.token_ids[turn.start : turn.end]))
    assert trained == router.served


@pytest.mark.parametrize(("mode", "sequences"), [("kept", 1), ("stripped", 2), ("off", 1)])
def test_what_is_trained_is_what_was_served(folder, mode, sequences):
    tokens = open_chat(folder, thinking=mode)
    turns = TURNS if mode != "off" else [turn.removeprefix(THINK) for turn in TURNS]
    rollouts, router, pool = play(tokens, turns)
    check(rollouts, router)
    assert len(rollouts) == sequences
    assert pool.actions == [turn.removeprefix(THINK) for turn in TURNS], "what is thought is not executed"
    assert [rollout.success for rollout in rollouts] == [rollouts[0].success] * sequences
    assert [rollout.segment for rollout in rollouts] == list(range(sequences))
    assert {rollout.episode_id for rollout in rollouts} == {rollouts[0].rollout_id}
    text = tokens.decode(rollouts[-1].token_ids)
    assert text.count("<think>") == {"kept": 2, "stripped": 1, "off": 2}[mode]
    assert text.count("<tool_response>") == (mode == "kept")
    said = [message for message in rollouts[-1].messages if message["role"] == "assistant"]
    assert [message["content"] for message in said] == pool.actions
    assert ["reasoning" in message for message in said] == {
        "kept": [True, True],
        "stripped": [False, True],
        "off": [False, False],
    }[mode]
    figures = rollout_metrics(rollouts)
    assert (figures["sequences"], figures["turns"]) == (sequences, 2)
    assert (figures.get("thinking_tokens", 0) > 0) == (mode != "off")
    [again] = [Rollout.from_dict(rollout.to_dict()) for rollout in rollouts[:1]]
    assert again == dataclasses.replace(rollouts[0])


def test_a_turn_cut_in_thinking_is_told_so_and_acts_on_nothing(folder):
    tokens = open_chat(folder)
    rollouts, router, pool = play(tokens, [TURNS[0], TURNS[1]], max_tokens_per_turn=12)
    check(rollouts, router)
    [rollout] = rollouts
    assert pool.actions == []
    assert [(turn.cut_in_thinking, turn.thinking_tokens, turn.failed) for turn in rollout.turns] == [
        (True, 12, True)
    ] * 2
    assert [message["content"] for message in rollout.messages[-4:]] == ["", CUT_IN_THINKING] * 2
    assert rollout_metrics(rollouts)["cut_in_thinking"] == 1.0
    assert tokens.decode(rollout.token_ids).count("</think>") == 1, "the one that closes the first turn's, not sampled"


def test_thinking_and_answer_have_limits_of_their_own(folder):
    tokens = open_chat(folder)
    thinking = len(tokens._control.encode(THINK.rstrip()))
    rollouts, router, _ = play(tokens, TURNS, max_thinking_tokens=thinking, max_tokens_per_turn=9)
    [rollout] = rollouts
    assert [turn.thinking_tokens for turn in rollout.turns] == [thinking] * 2
    assert [turn.end - turn.start for turn in rollout.turns] == [thinking + 9] * 2
    assert [asked for asked, _ in router.asked] == [thinking, 9] * 2
    assert len({seed for _, seed in router.asked}) == 4
    (first, thought), (second, answer) = router.served[:2]
    assert second == first + thought
    turn = rollout.turns[0]
    assert rollout.token_ids[turn.start : turn.end] == thought + answer
    assert all(not turn.cut_in_thinking for turn in rollout.turns)
    rollouts, _, _ = play(tokens, TURNS, max_thinking_tokens=thinking - 1)
    assert [turn.cut_in_thinking for turn in rollouts[0].turns] == [True, True]


@pytest.mark.fault("a policy that leaves its thinking out gets longer answers for it")
@pytest.mark.parametrize(("tokens_of_answer", "kept"), [(9, 9), (10, 10), (11, 10), (40, 10)])
def test_a_turn_without_thinking_ends_at_the_bound_of_an_answer(folder, tokens_of_answer, kept):
    """Else a policy that leaves its thinking out would get longer answers for it."""
    tokens = open_chat(folder)
    said = "a" + " b" * (tokens_of_answer - 2)
    assert len(tokens._control.encode(said)) + 1 == tokens_of_answer
    rollouts, router, _ = play(tokens, [said], max_thinking_tokens=100, max_tokens_per_turn=10)
    [turn] = rollouts[0].turns
    assert (turn.end - turn.start, turn.finish_reason) == (kept, "stop" if tokens_of_answer == kept else "length")
    assert len(router.asked) == 1


@pytest.mark.parametrize("stop", ["in the thinking", "in the answer"])
def test_a_stop_text_ends_a_turn_of_two_requests(folder, stop):
    """It is handed to vLLM in both, and what it ends is not gone on from."""
    tokens, asked = open_chat(folder), []
    thought, answer = (tokens._control.encode(text) for text in ("<think>\nso</think>", "yes"))

    class Stopping:
        async def generate(self, *, stops, stop_token_ids, **_):
            asked.append(stops)
            ids = tokens.encode_text("<think> so") if stop == "in the thinking" else (thought, answer)[len(asked) - 1]
            return Generation(list(ids), [-0.1] * len(ids), "stop", "s", 0, 0.1)

    services = EpisodeServices(None, tokens, Stopping(), None, NodeMetrics())
    limits = Limits(max_thinking_tokens=50, max_tokens_per_turn=50)
    sampler = PolicySampler(Sampling(), limits, 0, "policy", services)
    asyncio.run(sampler.sample("e", tokens.encode_text("Go."), 1, stops=["so"]))
    assert asked == [["so"]] * (1 if stop == "in the thinking" else 2)


def test_a_branch_goes_on_after_thinking_and_after_a_turn_that_was_cut(folder):
    tokens = open_chat(folder)
    [rollout], _, _ = play(tokens, [TURNS[0], "<think>\n" + "so " * 80, TURNS[1]], max_thinking_tokens=60)
    assert [turn.cut_in_thinking for turn in rollout.turns] == [False, True, False]
    [start] = Branch.of(rollout, [2]).starts()
    [branch], router, pool = play(tokens, [TURNS[1]], start=start)
    assert router.served[0][0] == rollout.token_ids[: rollout.turns[2].start]
    assert branch.token_ids == rollout.token_ids
    assert pool.actions == [turn.removeprefix(THINK) for turn in TURNS]


@pytest.mark.parametrize("name", ["qwen3", "llama3"])
def test_tools_are_offered_called_and_answered_in_the_models_own_form(folder, tmp_path, name):
    """The environment reads and writes one form whatever the model."""
    tokens = open_chat(folder if name == "qwen3" else write_llama3(tmp_path))
    call = ToolCall("add", {"n": 3})
    own = render_tool_call(call) if name == "qwen3" else '{"name": "add", "parameters": {"n": 3}}'
    thought = THINK if name == "qwen3" else ""
    pool = Adding(tokens)
    rollouts, router, _ = play(tokens, [thought + own] * 3, pool=pool)
    check(rollouts, router)
    [rollout] = rollouts
    assert pool.calls == [[call]] * 3
    text = tokens.decode(rollout.token_ids)
    if name == "qwen3":
        assert text.count("<|im_start|>user\n<tool_response>\n3 <|eot_id|>\n</tool_response><|im_end|>") == 2
    else:
        assert text.count('<|start_header_id|>ipython<|end_header_id|>\n\n"3 <|eot_id|>"<|eot_id|>') == 2
        assert "<tool_call>" not in text
        assert rollout.token_ids.count(tokens.turn_end) == text.count("<|eot_id|>") - 2, "the results' are text"
    assert [message["content"] for message in rollout.messages[-2:]] == [
        render_tool_call(call),
        render_tool_response("3 <|eot_id|>"),
    ]


def test_without_thinking_nothing_of_it_is_recorded(tmp_path):
    write_tokenizer(tmp_path)
    tokens = open_chat(tmp_path)
    [rollout], _, _ = play(tokens, ["```python\nadd(1)\n```"], max_thinking_tokens=2)
    assert {(turn.thinking_tokens, turn.cut_in_thinking) for turn in rollout.turns} == {(0, False)}
    assert all(set(message) == {"role", "content"} for message in rollout.messages)
    assert "thinking_tokens" not in rollout_metrics([rollout])
