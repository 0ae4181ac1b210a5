"""Turns samples into the micro-batches of a forward pass.

A :class:`MicroBatch` is some whole rollouts that go through the model together, either padded to the longest or packed
into one row without padding; a :class:`StepBatch` also has what a loss asks for. A rollout is never cut, and losses are
summed per rollout, so how rollouts fall into micro-batches and onto ranks changes nothing but speed and memory.

Shapes: s tokens, n sampled tokens, t agent turns, b rollouts, r rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from loop_recipes.engine.process_group import on_main_rank
from loop_recipes.engine.samples import AnySample, CreditedSample, Sample
from loop_recipes.engine.sequence_parallel import WHOLE, RowPart
from loop_recipes.engine.shared_prefixes import Keys, borders_of, lay_out, units
from loop_recipes.engine.step_plan import StepPlan, plan_step

PAD_ID = 0  # without effect: padding is on the right of causal attention and selects no row for the head


@dataclass(frozen=True)
class Documents:
    """Lengths of the pieces of a packed row, in order; takes the place of an attention mask.

    A piece is a rollout, or what follows a beginning that a rollout shares with another; its tokens then attend to the
    beginning, too. ``borders`` [b + 1], int32, are where pieces begin and end, on the micro-batch's device. ``longest``
    [tokens of the longest rollout, 0] holds that number as a size, because torch.compile makes a new graph for each
    number, but not for each size. ``part`` is this rank's part of the row.

    ``keys`` are the tokens to which each piece attends, causally from their end; None if these are the piece itself.
    """

    lengths: tuple[int, ...]
    borders: Tensor = field(compare=False, repr=False)
    longest: Tensor = field(compare=False, repr=False)
    part: RowPart = WHOLE
    keys: Keys | None = None

    @classmethod
    def of(cls, lengths: Sequence[int], part: RowPart = WHOLE, keys: Sequence[Tensor] | None = None) -> Documents:
        """Describe a row of pieces of these lengths.

        Args:
            keys: for each piece the places in the row to which it attends; the piece's own places come last.
        """
        longest = max(lengths if keys is None else map(len, keys))
        known = None if keys is None else Keys.of(keys)
        return cls(tuple(lengths), borders_of(lengths), torch.empty(longest, 0), part, known)

    def to(self, device: torch.device | str) -> Documents:
        keys = None if self.keys is None else self.keys.to(device)
        return replace(self, borders=self.borders.to(device), keys=keys)


@dataclass(frozen=True)
class MicroBatch:
    """Whole rollouts for one forward and backward pass.

    If ranks share a packed row, each has a part of the s positions and the whole of everything else.

    Attributes:
        rollout_ids: b ids, in the order of every per-rollout tensor here.
        tokens: [r, s].
        input_pos: [r, s], each token's position in its own rollout.
        documents: None for padded rows (causal attention; padding is on the right, out of sight); the pieces
            of the one row when packed.
        rows: [n], index into the flattened [r * s] of the position whose output predicts each sampled token; [m], for
            the tokens ``own``, if ranks share the row.
        own: [m], index into the n sampled tokens, for the tokens that this rank predicts; None if it predicts all.
        targets: [n], the sampled tokens.
        rollout_index: [n], 0..b-1.
        turn_index: [n], 0..t-1, dense over the micro-batch.
        turn_rollout: [t], the rollout of each turn.
        rewards: [b].
    """

    rollout_ids: tuple[str, ...]
    tokens: Tensor
    input_pos: Tensor
    documents: Documents | None
    rows: Tensor
    own: Tensor | None
    targets: Tensor
    rollout_index: Tensor
    turn_index: Tensor
    turn_rollout: Tensor
    rewards: Tensor

    def to(self, device: torch.device | str) -> Self:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in values.items() if isinstance(value, Tensor | Documents)
        }
        return replace(self, **moved)

    def inputs(self) -> dict[str, Any]:
        """Return the keyword arguments of :class:`~loop_recipes.engine.decoder.LogProbDecoder`."""
        return {
            "tokens": self.tokens,
            "input_pos": self.input_pos,
            "mask": self.documents,
            "rows": self.rows,
            "own": self.own,
            "targets": self.targets,
        }

    def split(self, per_token: Tensor) -> dict[str, Tensor]:
        """Cut a per-token result [n] into one tensor [n_i] for each rollout, by rollout id."""
        counts = torch.bincount(self.rollout_index, minlength=len(self.rollout_ids)).tolist()
        return dict(zip(self.rollout_ids, per_token.split(counts), strict=True))


@dataclass(frozen=True)
class StepBatch(MicroBatch):
    """A micro-batch of an optimizer step.

    Attributes:
        advantages: [b].
        episode_tokens, episode_turns: [b], sampled tokens and agent turns of each rollout's whole episode.
        sampler_logprobs: [n], as the sampler reported them.
        old_logprobs, ref_logprobs, token_advantages: [n], or None where the samples have none.
    """

    advantages: Tensor
    episode_tokens: Tensor
    episode_turns: Tensor
    sampler_logprobs: Tensor
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    token_advantages: Tensor | None

    def advantages_of_tokens(self) -> Tensor:
        """Return [n], each token's own advantage if it has one, otherwise its rollout's."""
        return self.advantages[self.rollout_index] if self.token_advantages is None else self.token_advantages


def collate(samples: Sequence[Sample], pad_id: int, packed: bool, part: RowPart = WHOLE) -> MicroBatch:
    """Make one micro-batch of the samples, in their order. Without samples, make an all-ignored one.

    The all-ignored micro-batch is for ranks that have run out of rollouts. It is one row of one padding token with
    n = b = 0; it runs every collective of a real one and contributes zero.

    Args:
        part: this rank's part of a packed row; padding tokens fill up the row until all parts are equal.
    """
    tokens, positions, documents, places = (_packed if packed else _padded)(samples, pad_id, part)
    turns_before = 0
    rows, targets, rollout_index, turn_index, turn_rollout = [], [], [], [], []
    for number, (sample, place) in enumerate(zip(samples, places, strict=True)):
        sampled = sample.mask.nonzero().squeeze(1)
        _, dense = torch.unique(sample.turn_ids[sampled], return_inverse=True)
        turns = int(dense.max()) + 1
        rows.append(place[sampled - 1])
        targets.append(sample.token_ids[sampled])
        rollout_index.append(torch.full_like(sampled, number))
        turn_index.append(turns_before + dense)
        turn_rollout.append(torch.full((turns,), number))
        turns_before += turns

    here, predicting, own = part.here(tokens.shape[1]), _cat(rows, torch.long), None
    if part.of > 1:
        own = ((predicting >= here.start) & (predicting < here.stop)).nonzero().squeeze(1)
        predicting = predicting[own] - here.start
    return MicroBatch(
        rollout_ids=tuple(sample.rollout_id for sample in samples),
        tokens=tokens[:, here],
        input_pos=positions[:, here],
        documents=documents,
        rows=predicting,
        own=own,
        targets=_cat(targets, torch.long),
        rollout_index=_cat(rollout_index, torch.long),
        turn_index=_cat(turn_index, torch.long),
        turn_rollout=_cat(turn_rollout, torch.long),
        rewards=torch.tensor([sample.reward for sample in samples], dtype=torch.float32),
    )


Rows = tuple[Tensor, Tensor, Documents | None, list[Tensor]]
"""Tokens and positions [r, s], and for each sample the place [its tokens] of each token in the flattened rows."""


def _packed(samples: Sequence[Sample], pad_id: int, part: RowPart) -> Rows:
    """Lay out one row. A beginning that sequences of an episode share is stored only once."""
    pieces = lay_out(samples)
    own = [(samples[piece.number].token_ids, piece) for piece in pieces if piece.shared < len(piece.places)]
    lengths, keys = [len(ids) - piece.shared for ids, piece in own], [piece.places for _, piece in own]
    used = sum(lengths)
    filling = -used % part.of if used else part.of
    if filling:
        lengths.append(filling)
        keys.append(torch.arange(used, used + filling))
    tokens = torch.cat([*(ids[piece.shared :] for ids, piece in own), torch.full((filling,), pad_id)])
    positions = torch.cat([*(torch.arange(piece.shared, len(ids)) for ids, piece in own), torch.arange(filling)])
    documents = Documents.of(lengths, part, keys if any(piece.shared for piece in pieces) else None)
    places = {piece.number: piece.places for piece in pieces}
    return tokens[None], positions[None], documents, [places[number] for number in range(len(samples))]


def _padded(samples: Sequence[Sample], pad_id: int, part: RowPart) -> Rows:
    """Lay out a row for each sequence; without sequences, one row of padding."""
    width = max([sample.tokens for sample in samples], default=1)
    tokens = torch.full((max(1, len(samples)), width), pad_id)
    for row, sample in enumerate(samples):
        tokens[row, : sample.tokens] = sample.token_ids
    positions = torch.arange(width).expand(tokens.shape).contiguous()
    return tokens, positions, None, list(torch.arange(tokens.numel()).view(tokens.shape))[: len(samples)]


def collate_step(samples: Sequence[CreditedSample], pad_id: int, packed: bool, part: RowPart = WHOLE) -> StepBatch:
    """Make a micro-batch as :func:`collate` does, with the tensors that a loss needs.

    Raises:
        ValueError: some of the samples have old or reference log-probs and others have none.
    """
    return StepBatch(
        **vars(collate(samples, pad_id, packed, part)),
        advantages=torch.tensor([sample.advantage for sample in samples], dtype=torch.float32),
        episode_tokens=torch.tensor([sample.episode_tokens for sample in samples], dtype=torch.long),
        episode_turns=torch.tensor([sample.episode_turns for sample in samples], dtype=torch.long),
        sampler_logprobs=_cat([sample.sampler_logprobs for sample in samples], torch.float32),
        old_logprobs=_cat_optional(samples, "old_logprobs"),
        ref_logprobs=_cat_optional(samples, "ref_logprobs"),
        token_advantages=_cat_optional(samples, "token_advantages") if samples else None,
    )


@dataclass(frozen=True)
class BatchLayout:
    """The layout by which the rollouts of all ranks become one rank's micro-batches.

    Attributes:
        token_budget: tokens of a micro-batch of one rank, padding included.
        packed: several rollouts stand in one row in place of padding.
        world_size, rank: ranks that share rows count as one rank here, with the budget of all of them together.
        part: this rank's part of each row.
    """

    token_budget: int
    packed: bool
    world_size: int = 1
    rank: int = 0
    part: RowPart = WHOLE
    pad_id: int = PAD_ID

    @property
    def row_budget(self) -> int:
        """The tokens of a micro-batch of all ranks that share it."""
        return self.token_budget * self.part.of


def micro_batches(samples: Sequence[Sample], layout: BatchLayout) -> list[MicroBatch]:
    """Return a rank's micro-batches of at most ``token_budget`` tokens, as many as each rank gets, longest first.

    They are planned over all ranks (:mod:`~loop_recipes.engine.step_plan`); ``samples`` are all ranks', in the
    same order on each. A rank that has run out of rollouts gets all-ignored micro-batches.

    Raises:
        ValueError: the budget is not positive.
    """
    return [collate(together, layout.pad_id, layout.packed, layout.part) for together in _planned(samples, layout)]


def step_batches(samples: Sequence[CreditedSample], layout: BatchLayout) -> list[StepBatch]:
    """Return the :func:`micro_batches` of an optimizer step.

    Raises:
        ValueError: as :func:`micro_batches` and :func:`collate_step`.
    """
    return [collate_step(together, layout.pad_id, layout.packed, layout.part) for together in _planned(samples, layout)]


def computed(samples: Sequence[Sample], layout: BatchLayout) -> list[tuple[int, int]]:
    """Return (tokens, tokens shared with an earlier sequence) of each sequence, as micro-batches hold the sequences.
    The difference is the number of tokens that go through the model."""
    if not layout.packed:
        return [(sample.tokens, 0) for sample in samples]
    laid = (piece for unit, _ in units(samples, layout.row_budget) for piece in lay_out(unit))
    return [(len(piece.places), piece.shared) for piece in laid]


def _planned(samples: Sequence[AnySample], layout: BatchLayout) -> list[list[AnySample]]:
    budget, packed, world_size = layout.row_budget, layout.packed, layout.world_size
    planned = units(samples, budget) if packed else [([sample], sample.tokens) for sample in samples]
    lengths = [tokens for _, tokens in planned]

    def plan() -> StepPlan:
        return plan_step(lengths, world_size, budget, packed)

    # The plan depends on floating-point numbers. Machines that round them otherwise would take other rollouts, or other
    # numbers of micro-batches, and wait for each other for ever.
    plans = on_main_rank(plan) if world_size > 1 else plan()
    return [[sample for i in call[layout.rank] for sample in planned[i][0]] for call in plans]


def _cat(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat(list(parts)).to(dtype) if parts else torch.empty(0, dtype=dtype)


def _cat_optional(samples: Sequence[CreditedSample], name: str) -> Tensor | None:
    """Join the samples' optional per-token tensors: None if no sample has one, an empty tensor without samples."""
    by_rollout = {sample.rollout_id: getattr(sample, name, None) for sample in samples}
    values = [value for value in by_rollout.values() if value is not None]
    if samples and not values:
        return None
    if len(values) < len(by_rollout):
        missing = next(rollout_id for rollout_id, value in by_rollout.items() if value is None)
        raise ValueError(f"rollout {missing} has no {name} while others of its micro-batch have")
    return _cat(values, torch.float32)
