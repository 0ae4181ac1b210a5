"""Conversations of others become the model's ids, or one line that names file, line and field."""

import gzip
import json
import math
from collections import Counter
from pathlib import Path

import pytest
import yaml

from loop_formats.schema import ConfigError
from loop_recipes.rollouts.chats import read_chat_set
from model_families.chat import open_chat
from model_families.chat.messages import ChatMessage
from support import random_policy
from support.chat_templates import FORMS
from support.texts import texts_beside

TABLES = texts_beside(__file__)

DATA = yaml.safe_load(Path(__file__).with_name("conversations.yaml").read_text())
THINKING = DATA["thinking"]

ADD = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": ADD}
ASK, SAY = {"role": "user", "content": "Add."}, {"role": "assistant", "content": "Done."}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"n": 1}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "2"}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    random_policy.write_tokenizer(folder)
    return open_chat(folder)


def read(tmp_path, chat, *records, name="chats.jsonl", turns="all", held_out=0.0):
    file = tmp_path / name
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return read_chat_set([str(file)], chat, turns, held_out)


def learned(chat, rollout):
    """The texts of the turns that are learned."""
    return [chat.decode(rollout.token_ids[turn.start : turn.end]) for turn in rollout.turns]


def whole(chat, found):
    return [chat.decode(rollout.token_ids) for rollout in found.rollouts]


@pytest.mark.parametrize("case", DATA["openai"].values(), ids=DATA["openai"])
@pytest.mark.parametrize("tools", [[], [TOOL], [ADD]], ids=["none", "wrapped", "bare"])
def test_openais_messages(tmp_path, chat, case, tools):
    [rollout] = read(tmp_path, chat, {"messages": case["messages"], "tools": tools}).rollouts
    assert learned(chat, rollout) == case["learned"]
    assert chat.decode(rollout.token_ids).startswith("<|im_start|>")
    assert ("<tools>" in chat.decode(rollout.token_ids)) == bool(tools)
    assert rollout.token_ids.count(chat._id("<|im_start|>")) == rollout.token_ids.count(chat.turn_end), (
        "text forged a turn"
    )
    assert {rollout.messages[turn.message]["role"] for turn in rollout.turns} == {"assistant"}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_every_conversation_has_a_form_in_every_familys_chat(tmp_path, form):
    FORMS[form].write(tmp_path / "model")
    chat = open_chat(tmp_path / "model")
    for messages, turns in (case.values() for case in DATA["openai"].values()):
        for tools in ([], [TOOL]):
            found = read(tmp_path, chat, {"messages": messages, "tools": tools}).rollouts
            said = [text for rollout in found for text in learned(chat, rollout)]
            assert len(said) == len(turns)
            for text, expected in zip(said, turns, strict=True):
                assert ("Done." in text) == ("Done." in expected)
                assert "Add." not in text, "the user's own words are learned"


def test_a_conversation_has_the_templates_own_text(tmp_path, chat):
    found = read(tmp_path, chat, {"messages": [SYSTEM, ASK, SAY, ASK, SAY]})
    said = "<|im_start|>system\nBe brief.<|im_end|>\n"
    said += 2 * "<|im_start|>user\nAdd.<|im_end|>\n<|im_start|>assistant\nDone.<|im_end|>\n"
    assert whole(chat, found) == [said.rstrip("\n")]


def test_the_last_turn_alone_is_learned_if_so_asked(tmp_path, chat):
    [rollout] = read(tmp_path, chat, {"messages": [ASK, CALLED, RESULT, SAY]}, turns="last").rollouts
    assert learned(chat, rollout) == ["Done.<|im_end|>"]


HUMAN, GPT = {"from": "human", "value": "Add."}, {"from": "gpt", "value": "Done."}


@pytest.mark.parametrize("case", DATA["sharegpt"].values(), ids=DATA["sharegpt"])
def test_sharegpt(tmp_path, chat, case):
    record = {"conversations": case["conversations"], "tools": json.dumps([ADD])}
    [rollout] = read(tmp_path, chat, record).rollouts
    assert len(rollout.turns) == case["turns"]


def step(source, message, **more):
    return {"step_id": 1, "source": source, "message": message, **more}


