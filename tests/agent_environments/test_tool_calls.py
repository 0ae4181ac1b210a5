"""The text of tool calls. The expected texts are what Qwen2.5-Instruct's published chat template renders."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_environments.tool_calls import (
    MAX_NESTING_LEVELS,
    BadCall,
    ToolCall,
    parse_tool_calls,
    render_tool_call,
    render_tool_response,
    tools_section,
)
from support.texts import texts_beside

TEXTS = texts_beside(__file__)
ADD = TEXTS["add"]
FINISH = {"type": "function", "function": {"name": "finish", "parameters": {"type": "object", "properties": {}}}}

RENDERED_SECTION = TEXTS["rendered_section"]
RENDERED_TURN = TEXTS["rendered_turn"]
RENDERED_ANSWER = TEXTS["rendered_answer"]

CALLS = [ToolCall("add", {"amount": 3, "note": 'a\n"ü"'}), ToolCall("finish", {})]


def test_the_system_messages_section():
    assert tools_section([ADD, FINISH]) == RENDERED_SECTION


def test_the_assistants_turn_both_ways():
    assert "\n".join(["Both.", *map(render_tool_call, CALLS)]) == RENDERED_TURN
    assert parse_tool_calls(RENDERED_TURN) == CALLS


def test_consecutive_results_share_a_turn():
    assert render_tool_response("3", "done") == RENDERED_ANSWER


@pytest.mark.parametrize("text", TEXTS["lenient_where_the_meaning_is_clear"])
def test_lenient_where_the_meaning_is_clear(text):
    assert parse_tool_calls(text) == [ToolCall("finish", {})]


def test_the_closing_tag_inside_a_string_closes_nothing():
    call = ToolCall("add", {"note": "</tool_call><tool_call>{}"})
    assert parse_tool_calls(render_tool_call(call)) == [call]


def test_no_call_is_no_call():
    assert parse_tool_calls('I would write {"name": "finish"} if I dared. </tool_call>') == []


@pytest.mark.parametrize(
    ("block", "error"), [*TEXTS["what_is_no_call_is_told"], ('{"name":' + "[" * 100_000, "nested too deeply")]
)
def test_what_is_no_call_is_told(block, error):
    assert parse_tool_calls(f"<tool_call>\n{block}\n</tool_call>\n" + render_tool_call(CALLS[1])) == [
        BadCall(block, error),
        CALLS[1],
    ]


def test_a_number_too_long_for_python_is_a_bad_call():
    (bad,) = parse_tool_calls('<tool_call>{"name": "add", "arguments": {"amount": ' + "9" * 5000 + "}}</tool_call>")
    assert isinstance(bad, BadCall)
    assert "4300 digits" in bad.error


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@given(st.lists(st.builds(ToolCall, st.from_regex(r"\A\w{1,20}\Z"), st.dictionaries(st.text(), JSON, max_size=4))))
def test_what_is_rendered_is_read(calls):
    assert parse_tool_calls("so:\n" + "\n".join(map(render_tool_call, calls))) == calls


@given(
    st.text() | st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "{", '"name"', ":", "}", "x"])).map("".join)
)
def test_any_text_is_read(text):
    for call in parse_tool_calls(text):
        json.dumps(call.arguments if isinstance(call, ToolCall) else call.error)


@pytest.mark.parametrize("levels", [MAX_NESTING_LEVELS + 1, 980, 100_000])
def test_what_can_hardly_be_written_again_is_no_call(levels):
    """Else the answer that holds it breaks wherever it is next written as JSON."""

    def call(levels):
        nested = "[" * levels + "]" * levels
        return parse_tool_calls(f'<tool_call>{{"name": "f", "arguments": {{"a": {nested}}}}}</tool_call>')

    [bad] = call(levels)
    assert isinstance(bad, BadCall)
    assert bad.error == "nested too deeply"
    assert isinstance(call(MAX_NESTING_LEVELS - 1)[0], ToolCall)
