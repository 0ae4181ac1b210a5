"""The batches of the warm start: random streams to learn copying, then demonstrations."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loop_recipes.warm_start.demonstration import Demonstration, Example, render
from model_families.chat.format import ChatFormat

DRAWN_TOGETHER = 64


@dataclass(frozen=True)
class Batch:
    """Right-padded rows under causal attention.

    ``tokens`` is [r, s]; ``rows`` [n] are indices into its flattened positions that predict ``targets`` [n].
    """

    tokens: Tensor
    rows: Tensor
    targets: Tensor


def collate(examples: Sequence[Example], pad_id: int) -> Batch:
    """Stack examples; each masked token is predicted from the position before it."""
    longest = max(len(example.token_ids) for example in examples)
    tokens = torch.full((len(examples), longest), pad_id)
    mask = torch.zeros((len(examples), longest), dtype=torch.bool)
    for row, example in enumerate(examples):
        tokens[row, : len(example.token_ids)] = example.token_ids
        mask[row, : len(example.mask)] = example.mask
    targets = mask.flatten().nonzero().squeeze(1)
    return Batch(tokens, targets - 1, tokens.flatten()[targets])


def copy_stream(length: int, vocab_size: int, longest_segment: int, rng: random.Random) -> Example:
    """Make random tokens, then repeat pieces of them; the mask covers each repeated piece from its second token on."""
    source = [rng.randrange(vocab_size) for _ in range(length // 2)]
    token_ids, mask = list(source), [False] * len(source)
    while len(token_ids) < length:
        size = rng.randint(4, longest_segment)
        start = rng.randrange(len(source) - size)
        token_ids += source[start : start + size]
        mask += [False] + [True] * (size - 1)
    return Example(torch.tensor(token_ids[:length]), torch.tensor(mask[:length]))


def copy_batches(steps: int, tokens_per_step: int, vocab_size: int, pad_id: int, seed: int) -> Iterator[Batch]:
    """Yield streams that grow from 128 to 1,024 tokens, so that the piece to copy is close by at first."""
    rng = random.Random(f"copy {seed}")
    for step in range(steps):
        length = 128 << min(3, 4 * step // steps)
        rows = [copy_stream(length, vocab_size, 16, rng) for _ in range(tokens_per_step // length)]
        yield collate(rows, pad_id)


def demonstration_batches(
    usual: Sequence[Demonstration],
    habitual: Sequence[Demonstration],
    habit_share: float,
    steps: int,
    tokens_per_step: int,
    tokens: ChatFormat,
    renamed: Callable[[Demonstration, random.Random], Demonstration],
    seed: object,
) -> Iterator[Batch]:
    """Yield ``steps`` batches. A batch has rows of similar length, about ``tokens_per_step`` tokens in all.

    A demonstration is ``renamed`` each time it is used. ``habit_share`` of the rows are ``habitual`` demonstrations,
    the others ``usual`` ones.
    """
    rng = random.Random(f"batches {seed}")
    batches: list[Batch] = []
    habits = round(DRAWN_TOGETHER * habit_share)
    for _ in range(steps):
        while not batches:
            chosen = rng.sample(usual, min(DRAWN_TOGETHER - habits, len(usual)))
            chosen += rng.sample(habitual, min(habits, len(habitual)))
            rows = sorted((render(renamed(one, rng), tokens) for one in chosen), key=lambda row: len(row.token_ids))
            group: list[Example] = []
            for row in rows:
                if group and (len(group) + 1) * len(row.token_ids) > tokens_per_step:
                    batches.append(collate(group, tokens.pad_id))
                    group = []
                group.append(row)
            batches.append(collate(group, tokens.pad_id))
            rng.shuffle(batches)
        yield batches.pop()
