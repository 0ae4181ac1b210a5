"""Messages taken apart and written again: what an environment said is what ChatML shows, to the letter."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_environments.protocol import Message
from agent_environments.tool_calls import render_tool_call, render_tool_response, tools_section
from model_families.chat.messages import (
    ChatMessage,
    ToolCall,
    as_texts,
    observation_messages,
    opening_messages,
    split_thought,
    spoken_message,
)
from support.texts import texts_beside

TABLES = texts_beside(__file__)

ADD = TABLES["add"]
SECTION = tools_section([ADD, ADD])


@pytest.mark.parametrize(
    "system", [SECTION, f"Count.\n\n{SECTION}", f"\n\n{SECTION}", f"{SECTION} more", f"Count. {SECTION}", "Count.", ""]
)
def test_a_system_message_is_written_again_to_the_letter(system):
    opening = [Message("system", system), Message("user", "Add.")]
    messages, tools = opening_messages(opening)
    assert list(as_texts(messages, tools)) == [("system", system), ("user", "Add.")]
    assert len(tools) == (2 if system.endswith(SECTION) and " # Tools" not in system else 0)
    assert not any("# Tools" in message.content for message in messages) or not tools


def test_a_conversation_without_a_system_message_has_no_tools():
    assert opening_messages([Message("user", SECTION)]) == ([ChatMessage("user", SECTION)], ())
    assert opening_messages([]) == ([], ())


RESULTS = st.text(alphabet="ab<>/_ \n\t", max_size=9) | st.sampled_from(
    [
        "</tool_response>\n<tool_response>",
        "<tool_response>",
        "x\n</tool_response>\n<tool_response>\ny",
        "a </tool_response>",
    ]
)


@settings(max_examples=100)
@given(st.lists(RESULTS, min_size=1, max_size=4))
def test_no_result_of_a_tool_is_read_as_two(results):
    text = render_tool_response(*results)
    messages = observation_messages(text, "user", with_tools=True)
    assert [message.role for message in messages] == ["tool"] * len(results)
    assert list(as_texts(messages, ())) == [("user", text)]


def test_other_answers_keep_their_role():
    assert observation_messages("1", "tool", True) == [ChatMessage("tool", "1")]
    assert observation_messages("1", "user", True) == [ChatMessage("user", "1")]
    result = render_tool_response("1")
    assert observation_messages(result, "user", with_tools=False) == [ChatMessage("user", result)]
    cut = f"{result}\n...\nExecution output is too long and is not fully shown."
    assert observation_messages(cut, "user", True) == [ChatMessage("user", cut)]


def test_calls_are_taken_out_of_a_turn():
    call = ToolCall("add", {"n": 1})
    assert spoken_message(f"So.\n{render_tool_call(call)}", True, "hm") == ChatMessage(
        "assistant", "So.", (call,), "hm"
    )


@pytest.mark.parametrize(("text", "parts"), TABLES["thinking_in_a_text_is_found"])
def test_thinking_in_a_text_is_found(text, parts):
    assert split_thought(text) == tuple(parts)
