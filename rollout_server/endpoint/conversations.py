"""The conversations of one episode as token ids: a tree of turns that hold the ids just as they were sampled.

A harness sends its whole history with every call. Encoding it again would give other ids than were sampled, in a few
turns of a hundred. So this module finds its longest beginning that ends in a turn sampled here, and encodes only the
messages after it. A history that was changed, cut or summarised leaves the tree at the first difference and grows a
branch. So do sub-agents, and calls made at the same time. If the chat format cannot go on from a turn, the whole
history is encoded, and a new sequence begins.

A turn with tool calls is known by the ids of its calls, and by its text: many programs fill in, convert or drop
arguments before they hand a call back, some rename a tool that does not exist, and some leave out the text. The policy
reads its own words. A turn without calls is known by its text alone. An id counts only at the place in the history at
which the call was made.

At the end each way from a first turn to a last one is one sequence that was served, token for token.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from loop_formats.rollout import Turn
from loop_plumbing.sanitize import printable
from model_families.chat.format import ChatFormat, ReadTurn
from model_families.chat.messages import ChatMessage, Tools, as_texts
from rollout_server.collecting.policy_client import SpokenRecord
from rollout_server.inference.router import Generation

EDITS = {
    "arguments": "its calls have other arguments: the policy is shown its own",
    "names": "its calls name other tools: the policy is shown its own, and the result that it got",
    "calls": "its calls are fewer, or in another order: the policy is shown what came back",
    "no_text": "its calls come back without the text beside them: the policy is shown its own",
    "text": "its text beside its calls is another: the policy is shown what came back",
}
"""The ways in which a turn that is known by its call ids comes back changed, and what the policy reads then."""


@dataclass(frozen=True)
class PromptTokens:
    """A prompt. ``token_ids`` are all its ids, ``new`` its messages after the latest sampled turn.

    ``text`` is set if the prompt is plain text without messages. ``edited`` holds the turns that the harness changed
    and sent back, each with the kind of change (:data:`EDITS`).
    """

    token_ids: list[int]
    messages: tuple[ChatMessage, ...]
    tools: Tools
    goes_on_from: _SampledTurn | None
    new: tuple[ChatMessage, ...]
    text: str | None = None
    edited: frozenset[tuple[_SampledTurn, str]] = frozenset()


@dataclass(eq=False)
class _SampledTurn:
    """A sampled turn and its prompt; ``between`` are the prompt's ids after the previous turn."""

    before: _SampledTurn | None
    between: list[int]
    new_texts: list[tuple[str, str]]
    spoken: ChatMessage
    turn: ReadTurn
    version: int
    generation: Generation
    continued: bool = False
    """True once another turn was sampled after it."""

    def path(self) -> list[_SampledTurn]:
        """Return the turns of the sequence, from the first turn to this turn."""
        turns, turn = [], self
        while turn.before is not None:
            turns.append(turn)
            turn = turn.before
        return [turn, *turns[::-1]]

    def prompt(self) -> list[int]:
        """Return the ids after which this turn was sampled."""
        *before, _ = self.path()
        return [token for turn in before for token in (*turn.between, *turn.generation.token_ids)] + self.between


@dataclass(frozen=True)
class Segment(SpokenRecord):
    """A served sequence, in the fields of :class:`~loop_formats.rollout.Rollout`."""

    turns: list[Turn] = field(default_factory=list)
    messages: list[dict[str, str]] = field(default_factory=list)