def atif(*steps, **agent):
    return {"schema_version": "ATIF-v1.8", "agent": {"name": "a", "version": "1", **agent}, "steps": list(steps)}


@pytest.mark.parametrize("case", DATA["atif"].values(), ids=DATA["atif"])
def test_atif(tmp_path, chat, case):
    [rollout] = read(tmp_path, chat, case["record"]).rollouts
    assert len(rollout.turns) == case["turns"]


def test_the_ids_of_a_trajectory_are_taken_as_they_are(tmp_path, chat):
    first = {"metrics": {"prompt_token_ids": [1, 5, 6], "completion_token_ids": [7, 2], "logprobs": [-0.5, -0.25]}}
    second = {"metrics": {"prompt_token_ids": [1, 5, 6, 7, 2, 9], "completion_token_ids": [8, 2]}}
    found = read(tmp_path, chat, atif(step("user", "x"), step("agent", "", **first), step("agent", "Done.", **second)))
    [rollout] = found.rollouts
    assert rollout.token_ids == [1, 5, 6, 7, 2, 9, 8, 2]
    assert [(turn.start, turn.end) for turn in rollout.turns] == [(3, 5), (6, 8)]
    assert rollout.sampler_logprobs == [0.0, 0.0, 0.0, -0.5, -0.25, 0.0, 0.0, 0.0]
    assert "1 of 1 conversations have token ids, which are taken as they are; 1 of them (100%)" in found.notes[-1]


def sampled(prompt, completion):
    return {"metrics": {"prompt_token_ids": prompt, "completion_token_ids": completion}}


def test_a_history_that_was_rewritten_is_two_sequences(tmp_path, chat):
    steps = [
        step("user", "x"),
        step("agent", "y", **sampled([1, 5], [7, 2])),
        step("agent", "z", **sampled([1, 9], [8, 2])),
    ]
    found = read(tmp_path, chat, atif(*steps)).rollouts
    assert [rollout.token_ids for rollout in found] == [[1, 5, 7, 2], [1, 9, 8, 2]]
    assert [(rollout.segment, rollout.segments) for rollout in found] == [(0, 2), (1, 2)]
    assert [turn.message for rollout in found for turn in rollout.turns] == [1, 2]


def test_ids_of_some_turns_alone_are_not_taken_and_that_is_said(tmp_path, chat):
    found = read(tmp_path, chat, atif(step("user", "x"), step("agent", "y", **sampled([1], [7])), step("agent", "z")))
    assert learned(chat, found.rollouts[0]) == ["y<|im_end|>", "z<|im_end|>"]
    assert found.notes == ["1 of 1 conversations have ids of some turns alone, and are encoded from their texts"]


def test_what_follows_a_traces_last_answer_needs_no_ids(tmp_path, chat):
    nodes = (node(ASK, ids=(1, 5)), node(SAY, 0, True, (3, 7, 2)), node(ASK, 1))
    [rollout] = read(tmp_path, chat, trace(*nodes)).rollouts
    assert rollout.token_ids == [1, 5, 3, 7, 2]


def node(message, parent=None, sampled=False, ids=(), **more):
    own = [sampled and place > 0 for place in range(len(ids))]
    return {"message": message, "parent": parent, "sampled": sampled, "token_ids": list(ids), "mask": own, **more}


def trace(*nodes, reward=1.0, **more):
    return {"nodes": list(nodes), "rewards": {"r": {"score": reward}}, "is_completed": True, **more}


@pytest.mark.parametrize("case", DATA["traces"].values(), ids=DATA["traces"])
def test_verifiers_traces(tmp_path, chat, case):
    assert [len(rollout.turns) for rollout in read(tmp_path, chat, case["record"]).rollouts] == case["turns"]


def test_the_ids_and_the_reward_of_a_trace_are_taken(tmp_path, chat):
    nodes = (node(ASK, ids=(1, 5)), node(SAY, 0, True, (3, 7, 2), logprobs=[-0.5, -1.0]))
    [rollout] = read(tmp_path, chat, trace(*nodes, reward=0.5)).rollouts
    assert (rollout.token_ids, rollout.reward, rollout.success) == ([1, 5, 3, 7, 2], 0.5, False)
    assert rollout.sampler_logprobs == [0.0, 0.0, 0.0, -0.5, -1.0]


