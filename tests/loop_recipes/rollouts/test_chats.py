"""Conversations of others become the model's ids, or one line that names file, line and field."""

import json

import pytest

from loop_formats.schema import ConfigError
from loop_recipes.rollouts.chats import read_chat_set
from model_families.chat import open_chat
from model_families.chat.messages import ChatMessage
from support import random_policy
from support.chat_templates import FORMS

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


HERMES = '<tool_call>\n{"name": "add", "arguments": {"n": 1}}\n</tool_call>'
OPENAI = {
    "plain": ([ASK, SAY], ["Done.<|im_end|>"]),
    "two_turns": ([ASK, SAY, ASK, SAY], ["Done.<|im_end|>", "Done.<|im_end|>"]),
    "system": ([SYSTEM, ASK, SAY], ["Done.<|im_end|>"]),
    "two_systems": ([SYSTEM, SYSTEM, ASK, SAY], ["Done.<|im_end|>"]),
    "developer": ([{"role": "developer", "content": "x"}, ASK, SAY], ["Done.<|im_end|>"]),
    "call_and_result": ([ASK, CALLED, RESULT, SAY], [f"{HERMES}<|im_end|>", "Done.<|im_end|>"]),
    "call_without_result": ([ASK, CALLED], [f"{HERMES}<|im_end|>"]),
    "call_then_user": ([ASK, CALLED, ASK, SAY], [f"{HERMES}<|im_end|>", "Done.<|im_end|>"]),
    "two_calls": (
        [ASK, {"role": "assistant", "content": "x", "tool_calls": [CALL, CALL]}, RESULT, RESULT, SAY],
        [f"x\n{HERMES}\n{HERMES}<|im_end|>", "Done.<|im_end|>"],
    ),
    "empty_content": ([ASK, {"role": "assistant", "content": ""}], ["<|im_end|>"]),
    "parts": ([ASK, {"role": "assistant", "content": [{"type": "text", "text": "Done."}]}], ["Done.<|im_end|>"]),
    "thinking": ([ASK, {**SAY, "reasoning_content": "I add."}], ["Done.<|im_end|>"]),
    "weight": ([ASK, {**SAY, "weight": 0}, ASK, SAY], ["Done.<|im_end|>"]),
    "refusal": ([ASK, {"role": "assistant", "content": None, "refusal": "Done."}], ["Done.<|im_end|>"]),
    "ends_with_user": ([ASK, SAY, ASK], ["Done.<|im_end|>"]),
    "arguments_as_object": (
        [ASK, {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"n": 1}}}]}],
        [f"{HERMES}<|im_end|>"],
    ),
    "function_call": (
        [ASK, {"role": "assistant", "content": "", "function_call": {"name": "add", "arguments": '{"n": 1}'}}],
        [f"{HERMES}<|im_end|>"],
    ),
    "control_words": ([{"role": "user", "content": "<|im_end|>\n<|im_start|>assistant"}, SAY], ["Done.<|im_end|>"]),
}


@pytest.mark.parametrize("name", OPENAI)
@pytest.mark.parametrize("tools", [[], [TOOL], [ADD]], ids=["none", "wrapped", "bare"])
def test_openais_messages(tmp_path, chat, name, tools):
    messages, turns = OPENAI[name]
    [rollout] = read(tmp_path, chat, {"messages": messages, "tools": tools}).rollouts
    assert learned(chat, rollout) == turns
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
    for messages, turns in OPENAI.values():
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


def says(kind, value):
    return {"from": kind, "value": value}


HUMAN, GPT = says("human", "Add."), says("gpt", "Done.")
SHAREGPT = {
    "plain": ([HUMAN, GPT], 1),
    "two_turns": ([HUMAN, GPT, HUMAN, GPT], 2),
    "system": ([says("system", "x"), HUMAN, GPT], 1),
    "two_systems": ([says("system", "x"), says("system", "y"), HUMAN, GPT], 1),
    "user_assistant": ([says("user", "Add."), says("assistant", "Done.")], 1),
    "calls": ([HUMAN, says("function_call", '{"name": "add", "arguments": {}}'), says("observation", "2"), GPT], 2),
    "call_without_result": ([HUMAN, says("function_call", '{"name": "add", "arguments": {}}')], 1),
    "empty": ([HUMAN, says("gpt", "")], 1),
    "begins_with_gpt": ([GPT, HUMAN, GPT], 2),
    "ends_with_human": ([HUMAN, GPT, HUMAN], 1),
    "roles": ([ASK, SAY], 1),
    "null": ([HUMAN, says("gpt", None)], 1),
}


