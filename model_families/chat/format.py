"""A model's chat: from messages to the ids that a model is served, and from sampled ids to a turn.

The chat template in the model's folder defines it, whatever its form is, if text cannot forge its turns. A conversation
only ever grows at its end: sampled ids are kept as they came and new ids are appended, because encoding a decoded text
again usually gives other ids. If a template cannot go on like that (it may drop earlier thinking), the format says so,
and a new sequence begins.

The form of a template is learned from what it writes: where an answer begins, what ends it, whether the history stays
as it was when a conversation goes on, and how a tool is called. The template itself writes every prompt. The text
behind a turn is written in a short conversation of the same kind, and is the template's text behind the same turn of a
longer one: that is tried when the format is opened, and where it is not so, the whole conversation is encoded anew and
a new sequence begins.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from agent_environments.protocol import Message
from agent_environments.tool_calls import CALL_OPENS, ToolCall, render_tool_response
from model_families.chat.calls import CALLED, OFFERED, CallForm, ObjectCalls, learn_form, rendered_call, unread_call
from model_families.chat.control import HIDDEN, UnforgeableTokenizer
from model_families.chat.messages import (
    THOUGHT_CLOSES,
    THOUGHT_OPENS,
    ChatMessage,
    Tools,
    as_texts,
    observation_messages,
    opening_messages,
    split_thought,
    spoken_message,
)
from model_families.chat.template import ChatTemplate
from model_families.chat.tokenizer import TextTokens

ASKED, ANSWER, MORE, RULE = "qwasked", "qwanswer", "qwmore", "qwrule"
"""Words that no template holds, as messages of the conversations that it is learned from."""
_BEGINS = re.compile(rf"{THOUGHT_OPENS}\s*({THOUGHT_CLOSES}\s*)?$")
"""Thinking that a prompt begins for the model, and perhaps ends."""
_EMPTY = re.compile(rf"{THOUGHT_OPENS}\s*{THOUGHT_CLOSES}\s*|^\s*{THOUGHT_CLOSES}\s*")
"""Thinking without a thought, whole or begun by a prompt."""


Thinking = Literal["kept", "stripped", "off"]
ObservationRole = Literal["user", "tool"]


@dataclass(frozen=True)
class ReadTurn:
    """The parts of a sampled turn.

    ``answer`` is all that an environment is given: the text behind the thinking, its tool calls in the form of
    :mod:`agent_environments.tool_calls`. ``thinking_tokens`` counts the sampled ids up to the end of the thinking,
    marks included. ``cut_in_thinking`` says that the turn ended within its thinking; such a turn has no answer.
    """

    answer: str
    reasoning: str = ""
    thinking_tokens: int = 0
    cut_in_thinking: bool = False

    @property
    def message(self) -> dict[str, str]:
        """The message that a record holds for the turn."""
        thought = {"reasoning": self.reasoning} if self.reasoning else {}
        return {"role": "assistant", "content": self.answer, **thought}


class ChatFormat(TextTokens):
    """The chat format of a model: its tokenizer, and the template in ``model_dir``.

    Args:
        model_dir: folder that holds the policy's ``tokenizer.json`` and its chat template.
        thinking: None keeps the template's default.
        observation_role: None means "tool" if the template keeps thinking before tool results only, else "user".

    Attributes:
        turn_end: the id that ends a whole turn.
        stop_ids: ids that end a turn when sampled, ``turn_end`` among them.
        pad_id: id of the padding.
        control_ids: the ids of the control tokens, which no text has.
        thinking: how thinking is treated; None for a model that does not think.
        observation_role: the role in which an environment's answers are written.
        thinking_ends: ids that end thinking: the end mark or a tool call; empty if no such end is to be waited for.
        call_form: how the template writes calls; None if their form could not be learned.
        native: whether offers, calls and results of tools use the template's own form; else they are plain text in
            the environments' form.

    Raises:
        ValueError: the folder has no template, ordinary text could forge a turn, or ``thinking`` is not supported.
    """

    thinking: Thinking | None = None
    thinking_ends: tuple[int, ...] = ()
    call_form: CallForm | None = None
    native = False
    _system = True
    """The template has a form for a system message."""
    _channel: Sequence[int] = ()
    """The ids that begin an answer where control tokens divide it from the thinking before it."""
    _hermes = False
    """Calls are written as environments read them."""
    _one_call = False
    """A turn makes no more than one call."""
    _results_alone = True
    """A result may stand behind a turn that makes no call."""
    _opens_call: int | None = None
    """The id that a call begins with, which ends thinking, too."""
    _always = False
    """Each prompt begins the model's thinking."""

    def __init__(
        self, model_dir: str | Path, thinking: Thinking | None = None, observation_role: ObservationRole | None = None
    ):
        self._template = ChatTemplate(model_dir)
        self._file = Path(model_dir) / "tokenizer.json"
        ends = _stated_ends(Path(model_dir))
        self._control = UnforgeableTokenizer(model_dir, "\n".join(self._template.named.values()), ends)
        super().__init__(self._control.text)
        switch = {"kept": True, "stripped": True, "off": False}
        self._settings: dict[str, Any] = {} if thinking is None else {"enable_thinking": switch[thinking]}
        self.control_ids = frozenset(self._control.ids.values())
        self._system = self._has_system()
        self._learn_turns()
        self._learn_stops(ends)
        self._learn_thinking(thinking)
        if "tools" in (self._template.text or ""):
            with suppress(ValueError):
                self._learn_calls()
        tool = self.thinking == "kept" and self._keeps_thinking("tool") and not self._keeps_thinking("user")
        self.observation_role: ObservationRole = observation_role or ("tool" if tool else "user")
        if self.thinking == "stripped" and self.observation_role == "tool":
            raise ValueError("model.thinking stripped needs model.observation_role user: before results it is kept")
        self._grows = {role: self._stays(role) for role in ("user", "tool")}

    def _encode(self, text: str) -> tuple[int, ...]:
        return super()._encode(text.replace(HIDDEN, "\ufffd"))

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._control.decode(token_ids)

    def _id(self, word: str) -> int:
        if word not in self._control.ids:
            raise ValueError(f"{self._file} has no token {word}, which its chat template writes")
        return self._control.ids[word]

    @property
    def thinks(self) -> bool:
        """Return whether the model's turns may begin with thinking."""
        return self.thinking in ("kept", "stripped")

    # Learning the template

    def _has_system(self) -> bool:
        try:
            return RULE in self._text([ChatMessage("system", RULE), ChatMessage("user", ASKED)])
        except ValueError:
            return False

    def _learn_turns(self) -> None:
        """Learn where an answer begins and ends. Check that control tokens separate the answer from other text."""
        question, answer = ChatMessage("user", ASKED), ChatMessage("assistant", ANSWER)
        asked = self._text([question])
        begun = _BEGINS.search(asked)
        self._begins = "" if begun is None else begun[0]
        before = asked.removesuffix(self._begins)
        whole = self._text([question, answer, ChatMessage("user", MORE)])
        if not whole.startswith(before) or whole.count(ANSWER) != 1:
            raise ValueError("the template writes a question or an answer in another way once there is an answer")
        start, end = whole.index(ANSWER), whole.index(ANSWER) + len(ANSWER)
        header = whole[whole.index(ASKED) + len(ASKED) : start]
        closing = self._first_control(whole[end : whole.find(MORE, end)])
        if closing is None or self._first_control(header) is None:
            raise ValueError(
                f"ordinary text divides its turns ({header!r} before an answer, "
                f"{whole[end : whole.find(MORE, end)]!r} behind it), so any text could forge one"
            )
        self._tail = whole[end : end + closing.start()]
        """The text between an answer and its end, such as a blank."""
        self._prefix = whole[len(asked) if whole.startswith(asked) else len(before) : start]
        self._prefix = _EMPTY.sub("", self._prefix)
        self._channel = self._control.encode(self._prefix) if self._first_control(self._prefix) else []
        try:
            last = self._text([question, answer], ask=False)
            ending = self._first_control(last[last.index(ANSWER) + len(ANSWER) :])
        except ValueError:
            ending = None
        self._end_word = (ending or closing)[0]
        self._ends = {closing[0], self._end_word}

    def _learn_stops(self, stated: Sequence[int]) -> None:
        """Learn the ids that end a turn: the template's, the folder's, and the token that begins another message."""
        self.turn_end = self._id(self._end_word)
        within = {self._id(word) for word in self._ends - {self._end_word}}
        self._last = self.turn_end if within else None
        words = [self._template.words.get(key) for key in ("eos_token", "pad_token")]
        eos, pad = (self._control.ids.get(word) if word else None for word in words)
        ends = [self.turn_end, *stated, eos, pad, None if self._channel else self._header()]
        # With channels, what ends an answer in the history ends a thought, too, and the turn goes on behind it.
        never = within if self._channel else set()
        self.stop_ids = tuple(token for token in dict.fromkeys(ends) if token is not None and token not in never)
        self.pad_id = next(token for token in (pad, eos, self.turn_end) if token is not None)

    def _header(self) -> int | None:
        """Return the control token that begins an answer, unless that token ends a message."""
        question = [ChatMessage("user", ASKED)]
        asked, before = self._text(question), self._text(question, ask=False)
        control = self._first_control(asked[len(before) :] if asked.startswith(before) else "")
        return None if control is None or control[0] == THOUGHT_OPENS else self._id(control[0])

    def _learn_thinking(self, asked: Thinking | None) -> None:
        can_think = bool(self._channel) or THOUGHT_CLOSES in (self._template.text or "")
        if not can_think and asked is not None:
            raise ValueError(f"{self._file.parent} does not think: leave model.thinking null, not {asked}")
        closed = THOUGHT_CLOSES in self._begins
        self._always = bool(self._begins) and not closed
        self.thinking = (asked or ("off" if closed else "kept")) if can_think else None
        if self.thinking == "off" and not closed:
            question = [ChatMessage("user", ASKED)]
            thinking = self._template.render([{"role": "user", "content": ASKED}], enable_thinking=True)
            if self._always or self._text(question) == thinking:
                raise ValueError(f"{self._file.parent} always thinks: model.thinking must be kept or stripped")
        self._closes = self._control.ids.get(THOUGHT_CLOSES)
        if self.thinks and not self._channel and self._closes is not None:
            self.thinking_ends = (self._closes,)

    def _learn_calls(self) -> None:
        """Learn how the template offers tools, and writes calls and results.

        Raises:
            ValueError: calls have a form that cannot be read or that no control token ends.
        """
        self.native = True
        try:
            self.call_form = learn_form(lambda *calls: self._called(*calls)[0])
            _, end = self._called(CALLED)
        except ValueError:
            self.native = False
            raise
        self._hermes = isinstance(self.call_form, ObjectCalls) and self.call_form.opens.strip() == CALL_OPENS
        try:
            self._called(CALLED, CALLED)
        except ValueError:
            self._one_call = True
        unasked = [ChatMessage("user", ASKED), ChatMessage("assistant", ANSWER), ChatMessage("tool", MORE)]
        try:
            self._results_alone = MORE in self._text(unasked)
        except ValueError:
            self._results_alone = False
        self._ends.add(end)
        self.stop_ids = tuple(dict.fromkeys((*self.stop_ids, self._id(end))))
        mark = self._control.shield.pattern.match(self.call_form.opens.strip())
        if mark and self.thinking_ends:
            self._opens_call = self._id(mark[0])
            self.thinking_ends = (*self.thinking_ends, self._opens_call)

    def _called(self, *calls: ToolCall) -> tuple[str, str]:
        """Return the turn that makes ``calls``, from behind its prompt and without thinking, and the control word that
        ends it."""
        question, results = ChatMessage("user", ASKED), [ChatMessage("tool", MORE) for _ in calls]
        before = self._before([question], (OFFERED,))
        text = self._text([question, ChatMessage("assistant", "", calls), *results], (OFFERED,))
        turn, result, _ = text.removeprefix(before).partition(MORE)
        if not text.startswith(before) or CALLED.name not in before or not result or self._channel:
            raise ValueError("it does not write tools, calls and results one after the other")
        stops = self._ends | {word for word, token in self._control.ids.items() if token in self.stop_ids}
        for word in self._control.shield.pattern.finditer(turn):
            if word[0] in stops:
                return _EMPTY.sub("", turn[: word.start()]), word[0]
        raise ValueError("no control token ends a call")

    def _keeps_thinking(self, role: ObservationRole) -> bool:
        """Return whether the template keeps a turn's thinking before a message in ``role``."""
        thought = ChatMessage("assistant", ANSWER, reasoning=RULE)
        try:
            return RULE in self._text([ChatMessage("user", ASKED), thought, ChatMessage(role, MORE)])
        except ValueError:
            return False

    def _stays(self, role: str) -> bool:
        """Return whether a new message in ``role`` leaves the conversation's earlier text unchanged, and is written in
        the same way in every conversation."""
        question, answer = ChatMessage("user", ASKED), ChatMessage("assistant", ANSWER)
        opened = [[question], [ChatMessage("system", RULE), question], [question, answer, ChatMessage("user", "qwa")]]
        turns: list[tuple[ChatMessage, Tools]] = [(answer, ())]
        if role == "tool" and self.native:
            turns.append((ChatMessage("assistant", "", (CALLED,)), (OFFERED,)))
        reply = ChatMessage(role, MORE)  # type: ignore[arg-type]
        for opening in opened:
            for turn, tools in turns:
                try:
                    before, whole = self._before(opening, tools), self._text([*opening, turn, reply], tools)
                    same = whole.startswith(before) and whole.endswith(self._after(turn, [reply], tools))
                    more = self._text([*opening, turn, reply, answer, ChatMessage("user", "qwlast")], tools)
                except ValueError:
                    return False
                # Thinking without a thought may be left out of the history: the served ids stay.
                begun = _EMPTY.sub("", whole.removesuffix(self._begins))
                if not same or MORE not in whole or not _EMPTY.sub("", more).startswith(begun):
                    return False
        return True

    # Writing

    def opening(self, messages: Sequence[ChatMessage], tools: Tools = ()) -> list[int]:
        """Return all ids up to where the assistant speaks.

        Raises:
            ValueError: the template cannot write these messages; one line.
        """
        return self._control.encode(self._text(messages, tools))

    def extension(
        self, prompt: Sequence[int], sampled: Sequence[int], messages: Sequence[ChatMessage], tools: Tools = ()
    ) -> list[int] | None:
        """Return the ids that follow ``prompt`` + ``sampled``, up to where the assistant speaks again.

        Return None if no text can follow these ids: encode the whole conversation as an :meth:`opening` then.
        """
        turn = self.read(prompt, sampled, bool(tools))
        ended = sampled[-1] in self.stop_ids
        roles = {message.role for message in messages}
        if "assistant" in roles or not all(self._grows.get(role, False) for role in roles):
            return None
        if turn.cut_in_thinking and ended:
            return None
        if self.thinking == "stripped" and "user" in roles and turn.thinking_tokens:
            return None
        spoken = spoken_message(turn.answer, bool(tools))
        try:
            calls = self.native and spoken.calls
            answer = ChatMessage("assistant", "", spoken.calls) if calls else ChatMessage("assistant", ANSWER)
            after = self._after(answer, messages, tools)
        except ValueError:
            return None
        if turn.cut_in_thinking and not self._channel:
            return self._control.encode(f"{THOUGHT_CLOSES}{after}")
        ids = self._control.encode(after)
        return ids[1:] if sampled[-1] in (ids[0], self._last) else ids

    def spoken(self, action: str, tools: Tools, reasoning: str = "") -> list[int]:
        """Return the ids of a whole turn as the policy would sample it: thinking (if the model :attr:`thinks`), action,
        calls in the model's own form, and end.

        Raises:
            ValueError: the template cannot write these calls or this thinking.
        """
        message = spoken_message(action, bool(tools), reasoning)
        if reasoning and self.thinking is None:
            raise ValueError("the model does not think")
        shielded = self._apart(message, bool(tools), self._control.shield)
        called = shielded.calls and self.native
        if reasoning or (self._always and not called):
            return self._thought_and_spoken(message, tools)
        if not called:
            [(_, text)] = as_texts([shielded], ())
            return self._control.encode(f"{self._prefix}{text}{self._tail}{self._end_word}")
        question, results = ChatMessage("user", ASKED), [ChatMessage("tool", MORE) for _ in message.calls]
        before, whole = self._before([question], tools), self._text([question, message, *results], tools)
        after = self._after(message, results, tools)
        turn = whole[len(before) : len(whole) - len(after)].removeprefix(self._begins)
        return self._control.encode(turn) + self._control.encode(after)[:1]

    def _thought_and_spoken(self, message: ChatMessage, tools: Tools) -> list[int]:
        """Return the ids of a turn with its thinking, which templates keep at least in the last turn."""
        question = ChatMessage("user", ASKED)
        before, whole = self._text([question], tools), self._text([question, message], tools, ask=False)
        if not whole.startswith(before):
            raise ValueError("the template writes a turn with thinking in another way than its prompts begin one")
        turn = whole[len(before) :].rstrip()
        return self._control.encode(turn if turn.endswith(tuple(self._ends)) else turn + self._end_word)

    def aside(self, text: str) -> list[int]:
        """Return the ids of a system message with ``text``, to put before a whole prompt. If the template merges system
        messages into user messages, return the ids of a user message."""
        question = ChatMessage("user", ASKED)
        asked, noted = (self._text(each, ask=False) for each in ([question], [ChatMessage("system", RULE), question]))
        end = _common_end(asked, noted)
        words = [*self._control.shield.pattern.finditer(end)]
        ends = bool(words) and words[0].start() == 0 and words[0][0] in self._ends  # the system message, in both
        if ends and len(words) > 1:
            end = end[words[1].start() :]
        before, _, after = noted[: len(noted) - len(end)].rpartition(RULE)
        if not ends and self._first_control(after) is None:
            before, _, after = self._text([ChatMessage("user", RULE)], ask=False).rpartition(RULE)
        return self._control.encode(f"{before}{self._control.shield(text)}{after}")

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids that open an environment's episode, up to where the assistant speaks."""
        return self.opening(*opening_messages(messages))

    def heard(self, observation: str, tools: Tools) -> list[ChatMessage]:
        """Return an environment's answer as messages in :attr:`observation_role`."""
        return observation_messages(observation, self.observation_role, bool(tools))

    def scripted(
        self, opening: Sequence[Message], steps: Sequence[tuple[str, str]]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of an episode that follows a script, and the span [start, end) of each of its turns.

        Args:
            steps: (action, observation) of each turn; nobody sees the last observation.

        Raises:
            ValueError: this format divides the turns into several sequences.
        """
        messages, tools = opening_messages(opening)
        token_ids, spans, start = self.opening(messages, tools), [], 0
        for number, (action, _) in enumerate(steps):
            if number:
                heard = self.heard(steps[number - 1][1], tools)
                between = self.extension(token_ids[:start], token_ids[start:], heard, tools)
                if between is None:
                    raise ValueError(f"in this chat an episode is several sequences (thinking is {self.thinking})")
                token_ids += between
            start = len(token_ids)
            token_ids += self.spoken(action, tools)
            spans.append((start, len(token_ids)))
        return token_ids, spans

    def _before(self, messages: Sequence[ChatMessage], tools: Tools = ()) -> str:
        """Return the text of a prompt, without the opening of the thinking at its end."""
        return self._text(messages, tools).removesuffix(self._begins)

    def _after(self, turn: ChatMessage, messages: Sequence[ChatMessage], tools: Tools = ()) -> str:
        """Return the text after ``turn``, beginning with the control token that ends the turn."""
        question = ChatMessage("user", ASKED)
        before, whole = self._before([question], tools), self._text([question, turn, *messages], tools)
        if not whole.startswith(before):
            raise ValueError("the template writes a question in another way once it is answered")
        start = len(before)
        if not turn.calls:
            start = whole.index(ANSWER, start)
        for word in self._control.shield.pattern.finditer(whole, start):
            if word[0] in self._ends:
                return whole[word.start() :]
        raise ValueError("nothing ends a turn")

    def _text(self, messages: Sequence[ChatMessage], tools: Tools = (), ask: bool = True) -> str:
        """Return the text that the template writes. Only an unmarked control word becomes a control token."""
        return self._template.render(*self._inputs_of(messages, tools, self._control.shield), ask, **self._settings)

    def stock(self, messages: Sequence[ChatMessage], tools: Tools = ()) -> str:
        """Return the template's text without marks, for a tokenizer that reads control tokens in any text."""
        return self._template.render(*self._inputs_of(messages, tools, lambda value: value), **self._settings)

    def _inputs_of(
        self, messages: Sequence[ChatMessage], tools: Tools, shield: Callable[[Any], Any]
    ) -> tuple[list[dict[str, Any]], Any]:
        """Return the messages and tools in the form that a template takes."""
        apart = [self._apart(message, bool(tools), shield) for message in messages]
        if not self.native:
            apart = _in_texts(apart, shield(list(tools)))
        if not self._system and apart and apart[0].role == "system":
            own, *apart = apart
            if apart and apart[0].role == "user":
                own = replace(own, content=f"{own.content}\n\n{apart.pop(0).content}")
            apart.insert(0, replace(own, role="user"))
        inputs: list[dict[str, Any]] = []
        unanswered: list[dict[str, Any]] = []
        for message in apart:
            plain = self._plain(message)
            if message.role == "tool" and unanswered:
                plain |= unanswered.pop(0)
            elif message.role == "tool" and not self._results_alone:
                plain = {"role": "user", "content": render_tool_response(message.content)}
            elif "tool_calls" in plain:
                unanswered = [
                    {"tool_call_id": call["id"], "name": call["function"]["name"]} for call in plain["tool_calls"]
                ]
            inputs.append(plain)
        return inputs, shield(list(tools)) if self.native and tools else ()

    def _apart(self, message: ChatMessage, with_tools: bool, shield: Callable[[Any], Any]) -> ChatMessage:
        """Return a message with its thinking and calls in separate fields, and with every text shielded."""
        if message.role == "assistant" and not message.calls:
            reasoning, content = message.reasoning, message.content
            if self.thinking is not None and not self._channel and not reasoning:
                reasoning, content, _ = split_thought(content)
            message = spoken_message(content, with_tools, reasoning)
        if self._one_call and len(message.calls) > 1:  # as the policy wrote them, which is not a form of the template's
            [(_, text)] = as_texts([message], ())
            message = ChatMessage("assistant", text, reasoning=message.reasoning)
        reasoning = "" if self.thinking is None else shield(message.reasoning)
        calls = tuple(ToolCall(shield(call.name), shield(call.arguments)) for call in message.calls)
        return replace(message, content=shield(message.content), reasoning=reasoning, calls=calls)

    def _plain(self, message: ChatMessage) -> dict[str, Any]:
        """Return a message in the form that a template takes."""
        plain: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.reasoning:
            text = self._template.text or ""
            for key in ("reasoning_content", "thinking"):
                if re.search(rf"""\.{key}\b|['"]{key}['"]""", text):
                    plain[key] = message.reasoning
                    break
            else:
                plain["content"] = f"{THOUGHT_OPENS}\n{message.reasoning}\n{THOUGHT_CLOSES}\n\n{message.content}"
        if message.calls:
            calls = [{"name": call.name, "arguments": call.arguments} for call in message.calls]
            plain["tool_calls"] = [
                {"id": f"call{number:05}", "type": "function", "function": call} for number, call in enumerate(calls)
            ]
        return plain

    def _first_control(self, text: str) -> re.Match[str] | None:
        return self._control.shield.pattern.search(text)

    # Reading

    def read(self, prompt: Sequence[int], sampled: Sequence[int], with_tools: bool) -> ReadTurn:
        """Return the turn that was sampled after ``prompt``; set ``with_tools`` if tools were offered. Never raises."""
        body = self.without_stop(sampled)
        if self._channel:
            return self._read_channels(body, with_tools)
        if self.thinking is None:
            return ReadTurn(self._answer(self.decode(body), with_tools))
        text = self.decode(body)
        begun = self._always and _ends_with(prompt, self._control.encode(self._begins))
        if not begun and not text.lstrip().startswith(THOUGHT_OPENS):
            return ReadTurn(self._answer(text, with_tools))
        end = self._end_of_thought(body)
        reasoning = self.decode(body[:end]).replace(THOUGHT_OPENS, "", 1)
        if end == len(body) and THOUGHT_CLOSES not in reasoning:
            return ReadTurn("", reasoning.strip("\n"), len(body), cut_in_thinking=True)
        reasoning, closes, answer = reasoning.rpartition(THOUGHT_CLOSES)
        if not closes:  # a call ends it
            reasoning, answer = answer, ""
        answer += self.decode(body[end:])
        return ReadTurn(self._answer(answer.lstrip("\n"), with_tools), reasoning.strip("\n"), end)

    def without_stop(self, sampled: Sequence[int]) -> list[int]:
        """Return the sampled ids without the id that ended the turn."""
        return list(sampled[:-1] if sampled and sampled[-1] in self.stop_ids else sampled)

    def _read_channels(self, body: list[int], with_tools: bool) -> ReadTurn:
        """Read the answer from the answer channel. A turn without channels is entirely an answer."""
        width = len(self._channel)
        starts = [at for at in range(len(body) - width + 1) if body[at : at + width] == list(self._channel)]
        text = self.decode(body)
        if not starts and self._first_control(text) is None:
            return ReadTurn(self._answer(text, with_tools))
        word = self._control.shield.pattern.findall(self._prefix)[-1]
        end = starts[-1] if starts else len(body)
        pieces = self.decode(body[:end]).split(word)[1:]
        thought = "\n".join(self._control.shield.pattern.split(piece)[0] for piece in pieces)
        if not starts:
            return ReadTurn("", thought, len(body), cut_in_thinking=True)
        answer = self._answer(self.decode(body[end + width :]), with_tools)
        return ReadTurn(answer, thought, end + width if thought else 0)

    def _end_of_thought(self, body: list[int]) -> int:
        """Return the number of ids up to the end of the thinking, or of all ids if the thinking does not end."""
        if self._closes in body:
            return body.index(self._closes) + 1
        if self._closes is not None:
            return body.index(self._opens_call) if self._opens_call in body else len(body)
        return bisect_left(range(len(body)), True, key=lambda count: THOUGHT_CLOSES in self.decode(body[:count]))

    def _answer(self, text: str, with_tools: bool) -> str:
        """Return a text of the policy with its calls in the form that environments read."""
        text = text.removeprefix(self._prefix)
        if self.call_form is None or not with_tools or self._hermes:
            return text
        try:
            before, calls = self.call_form.read(text)
            blocks = [
                rendered_call(name, arguments, json.dumps({"name": name, "arguments": arguments}))
                for name, arguments in calls
            ]
        except (ValueError, KeyError, RecursionError):  # JSON that Python cannot read, or not write again
            return unread_call(text.strip())
        return "\n".join(piece for piece in (before.strip(), *blocks) if piece) if blocks else text


def _in_texts(messages: Sequence[ChatMessage], tools: Tools) -> list[ChatMessage]:
    """Return the messages with calls and results as text in the environments' form; thoughts stay separate."""
    spoken = iter([message for message in messages if message.role == "assistant"])
    return [
        ChatMessage(role, text, reasoning=next(spoken).reasoning if role == "assistant" else "")  # type: ignore[arg-type]
        for role, text in as_texts(messages, tools)
    ]


def _stated_ends(folder: Path) -> list[int]:
    """Return the ids that end a generation, according to generation_config.json and config.json."""
    stated: list[int] = []
    for name in ("generation_config.json", "config.json"):
        try:
            ends = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            continue
        stated += [token for token in (ends if isinstance(ends, list) else [ends]) if isinstance(token, int)]
    return stated


def _common_end(one: str, other: str) -> str:
    pairs = zip(reversed(one), reversed(other), strict=False)
    count = next((number for number, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))
    return one[len(one) - count :]


def _ends_with(ids: Sequence[int], last: Sequence[int]) -> bool:
    return list(ids[len(ids) - len(last) :]) == list(last)
