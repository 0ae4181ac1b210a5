"""Tool calls as text, in the form of Qwen2.5's chat template: how tools are offered, called and answered.

The policy is offered JSON schemas in its system message, writes ``<tool_call>`` blocks (the form of Hermes, on which
Qwen2.5 was trained) and reads ``<tool_response>`` blocks in a user message. All functions here give the *content* of a
message, to the letter the template's text between ``<|im_start|>role\\n`` and ``<|im_end|>``. A text made here has the
tokens that the model has seen in its own training.

The policy may write anything. A block that is not a call is a :class:`BadCall`, never an exception: the policy reads
the fault, and may try again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

CALL_OPENS = "<tool_call>"
CALL_CLOSES = "</tool_call>"
MAX_NESTING_LEVELS = 100
"""Levels of objects and lists within each other in a call's arguments. Deeper ones can be read, but Python's JSON may
fail to write them: its recursion limit depends on the caller."""
NESTED_TOO_DEEPLY = "nested too deeply"

_SECTION = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{schemas}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
_SPACE = re.compile(r"\s*")
_SECTION_OPENS, _SECTION_CLOSES = _SECTION.format(schemas="\0").split("\0")
_RESULT_MARK = re.compile(r"<(/?)tool_response>")


@dataclass(frozen=True)
class ToolCall:
    """A call as the policy wrote it; its tool may not exist, or may not take these arguments."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class BadCall:
    """A ``<tool_call>`` block that is not a call: its text, and the error in it."""

    text: str
    error: str


def tools_section(schemas: Sequence[Mapping[str, Any]]) -> str:
    """Return the section on tools for the system message; the template puts a blank line between the user's own text
    and this section.

    Args:
        schemas: one schema per tool, in the form of OpenAI's API: ``{"type": "function", "function": {"name",
            "description", "parameters"}}``. Keys stay in their order.
    """
    return _SECTION.format(schemas="\n".join(_json(schema) for schema in schemas))


def split_tools_section(content: str) -> tuple[str | None, list[dict[str, Any]]]:
    """Split a system message into the user's own text (or None) and the tools that :func:`tools_section` wrote."""
    before, opens, after = content.partition(_SECTION_OPENS)
    if not opens or not after.endswith(_SECTION_CLOSES):
        return content, []
    try:
        schemas = [json.loads(line) for line in after[: -len(_SECTION_CLOSES)].split("\n")]
    except (ValueError, RecursionError):
        return content, []
    if tools_section(schemas) != content[len(before) :] or (before and not before.endswith("\n\n")):
        return content, []
    return (before[:-2], schemas) if before else (None, schemas)


def parse_tool_calls(text: str) -> list[ToolCall | BadCall]:
    """Return the calls in an assistant message, in order; all other text in the message is the policy's thought.

    A last block without ``</tool_call>`` counts if its JSON is whole. A missing ``arguments`` stands for ``{}``.
    """
    calls: list[ToolCall | BadCall] = []
    position = 0
    while (opening := text.find(CALL_OPENS, position)) >= 0:
        start = opening + len(CALL_OPENS)
        try:
            call, end = _read(text, start)
            position = _past_the_close(text, end)
        except (ValueError, RecursionError) as error:
            # ValueError is also what Python raises of a number with more than 4,300 digits.
            end = text.find(CALL_CLOSES, start)
            end, position = (len(text), len(text)) if end < 0 else (end, end + len(CALL_CLOSES))
            calls.append(BadCall(text[start:end].strip(), _complaint(error)))
        else:
            calls.append(call)
    return calls


def render_tool_call(call: ToolCall) -> str:
    """Return a call as the policy should write it; a newline separates it from the text before it in the message."""
    # The template puts the name in as it is.
    return f'{CALL_OPENS}\n{{"name": "{call.name}", "arguments": {_json(call.arguments)}}}\n{CALL_CLOSES}'


def render_tool_response(*contents: str) -> str:
    """Return the user message that answers a turn: the results of its calls, in their order.

    Marks within a result get a blank, so that no tool can fake the result of another tool.
    """
    return "\n".join(f"<tool_response>\n{_unmarked(content)}\n</tool_response>" for content in contents)


def split_tool_responses(text: str) -> list[str] | None:
    """Return the results that :func:`render_tool_response` has put into ``text``; None for any other text."""
    head, foot, between = "<tool_response>\n", "\n</tool_response>", "\n</tool_response>\n<tool_response>\n"
    if not (text.startswith(head) and text.endswith(foot) and len(text) >= len(head) + len(foot)):
        return None
    results = text[len(head) : -len(foot)].split(between)
    return results if render_tool_response(*results) == text else None


def _unmarked(content: str) -> str:
    return _RESULT_MARK.sub(r"<\1tool_response >", content)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)  # as transformers' templates do


def _read(text: str, start: int) -> tuple[ToolCall, int]:
    """Return the call whose JSON begins at ``start``, and the JSON's end; its strings may hold ``</tool_call>``."""
    value, end = STRICT_JSON.raw_decode(text, _skip_space(text, start))
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError('a call is an object with "name" and "arguments"')
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        raise ValueError('"arguments" must be an object')
    if _deeper(arguments, MAX_NESTING_LEVELS):
        raise ValueError(NESTED_TOO_DEEPLY)
    return ToolCall(value["name"], arguments), end


def _past_the_close(text: str, end: int) -> int:
    end = _skip_space(text, end)
    if text.startswith(CALL_CLOSES, end):
        return end + len(CALL_CLOSES)
    if end == len(text):
        return end
    raise ValueError(f"there is more after the JSON object, where {CALL_CLOSES} should be")


def _skip_space(text: str, start: int) -> int:
    return _SPACE.match(text, start).end()  # type: ignore[union-attr]  # it matches everywhere


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"{digits} is too large for a number")
    return number


STRICT_JSON = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)


def _deeper(value: object, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(levels == 0 or _deeper(each, levels - 1) for each in inner)


def _complaint(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {error.msg}"
    return NESTED_TOO_DEEPLY if isinstance(error, RecursionError) else str(error)