@pytest.mark.parametrize("case", DATA["refused"].values(), ids=DATA["refused"])
def test_what_is_no_conversation_is_one_line(tmp_path, chat, case):
    record = case["record"]
    file = tmp_path / "chats.jsonl"
    file.write_text(record if isinstance(record, str) else json.dumps(record))
    with pytest.raises(ConfigError, match=case["said"]) as refused:
        read_chat_set([str(file)], chat, "all", 0.0)
    assert str(refused.value).startswith(f"data: {file}")
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_one_line(tmp_path, chat):
    with pytest.raises(ConfigError, match=r"data: .*none\.jsonl is not a file"):
        read_chat_set([str(tmp_path / "none.jsonl")], chat, "all", 0.0)


def test_parquet_reads_as_jsonl_does(tmp_path, chat):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    records = [{"messages": [SYSTEM, ASK, SAY]}, {"messages": [ASK, CALLED, RESULT, SAY]}]
    parquet.write_table(arrow.Table.from_pylist(records), tmp_path / "chats.parquet")
    table = read_chat_set([str(tmp_path / "chats.parquet")], chat, "all", 0.0)
    assert whole(chat, table) == whole(chat, read(tmp_path, chat, *records))


def test_conversations_are_held_out_by_what_they_ask(tmp_path, chat):
    records = [{"messages": [{"role": "user", "content": f"Add {n // 2}."}, SAY]} for n in range(200)]
    found = read(tmp_path, chat, *records, held_out=0.25)
    sides = [{rollout.messages[0]["content"] for rollout in part} for part in (found.rollouts, found.held_out)]
    assert not sides[0] & sides[1]
    assert len(sides[1]) == 25
    tasks = Counter(rollout.task_id for rollout in found.rollouts)
    assert {*tasks.values()} == {2}, "answers to one question are rollouts of one task"
    assert sorted(rollout.index for rollout in found.rollouts) == [0] * 75 + [1] * 75
    assert [r.rollout_id for r in read(tmp_path, chat, *records, held_out=0.25).held_out] == [
        r.rollout_id for r in found.held_out
    ]


def test_what_a_conversation_cannot_say_is_said_once(tmp_path, chat):
    thought = {**SAY, "reasoning": "I add."}
    found = read(tmp_path, chat, {"messages": [ASK, thought, ASK, SAY]}, {"messages": [ASK, {**SAY, "weight": 0}]})
    assert found.notes == [
        "1 of 2 conversations have no turn to learn from, and are left out",
        "the thinking of 1 of 3 turns (33%) is not learned: the model does not think",
    ]


THOUGHT, MARKED = "I add.\n\nIt is 2.", "<think>\nI add.\n\nIt is 2.\n</think>\n\nDone."
THINKERS = [form for form in FORMS if FORMS[form].thinking]


@pytest.fixture(scope="module")
def thinkers(tmp_path_factory):
    """The formats whose turns think, by form and way of thinking."""
    root = tmp_path_factory.mktemp("thinkers")
    folders = {form: FORMS[form].write(root / str(number)) for number, form in enumerate(THINKERS)}
    modes = ("kept", "stripped")
    return {
        (form, mode): open_chat(folder, thinking=mode, observation_role="user")
        for form, folder in folders.items()
        for mode in modes
    }


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["kept", "stripped"])
@pytest.mark.parametrize("form", THINKERS)
def test_thinking_is_learned_in_the_models_own_form(tmp_path, thinkers, form, mode):
    chat = thinkers[form, mode]
    for name, record in THINKING.items():
        found = read(tmp_path, chat, record)
        [rollout] = found.rollouts
        [turn] = rollout.turns
        said = chat.read(rollout.token_ids[: turn.start], rollout.token_ids[turn.start : turn.end], False)
        assert (said.reasoning, said.answer) == (THOUGHT, "Done."), name
        assert rollout.token_ids[: turn.start] == chat.opening([ChatMessage("user", "Add.")]), name
        assert turn.end == len(rollout.token_ids)
        assert rollout.token_ids[-1] in chat.stop_ids
        assert found.notes == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["kept", "stripped"])
