"""Conversations as rollouts: written by the model's own chat format, the assistant's turns as if they were sampled."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from agent_environments.tool_calls import render_tool_call, render_tool_response, tools_section
from loop_formats.ids import rollout_id, segment_id
from loop_formats.rollout import Rollout
from loop_formats.schema import ConfigError, require
from loop_recipes.rollouts.chat_files import Chat, read_chats
from model_families.chat.format import ChatFormat
from model_families.chat.messages import THOUGHT_CLOSES, THOUGHT_OPENS, ChatMessage, split_thought

SERVER = "file"
"""What the turns name as their server."""
TRAINED, HELD_OUT = "data_trained", "data_held_out"
"""The collections that conversations are kept in."""
_Written = tuple[list[int], list[tuple[int, int, int]]]
"""The ids of a sequence, and (message, start, end) of its turns."""


@dataclass
class ChatSet:
    """Rollouts of conversations, some held out, and ``notes`` on what a conversation cannot say."""

    rollouts: list[Rollout] = field(default_factory=list)
    held_out: list[Rollout] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_chat_set(files: Sequence[str], tokens: ChatFormat, turns: Literal["all", "last"], held_out: float) -> ChatSet:
    """Read files of conversations.

    Args:
        tokens: of the model in training.
        turns: which of a conversation's assistant turns are learned from.
        held_out: share of the conversations that are not trained on, chosen by their messages: the same ones always.

    Raises:
        ConfigError: a file, or a conversation in it; names file, line and field.
    """
    chats: list[Chat] = []
    found = ChatSet()
    dataset = "+".join(dict.fromkeys(Path(file).stem for file in files))
    learned = 0
    try:
        for file in files:
            chats += (_thoughts_apart(chat, tokens) for chat in read_chats(Path(file)))
        apart = _held_out(chats, held_out)
        for number, chat in enumerate(chats):
            side = (HELD_OUT, found.held_out) if _asked(chat) in apart else (TRAINED, found.rollouts)
            rollouts = _rollouts(chat, tokens, turns, f"chat{number:06d}", dataset, side[0])
            side[1].extend(rollouts)
            learned += bool(rollouts)
        require(found.rollouts, f"data: none of {len(chats)} conversations has a turn to learn from")
        found.notes = [*_notes(chats, learned, tokens)]
    except ConfigError:
        raise
    except (ValueError, OSError) as error:
        raise ConfigError(f"data: {error}") from error
    return found


def _notes(chats: Sequence[Chat], learned: int, tokens: ChatFormat) -> Iterator[str]:
    """What is not learned as the files have it."""
    if learned < len(chats):
        yield f"{len(chats) - learned} of {len(chats)} conversations have no turn to learn from, and are left out"
    stored = [chat for chat in chats if chat.tokens]
    texts = [message for chat in chats if not chat.tokens for message in chat.messages if message.role == "assistant"]
    if (thoughts := sum(bool(message.reasoning) for message in texts)) and not tokens.thinks:
        share = f"{thoughts} of {len(texts)} turns ({thoughts / len(texts):.0%})"
        why = "does not think" if tokens.thinking is None else "has its thinking off"
        yield f"the thinking of {share} is not learned: the model {why}"
    marked = sum(THOUGHT_CLOSES in message.content for message in texts)
    if marked and tokens.thinking is None:
        share = f"{marked} of {len(texts)} turns ({marked / len(texts):.0%})"
        yield f"{THOUGHT_OPENS} in the text of {share} is learned as text: the model does not think"
    if stored:
        other = sum(not _as_written(chat, tokens) for chat in stored)
        yield (
            f"{len(stored)} of {len(chats)} conversations have token ids, which are taken as they are; {other} of them "
            f"({other / len(stored):.0%}) would have others if their texts were encoded again"
        )
    if in_part := sum(chat.in_part for chat in chats):
        yield f"{in_part} of {len(chats)} conversations have ids of some turns alone, and are encoded from their texts"


def _asked(chat: Chat) -> bytes:
    """A digest of what is said before the first answer: two answers to one question are on the same side."""
    before = itertools.takewhile(lambda message: message.role != "assistant", chat.messages)
    text = "\0".join(f"{message.role} {message.content}" for message in before)
    return hashlib.sha256(text.encode(errors="replace")).digest()


def _held_out(chats: Sequence[Chat], share: float) -> set[bytes]:
    """So large a share of what is asked, at least one where it is above 0: the same for the same conversations."""
    asked = sorted({*map(_asked, chats)})
    return set(asked[: max(1, round(share * len(asked)))] if share else [])


def _rollouts(chat: Chat, tokens: ChatFormat, turns: str, task: str, dataset: str, collection: str) -> list[Rollout]:
    """The sequences of a conversation that have a turn to learn from."""
    spoken = [n for n, message in enumerate(chat.messages) if message.role == "assistant"]
    if not spoken:
        raise ValueError(f"{chat.place}: there is no assistant message to learn from")
    learned = {place for place in (spoken if turns == "all" else spoken[-1:]) if chat.weights.get(place, 1.0)}
    written: list[tuple[list[int], list[tuple[int, int, int]], list[float]]]
    if chat.tokens:
        places = [[(p, *span) for p, span in zip(each.messages, each.spans, strict=True)] for each in chat.tokens]
        written = [(each.token_ids, own, each.logprobs) for each, own in zip(chat.tokens, places, strict=True)]
    else:
        written = [(ids, own, [0.0] * len(ids)) for ids, own in _sequences(chat, tokens)]
    kept = [
        (ids, found, own) for ids, spans, found in written if (own := [each for each in spans if each[0] in learned])
    ]
    name = rollout_id(collection, task, 0, 0)
    messages = [*_record(chat)]
    rollouts = []
    for segment, (ids, found, own) in enumerate(kept):
        weights = [chat.weights.get(message, 1.0) for message, _, _ in own]
        rollout = Rollout.written(
            name,
            collection_id=collection,
            task_id=task,
            dataset=dataset,
            server=SERVER,
            token_ids=ids,
            spans=own,
            messages=messages,
            reward=chat.reward,
            success=chat.reward >= 1.0,
            logprobs=found,
            extra={"place": chat.place} | ({"weights": weights} if {*weights} != {1.0} else {}),
            episode_id=name,
        )
        if len(kept) > 1:
            rollout = replace(rollout, rollout_id=segment_id(name, segment), segment=segment, segments=len(kept))
        try:
            rollouts.append(rollout.validate())
        except ValueError as error:
            raise ValueError(f"{chat.place}: {error}") from error
    return rollouts


def _sequences(chat: Chat, tokens: ChatFormat) -> Iterator[_Written]:
    """The conversation in the model's own form: one sequence, or several where the form drops what was said before."""
    messages = _one_system(chat.messages if tokens.thinks else [*map(_without_thought, chat.messages)])
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
                    yield ids, spans
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
    yield ids, spans


