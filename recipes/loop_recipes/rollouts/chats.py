"""Conversations as rollouts: written by the model's own chat format, the assistant's turns as if they were sampled."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from agent_environments.tool_calls import CALL_OPENS, render_tool_call, render_tool_response, tools_section
from loop_formats.ids import rollout_id, segment_id
from loop_formats.rollout import Rollout
from loop_formats.schema import ConfigError, require
from loop_plumbing.breakage import raised_as
from loop_plumbing.grouping import grouped
from loop_recipes.rollouts.chat_files import Chat, ChatTokens, read_chats
from model_families.chat.format import ChatFormat
from model_families.chat.messages import THOUGHT_CLOSES, THOUGHT_OPENS, ChatMessage, split_thought

SERVER = "file"
"""The name of the server in the turns of files."""
TRAINED, HELD_OUT = "data_trained", "data_held_out"
"""The names of the collections that hold the conversations."""
_TEMPLATE_MARKS = re.compile(
    r"<[|｜](?:im_|end|eo|begin|start|return|user|assistant|system|tool|User|Assistant)[\w▁]*[|｜]>"
    r"|</s>|<[be]os>|\[/?INST\]|<(?:start|end)_of_turn>|<turn\|>|<\|turn>"
)


@dataclass
class ChatSet:
    """Rollouts made of conversations, some of them held out, and ``notes`` on contents that are not learned."""

    rollouts: list[Rollout] = field(default_factory=list)
    held_out: list[Rollout] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_chat_set(
    files: Sequence[str],
    tokens: ChatFormat,
    turns: Literal["all", "last"],
    held_out: float,
    most_tokens: float = math.inf,
) -> ChatSet:
    """Read files of conversations; conversations with the same question are rollouts of one task.

    Args:
        tokens: the chat format of the model in training.
        turns: the assistant turns of a conversation to learn from.
        held_out: share of the conversations that are not trained on. The same messages give the same choice.
        most_tokens: a conversation with a longer sequence is left out.

    Raises:
        ConfigError: a file or a conversation is invalid; the message names file, line and field.
    """
    chat_set = ChatSet()
    dataset = "+".join(dict.fromkeys(Path(file).stem for file in files))
    with raised_as(ConfigError, "data: ", ValueError, OSError):
        chats = [chat for file in files for chat in read_chats(Path(file), tokens.vocab_size)]
        if tokens.thinking is not None:
            chats = [replace(chat, messages=[*map(_thought_apart, chat.messages)]) for chat in chats]
        learned = {number: places for number, chat in enumerate(chats) if (places := _learned(chat, tokens, turns))}

        same = _grouped({number: chats[number] for number in learned}, whole=False).values()
        attempts = {number: (group[0], index) for group in same for index, number in enumerate(group)}

        def made(number: int, collection: str) -> list[Rollout]:
            task, index = attempts[number]
            return _rollouts(chats[number], tokens, learned[number], f"chat{task:06d}", index, dataset, collection)

        rollouts = {number: made(number, TRAINED) for number in learned}
        chat_set.notes = [*_notes(chats, len(learned), tokens)]
        lengths = {number: max(len(rollout.token_ids) for rollout in own) for number, own in rollouts.items()}
        long = [number for number in rollouts if lengths[number] > most_tokens]
        if long:
            chat_set.notes.append(
                f"{len(long)} of {len(chats)} conversations are longer than the model's {most_tokens} tokens, and are "
                f"left out; the first is {chats[long[0]].place} with {lengths[long[0]]}"
            )
        used = [number for number in rollouts if lengths[number] <= most_tokens]
        none = f"none of {len(chats)} conversations has a turn to learn from"
        require(used, chat_set.notes[-1] if long else none)
        apart = _held_out({number: chats[number] for number in used}, held_out)
        if held_out:
            chat_set.notes.append(f"held_out: {len(apart)} of {len(used)} conversations, for a share of {held_out:g}")
        chat_set.rollouts = [rollout for number in used if number not in apart for rollout in rollouts[number]]
        chat_set.held_out = [rollout for number in used if number in apart for rollout in made(number, HELD_OUT)]
    return chat_set


def _notes(chats: Sequence[Chat], learned: int, tokens: ChatFormat) -> Iterator[str]:
    """Yield notes on contents that the policy does not learn exactly as the files have them."""
    if learned < len(chats):
        yield f"{len(chats) - learned} of {len(chats)} conversations have no turn to learn from, and are left out"
    stored = [chat for chat in chats if chat.tokens]
    texts = [(chat, m) for chat in chats if not chat.tokens for m in chat.messages if m.role == "assistant"]

    def share(count: int) -> str:
        return f"{count} of {len(texts)} turns ({count / len(texts):.0%})"

    if (thoughts := sum(bool(message.reasoning) for _, message in texts)) and not tokens.thinks:
        why = "does not think" if tokens.thinking is None else "has its thinking off"
        yield f"the thinking of {share(thoughts)} is not learned: the model {why}"
    if silent := sum(_is_silent(message, tokens) for _, message in texts):
        yield f"{share(silent)} say nothing, and are not learned"
    marks = Counter(mark for chat, message in texts for mark in _marks(chat, message, tokens))
    for (mark, why), count in marks.items():
        yield f"{mark} in the text of {share(count)} is learned as text: {why}"
    others = [each.content for chat in chats if not chat.tokens for each in chat.messages if each.role != "assistant"]
    for mark, count in Counter(m for text in others for m in sorted({*_TEMPLATE_MARKS.findall(text)})).items():
        yield f"{mark} in {count} of {len(others)} other texts is read as text: a chat template was applied before"
    if stored:
        other = sum(not _as_written(chat, tokens) for chat in stored)
        yield (
            f"{len(stored)} of {len(chats)} conversations have token ids, which are taken as they are; {other} of them "
            f"({other / len(stored):.0%}) would have others if their texts were encoded again"
        )
    if in_part := sum(chat.in_part for chat in chats):
        yield f"{in_part} of {len(chats)} conversations have ids of some turns alone, and are encoded from their texts"
    if unread := Counter(name for chat in chats for name in chat.unread):
        yield f"not read: {', '.join(f'{name} ({count} of {len(chats)})' for name, count in unread.items())}"


def _marks(chat: Chat, message: ChatMessage, tokens: ChatFormat) -> Iterator[tuple[str, str]]:
    """Yield each mark (such as that of thinking) that is plain text in a turn, and the reason."""
    if THOUGHT_CLOSES in message.content and tokens.thinking is None:
        yield THOUGHT_OPENS, "the model does not think"
    if CALL_OPENS in message.content and not chat.tools:
        yield CALL_OPENS, "the conversation has no tools"
    for mark in {*_TEMPLATE_MARKS.findall(message.content)}:
        yield mark, "a chat template was applied before; take it off"


def _asked(chat: Chat, whole: bool) -> bytes:
    """Return a digest of the messages before the first answer, or with ``whole`` of all the user's messages."""
    before = itertools.takewhile(lambda message: message.role != "assistant", chat.messages)
    heard = [message for message in chat.messages if message.role == "user"] if whole else before
    text = "\0".join(f"{message.role} {message.content}" for message in heard)
    return hashlib.sha256(text.encode(errors="replace")).digest()