@pytest.mark.parametrize("form", THINKERS)
def test_later_turns_of_a_conversation_that_thinks_are_learned_as_they_would_be_served(tmp_path, thinkers, form, mode):
    chat = thinkers[form, mode]
    thought, called = {**SAY, "reasoning": THOUGHT}, {**CALLED, "reasoning": "Call."}
    found = read(tmp_path, chat, {"messages": [ASK, called, RESULT, thought, ASK, thought], "tools": [TOOL]})
    said = []
    for rollout in found.rollouts:
        for turn in rollout.turns:
            told = chat.read(rollout.token_ids[: turn.start], rollout.token_ids[turn.start : turn.end], True)
            said.append((told.reasoning, "add" in told.answer or told.answer))
    assert said == [("Call.", True), (THOUGHT, "Done."), (THOUGHT, "Done.")]
    assert [r.messages[turn.message].get("reasoning") for r in found.rollouts for turn in r.turns] == [
        "Call.",
        THOUGHT,
        THOUGHT,
    ]


def test_a_model_that_does_not_think_learns_marks_as_text_which_is_said(tmp_path, chat):
    found = read(tmp_path, chat, THINKING["marks"], {"messages": [ASK, SAY]})
    assert learned(chat, found.rollouts[0]) == [f"{MARKED}<|im_end|>"]
    [note] = found.notes
    assert note == "<think> in the text of 1 of 2 turns (50%) is learned as text: the model does not think"


def test_thinking_that_is_off_is_left_out_and_said(tmp_path):
    chat = open_chat(FORMS["SmolLM3"].write(tmp_path / "model"), thinking="off")
    found = read(tmp_path, chat, THINKING["marks"], THINKING["reasoning"])
    assert [learned(chat, rollout) for rollout in found.rollouts] == [["Done.<|im_end|>"]] * 2
    assert found.notes == ["the thinking of 2 of 2 turns (100%) is not learned: the model has its thinking off"]


@pytest.mark.parametrize(("weights", "turns", "kept"), TABLES["a_turn_has_the_weight_of_its_message"])
def test_a_turn_has_the_weight_of_its_message(tmp_path, chat, weights, turns, kept):
    first, second = ({**SAY, "weight": weight} for weight in weights)
    [rollout] = read(tmp_path, chat, {"messages": [SYSTEM, SYSTEM, ASK, first, ASK, second]}).rollouts
    assert (len(rollout.turns), rollout.extra.get("weights")) == (turns, kept)
    shares = [{**GPT, "weight": weight} for weight in weights]
    record = {"system": "x", "conversations": [HUMAN, shares[0], HUMAN, shares[1]]}
    [rollout] = read(tmp_path, chat, record).rollouts
    assert (len(rollout.turns), rollout.extra.get("weights")) == (turns, kept)


def test_an_answer_that_nothing_is_said_before_is_named_where_a_template_cannot_write_it(tmp_path):
    chat = open_chat(FORMS["SmolLM3"].write(tmp_path / "model"))
    said = r":1: messages\[0\]: the chat template has no form for a conversation that begins with an answer$"
    with pytest.raises(ConfigError, match=said):
        read(tmp_path, chat, {"messages": [SAY, ASK, SAY]})


def says(kind, value):
    return {"from": kind, "value": value}