def _one_system(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The messages, those of the system at the beginning joined into one: most templates have a form for one alone."""
    first = next((n for n, message in enumerate(messages) if message.role != "system"), len(messages))
    if first < 2:
        return list(messages)
    return [ChatMessage("system", "\n\n".join(each.content for each in messages[:first])), *messages[first:]]


def _thoughts_apart(chat: Chat, tokens: ChatFormat) -> Chat:
    """The conversation with the thinking in the text of its turns apart, for a model whose turns have some."""
    if tokens.thinking is None:
        return chat
    return replace(chat, messages=[*map(_thought_apart, chat.messages)])


def _thought_apart(message: ChatMessage) -> ChatMessage:
    if message.role != "assistant":
        return message
    reasoning, content, cut = split_thought(message.content)
    if message.reasoning or cut or not reasoning:
        return replace(message, reasoning=message.reasoning.strip())
    return replace(message, content=content, reasoning=reasoning.strip())


def _without_thought(message: ChatMessage) -> ChatMessage:
    return replace(message, reasoning="") if message.reasoning else message


def _action(message: ChatMessage) -> str:
    return "\n".join(part for part in (message.content, *map(render_tool_call, message.calls)) if part)


def _record(chat: Chat) -> Iterator[dict[str, str]]:
    """The messages as records have them: tools in the system message, calls and results as text."""
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
    """Whether the ids of a conversation that has some are those of its texts."""
    try:
        written = [ids for ids, _ in _sequences(chat, tokens)]
    except ValueError:
        return False
    stored = [each.token_ids for each in chat.tokens]
    return len(written) == len(stored) and all(a[: len(b)] == b for a, b in zip(written, stored, strict=True))
