"""The conversations of one episode as token ids: a tree whose sampled nodes hold the ids just as they were sampled.

A harness sends its whole history with every call. Encoding it again would give other ids than were sampled, in a few
turns of a hundred. So each message is looked up among those that have followed the same beginning before: what is found
has its ids, and only what is new is encoded. A history that was changed, cut or summarised leaves the tree at the first
difference and grows a branch. So do sub-agents, and calls made at the same time.

At the end each way from the root to a leaf is one sequence that was served, token for token.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from loop_formats.chat_tokens import ChatTokens
from loop_formats.rollout import Turn
from rollout_server.endpoint.messages import ChatMessage
from rollout_server.inference.router import Generation


@dataclass(eq=False)
class _Node:
    """A message after its parent's. ``token_ids`` are its own ids; ``sampled`` says what of them the policy spoke."""

    parent: _Node | None
    role: str
    text: str
    token_ids: list[int]
    sampled: _Sampled | None = None
    ending: list[int] = field(default_factory=list)
    """Ids that nobody sampled, between this message and one that follows."""
    children: dict[Hashable, _Node] = field(default_factory=dict)
    continued: bool = False
    """Something was sampled further down."""

    def path(self) -> list[_Node]:
        """From the root's child to this node."""
        nodes: list[_Node] = []
        node: _Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(frozen=True)
class _Sampled:
    """Of a sampled node, whose ids end in those of ``generation``."""

    policy_version: int
    generation: Generation


@dataclass(frozen=True)
class Prompt:
    """A prompt: the part that is in the tree already, and new messages; ``token_ids`` is the whole prompt."""

    token_ids: list[int]
    _found: _Node
    _new: tuple[ChatMessage, ...]


@dataclass(frozen=True)
class Segment:
    """One sequence; the fields are those of :class:`~loop_formats.rollout.Rollout`."""

    token_ids: list[int]
    mask: list[bool]
    sampler_logprobs: list[float]
    turns: list[Turn]
    messages: list[dict[str, str]]


class Conversations:
    """The tree of one episode. Looking up and adding are separate, so that calls may overlap."""

    def __init__(self, tokens: ChatTokens):
        self._tokens = tokens
        self._root = _Node(None, "", "", [])
        self._sampled: list[_Node] = []

    @property
    def turns(self) -> int:
        """Turns sampled so far."""
        return len(self._sampled)

    def prompt(self, messages: Sequence[ChatMessage]) -> Prompt:
        """The ids to sample after; nothing is kept until :meth:`add`."""
        node, number = self._root, 0
        while number < len(messages) and (child := node.children.get(messages[number].key)) is not None:
            node, number = child, number + 1
        token_ids: list[int] = []
        for step in node.path():
            token_ids += step.token_ids
            token_ids += step.ending
        for message in messages[number:]:
            token_ids += self._tokens.message(message.role, message.text)
        return Prompt(token_ids + self._tokens.assistant_header, node, tuple(messages[number:]))

    def add(self, prompt: Prompt, spoken: ChatMessage, text: str, version: int, generation: Generation) -> None:
        """Keep what was sampled after a prompt.

        Args:
            spoken: the turn as the harness is told it, by which it is known when it comes back.
            text: all of it.
        """
        node = prompt._found
        for message in prompt._new:
            ids = self._tokens.message(message.role, message.text)
            following = node.children.get(message.key)
            # While this call was under way, another may have sampled these very words, or brought them with other
            # blanks: with ids not served here.
            if following is None or following.sampled is not None or following.token_ids != ids:
                following = _Node(node, message.role, message.text, ids)
                node.children.setdefault(message.key, following)
            node = following
        ids = self._tokens.assistant_header + generation.token_ids
        ending = self._tokens.ending(closed=generation.token_ids[-1] == self._tokens.im_end)
        turn = _Node(node, "assistant", text, ids, _Sampled(version, generation), ending)
        # The same words said twice are two turns; who goes on from them goes on from the later one.
        node.children[spoken.key] = turn
        node.children.setdefault(spoken.key_without_thought, turn)
        self._sampled.append(turn)
        for before in node.path():
            before.continued = True

    def segments(self) -> list[Segment]:
        """The sequences that were served, in the order in which their last turns were sampled.

        Each sampled turn is a turn of the first sequence that holds it, and context in all others.
        """
        recorded: set[_Node] = set()
        segments = []
        for leaf in self._sampled:
            if not leaf.continued:
                segments.append(_segment(leaf.path(), recorded))
                recorded.update(leaf.path())
        return segments


def _segment(path: Sequence[_Node], recorded: set[_Node]) -> Segment:
    segment = Segment([], [], [], [], [])
    for number, node in enumerate(path):
        if number:
            _append_context(segment, path[number - 1].ending)
        segment.messages.append({"role": node.role, "content": node.text})
        if node.sampled is None or node in recorded:
            _append_context(segment, node.token_ids)
            continue
        generation = node.sampled.generation
        _append_context(segment, node.token_ids[: -len(generation.token_ids)])
        start = len(segment.token_ids)
        segment.token_ids.extend(generation.token_ids)
        segment.mask.extend([True] * len(generation.token_ids))
        segment.sampler_logprobs.extend(generation.logprobs)
        segment.turns.append(
            Turn(
                start=start,
                end=len(segment.token_ids),
                policy_version=node.sampled.policy_version,
                finish_reason=generation.finish_reason,
                server=generation.server,
                sampling_seconds=generation.seconds,
                environment_seconds=0.0,
                cached_tokens=generation.cached_tokens,
                message=number,
            )
        )
    return segment


def _append_context(segment: Segment, token_ids: Sequence[int]) -> None:
    """Ids that this sequence does not train on."""
    segment.token_ids.extend(token_ids)
    segment.mask.extend([False] * len(token_ids))
    segment.sampler_logprobs.extend([0.0] * len(token_ids))