HERMES = '<tool_call>\n{"name": "add", "arguments": {"n": 1}}\n</tool_call>'
TURNED_ROUND = [{**RESULT, "tool_call_id": "c2", "content": "22"}, {**RESULT, "content": "11"}]
TWO_CALLS = {"role": "assistant", "tool_calls": [CALL, {**CALL, "id": "c2"}]}
ATIF_CALLS = [{"tool_call_id": name, "function_name": "add", "arguments": {}} for name in ("c1", "c2")]
ATIF_RESULTS = [{"source_call_id": "c2", "content": "22"}, {"source_call_id": "c1", "content": "11"}]
CALL_VALUE = json.dumps([{"name": "add", "arguments": {"n": 1}}] * 2)
IN_ORDER = "<tool_response>\n11\n</tool_response>\n<tool_response>\n22\n</tool_response>"
STRANGE = {
    "nulls_of_a_table": (
        {"messages": [ASK, {**SAY, "function_call": {"name": "add", "arguments": {"n": 1, "m": None}}}]},
        '"arguments": {"n": 1}}',
    ),
    "system_beside_messages": ({"system": "Be brief.", "messages": [ASK, SAY]}, "system\nBe brief.<"),
    "system_beside_roles": ({"system": "Be brief.", "conversations": [ASK, SAY]}, "system\nBe brief.<"),
    "calls_in_a_list": ({"conversations": [HUMAN, says("function_call", CALL_VALUE)]}, f"{HERMES}\n{HERMES}<"),
    "calls_as_text": ({"messages": [ASK, {**CALLED, "tool_calls": json.dumps([CALL])}]}, f"{HERMES}<"),
    "results_in_another_order": ({"messages": [ASK, TWO_CALLS, *TURNED_ROUND, SAY]}, IN_ORDER),
    "results_of_atif": (
        atif(step("user", "x"), step("agent", "", tool_calls=ATIF_CALLS, observation={"results": ATIF_RESULTS})),
        None,
    ),
    "hermes_result": (
        {"conversations": [HUMAN, GPT, says("tool", "<tool_response>\n2\n</tool_response>"), GPT]},
        "user\n<tool_response>\n2\n</tool_response><",
    ),
    "empty_turn": ({"messages": [ASK, {**SAY, "content": None}, ASK, SAY]}, "1 of 2 turns (50%) say nothing"),
    "end_in_the_text": ({"messages": [ASK, {**SAY, "content": "Yes.<|im_end|>"}]}, r"<|im_end|> in the text of 1 of 1"),
    "calls_without_tools": ({"messages": [ASK, {**SAY, "content": HERMES}]}, "<tool_call> in the text of 1 of 1"),
    "picture_beside": ({"messages": [ASK, SAY], "images": ["a.png"]}, "not read: images (1 of 1)"),
    "part_of_a_turn": (
        {"messages": [ASK, {**SAY, "train_detail": [{"train": False}]}]},
        "not read: messages[].train_detail (1 of 1)",
    ),
    "loss_false": ({"messages": [ASK, {**SAY, "loss": False}, ASK, SAY]}, [1]),
    "train_false": ({"conversations": [HUMAN, {**GPT, "train": False}, HUMAN, GPT]}, [1]),
    "a_step_of_no_model": (atif(step("user", "x"), step("agent", "y", llm_call_count=0), step("agent", "z")), [1]),
    "two_weights": ({"messages": [ASK, {**SAY, "weight": 1, "loss": False}]}, r":1: messages[1]: weight is 1 and loss"),
    "mask": ({"messages": [ASK, {**SAY, "mask": True}]}, r":1: messages[1].mask is true or false: write weight"),
    "negative_id": (atif(step("agent", "y", **sampled([-1, 5], [7]))), r"steps[0].metrics.prompt_token_ids[0] is -1"),
    "broken_id": (trace(node(ASK, ids=(1, 5.5)), node(SAY, 0, True, (3, 7))), r"nodes[0].token_ids[1] is 5.5"),
    "true_id": (atif(step("agent", "y", **sampled([1], [True]))), r"steps[0].metrics.completion_token_ids[0] is True"),
    "no_name": (atif(step("agent", "y", tool_calls=[{"arguments": {}}])), r"steps[0].tool_calls[0] names no function"),
    "no_object": (atif("x"), r":1: steps[0] is text: it must be an object"),
}


@pytest.mark.fault("a field of somebody's chats was dropped, or taken in another sense than theirs")
@pytest.mark.parametrize("name", STRANGE)
def test_what_others_write_is_taken_or_told(tmp_path, chat, name):
    record, expected = STRANGE[name]
    try:
        found = read(tmp_path, chat, record)
    except ConfigError as error:
        told, turns = str(error), []
    else:
        told, turns = "\n".join([*whole(chat, found), *found.notes]), [len(r.turns) for r in found.rollouts]
    if expected is None:
        results = [message["content"] for message in found.rollouts[0].messages[2:]]
        assert results == [f"<tool_response>\n{text}\n</tool_response>" for text in ("11", "22")]
    else:
        assert turns == expected if isinstance(expected, list) else expected in told


