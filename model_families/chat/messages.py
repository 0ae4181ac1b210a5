"""A message of a conversation, whatever the format: a role, text, tool calls and thinking apart from each other.

Environments speak in texts. Their form of tools is that of :mod:`agent_environments.tool_calls`, and here
it is taken apart: a format writes tools, calls and results in its model's own form.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from agent_environments.protocol import Message
from agent_environments.tool_calls import (
    CALL_OPENS,
    BadCall,
    ToolCall,
    parse_tool_calls,
    render_tool_call,
    render_tool_response,
    split_tool_responses,
    split_tools_section,
    tools_section,
)
from loop_plumbing.sanitize import printable

ChatRole = Literal["system", "user", "assistant", "tool"]
Tools = Sequence[Mapping[str, Any]]
"""JSON schemas in the form of OpenAI's API, one a tool."""
THOUGHT_OPENS, THOUGHT_CLOSES = "<think>", "</think>"


@dataclass(frozen=True)
class ChatMessage:
    """A message. Only an assistant's message has ``calls`` and ``reasoning``; ``content`` is all other text.

    ``call_ids`` are the client's ids of the calls, "" for a call without an id; a tool's message has the id of the
    call that it answers. No policy reads these ids: messages that differ only in ids are equal.
    """

    role: ChatRole
    content: str
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    call_ids: tuple[str, ...] = field(default=(), compare=False)

    @property
    def key(self) -> Hashable:
        """A key that is equal for all spellings in which a client may return the message, with or without reasoning."""
        if self.role != "assistant":
            return self.role, self.content
        calls = tuple((call.name, json.dumps(call.arguments, sort_keys=True)) for call in self.calls)
        return self.role, self.content.strip(), calls

    @property
    def key_without_thought(self) -> Hashable:
        """The key of this message if the client sends it back without the ``<think>`` part that begins its content."""
        opens = self.content.find(THOUGHT_OPENS)
        closes = self.content.find(THOUGHT_CLOSES, opens)
        if opens < 0 or closes < 0:
            return self.key
        content = self.content[:opens].rstrip() + self.content[closes + len(THOUGHT_CLOSES) :]
        return ChatMessage(self.role, content, self.calls).key


def results_by_call(messages: Iterable[ChatMessage]) -> list[ChatMessage]:
    """Return the messages, with consecutive tool results sorted in the order of their calls if ids name the calls."""
    ordered: list[ChatMessage] = []
    calls: list[str] = []
    for role, group in itertools.groupby(messages, key=lambda message: message.role):
        run = list(group)
        if role == "assistant":
            calls = [name for message in run for name in message.call_ids]
        elif role == "tool" and all({*message.call_ids} & {*calls} for message in run):
            run.sort(key=lambda message: calls.index(message.call_ids[0]))
        ordered += run
    return ordered


def spoken_message(text: str, with_tools: bool, reasoning: str = "") -> ChatMessage:
    """Return the message of an assistant's text, with its calls split off. If a block is not a call, all stays text."""
    calls = parse_tool_calls(text) if with_tools else []
    sound = tuple(call for call in calls if isinstance(call, ToolCall))
    if not calls or any(isinstance(call, BadCall) for call in calls):
        return ChatMessage("assistant", text, reasoning=reasoning)
    return ChatMessage("assistant", text[: text.index(CALL_OPENS)].strip(), sound, reasoning)


def opening_messages(messages: Sequence[Message]) -> tuple[list[ChatMessage], Tools]:
    """Return the messages that open an episode, and the tools that its system message offers."""
    plain = [ChatMessage(message.role, message.content) for message in messages]
    if not plain or plain[0].role != "system":
        return plain, ()
    own, tools = split_tools_section(plain[0].content)
    system = [] if own is None else [ChatMessage("system", own)]
    return [*system, *plain[1:]], tools


def observation_messages(text: str, role: Literal["user", "tool"], with_tools: bool) -> list[ChatMessage]:
    """Return an environment's answer: the results of a turn's tool calls, or one message in ``role``."""
    results = split_tool_responses(text) if with_tools else None
    if results is None:
        return [ChatMessage(role, text)]
    return [ChatMessage("tool", result) for result in results]


def as_texts(messages: Sequence[ChatMessage], tools: Tools) -> Iterator[tuple[str, str]]:
    """Yield (role, text) of the turns in the form that environments speak, records hold and Qwen2.5's template writes.

    Tools stand in the system message, calls in the assistant's text, and results that follow each other share one user
    message. Thinking is left out.
    """
    if tools and (not messages or messages[0].role != "system"):
        yield "system", tools_section(tools)
    results: list[str] = []
    for number, message in enumerate(messages):
        if message.role == "tool":
            results.append(printable(message.content))
            continue
        if results:
            yield "user", render_tool_response(*results)
            results = []
        pieces = [message.content, *(render_tool_call(call) for call in message.calls)]
        if number == 0 and tools and message.role == "system":
            yield "system", printable(f"{message.content}\n\n{tools_section(tools)}")
        else:
            yield message.role, printable("\n".join(piece for piece in pieces if piece))
    if results:
        yield "user", render_tool_response(*results)


def split_thought(text: str) -> tuple[str, str, bool]:
    """Return (thinking, answer, cut) of the text of a turn; ``cut`` says that the turn ended within its thinking."""
    thought, closed, answer = text.partition(THOUGHT_CLOSES)
    if closed:
        return thought.replace(THOUGHT_OPENS, "", 1).strip("\n"), answer.lstrip("\n"), False
    if text.lstrip().startswith(THOUGHT_OPENS):
        return text.replace(THOUGHT_OPENS, "", 1).strip("\n"), "", True
    return "", text, False
