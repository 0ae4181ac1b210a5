"""Measures a policy on held-out demonstrations: loss, and the probability that it would take the same turns.

All figures come from one forward pass of each demonstration (teacher forcing), in seconds, where an evaluation in the
world takes minutes. Reference solutions follow from the task, so the probability that the policy repeats all turns of
one is close to its probability to solve the task at temperature 1.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from loop_recipes.engine.decoder import LogProbDecoder
from loop_recipes.warm_start.batches import collate
from loop_recipes.warm_start.demonstration import Demonstration, render
from model_families.chat.format import ChatFormat

_VALUE = re.compile(r"\b(\w+)=('[^']*'|\d+)")
"""A literal argument in a turn's code. Quotes belong to the value, because a value that goes on is a wrong one."""
HALF = math.log(0.5)


@dataclass(frozen=True)
class HeldOut:
    """The measurements over all held-out demonstrations.

    Attributes:
        loss: mean negative log-prob of the agent's tokens, in nats.
        values: chance to write the whole value, mean over the values of each keyword argument (``password``, ...).
        sampled: chance to write the whole episode at temperature 1, mean over the demonstrations of each group.
        greedy: share of the demonstrations of each group that greedy decoding surely writes, because every token is
            likelier than all other tokens together.
    """

    loss: float
    values: dict[str, float]
    sampled: dict[str, float]
    greedy: dict[str, float]


@torch.no_grad()
def measure(
    model: LogProbDecoder, demonstrations: Sequence[Demonstration], tokens: ChatFormat, groups: Mapping[str, str]
) -> HeldOut:
    """Measure clean ``demonstrations``; ``groups`` maps each task to the group's name in the measurements."""
    total, count = 0.0, 0
    values, sampled, greedy = (defaultdict[str, list[float]](list) for _ in range(3))
    for one in demonstrations:
        batch = collate([render(one, tokens)], tokens.pad_id)
        logprobs = model(batch.tokens, rows=batch.rows, targets=batch.targets).logprobs
        total, count = total - logprobs.sum().item(), count + len(logprobs)
        sampled[groups[one.task_id]].append(logprobs.sum().exp().item())
        greedy[groups[one.task_id]].append(float((logprobs > HALF).all()))
        start = 0
        for action, _ in one.steps:
            spans = tokens.spans(action)
            spoken, start = logprobs[start : start + len(spans)], start + len(spans) + 1  # and the end of the turn
            for value in _VALUE.finditer(action):
                inside = torch.tensor([begin < value.end(2) and end > value.start(2) for begin, end in spans])
                values[value[1]].append(spoken[inside].sum().exp().item())
    return HeldOut(total / count, _means(values), _means(sampled), _means(greedy))


def _means(lists: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: sum(numbers) / len(numbers) for name, numbers in sorted(lists.items())}