@pytest.mark.fault("one conversation that is too long refused all of them, without its name")
def test_a_conversation_that_is_too_long_is_left_out_and_named(tmp_path, chat):
    records = [{"messages": [{"role": "user", "content": "Add. " * count}, SAY]} for count in (1, 200, 300)]
    file = tmp_path / "chats.jsonl"
    found = [len(rollout.token_ids) for rollout in read(tmp_path, chat, *records).rollouts]
    kept = read_chat_set([str(file)], chat, "all", 0.0, 100)
    assert [len(rollout.token_ids) for rollout in kept.rollouts] == found[:1]
    assert kept.notes == [
        "2 of 3 conversations are longer than the model's 100 tokens, and are left out; "
        f"the first is {file}:2 with {found[1]}"
    ]
    with pytest.raises(ConfigError, match="3 of 3 conversations are longer"):
        read_chat_set([str(file)], chat, "all", 0.0, 1)


@pytest.mark.fault("an id that the model has not is told without its file and line, or taken")
@pytest.mark.parametrize(
    ("numbers", "field"),
    [
        ({"completion_token_ids": [5, 99_999]}, r"completion_token_ids\[1\] is 99999, .* to {}; name"),
        ({"completion_token_ids": [-1, 5]}, r"completion_token_ids\[0\] is -1, "),
        ({"prompt_token_ids": [99_999]}, r"prompt_token_ids\[0\] is 99999, "),
        ({"prompt_token_ids": [True]}, r"prompt_token_ids\[0\] is True, "),
        ({"logprobs": [-0.5, "x"]}, r"logprobs\[1\] is 'x': "),
        ({"logprobs": [0.5, -1.0]}, r"logprobs\[0\] is 0.5: "),
        ({"logprobs": [-1.0, math.nan]}, r"logprobs\[1\] is nan: "),
    ],
)
def test_a_token_of_another_model_is_told_with_its_place(tmp_path, chat, numbers, field):
    last, file = chat.vocab_size - 1, tmp_path / "chats.jsonl"
    well = {"prompt_token_ids": [1], "completion_token_ids": [5, last], "logprobs": [-0.5, -1.0]}
    steps = [[step("user", "x"), step("agent", "y", metrics=each)] for each in (well, well | numbers)]
    assert read(tmp_path, chat, atif(*steps[0])).rollouts[0].token_ids == [1, 5, last]
    with pytest.raises(ConfigError, match=rf"^data: {file}:2: steps\[1\]\.metrics\.{field.format(last)}"):
        read(tmp_path, chat, *(atif(*each) for each in steps))
    said = node(SAY, 0, True, [3, 5, last]) | {"token_ids" if "ids" in key else key: v for key, v in numbers.items()}
    part = field.format(last).replace("completion_", "").replace("prompt_", "")
    with pytest.raises(ConfigError, match=rf"^data: {file}:1: nodes\[1\]\.{part}"):
        read(tmp_path, chat, trace(node(ASK, ids=(1,)), said))


PLAIN = json.dumps({"messages": [ASK, SAY]}) + "\n"
FILES = {
    "a.jsonl.gz": (gzip.compress(PLAIN.encode()), None),
    "utf16.jsonl": (PLAIN.encode("utf-16"), None),
    "lines.json": ((PLAIN + PLAIN).encode(), None),
    "latin1.jsonl": (PLAIN.replace("Add.", "Añade").encode("latin-1"), "latin1.jsonl is not UTF-8"),
    "whole.jsonl": (json.dumps([{"messages": [ASK, SAY]}], indent=1).encode(), "whole.jsonl:1 is not JSON"),
    "a.parquet": (b"x", "a.parquet"),
    "a.jsonl.zst": (b"\x28\xb5\x2f\xfd\0", "a.jsonl.zst is zstd, which is not read here: give its content"),
    "a.zip": (b"PK\x03\x04", "a.zip is zip, which is not read here"),
    "a.csv": (b"task,answer\nAdd.,2\n", "a.csv is CSV, which is not read here: give its content as JSON lines"),
    "a.tsv.gz": (gzip.compress(b"task\tanswer\n"), "a.tsv.gz is TSV, which is not read here"),
    "stray.jsonl": (
        json.dumps({"messages": [ASK, CALLED, {**RESULT, "tool_call_id": "c9"}, SAY]}).encode(),
        "stray.jsonl:1: a tool's message answers call 'c9', which no call before it has",
    ),
    "table.jsonl": (b"PAR1x", "table.jsonl is parquet, which is not read here"),
}