class Conversations:
    """The tree of the conversations in one episode. Look-up and adding are separate, so calls may overlap."""

    def __init__(self, tokens: ChatFormat):
        self._tokens = tokens
        self._places: dict[tuple[int, Hashable], int] = {}
        """(place of a history, the next message) -> place of the longer history; place 0 is before all messages."""
        self._turns: dict[int, _SampledTurn] = {}
        """The turn that was sampled last at a place."""
        self._messages: dict[int, tuple[int, ChatMessage]] = {}
        """Place -> the place before it, and the message between them."""
        self._texts: dict[tuple[int, bytes], _SampledTurn] = {}
        """(length, digest) of a text -> the turn whose last id ends it; texts would fill the memory."""
        self._unended: dict[int, list[tuple[str, _SampledTurn]]] = {}
        """(text, turn) of turns that a stop text or a limit cut, by the place before them."""
        self._callers: dict[str, tuple[int, _SampledTurn]] = {}
        """Call id -> the place of the turn that made the call, and that turn."""
        self._edited: set[tuple[_SampledTurn, str]] = set()
        self._sampled: list[_SampledTurn] = []

    @property
    def turns(self) -> int:
        """The number of turns sampled so far."""
        return len(self._sampled)

    @property
    def edits(self) -> dict[str, int]:
        """The number of turns that came back changed, by kind of change (:data:`EDITS`), without zeros."""
        return dict(Counter(kind for _, kind in self._edited))

    def prompt(self, messages: Sequence[ChatMessage], tools: Tools = ()) -> PromptTokens:
        """Return the prompt after which to sample. The tree stays unchanged until :meth:`add`.

        Raises:
            ValueError: the chat format has no form for these messages.
        """
        path, known, parent = list(messages), list(messages), None
        place, edited = self._places.get((0, _offered(tools))), set[tuple[_SampledTurn, str]]()
        end, written = 0, ""
        for number, message in enumerate(messages):
            if place is None:
                break
            known_by_ids, message = self._by_call_ids(place, message, edited)
            path[number] = message
            before, place = place, self._places.get((place, message.key))
            if message.role != "assistant":
                continue
            turn, rest = (None, "") if place is None else (known_by_ids or self._turns.get(place), "")
            if turn is None:
                turn, rest = self._written_on(before, message)
            if turn is not None:
                parent, end, written = turn, number + 1, rest
                known[number] = replace(message, reasoning=turn.spoken.reasoning)
        new = tuple(messages[end:])
        if parent is not None:
            prompt, sampled = parent.prompt(), parent.generation.token_ids
            more = self._tokens.encode_text(written) if written else []
            between = self._tokens.extension(prompt, [*sampled, *more], new, tools)
            if between is not None:
                new = (ChatMessage("assistant", written), *new) if written else new
                served = [*prompt, *sampled, *more, *between]
                return PromptTokens(served, tuple(path), tools, parent, new, edited=frozenset(edited))
        opening = self._tokens.opening(known, tools)
        return PromptTokens(opening, tuple(path), tools, None, tuple(known), edited=frozenset(edited))

    def _by_call_ids(
        self, place: int, message: ChatMessage, edited: set[tuple[_SampledTurn, str]]
    ) -> tuple[_SampledTurn | None, ChatMessage]:
        """Return the turn after ``place`` that made the calls with a message's call ids, and the completed message.

        If there is no such turn, return None and the unchanged message. Adds the changes found to ``edited``.
        """
        named = (self._callers[name] for name in message.call_ids if name in self._callers)
        at, turn = next(named, (0, None))
        if turn is None or self._messages[at][0] != place:
            return None, message
        original = replace(message, calls=turn.spoken.calls, content=message.content or turn.spoken.content)
        if message.call_ids != turn.spoken.call_ids:
            edited.add((turn, "calls"))
        elif self._places.get((place, original.key)) != at:
            edited.add((turn, "text"))
        else:
            edited.update((turn, kind) for kind in _edits(turn.spoken, message))
            return turn, original
        return None, message

    def _written_on(self, place: int, message: ChatMessage) -> tuple[_SampledTurn | None, str]:
        """Return the unended turn after ``place`` that begins a message, and the text that the harness added."""
        for text, turn in reversed(self._unended.get(place, [])):
            if message.content.startswith(text) and not message.calls:
                return turn, printable(message.content[len(text) :])
        return None, ""

    def text_prompt(self, text: str) -> PromptTokens:
        """Return the prompt for a plain text. It continues a turn if it begins with all text up to that turn's end."""
        text = printable(text)
        for length, digest in sorted(self._texts, key=lambda key: -key[0]):
            if digest == _digest(text[:length]):
                parent = self._texts[length, digest]
                new = text[length:]
                between = self._tokens.encode_text(new) if new else []
                served = [*parent.prompt(), *parent.generation.token_ids, *between]
                return PromptTokens(served, (), (), parent, (ChatMessage("user", new),) if new else (), text)
        return PromptTokens(self._tokens.encode_text(text), (), (), None, (ChatMessage("user", text),), text)

    def add(
        self,
        prompt: PromptTokens,
        spoken: ChatMessage,
        turn: ReadTurn,
        version: int,
        generation: Generation,
        stopped_by: str | None = None,
    ) -> int:
        """Add the turn that was sampled after a prompt. Return the turn's place, for :meth:`messages`.

        Args:
            spoken: the turn as the harness gets it; identifies the turn when the harness sends it back.
            turn: the whole turn.
            stopped_by: the stop text that ended the turn; a harness may append this text again.
        """
        before = prompt.goes_on_from
        served = 0 if before is None else len(before.prompt()) + len(before.generation.token_ids)
        new_texts = list(as_texts(prompt.new, prompt.tools if before is None else ()))
        sampled = _SampledTurn(before, prompt.token_ids[served:], new_texts, spoken, turn, version, generation)
        self._sampled.append(sampled)
        if before is not None:
            before.continued = True
        if prompt.text is not None:
            if self._tokens.without_stop(generation.token_ids) == generation.token_ids:  # stop ids have no text
                text = prompt.text + self._tokens.decode(generation.token_ids)
                self._texts[len(text), _digest(text)] = sampled
            return 0
        place = self._place(0, _offered(prompt.tools))
        for message in prompt.messages:
            place = self._reach(place, message)
        # The same words sampled twice are two turns; a call goes on from the later one.
        at = self._reach(place, spoken)
        for variant in (spoken, replace(spoken, content=spoken.content + (stopped_by or ""))):
            self._places.setdefault((place, variant.key), at)
            self._places.setdefault((place, variant.key_without_thought), at)
        if self._tokens.without_stop(generation.token_ids) == generation.token_ids and not spoken.calls:
            texts = {spoken.content + (stopped_by or ""), turn.answer} - {""}
            self._unended.setdefault(place, []).extend((text, sampled) for text in sorted(texts, key=len))
        self._turns[at] = sampled
        self._callers.update(dict.fromkeys(spoken.call_ids, (at, sampled)))
        self._edited |= prompt.edited
        return at

    def messages(self, place: int) -> list[ChatMessage]:
        """Return the messages from the beginning of a conversation to a place in the tree."""
        messages = []
        while place in self._messages:
            place, message = self._messages[place]
            messages.append(message)
        return messages[::-1]

    def _reach(self, place: int, message: ChatMessage) -> int:
        at = self._place(place, message.key)
        self._messages.setdefault(at, (place, message))
        return at

    def _place(self, place: int, key: Hashable) -> int:
        return self._places.setdefault((place, key), len(self._places) + 1)

    def segments(self) -> list[Segment]:
        """Return the served sequences, in the order in which their last turns were sampled.

        A sampled turn that several sequences hold is a turn in the first, and context in all others.
        """
        recorded: set[_SampledTurn] = set()
        segments = []
        for leaf in self._sampled:
            if not leaf.continued:
                segments.append(_segment(leaf.path(), recorded))
                recorded.update(leaf.path())
        return segments


def _edits(original: ChatMessage, returned: ChatMessage) -> Iterator[str]:
    """Yield the kinds of changes with which a turn with calls came back (:data:`EDITS`)."""
    if [call.name for call in returned.calls] != [call.name for call in original.calls]:
        yield "names"
    if [_spelled(call.arguments) for call in returned.calls] != [_spelled(call.arguments) for call in original.calls]:
        yield "arguments"
    if original.content and not returned.content:
        yield "no_text"


def _spelled(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, sort_keys=True)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _offered(tools: Tools) -> str:
    return json.dumps(list(tools), sort_keys=True)


def _segment(path: Sequence[_SampledTurn], recorded: set[_SampledTurn]) -> Segment:
    segment = Segment()
    for sampled in path:
        segment.append_context(sampled.between)
        segment.messages.extend({"role": role, "content": text} for role, text in sampled.new_texts)
        segment.messages.append(sampled.turn.message)
        generation = sampled.generation
        if sampled in recorded:
            segment.append_context(generation.token_ids)  # this sequence does not train on them
            continue
        message = len(segment.messages) - 1
        segment.turns.append(segment.append_turn(generation, sampled.turn, sampled.version, message))
    return segment
