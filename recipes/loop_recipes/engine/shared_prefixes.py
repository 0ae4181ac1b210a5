"""Sequences of one episode that begin alike, laid into a packed row with their common beginning once.

An agent whose thinking is left out of later prompts leaves a sequence for each turn, which may have nine tenths of its
tokens in common with others (benchmarks/thinking_modes.py). A transformer gives a token the same states in all
sequences that are the same up to it. So one of them computes these tokens, and the others go on from there: their own
tokens attend to the common ones and to themselves, and a token sampled after a common one is predicted from that one's
place. Losses see the sampled tokens of each sequence as before.

Only sequences of one episode are compared. The rollouts of a task share their prompt, which is less than a third.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from loop_plumbing.grouping import grouped
from loop_recipes.engine.samples import AnySample, Sample

MOST_KEYS = 8
"""The most keys for each token that a unit computes: sequences that go on from others have keys copied, which the
memory plan leaves out. At 7B, 8 of them take a sixth of the memory of the layer at work."""


@dataclass(frozen=True)
class Keys:
    """The attention keys of all pieces, one piece after the other: counts, places of the k keys in the row, borders."""

    lengths: tuple[int, ...]
    places: Tensor = field(compare=False, repr=False)
    borders: Tensor = field(compare=False, repr=False)

    @classmethod
    def of(cls, places: Sequence[Tensor]) -> Keys:
        lengths = tuple(map(len, places))
        return cls(lengths, torch.cat(list(places)), borders_of(lengths))

    def to(self, device: torch.device | str) -> Keys:
        return replace(self, places=self.places.to(device), borders=self.borders.to(device))

    def take(self, tensor: Tensor) -> Tensor:
        """Take the keys [k, ...] out of a row [s, ...]; gradients of tokens that pieces share are added up in fp32."""
        return _Taken.apply(tensor, self.places)


class _Taken(torch.autograd.Function):
    """index_select whose gradient is summed in fp32: in bf16 the twentieth addend would be lost."""

    @staticmethod
    def forward(ctx, tensor, places):
        ctx.save_for_backward(places)
        ctx.rows = tensor.shape[0]
        return tensor.index_select(0, places)

    @staticmethod
    def backward(ctx, upstream):
        (places,) = ctx.saved_tensors
        total = upstream.new_zeros(ctx.rows, *upstream.shape[1:], dtype=torch.float32)
        return total.index_add_(0, places, upstream.float()).to(upstream.dtype), None


def borders_of(lengths: Sequence[int]) -> Tensor:
    """Return where pieces of these lengths begin and end in a row: int32 [pieces + 1]."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


class Piece(NamedTuple):
    """Sequence ``number`` in a packed row. It shares its first ``shared`` tokens with an earlier sequence.

    ``places`` [tokens] are the places of all its tokens in the row.
    """

    number: int
    shared: int
    places: Tensor


def lay_out(samples: Sequence[Sample]) -> list[Piece]:
    """Return the pieces of a row, each episode's together, longest first. The pieces' own tokens follow each other."""
    pieces: list[Piece] = []
    used = 0
    for members in _episodes(samples):
        laid: list[Piece] = []
        for number in members:
            other, shared = _beginning(samples[number], [samples[piece.number] for piece in laid])
            own = torch.arange(used, used + samples[number].tokens - shared)
            laid.append(Piece(number, shared, torch.cat([laid[other].places[:shared], own]) if shared else own))
            used += len(own)
        pieces += laid
    return pieces


def units(samples: Sequence[AnySample], token_budget: int) -> list[tuple[list[AnySample], int]]:
    """Return the units of a plan, each with its number of tokens in a row. A unit is a sequence, or as many sequences
    of an episode with a shared beginning as the budget has room for."""
    planned: list[tuple[list[AnySample], int]] = []
    for members in _episodes(samples):
        unit: list[AnySample] = []
        tokens, keys = 0, 0
        for sample in (samples[number] for number in members):
            _, shared = _beginning(sample, unit)
            more = sample.tokens - shared
            over = tokens + more > token_budget or keys + sample.tokens > MOST_KEYS * (tokens + more)
            if unit and (over or not shared):
                planned.append((unit, tokens))
                unit, tokens, keys, more = [], 0, 0, sample.tokens
            unit.append(sample)
            tokens, keys = tokens + more, keys + sample.tokens
        planned.append((unit, tokens))
    return planned


def _episodes(samples: Sequence[Sample]) -> list[list[int]]:
    """Return the numbers of each episode's sequences, longest first."""
    by_episode = grouped((sample.episode, number) for number, sample in enumerate(samples))
    return [sorted(members, key=lambda number: -samples[number].tokens) for members in by_episode.values()]


def _beginning(sample: Sample, others: Sequence[Sample]) -> tuple[int, int]:
    """Return which of the others shares the longest beginning with ``sample``, and its length; -1 and 0 if none."""
    in_common = [(_in_common(sample.token_ids, other.token_ids), number) for number, other in enumerate(others)]
    tokens, number = max(in_common, key=lambda each: each[0], default=(0, -1))
    return number, tokens


def _in_common(one: Tensor, other: Tensor) -> int:
    """Count the tokens that two sequences have in common before the first that differs."""
    shorter = min(len(one), len(other))
    differ = one[:shorter] != other[:shorter]
    return int(differ.int().argmax()) if bool(differ.any()) else shorter
