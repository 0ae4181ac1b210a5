"""Chat requests as ChatML turns: the texts are what Qwen2.5-Instruct's published chat template renders."""

import json

import pytest

from agent_environments.tool_calls import ToolCall, tools_section
from model_families.chat.messages import ChatMessage, as_texts, spoken_message
from rollout_server.endpoint.messages import BadMessages, read_messages

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def call(name, arguments, identity="call_1"):
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def texts(messages, tools=()):
    return list(as_texts(read_messages(messages, list(tools)), list(tools)))


def test_roles_parts_and_tool_results_become_turns():
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Add "}, {"type": "text", "text": "three."}]},
        {"role": "assistant", "content": None, "tool_calls": [call("add", '{"n":1}'), call("add", '{"n": 2}')]},
        {"role": "tool", "tool_call_id": "call_1", "content": "1"},
        {"role": "tool", "tool_call_id": "call_2", "content": "3"},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "Thanks."},
    ]
    assert texts(messages) == [
        ("system", "Be brief."),
        ("user", "Add three."),
        (
            "assistant",
            '<tool_call>\n{"name": "add", "arguments": {"n": 1}}\n</tool_call>\n'
            '<tool_call>\n{"name": "add", "arguments": {"n": 2}}\n</tool_call>',
        ),
        ("user", "<tool_response>\n1\n</tool_response>\n<tool_response>\n3\n</tool_response>"),
        ("assistant", "Done."),
        ("user", "Thanks."),
    ]


def test_tools_are_offered_in_the_system_message():
    user = {"role": "user", "content": "Add."}
    section = tools_section([ADD])
    assert texts([{"role": "system", "content": "Be brief."}, user], [ADD])[0] == ("system", f"Be brief.\n\n{section}")
    assert texts([user], [ADD]) == [("system", section), ("user", "Add.")]


def test_thought_before_a_call_stays_before_it():
    said = {"role": "assistant", "content": "I add.", "tool_calls": [call("add", "{}")]}
    assert texts([said]) == [("assistant", 'I add.\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>')]


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"role": "function", "content": "3"}, "role 'function' is not one of"),
        ({"content": "3"}, "role None"),
        ({"role": "user", "content": 3}, r"messages\[0\].content must be text"),
        ({"role": "assistant", "content": [{"type": "image_url"}]}, "the policy reads text only"),
        ({"role": "system", "content": [{"type": "image_url"}]}, "the policy reads text only"),
        ({"role": "user", "content": [{"type": "text", "text": 3}]}, "the policy reads text only"),
        ({"role": "user", "content": [{"type": None}]}, "the policy reads text only"),
        ({"role": "user", "content": ["text"]}, "not a part of a message"),
        ({"role": "assistant", "tool_calls": [call("add", "[1]")]}, "a JSON object"),
        ({"role": "assistant", "tool_calls": [call("add", "{")]}, "a JSON object"),
        ({"role": "assistant", "tool_calls": [call("add", '{"a":' * 5000)]}, "a JSON object"),
        ({"role": "assistant", "tool_calls": ["add"]}, "a function with a name"),
    ],
)
def test_what_is_no_message_is_named(message, why):
    with pytest.raises(BadMessages, match=why):
        read_messages([message], [])


IMAGE = {"type": "base64", "media_type": "image/png", "data": "x"}
NESTED = {"type": "document", "source": {"type": "content", "content": [{"type": "document", "title": "inner"}]}}


def left_out(what):
    return f"[A part of type {what} is left out here: only text can be read.]"


