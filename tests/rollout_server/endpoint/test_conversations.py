"""What was served is what is stored: random harnesses against a policy of random ids."""

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_families.chat import open_chat
from model_families.chat.messages import spoken_message
from rollout_server.endpoint.conversations import Conversations
from rollout_server.endpoint.dialects.chat import assistant_message
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
    return open_chat(folder)


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

    def end(self, prompt, text=None, ids=None, stopped_by=None):
        """Sample after a prompt, say ``text``, or sample ``ids``; returns the assistant message as the endpoint tells
        it, without the stop text that ended it."""
        generation = sampled_turn(self.tokens, self.rng)
        if text is not None:
            ids = [*encoder(self.tokens)(text), *([] if stopped_by else [self.tokens.turn_end])]
        if ids is not None:
            generation = Generation(ids, [-0.5] * len(ids), "cut" if stopped_by else "stop", "s", 0, 0.1)
        turn = self.tokens.read(prompt.token_ids, generation.token_ids, with_tools=True)
        spoken = spoken_message(turn.answer.removesuffix(stopped_by or ""), True, turn.reasoning)
        number = len(self.served)
        spoken = replace(spoken, call_ids=tuple(f"call_own_{number}_{n}" for n in range(len(spoken.calls))))
        self.tree.add(prompt, spoken, turn, number, generation, stopped_by)
        self.served.append((prompt.token_ids, generation))
        return assistant_message(spoken)

    def ask(self, messages, text=None):
        return self.end(self.begin(messages), text)


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
        told = policy.ask(messages, "<think>\nhm\n</think>\n\nYes.")
        assert told.get("reasoning_content") == (None if name == "llama3" else "hm")
        messages += [{"role": "assistant", "content": told["content"]}, {"role": "user", "content": f"go on {number}"}]
    assert [len(segment.turns) for segment in check(policy)] == [4 // sequences] * sequences


@pytest.mark.parametrize("name", ["chatml", "llama3", "kept", "off"])
def test_what_a_harness_writes_on_a_turn_that_was_cut_goes_on_from_its_ids(formats, name):
    """It puts the stop text back, and its own record of the call after it."""
    policy = Policy(formats[name], random.Random(8))
    messages = opening(policy.rng)
    for number in range(3):
        policy.end(policy.begin(messages), "<code>go</code>", stopped_by="</code>")
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
    policy.end(policy.begin(start), ids=[*ids, tokens.turn_end])
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


CALLS = (
    'So.\n<tool_call>\n{"name": "edit", "arguments": {"path": "a", "amount": 20000.0, "note": null}}\n</tool_call>\n'
    '<tool_call>\n{"name": "look", "arguments": {"all": "false"}}\n</tool_call>'
)


def handed_back(said, *calls, **text):
    """``said`` with other calls, each (place among those that were told, changes of its fields); perhaps with another
    ``content``."""
    told = said["tool_calls"]

    def other(place, name=None, identity=None, **arguments):
        function = told[place]["function"]
        given = {**json.loads(function["arguments"]), **arguments}
        given = {key: value for key, value in given.items() if value is not ...}
        function = {"name": name or function["name"], "arguments": json.dumps(given, indent=1)}
        return {"id": told[place]["id"] if identity is None else identity, "type": "function", "function": function}

    changed = [other(place, **changes) for place, changes in calls]
    return {**said, **text, "tool_calls": changed}


SECOND = (1, {})
KNOWN = {
    "as they were told": ([(0, {}), SECOND], {}),
    "a default is filled in": ([(0, {"replace_all": False}), SECOND], {"arguments": 1}),
    "a float becomes an integer": ([(0, {"amount": 20000}), SECOND], {"arguments": 1}),
    "null is dropped": ([(0, {"note": ...}), SECOND], {"arguments": 1}),
    "a text becomes a truth value": ([(0, {}), (1, {"all": False})], {"arguments": 1}),
    "an unknown tool is renamed": ([(0, {"name": "invalid"}), SECOND], {"names": 1}),
    "the text is left out": ([(0, {}), SECOND], {"no_text": 1}, {"content": ""}),
    "the text is null, a default filled in": (
        [(0, {"a": 1}), SECOND],
        {"arguments": 1, "no_text": 1},
        {"content": None},
    ),
    "renamed, and all arguments replaced": (
        [(0, {"name": "invalid", "path": ..., "amount": ..., "note": ..., "error": "no"}), SECOND],
        {"names": 1, "arguments": 1},
    ),
}
CONTENT = {
    "an id that nobody gave": ([(0, {"identity": "call_9", "path": "b"}), SECOND], {}, {"calls": 1}),
    "ids of another session": (
        [(0, {"identity": "call_other_0_0", "path": "b"}), (1, {"identity": "call_other_0_1"})],
        {},
        {},
    ),
    "no ids": ([(0, {"identity": "", "path": "b"}), (1, {"identity": ""})], {}, {}),
    "an id twice": ([(0, {"path": "b"}), (0, {})], {}, {"calls": 1}),
    "ids in another order": ([(1, {}), (0, {"path": "b"})], {}, {"calls": 1}),
    "a call is left out": ([(0, {"path": "b"})], {}, {"calls": 1}),
    "a call is added": ([(0, {"path": "b"}), SECOND, (0, {"identity": "call_own_0_2"})], {}, {"calls": 1}),
    "another text": ([(0, {"path": "b"}), SECOND], {"content": "I never said so."}, {"text": 1}),
}


@pytest.mark.fault("a program that fills in a call begins a new sequence")
@pytest.mark.parametrize("name", ["chatml", "kept"])
@pytest.mark.parametrize("case", KNOWN)
def test_a_turn_whose_call_ids_are_known_is_the_one_that_was_sampled(formats, name, case):
    policy, (calls, edits, *text) = Policy(formats[name], random.Random(9)), (*KNOWN[case], {})
    start = [{"role": "user", "content": "Go."}]
    said = policy.ask(start, CALLS)
    results = [{"role": "tool", "content": text} for text in ("1", "2")]
    policy.ask([*start, handed_back(said, *calls, **text[0]), *results])
    [segment] = check(policy)
    assert len(segment.turns) == 2
    assert segment.messages[2]["content"].count("20000.0") == 1
    assert policy.tree.edits == edits


@pytest.mark.parametrize("case", CONTENT)
def test_what_is_not_the_turn_of_its_call_ids_is_encoded_as_it_came(tokens, case):
    policy, (calls, options, edits) = Policy(tokens, random.Random(10)), CONTENT[case]
    start = [{"role": "user", "content": "Go."}]
    said = policy.ask(start, CALLS)
    policy.ask([*start, handed_back(said, *calls, **options), {"role": "tool", "content": "1"}])
    first, second = check(policy)
    assert (len(first.turns), len(second.turns)) == (1, 1)
    shown = tokens.decode(policy.served[1][0])
    assert '"path": "b"' in shown
    assert options.get("content", "So.") in shown
    assert policy.tree.edits == edits


@pytest.mark.fault("a program that fills in a call begins a new sequence")
def test_ten_edits_that_a_program_fills_in_are_one_sequence(tokens):
    policy = Policy(tokens, random.Random(11))
    messages = [{"role": "user", "content": "Go."}]
    for number in range(10):
        call = {"name": "edit", "arguments": {"n": number}}
        said = policy.ask(messages, f"{number}\n<tool_call>{json.dumps(call)}</tool_call>")
        messages += [handed_back(said, (0, {"replace_all": False})), {"role": "tool", "content": "done"}]
    [segment] = check(policy)
    assert (len(segment.turns), policy.tree.edits) == (10, {"arguments": 9})


def test_a_forged_transcript_is_encoded_as_it_came(tokens):
    """Its ids are this session's, but not at this place: compacted, moved, or below another system message."""
    policy = Policy(tokens, random.Random(12))
    start = [{"role": "system", "content": "Edit."}, {"role": "user", "content": "the long question"}]
    first = policy.ask(start, CALLS)
    result = {"role": "tool", "content": "1"}
    second = policy.ask([*start, first, result], CALLS)
    edited = handed_back(second, (0, {"path": "b"}), SECOND)
    for forged in (
        [start[0], {"role": "user", "content": "in short"}, edited],
        [*start, edited],
        [{"role": "system", "content": "Delete."}, start[1], first, result, edited],
        [*start, {"role": "assistant", "content": "No."}, edited],
        [*start, edited, result, edited],
    ):
        policy.ask([*forged, result])
        shown = tokens.decode(policy.served[-1][0])
        assert '"path": "b"' in shown
        assert ("the long question" in shown) == (forged[1] == start[1])
    assert len(check(policy)) == 6
    assert policy.tree.edits == {}


def test_of_two_turns_of_the_same_words_the_ids_say_which_one_is_gone_on_from(tokens):
    """The same call made twice; in content alone it would be the later one."""
    policy = Policy(tokens, random.Random(13))
    start = [{"role": "user", "content": "Go."}]
    words = [f'{blank}<tool_call>{{"name": "look", "arguments": {{}}}}</tool_call>' for blank in ("", " ")]
    said = [policy.ask(start, text) for text in words]
    assert policy.served[0][1].token_ids != policy.served[1][1].token_ids
    for turn in (0, 1):
        policy.ask([*start, said[turn], {"role": "tool", "content": "1"}])
        prompt, sampled = policy.served[turn]
        ids = [*prompt, *sampled.token_ids]
        assert policy.served[-1][0][: len(ids)] == ids
    assert [len(segment.turns) for segment in check(policy)] == [2, 2]
