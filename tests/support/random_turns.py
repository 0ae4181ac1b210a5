"""A policy of random ids, and what must hold of the record of an episode that it was served in."""

import random
from collections import Counter
from collections.abc import Callable, Container

from agent_environments.tool_calls import ToolCall, render_tool_call
from model_families.chat.format import ChatFormat
from rollout_server.endpoint.conversations import Segment
from rollout_server.inference.router import Generation
from support.random_harness import ODD


def encoder(tokens: ChatFormat) -> Callable[[str], list[int]]:
    """Encodes what a policy says, with the control tokens in it."""
    return tokens._control.encode


def sampled_turn(tokens: ChatFormat, rng: random.Random) -> Generation:
    """Random ids, a call, a thought or a few words; ended, or cut by a limit."""
    kind, encode = rng.choice(["ids", "call", "thought", "text"]), encoder(tokens)
    if kind == "ids":
        ids = [rng.randrange(tokens.vocab_size) for _ in range(rng.randrange(1, 9))]
        ids = [token for token in ids if token not in tokens.stop_ids] or tokens.encode_text("a")
    elif kind == "call":
        arguments = {"n": rng.random(), "text": rng.choice(ODD[:2]), "a": [None, {"b": 1}]}
        ids = encode("So. " + render_tool_call(ToolCall("add", arguments)))
    elif kind == "thought":
        ids = encode(f"<think>\n{rng.random()}\n</think>\n\nYes {rng.random()}")
    else:
        ids = encode(rng.choice(["yes ", "no", " "]))
    ended = rng.random() < 0.7
    ids = [*ids, tokens.turn_end] if ended else ids
    return Generation(ids, [-rng.random() for _ in ids], "stop" if ended else "length", "s", 0, 0.1)


def check_segments(
    segments: list[Segment],
    served: list[tuple[list[int], Generation]],
    tokens: ChatFormat,
    plain: Container[int] = (),
) -> list[Segment]:
    """Each call is a prefix of a sequence; over all sequences each sampled token is there once, with its log-prob.

    Args:
        served: (prompt, what was sampled) by policy version, which counts the turns from 0.
        plain: versions whose prompt was plain text.
    """
    for prompt, generation in served:
        ids = prompt + generation.token_ids
        assert any(segment.token_ids[: len(ids)] == ids for segment in segments)
    stored = Counter()
    for segment in segments:
        assert len(segment.token_ids) == len(segment.mask) == len(segment.sampler_logprobs)
        assert segment.turns
        covered = [False] * len(segment.mask)
        for turn in segment.turns:
            span = slice(turn.start, turn.end)
            covered[span] = [True] * (turn.end - turn.start)
            said = segment.messages[turn.message]
            if turn.policy_version in plain:
                assert said["content"] == tokens.decode(tokens.without_stop(segment.token_ids[span]))
            else:
                read = tokens.read(segment.token_ids[: turn.start], segment.token_ids[span], with_tools=True)
                assert said == read.message
                assert (turn.thinking_tokens, turn.cut_in_thinking) == (read.thinking_tokens, read.cut_in_thinking)
            stored[turn.policy_version, tuple(segment.token_ids[span]), tuple(segment.sampler_logprobs[span])] += 1
        assert covered == segment.mask
        assert not any(value for value, own in zip(segment.sampler_logprobs, segment.mask, strict=True) if not own)
    sampled = [generation for _, generation in served]
    assert stored == Counter((n, tuple(g.token_ids), tuple(g.logprobs)) for n, g in enumerate(sampled))
    return segments