@pytest.mark.fault("a picture ends an agent's episode without a word")
@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize(
    ("part", "told"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,x"}}, left_out("'image_url'")),
        ({"type": "image", "source": IMAGE}, left_out("'image' (image/png)")),
        ({"type": "file", "file": {"filename": "a.pdf"}}, left_out("'file' (a.pdf)")),
        ({"type": "input_file", "filename": "a\u202e\n.pdf"}, left_out("'input_file' (a\\u202e .pdf)")),
        ({"type": "document", "title": "T", "source": {"type": "url"}}, left_out("'document' (T)")),
        ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "words"}}, "words"),
        ({"type": "document", "source": {"type": "content", "content": "words"}}, "words"),
        (NESTED, left_out("'document' (inner)")),
        ({"type": "search_result", "title": "T", "source": "u", "content": [{"type": "text", "text": "w"}]}, "T\nu\nw"),
        ({"type": "hologram"}, left_out("'hologram'")),
        ({"type": "tool_reference", "tool_name": "look"}, "The tool look can be called from here on."),
    ],
)
def test_what_no_policy_can_read_is_told(role, part, told):
    text = {"type": "text", "text": "see"}
    [alone, between] = read_messages([{"role": role, "content": of} for of in ([part], [text, part, text, text])], [])
    assert alone.content == told
    assert between.content == f"see\n{told}\nseesee"


def test_thoughts_among_the_parts_of_an_answer_are_left_out():
    parts = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Yes."}]
    [message] = read_messages([{"role": "assistant", "content": parts}], [])
    assert message.content == "Yes."


@pytest.mark.parametrize("arguments", ["", None])
def test_no_arguments_are_none(arguments):
    [message] = read_messages([{"role": "assistant", "tool_calls": [call("look", arguments)]}], [])
    assert message.calls == (ToolCall("look", {}),)


def test_no_messages():
    with pytest.raises(BadMessages, match="at least one"):
        read_messages([], [])


def test_lone_surrogates_are_made_printable():
    [(_, text)] = texts([{"role": "assistant", "content": "\ud800", "tool_calls": [call("add", '{"n": "\\udc00"}')]}])
    assert text == '?\n<tool_call>\n{"name": "add", "arguments": {"n": "?"}}\n</tool_call>'


CALLS = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"n": 1, "b": "x"}}\n</tool_call>\n'


def test_calls_are_told_as_calls_where_tools_were_offered():
    spoken = spoken_message(CALLS, with_tools=True)
    assert spoken == ChatMessage("assistant", "I add.", (ToolCall("add", {"n": 1, "b": "x"}),))
    assert spoken_message(CALLS, with_tools=False) == ChatMessage("assistant", CALLS)
    broken = CALLS + "<tool_call>\nadd!\n</tool_call>"
    assert spoken_message(broken, with_tools=True) == ChatMessage("assistant", broken)


@pytest.mark.parametrize(
    "echo",
    [
        {"content": "I add.", "tool_calls": [call("add", '{"n": 1, "b": "x"}')]},
        {"content": " I add.\n", "tool_calls": [call("add", '{"b":"x","n":1}', "another")]},
        {"content": "I add.", "tool_calls": [call("add", json.dumps({"n": 1, "b": "x"}, indent=4))], "refusal": None},
    ],
)
def test_a_turn_handed_back_in_another_spelling_is_the_same(echo):
    [read] = read_messages([{"role": "assistant", **echo}], [])
    assert read.key == spoken_message(CALLS, with_tools=True).key


def test_a_turn_without_its_thought_is_known_and_one_with_another_is_not():
    spoken = spoken_message("<think>\nhm\n</think>\n\nYes.", with_tools=False)
    [without] = read_messages([{"role": "assistant", "content": "Yes."}], [])
    [other] = read_messages([{"role": "assistant", "content": "<think>ha</think>Yes."}], [])
    assert without.key == spoken.key_without_thought != spoken.key
    assert other.key not in (spoken.key, spoken.key_without_thought)


def test_a_thought_is_left_out_of_the_key_with_the_white_space_before_it():
    def key(content):
        return ChatMessage("assistant", content).key

    for said, left in (
        ("<think>a\nb</think>\n\nSo.", "So."),
        ("Well.\n <think>a</think> So. <think>b</think>", "Well. So. <think>b</think>"),
        ("<think>endless", "<think>endless"),
        ("</think> late <think>", "</think> late <think>"),
    ):
        assert ChatMessage("assistant", said).key_without_thought == key(left)


def test_a_turn_of_nothing_but_white_space_is_read_in_one_pass():
    """Every turn that is sampled is looked at, in the event loop: 1,500 tokens may be 100,000 blanks."""
    spaces = ChatMessage("assistant", " " * 10_000_000 + "x")
    assert spaces.key_without_thought == ChatMessage("assistant", "x").key