def _held_out(chats: Mapping[int, Chat], share: float) -> set[int]:
    """Return the numbers of a ``share`` of the conversations, at least one if the share is above 0. The same
    conversations give the same choice.

    Conversations with the same beginning stay together. If these are too many, only those with equal user messages do.

    Raises:
        ValueError: all would be on one side.
    """
    if not share:
        return set()
    most = max(1, min(round(share * len(chats)), len(chats) - 1))
    groups = _grouped(chats, whole=False)
    for name, group in [*groups.items()]:
        if len(group) > most:
            groups |= _grouped({number: chats[number] for number in groups.pop(name)}, whole=True)
    if len(groups) == 1:
        raise ValueError(
            f"held_out is {share:g}, and all {len(chats)} conversations ask the same: leave held_out out, or add others"
        )
    apart: set[int] = set()
    for _, group in sorted(groups.items()):
        if len(apart) + len(group) <= most:
            apart.update(group)
    return apart or {*min(groups.values(), key=len)}


def _grouped(chats: Mapping[int, Chat], whole: bool) -> dict[bytes, list[int]]:
    return grouped((_asked(chat, whole), number) for number, chat in chats.items())


def _learned(chat: Chat, tokens: ChatFormat, turns: str) -> set[int]:
    """Return the places of the turns to learn from."""
    spoken = [n for n, message in enumerate(chat.messages) if message.role == "assistant"]
    if not spoken:
        raise ValueError(f"{chat.place}: there is no assistant message to learn from")
    return {
        place
        for place in (spoken if turns == "all" else spoken[-1:])
        if chat.weights.get(place, 1.0) and (chat.tokens or not _is_silent(chat.messages[place], tokens))
    }


def _is_silent(message: ChatMessage, tokens: ChatFormat) -> bool:
    return not (message.content.strip() or message.calls or (message.reasoning and tokens.thinks))