@pytest.mark.fault("a file of chats in another encoding was refused without its name")
@pytest.mark.parametrize("name", FILES)
def test_files_of_others_are_read_or_named(tmp_path, chat, name):
    content, refused = FILES[name]
    (tmp_path / name).write_bytes(content)
    if refused is None:
        found = read_chat_set([str(tmp_path / name)], chat, "all", 0.0)
        assert {learned(chat, rollout)[0] for rollout in found.rollouts} == {"Done.<|im_end|>"}
        return
    with pytest.raises(ConfigError) as error:
        read_chat_set([str(tmp_path / name)], chat, "all", 0.0)
    assert refused in str(error.value)


LONG = "y" * (1 << 20)


def gzipped(file, content=b" " * (64 << 20), times=1):
    file.write_bytes(gzip.compress(content) * times)


def table(file, rows):
    pytest.importorskip("pyarrow.parquet").write_table(pytest.importorskip("pyarrow").table(rows), file)


BOMBS = {
    **dict.fromkeys(["one.jsonl.gz", "one.jsonl", "one.json"], gzipped),
    "several.jsonl": lambda file: gzipped(file, b" " * (1 << 20), 64),
    "one line.jsonl": lambda file: gzipped(file, json.dumps({"messages": "x" * (64 << 20)}).encode()),
    "texts.parquet": lambda file: table(file, {"messages": [LONG] * 300}),
    "other columns.parquet": lambda file: table(file, {f"column{n}": [LONG] * 100 for n in range(3)}),
    "a list.parquet": lambda file: table(file, {"messages": [[LONG] * 300]}),
    "objects.parquet": lambda file: table(file, {"messages": [[{"role": "user", "content": LONG}] * 3] * 100}),
    "nulls.parquet": lambda file: table(file, {"messages": [[None] * 30_000_000]}),
}


@pytest.mark.attack
@pytest.mark.fault("a small file of somebody else's unpacks to more than there is memory for")
@pytest.mark.parametrize("name", BOMBS)
def test_a_file_that_unpacks_to_much_more_is_refused_in_a_line(tmp_path, chat, monkeypatch, name):
    BOMBS[name](tmp_path / name)
    assert (tmp_path / name).stat().st_size < 4 << 20
    for module in ("loop_plumbing.json_lines", "loop_recipes.rollouts.chat_files"):
        monkeypatch.setattr(f"{module}.most_unpacked", lambda file: 32 << 20)
    with pytest.raises(ConfigError, match=f"{name} (unpacks to|takes) more than 32 MiB.* if it is yours") as error:
        read_chat_set([str(tmp_path / name)], chat, "all", 0.0)
    assert "\n" not in str(error.value)


def questions(*counts):
    """Conversations of which so many ask each question."""
    return [
        {"messages": [{"role": "user", "content": f"{n}?"}, SAY]}
        for n, count in enumerate(counts)
        for _ in range(count)
    ]


GREETED = [{"messages": [ASK, SAY, {"role": "user", "content": str(n)}, SAY]} for n in range(95)]
SHARES = {
    "one_large_group": (questions(95, *[1] * 15), 0.1, 11),
    "large_groups_alone": (questions(50, 50, 50), 0.1, 50),
    "a_greeting": (GREETED + questions(1, 1, 1, 1, 1), 0.1, 10),
    "greetings_alone": (GREETED, 0.2, 19),
    "one_each": (questions(*[1] * 20), 0.1, 2),
    "attempts": (questions(*[10] * 10), 0.2, 20),
    "little": (questions(*[1] * 20), 0.01, 1),
    "all_alike": (questions(20), 0.2, "all 20 conversations ask the same"),
    "one": (questions(1), 0.5, "all 1 conversations ask the same"),
    "nearly_all": (questions(1, 1), 0.99, 1),
}


@pytest.mark.fault("held_out set another share of the conversations aside than was asked, without a word")
@pytest.mark.parametrize("name", SHARES)
def test_a_share_is_one_of_conversations_and_is_told(tmp_path, chat, name):
    records, share, expected = SHARES[name]
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            read(tmp_path, chat, *records, held_out=share)
        return
    found = read(tmp_path, chat, *records, held_out=share)
    assert len(found.held_out) == expected
    assert f"held_out: {expected} of {len(records)} conversations" in "\n".join(found.notes)
