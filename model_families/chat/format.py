"""The interface of a chat format: from messages to the ids that a model is served, and from sampled ids to a turn.

A conversation only ever grows at its end: sampled ids are kept as they came and new ids are appended, because encoding
a decoded text again gives other ids more often than not. Where a format cannot go on like that (a model's template may
drop earlier thinking), it says so, and a new sequence begins.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from agent_environments.protocol import Message
from model_families.chat.calls import CallForm
from model_families.chat.messages import ChatMessage, Tools, observation_messages, opening_messages
from model_families.chat.tokenizer import TextTokens

Thinking = Literal["kept", "stripped", "off"]
ObservationRole = Literal["user", "tool"]


@dataclass(frozen=True)
class ReadTurn:
    """A sampled turn, read.

    ``answer`` is all that an environment is given: the text behind the thinking, its tool calls in the form of
    :mod:`agent_environments.tool_calls`. ``thinking_tokens`` counts the sampled ids up to the end of the thinking,
    marks included. ``cut_in_thinking``: the turn ended before its thinking did; it has no answer then.
    """

    answer: str
    reasoning: str = ""
    thinking_tokens: int = 0
    cut_in_thinking: bool = False

    @property
    def message(self) -> dict[str, str]:
        """The turn as a record's message."""
        thought = {"reasoning": self.reasoning} if self.reasoning else {}
        return {"role": "assistant", "content": self.answer, **thought}


class ChatFormat(TextTokens, ABC):
    """A tokenizer with one model family's chat around it.

    Attributes:
        turn_end: the id that ends a whole turn.
        stop_ids: ids that end a turn when sampled, ``turn_end`` among them.
        pad_id: id of the padding.
        control_ids: the ids of the control tokens, which no text has.
        thinking: how thinking is treated; None for a model that does not think.
        observation_role: the role in which an environment's answers are written.
        thinking_ends: ids that end thinking: its own mark, or a tool call; none where there is nothing to wait for.
        call_form: how the model's own template writes calls; None where it has no form that could be learned.
    """

    turn_end: int
    stop_ids: tuple[int, ...]
    pad_id: int
    control_ids: frozenset[int]
    thinking: Thinking | None = None
    observation_role: ObservationRole = "user"
    thinking_ends: tuple[int, ...] = ()
    call_form: CallForm | None = None

    @property
    def thinks(self) -> bool:
        """Return whether its turns may begin with thinking."""
        return self.thinking in ("kept", "stripped")

    @abstractmethod
    def opening(self, messages: Sequence[ChatMessage], tools: Tools = ()) -> list[int]:
        """Return all ids up to where the assistant speaks.

        Raises:
            ValueError: messages that the model's own format has no form for; one line.
        """

    @abstractmethod
    def extension(
        self, prompt: Sequence[int], sampled: Sequence[int], messages: Sequence[ChatMessage], tools: Tools = ()
    ) -> list[int] | None:
        """Return the ids that follow ``prompt`` + ``sampled``, up to where the assistant speaks again.

        None: those ids cannot be gone on from, and the whole conversation is to be encoded as an :meth:`opening`.
        """

    @abstractmethod
    def read(self, prompt: Sequence[int], sampled: Sequence[int], with_tools: bool) -> ReadTurn:
        """Read what was sampled after ``prompt``; ``with_tools``: the model was offered tools. Never raises."""

    @abstractmethod
    def spoken(self, action: str, tools: Tools, reasoning: str = "") -> list[int]:
        """Return the ids of a whole turn as the policy would sample it: its thinking where it :attr:`thinks`, an
        action, its calls in the model's own form, its end.

        Raises:
            ValueError: calls or thinking that the model's own format has no form for.
        """

    @abstractmethod
    def aside(self, text: str) -> list[int]:
        """Return the ids of a system message that stands before a whole prompt."""

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids that open an environment's episode, up to where the assistant speaks."""
        return self.opening(*opening_messages(messages))

    def heard(self, observation: str, tools: Tools) -> list[ChatMessage]:
        """Return an environment's answer, as messages in the role that this format is given it in."""
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

    def without_stop(self, sampled: Sequence[int]) -> list[int]:
        """Return the sampled ids before the one that ended the turn."""
        return list(sampled[:-1] if sampled and sampled[-1] in self.stop_ids else sampled)