def _rollouts(
    chat: Chat, tokens: ChatFormat, learned: Collection[int], task: str, index: int, dataset: str, collection: str
) -> list[Rollout]:
    """Make the sequences of a conversation that have one of the ``learned`` turns."""
    used = [
        (sequence, own)
        for sequence in chat.tokens or _sequences(chat, tokens)
        if (own := [span for span in sequence.spans if span[0] in learned])
    ]
    name = rollout_id(collection, task, index, 0)
    messages = [*_record(chat)]
    rollouts = []
    for segment, (sequence, own) in enumerate(used):
        weights = [chat.weights.get(message, 1.0) for message, _, _ in own]
        rollout = Rollout.written(
            name,
            collection_id=collection,
            task_id=task,
            dataset=dataset,
            server=SERVER,
            token_ids=sequence.token_ids,
            spans=own,
            messages=messages,
            reward=chat.reward,
            success=chat.reward >= 1.0,
            logprobs=sequence.logprobs,
            extra={"place": chat.place} | ({"weights": weights} if {*weights} != {1.0} else {}),
            episode_id=name,
            index=index,
        )
        if len(used) > 1:
            rollout = replace(rollout, rollout_id=segment_id(name, segment), segment=segment, segments=len(used))
        with raised_as(ValueError, f"{chat.place}: "):
            rollouts.append(rollout.validate(tokens.vocab_size))
    return rollouts


def _sequences(chat: Chat, tokens: ChatFormat) -> Iterator[ChatTokens]:
    """Yield the conversation in the model's form: one sequence, or several where the form drops earlier text."""
    spoken = chat.messages if tokens.thinks else [replace(message, reasoning="") for message in chat.messages]
    messages = _one_system(spoken)
    shift = len(chat.messages) - len(messages)
    ids: list[int] = []
    spans: list[tuple[int, int, int]] = []
    since: list[ChatMessage] = []
    try:
        for number, message in enumerate(messages):
            if message.role != "assistant":
                since.append(message)
                continue
            start = spans[-1][1] if spans else 0
            further = tokens.extension(ids[:start], ids[start:], since, chat.tools) if spans else None
            if further is None:
                if spans:
                    yield ChatTokens(ids, spans, [0.0] * len(ids))
                ids, spans = tokens.opening(messages[:number], chat.tools), []
            else:
                ids = ids + further
            start, since = len(ids), []
            turn = tokens.spoken(_action(message), chat.tools, message.reasoning)
            if message.reasoning and tokens.read(ids, turn, bool(chat.tools)).reasoning.strip() != message.reasoning:
                raise ValueError("the chat template has no form for its thinking")
            ids = ids + turn
            spans = [*spans, (number + shift, start, len(ids))]
    except ValueError as error:
        begins = "the chat template has no form for a conversation that begins with an answer"
        raise ValueError(f"{chat.place}: messages[{number + shift}]: {error if number else begins}") from error
    yield ChatTokens(ids, spans, [0.0] * len(ids))


def _one_system(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Join the system messages at the beginning into one: most templates have a form for one alone."""
    first = next((n for n, message in enumerate(messages) if message.role != "system"), len(messages))
    if first < 2:
        return list(messages)
    return [ChatMessage("system", "\n\n".join(each.content for each in messages[:first])), *messages[first:]]


def _thought_apart(message: ChatMessage) -> ChatMessage:
    """Return the message with the thinking moved from the turn's text to a field of its own."""
    if message.role != "assistant":
        return message
    reasoning, content, cut = split_thought(message.content)
    if message.reasoning or cut or not reasoning:
        return replace(message, reasoning=message.reasoning.strip())
    return replace(message, content=content, reasoning=reasoning.strip())


def _action(message: ChatMessage) -> str:
    return "\n".join(text for text in (message.content, *map(render_tool_call, message.calls)) if text)


def _record(chat: Chat) -> Iterator[dict[str, str]]:
    """Yield the messages in the form of a rollout's record: tools in the system message, calls and results as text."""
    for number, message in enumerate(chat.messages):
        text = _action(message) if message.role == "assistant" else message.content
        if number == 0 and chat.tools and message.role == "system":
            text = f"{text}\n\n{tools_section(chat.tools)}"
        thought = {"reasoning": message.reasoning} if message.reasoning else {}
        tool = message.role == "tool"
        yield {
            "role": "user" if tool else message.role,
            "content": render_tool_response(text) if tool else text,
            **thought,
        }


def _as_written(chat: Chat, tokens: ChatFormat) -> bool:
    """Return whether the conversation's texts encode to the stored ids."""
    try:
        written = [each.token_ids for each in _sequences(chat, tokens)]
    except ValueError:
        return False
    stored = [each.token_ids for each in chat.tokens]
    return len(written) == len(stored) and all(a[: len(b)] == b for a, b in zip(written, stored, strict=True))
