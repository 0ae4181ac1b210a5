"""What was served is what is stored: random harnesses against a policy of random ids."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_families.chat import open_chat
from model_families.chat.chatml import ChatML
from model_families.chat.format import ReadTurn
from model_families.chat.messages import spoken_message
from rollout_server.endpoint.conversations import Conversations
from rollout_server.endpoint.dialects.chat import said_message
from rollout_server.endpoint.messages import read_messages
from rollout_server.inference.router import Generation
from support.chat_tokenizers import write_llama3, write_qwen3
from support.random_harness import TOOL, append_turn, opening, picked, respelled
from support.random_policy import write_tokenizer
from support.random_turns import check_segments, encoder, sampled_turn


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return ChatML(folder)


@pytest.fixture(scope="module")
def formats(tmp_path_factory, tokens):
    """The chat formats by name, those that think in each way."""
    root = tmp_path_factory.mktemp("formats")
    qwen3 = write_qwen3(root / "qwen3", words=4000)
    thinking = {mode: open_chat(qwen3, thinking=mode) for mode in ("kept", "stripped", "off")}
    return {"chatml": tokens, "llama3": open_chat(write_llama3(root / "llama3")), **thinking}


class Policy:
    """Serves an episode; keeps what was served and what it sampled."""

    def __init__(self, tokens, rng):
        self.tokens, self.rng = tokens, rng
        self.tree = Conversations(tokens)
        self.served = []

    def begin(self, messages):
        return self.tree.prompt(read_messages(messages, [TOOL]), [TOOL])

    def end(self, prompt):
        """Sample after a prompt; returns the assistant message as the endpoint tells it."""
        generation = sampled_turn(self.tokens, self.rng)
        ids = generation.token_ids
        turn = self.tokens.read(prompt.token_ids, ids, with_tools=True)
        spoken = spoken_message(turn.answer, True, turn.reasoning)
        self.tree.add(prompt, spoken, turn, len(self.served), generation)
        self.served.append((prompt.token_ids, generation))
        return said_message(len(self.served), spoken)

    def ask(self, messages):
        return self.end(self.begin(messages))


def check(policy):
    return check_segments(policy.tree.segments(), policy.served, policy.tokens)


@pytest.mark.parametrize("name", ["chatml", "llama3", "kept", "stripped", "off"])
@settings(max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_random_harnesses(formats, name, seed):
    rng = random.Random(seed)
    policy = Policy(formats[name], rng)
    histories, under_way = [opening(rng)], []
    for _ in range(rng.randrange(1, 14)):
        history = picked(histories, rng)
        match rng.randrange(4):
            case 0:  # a call that overlaps with others
                under_way.append((history, policy.begin(history)))
            case 1 if under_way:
                _, prompt = under_way.pop(rng.randrange(len(under_way)))
                policy.end(prompt)
            case _:
                append_turn(history, policy.ask(history), rng)
    for _, prompt in under_way:
        policy.end(prompt)
    if policy.served:
        check(policy)


def play(policy, turns, echo=lambda said: said):
    messages = opening(policy.rng)
    for number in range(turns):
        messages += [echo(policy.ask(messages)), {"role": "user", "content": f"go on {number}"}]
    return messages


def test_an_echo_is_one_sequence(tokens):
    policy = Policy(tokens, random.Random(1))
    play(policy, 6, lambda said: respelled(said, policy.rng))
    [segment] = check(policy)
    assert len(segment.turns) == 6
    assert [message["role"] for message in segment.messages] == ["system", *["user", "assistant"] * 6]


@pytest.mark.parametrize(("name", "sequences"), [("llama3", 1), ("kept", 1), ("off", 1), ("stripped", 4)])
def test_a_harness_that_leaves_out_the_thinking_is_known(formats, name, sequences):
    """It is told of the thinking apart, and hands back the answer alone."""
    policy = Policy(formats[name], random.Random(7))
    messages = opening(policy.rng)
    for number in range(4):
        prompt = policy.begin(messages)
        ids = [*encoder(policy.tokens)("<think>\nhm\n</think>\n\nYes."), policy.tokens.turn_end]
        turn = policy.tokens.read(prompt.token_ids, ids, with_tools=True)
        generation = Generation(ids, [-0.5] * len(ids), "stop", "s", 0, 0.1)
        spoken = spoken_message(turn.answer, True, turn.reasoning)
        policy.tree.add(prompt, spoken, turn, number, generation)
        policy.served.append((prompt.token_ids, generation))
        told = said_message(number, spoken)
        assert told.get("reasoning_content") == (None if name == "llama3" else "hm")
        messages += [{"role": "assistant", "content": told["content"]}, {"role": "user", "content": f"go on {number}"}]
    assert [len(segment.turns) for segment in check(policy)] == [4 // sequences] * sequences


@pytest.mark.parametrize("name", ["chatml", "llama3", "kept", "off"])
def test_what_a_harness_writes_on_a_turn_that_was_cut_goes_on_from_its_ids(formats, name):
    """It puts the stop text back, and its own record of the call after it."""
    policy = Policy(formats[name], random.Random(8))
    messages = opening(policy.rng)
    for number in range(3):
        prompt = policy.begin(messages)
        ids = encoder(policy.tokens)("<code>go</code>")
        generation = Generation(ids, [-0.5] * len(ids), "cut", "s", 0, 0.1)
        turn = policy.tokens.read(prompt.token_ids, ids, with_tools=True)
        policy.tree.add(prompt, spoken_message("<code>go", True), turn, number, generation, "</code>")
        policy.served.append((prompt.token_ids, generation))
        messages += [
            {"role": "assistant", "content": "<code>go</code>\nCalled."},
            {"role": "user", "content": f"{number}"},
        ]
    policy.ask(messages)
    [segment] = check(policy)
    assert len(segment.turns) == 4
    assert policy.tokens.decode(segment.token_ids).count("</code>\nCalled.") == 3


def test_turns_that_come_back_changed_fork(tokens):
    policy = Policy(tokens, random.Random(2))
    play(policy, 6, lambda said: {"role": "assistant", "content": "changed"})
    assert [len(segment.turns) for segment in check(policy)] == [1] * 6


def test_compaction_is_a_second_sequence(tokens):
    policy = Policy(tokens, random.Random(3))
    messages = play(policy, 3)
    messages[1:] = [{"role": "user", "content": "Three turns were played."}]
    for _ in range(3):
        messages += [policy.ask(messages), {"role": "user", "content": "go on"}]
    assert [len(segment.turns) for segment in check(policy)] == [3, 3]


def test_a_shared_beginning_is_sampled_in_the_first_sequence_only(tokens):
    policy = Policy(tokens, random.Random(4))
    messages = play(policy, 2)
    policy.ask([*messages, {"role": "user", "content": "left"}])
    policy.ask([*messages, {"role": "user", "content": "right"}])
    left, right = check(policy)
    assert [len(segment.turns) for segment in (left, right)] == [3, 1]
    shared = left.turns[1].end
    assert left.token_ids[:shared] == right.token_ids[:shared]


def test_words_that_another_call_samples_meanwhile_do_not_change_what_was_served(tokens):
    """A harness writes an assistant turn itself; before its call ends, the policy says the same with other ids."""
    policy = Policy(tokens, random.Random(5))
    start = [{"role": "user", "content": "Say ab."}]
    written = policy.begin([*start, {"role": "assistant", "content": "ab"}, {"role": "user", "content": "Again."}])
    ids = [tokens.encode_text(letter)[0] for letter in "ab"]
    generation = Generation([*ids, tokens.im_end], [-0.5] * 3, "stop", "s", 0, 0.1)
    prompt = policy.begin(start)
    policy.tree.add(prompt, spoken_message("ab", True), ReadTurn("ab"), 0, generation)
    policy.served.append((prompt.token_ids, generation))
    policy.end(written)
    assert len(check(policy)) == 2


def test_overlapping_histories_with_other_blanks_are_each_stored_as_served(tokens):
    """Two calls hold an assistant turn of the harness's own, the same one but for blanks and the order of arguments."""
    policy = Policy(tokens, random.Random(6))
    user = [{"role": "user", "content": "Go on."}]

    def written(content, arguments):
        call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
        return [*user, {"role": "assistant", "content": content, "tool_calls": [call]}, *user]

    histories = [written("Yes.", '{"n": 1, "m": 2}'), written("Yes. ", '{"n": 1, "m": 2}')]
    histories.append(written("Yes.", '{"m": 2, "n": 1}'))
    for prompt in [policy.begin(history) for history in histories]:
        policy.end(prompt)
    assert len({tuple(prompt) for prompt, _ in policy.served}) == 3
    assert len(check(policy)) == 3