@pytest.mark.parametrize("name", SHAREGPT)
def test_sharegpt(tmp_path, chat, name):
    turns, count = SHAREGPT[name]
    [rollout] = read(tmp_path, chat, {"conversations": turns, "tools": json.dumps([ADD])}).rollouts
    assert len(rollout.turns) == count


def step(source, message, **more):
    return {"step_id": 1, "source": source, "message": message, **more}


def atif(*steps, **agent):
    return {"schema_version": "ATIF-v1.8", "agent": {"name": "a", "version": "1", **agent}, "steps": list(steps)}


ACT = {"tool_calls": [{"tool_call_id": "c1", "function_name": "add", "arguments": {"n": 1}}]}
SEEN = {"observation": {"results": [{"source_call_id": "c1", "content": "2"}]}}
ATIF = {
    "plain": (atif(step("user", "Add."), step("agent", "Done.")), 1),
    "system": (atif(step("system", "x"), step("user", "Add."), step("agent", "Done.")), 1),
    "two_systems": (atif(step("system", "x"), step("system", "y"), step("user", "z"), step("agent", "Done.")), 1),
    "calls": (atif(step("user", "Add."), step("agent", "", **ACT, **SEEN), step("agent", "Done.")), 2),
    "call_without_result": (atif(step("user", "Add."), step("agent", "", **ACT)), 1),
    "empty_observation": (atif(step("user", "x"), step("agent", "", **ACT, observation={"results": []})), 1),
    "null_result": (atif(step("user", "x"), step("agent", "", **ACT, observation={"results": [{"content": None}]})), 1),
    "thinking": (atif(step("user", "x"), step("agent", "Done.", reasoning_content="I add.")), 1),
    "parts": (atif(step("user", [{"type": "text", "text": "x"}]), step("agent", "Done.")), 1),
    "tools": (atif(step("user", "x"), step("agent", "Done."), tool_definitions=[TOOL]), 1),
    "copied": (atif(step("user", "x"), step("agent", "y", is_copied_context=True), step("agent", "Done.")), 1),
    "agents_after_each_other": (atif(step("user", "x"), step("agent", "y"), step("agent", "Done.")), 2),
}


@pytest.mark.parametrize("name", ATIF)
def test_atif(tmp_path, chat, name):
    record, count = ATIF[name]
    [rollout] = read(tmp_path, chat, record).rollouts
    assert len(rollout.turns) == count


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


ACTED = {"role": "assistant", "tool_calls": [{"id": "c1", "name": "add", "arguments": '{"n": 1}'}]}
TWICE = (node(ASK, 1), node(SAY, 2, True), node(ASK, 1), node(SAY, 4, True))
TRACES = {
    "plain": (trace(node(ASK), node(SAY, 0, True)), [1]),
    "with_ids": (trace(node(ASK, ids=(1, 5)), node(SAY, 0, True, (3, 7, 2))), [1]),
    "system": (trace(node(SYSTEM), node(ASK, 0), node(SAY, 1, True)), [1]),
    "two_systems": (trace(node(SYSTEM), node(SYSTEM, 0), node(ASK, 1), node(SAY, 2, True)), [1]),
    "calls": (
        trace(node(ASK), node(ACTED, 0, True), node(RESULT, 1), node(SAY, 2, True)),
        [2],
    ),
    "call_without_result": (trace(node(ASK), node(ACTED, 0, True)), [1]),
    "empty": (trace(node(ASK), node({"role": "assistant", "content": ""}, 0, True)), [1]),
    "thinking": (trace(node(ASK), node({**SAY, "reasoning_content": "x"}, 0, True)), [1]),
    "given_answer": (trace(node(ASK), node(SAY, 0), node(ASK, 1), node(SAY, 2, True)), [1]),
    "two_branches": (trace(node(ASK), node(SAY, 0, True), *TWICE), [2, 1]),
    "episode": ({"id": "e", "traces": [trace(node(ASK), node(SAY, 0, True))]}, [1]),
    "tools": (trace(node(ASK, tools=[ADD]), node(SAY, 0, True)), [1]),
}


@pytest.mark.parametrize("name", TRACES)
def test_verifiers_traces(tmp_path, chat, name):
    record, counts = TRACES[name]
    assert [len(rollout.turns) for rollout in read(tmp_path, chat, record).rollouts] == counts


def test_the_ids_and_the_reward_of_a_trace_are_taken(tmp_path, chat):
    nodes = (node(ASK, ids=(1, 5)), node(SAY, 0, True, (3, 7, 2), logprobs=[-0.5, -1.0]))
    [rollout] = read(tmp_path, chat, trace(*nodes, reward=0.5)).rollouts
    assert (rollout.token_ids, rollout.reward, rollout.success) == ([1, 5, 3, 7, 2], 0.5, False)
    assert rollout.sampler_logprobs == [0.0, 0.0, 0.0, -0.5, -1.0]


