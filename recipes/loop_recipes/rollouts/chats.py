"""Conversations as rollouts: written by the model's own chat format, the assistant's turns as if they were sampled."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from agent_environments.tool_calls import render_tool_call, render_tool_response, tools_section
from loop_formats.ids import rollout_id, segment_id
from loop_formats.rollout import Rollout, Turn
from loop_formats.schema import ConfigError, require
from loop_recipes.rollouts.chat_files import Chat, read_chats
from model_families.chat.format import ChatFormat
from model_families.chat.messages import ChatMessage

SPEAKER = "file"
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
    found = ChatSet()
    count, empty, thoughts, spoken, exact, stored = 0, 0, 0, 0, 0, 0
    dataset = "+".join(dict.fromkeys(Path(file).stem for file in files))
    for file in files:
        try:
            for chat in read_chats(Path(file)):
                apart = _held_out(chat, held_out)
                rollouts = _rollouts(chat, tokens, turns, f"chat{count:06d}", dataset, HELD_OUT if apart else TRAINED)
                count += 1
                empty += not rollouts
                (found.held_out if apart else found.rollouts).extend(rollouts)
                assistants = [message for message in chat.messages if message.role == "assistant"]
                spoken += len(assistants)
                thoughts += sum(bool(message.reasoning) for message in assistants)
                if chat.tokens is not None:
                    stored += 1
                    exact += _as_written(chat, tokens)
        except (ValueError, OSError) as error:
            raise ConfigError(f"data: {error}") from error
    require(found.rollouts, f"data: none of {count} conversations has a turn to learn from")
    if empty:
        found.notes.append(f"{empty} of {count} conversations have no turn to learn from, and are left out")
    if thoughts:
        found.notes.append(
            f"the thinking of {thoughts} of {spoken} turns ({thoughts / spoken:.0%}) is not learned: turns are written "
            "as answers"
        )
    if stored:
        found.notes.append(
            f"{stored} of {count} conversations have token ids, which are taken as they are; {stored - exact} of them "
            f"({(stored - exact) / stored:.0%}) would have others if their texts were encoded again"
        )
    return found


def _held_out(chat: Chat, share: float) -> bool:
    """By what is said before the first answer, so that two answers to one question are on the same side."""
    first = next(
        n for n, message in enumerate([*chat.messages, None]) if message is None or message.role == "assistant"
    )
    text = "\0".join(f"{message.role} {message.content}" for message in chat.messages[:first])
    return int.from_bytes(hashlib.sha256(text.encode(errors="replace")).digest()[:8], "big") < share * 2**64


def _rollouts(chat: Chat, tokens: ChatFormat, turns: str, task: str, dataset: str, collection: str) -> list[Rollout]:
    """The sequences of a conversation that have a turn to learn from."""
    places = [n for n, message in enumerate(chat.messages) if message.role == "assistant"]
    if not places:
        raise ValueError(f"{chat.place}: there is no assistant message to learn from")
    learned = {place for place in (places if turns == "all" else places[-1:]) if place not in chat.left_out}
    written: list[_Written]
    if chat.tokens is not None:
        spans = [(place, *span) for place, span in zip(chat.tokens.messages, chat.tokens.spans, strict=True)]
        written = [(chat.tokens.token_ids, spans)]
    else:
        written = [*_sequences(chat, tokens)]
    kept = [(ids, own) for ids, spans in written if (own := [span for span in spans if span[0] in learned])]
    name = rollout_id(collection, task, 0, 0)
    messages = [*_record(chat)]
    rollouts = []
    for segment, (ids, own) in enumerate(kept):
        mask, logprobs = [False] * len(ids), [0.0] * len(ids)
        for _, start, end in own:
            mask[start:end] = [True] * (end - start)
            if chat.tokens is not None:
                logprobs[start:end] = chat.tokens.logprobs[start:end]
        rollout = Rollout(
            rollout_id=name,
            collection_id=collection,
            task_id=task,
            index=0,
            attempt=0,
            seed=0,
            dataset=dataset,
            token_ids=ids,
            mask=mask,
            sampler_logprobs=logprobs,
            turns=[Turn(start, end, 0, "stop", SPEAKER, 0.0, 0.0, message=place) for place, start, end in own],
            messages=messages,
            reward=chat.reward,
            success=chat.reward >= 1.0,
            requirements=[],
            end_reason="completed",
            temperature=0.0,
            started_at=0.0,
            seconds=0.0,
            extra={"place": chat.place},
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
    messages = _one_system(chat.messages)
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
                ids, spans = tokens.opening([_without_thought(each) for each in messages[:number]], chat.tools), []
            else:
                ids = ids + further
            start, since = len(ids), []
            ids = ids + tokens.spoken(_action(message), chat.tools)
            spans = [*spans, (number + shift, start, len(ids))]
    except ValueError as error:
        raise ValueError(f"{chat.place}: messages[{number + shift}]: {error}") from error
    yield ids, spans


def _one_system(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The messages, those of the system at the beginning joined into one: most templates have a form for one alone."""
    first = next((n for n, message in enumerate(messages) if message.role != "system"), len(messages))
    if first < 2:
        return list(messages)
    return [ChatMessage("system", "\n\n".join(each.content for each in messages[:first])), *messages[first:]]


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
    assert chat.tokens is not None
    try:
        written = [*_sequences(chat, tokens)]
    except ValueError:
        return False
    ids = chat.tokens.token_ids
    return len(written) == 1 and written[0][0][: len(ids)] == ids