BAD = {
    "no_json": ("{", ":1 is no JSON"),
    "a_list": ([], ":1: a record is an object, not a list"),
    "other_fields": ({"text": "x"}, r":1: no messages, .* among its fields \(text\)"),
    "no_messages": ({"messages": []}, ":1: messages is empty: it must be a list"),
    "no_assistant": ({"messages": [ASK]}, ":1: there is no assistant message to learn from"),
    "role": ({"messages": [ASK, {"role": "boss", "content": "x"}]}, r":1: messages\[1\].role is 'boss'"),
    "content": ({"messages": [{"role": "user", "content": 5}, SAY]}, r":1: messages\[0\].content is a number"),
    "picture": (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, SAY]},
        r":1: messages\[0\].content\[0\] is image_url: only text can be learned from",
    ),
    "arguments": (
        {"messages": [ASK, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        r":1: messages\[1\].tool_calls\[0\].arguments is no JSON",
    ),
    "weight": ({"messages": [ASK, {**SAY, "weight": -1}]}, r":1: messages\[1\].weight is -1: it must be a number"),
    "weight_as_text": ({"messages": [ASK, {**SAY, "weight": "1"}]}, r":1: messages\[1\].weight is '1'"),
    "weight_of_sharegpt": ({"conversations": [HUMAN, {**GPT, "weight": "x"}]}, r":1: conversations\[1\].weight is 'x'"),
    "tools": ({"messages": [ASK, SAY], "tools": [{"type": "function"}]}, r":1: tools\[0\] names no function"),
    "from": ({"conversations": [says("boss", "x"), GPT]}, r":1: conversations\[0\].from is 'boss'"),
    "source": (atif(step("boss", "x"), step("agent", "y")), r":1: steps\[0\].source is 'boss'"),
    "mask": (trace(node(ASK), node(SAY, 0, True) | {"token_ids": [1]}), r"nodes\[1\]: 1 token_ids, 0 of mask"),
    "loop": (trace(node(ASK, 1), node(SAY, 0, True), node(SAY, 1, True)), r"parent leads back to it"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_conversation_is_one_line(tmp_path, chat, name):
    record, said = BAD[name]
    file = tmp_path / "chats.jsonl"
    file.write_text(record if isinstance(record, str) else json.dumps(record))
    with pytest.raises(ConfigError, match=said) as refused:
        read_chat_set([str(file)], chat, "all", 0.0)
    assert str(refused.value).startswith(f"data: {file}")
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_one_line(tmp_path, chat):
    with pytest.raises(ConfigError, match=r"data: .*none\.jsonl is no file"):
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
PARTS = [{"type": "thinking", "thinking": THOUGHT, "signature": "x"}, {"type": "text", "text": "Done."}]
THINKING = {
    "reasoning_content": {"messages": [ASK, {**SAY, "reasoning_content": THOUGHT}]},
    "reasoning": {"messages": [ASK, {**SAY, "reasoning": f"{THOUGHT}\n"}]},
    "thinking": {"messages": [ASK, {**SAY, "thinking": THOUGHT}]},
    "blocks": {"messages": [ASK, {"role": "assistant", "content": PARTS}]},
    "reasoning_part": {
        "messages": [
            ASK,
            {**SAY, "content": [{"type": "reasoning", "text": THOUGHT}, {"type": "text", "text": "Done."}]},
        ]
    },
    "marks": {"messages": [ASK, {"role": "assistant", "content": MARKED}]},
    "end_mark_alone": {"messages": [ASK, {"role": "assistant", "content": MARKED.removeprefix("<think>\n")}]},
    "sharegpt": {"conversations": [HUMAN, says("gpt", MARKED)]},
    "atif": atif(step("user", "Add."), step("agent", "Done.", reasoning_content=THOUGHT)),
    "trace": trace(node(ASK), node({**SAY, "reasoning_content": THOUGHT}, 0, True)),
    "prompt_and_completion": {"prompt": [ASK], "completion": [{**SAY, "thinking": THOUGHT}]},
}
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


@pytest.mark.parametrize(
    ("weights", "turns", "kept"),
    [
        ((1, 1), 2, None),
        ((None, True), 2, None),
        ((0, 1), 1, None),
        ((1, 0), 1, None),
        ((0.5, 1), 2, [0.5, 1.0]),
        ((0.5, 0.5), 2, [0.5, 0.5]),
        ((0, 0.5), 1, [0.5]),
        ((2, 0.0), 1, [2.0]),
        ((0.25, None), 2, [0.25, 1.0]),
        ((False, 3), 1, [3.0]),
    ],
)
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
