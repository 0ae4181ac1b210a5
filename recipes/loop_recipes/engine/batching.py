"""Turns rollouts into the micro-batches of a forward pass.

A :class:`Sample` is one rollout as the learner sees it, a :class:`MicroBatch` some whole rollouts that go through the
model together, either padded to the longest or packed into one row without padding. A rollout is never cut, and losses
are summed per rollout, so how rollouts fall into micro-batches and onto ranks changes nothing but speed and memory.

An episode is mostly one rollout. Where it is several, each is a sample with the episode's return and advantage, and
what is a mean over an episode is divided by the episode's own counts: summed over its samples, it is that mean.

Shapes: s tokens, n sampled tokens, t agent turns, b rollouts, r rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from loop_formats.rollout import Rollout
from loop_formats.schema import require
from loop_recipes.config.loop_config import UpdateConfig
from loop_recipes.engine.step_plan import plan_step


@dataclass(frozen=True)
class Sample:
    """One rollout on its way through the learner.

    Attributes:
        token_ids: [s], the served sequence.
        mask: [s], true exactly where the policy sampled the token; never at position 0.
        turn_ids: [s], 0..t-1 where the mask is true, -1 elsewhere.
        sampler_logprobs: [n], what the sampler reported; only compared with, never trained on.
        policy_versions: [n], the version that sampled each token.
        reward: the return of the episode.
        advantage: filled in once the group is complete.
        old_logprobs: [n], the learner's own log-probs under the sampling version, once recomputed.
        entropy: [n], nats, of the whole distribution that each token was sampled from, where asked for.
        ref_logprobs: [n], log-probs under the reference policy, where the loss has a KL term.
        token_advantages: [n], where a critic gives each token its own advantage, or a preference its own weight; they
            replace ``advantage``.
        pair: of the preference pair that it is one half of; empty without one. ``advantage`` is then 1 or -1.
        collection_id: of the collection that the rollout is from; empty for one that was made up.
        episode_id: the same for all rollouts of an episode; empty for one that is an episode by itself.
        segment: which of them it is, from 0.
        episode_tokens, episode_turns: sampled tokens and agent turns of the whole episode, where it is more than this
            rollout (:func:`with_episode_counts`).
        hidden_tokens: tokens at the beginning that only a critic of turns may see (SWEET-RL); an actor does not train
            on a sample that has any.
    """

    rollout_id: str
    task_id: str
    token_ids: Tensor
    mask: Tensor
    turn_ids: Tensor
    sampler_logprobs: Tensor
    policy_versions: Tensor
    reward: float
    advantage: float = 0.0
    old_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    ref_logprobs: Tensor | None = None
    token_advantages: Tensor | None = None
    pair: str = ""
    collection_id: str = ""
    episode_id: str = ""
    segment: int = 0
    episode_tokens: int | None = None
    episode_turns: int | None = None
    hidden_tokens: int = 0

    def __post_init__(self) -> None:
        if not bool(self.mask.any()):
            raise ValueError(f"rollout {self.rollout_id}: no sampled token to learn from")
        if bool(self.mask[0]):
            raise ValueError(f"rollout {self.rollout_id}: the first token counts as sampled, but nothing predicts it")

    @classmethod
    def from_rollout(cls, rollout: Rollout, unfinished_return: Literal["graded", "zero"] = "graded") -> Sample:
        """The learner's view of a validated record.

        Args:
            unfinished_return: "zero" replaces the reward of an episode that the agent did not end itself by 0.
        """
        unpaid = unfinished_return == "zero" and rollout.end_reason != "completed"
        mask = torch.tensor(rollout.mask, dtype=torch.bool)
        turn_ids = torch.full((len(rollout.mask),), -1, dtype=torch.long)
        versions = torch.zeros(len(rollout.mask), dtype=torch.long)
        for number, turn in enumerate(rollout.turns):
            turn_ids[turn.start : turn.end] = number
            versions[turn.start : turn.end] = turn.policy_version
        return cls(
            rollout_id=rollout.rollout_id,
            task_id=rollout.task_id,
            token_ids=torch.tensor(rollout.token_ids, dtype=torch.long),
            mask=mask,
            turn_ids=turn_ids,
            sampler_logprobs=torch.tensor(rollout.sampler_logprobs, dtype=torch.float32)[mask],
            policy_versions=versions[mask],
            reward=0.0 if unpaid else rollout.reward,
            collection_id=rollout.collection_id,
            episode_id=rollout.episode_id,
            segment=rollout.segment,
        )

    def beginning(self, length: int) -> Sample:
        """As it comes from a rollout, but with its first ``length`` tokens only; the whole one if it is no longer.

        Raises:
            ValueError: none of them was sampled.
        """
        sampled = int(self.mask[:length].sum())
        return replace(
            self,
            token_ids=self.token_ids[:length],
            mask=self.mask[:length],
            turn_ids=self.turn_ids[:length],
            sampler_logprobs=self.sampler_logprobs[:sampled],
            policy_versions=self.policy_versions[:sampled],
        )

    def only_turn(self, number: int) -> Sample:
        """As it comes from a rollout, but up to the end of the turn ``number`` of those it sampled (from 0), the only
        one that it then learns from."""
        here = self.turn_ids == number
        end, sampled = int(here.nonzero().max()) + 1, here[self.mask]
        return replace(
            self,
            token_ids=self.token_ids[:end],
            mask=here[:end],
            turn_ids=torch.where(here, 0, -1)[:end],
            sampler_logprobs=self.sampler_logprobs[sampled],
            policy_versions=self.policy_versions[sampled],
        )

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    @property
    def turns(self) -> int:
        """Agent turns with a sampled token."""
        return len(torch.unique(self.turn_ids[self.mask]))

    @property
    def episode(self) -> str:
        """The id of its episode."""
        return self.episode_id or self.rollout_id


def episodes(samples: Iterable[Sample]) -> list[list[Sample]]:
    """The samples of each episode together, episodes in the order in which the first of each comes."""
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.episode, []).append(sample)
    return list(found.values())


def training_samples(rollouts: Sequence[Rollout], config: UpdateConfig) -> list[Sample]:
    """The samples of the rollouts, with the return and up to the length that ``config`` says.

    A rollout with no sampled token within ``max_tokens_per_rollout`` has nothing to learn from and is left out.

    Raises:
        ConfigError: none is left.
    """
    samples = [Sample.from_rollout(rollout, config.unfinished_return) for rollout in rollouts]
    length = config.max_tokens_per_rollout
    if length is None:
        return samples
    kept = [sample.beginning(length) for sample in samples if bool(sample.mask[:length].any())]
    require(
        kept,
        f"update.max_tokens_per_rollout is {length}, and none of {len(samples)} rollouts has a sampled token so early; "
        "it must be longer than their prompts",
    )
    return kept


def check_token_ids(samples: Sequence[Sample], vocabulary: int, key: str) -> None:
    """Check that the model in training knows every token id of the samples.

    Args:
        vocabulary: how many token ids the model in training knows.
        key: of the config, which says where the samples are from.

    Raises:
        ConfigError: a sample holds an id beyond them.
    """
    for sample in samples:
        largest = int(sample.token_ids.max())
        require(
            largest < vocabulary,
            f"{key}: rollout {sample.rollout_id} holds the token id {largest}, but the config's model has a vocabulary "
            f"of {vocabulary}; another model sampled it: name that one under `model` and `checkpointer`",
        )


def with_episode_counts(samples: Sequence[Sample]) -> list[Sample]:
    """The samples of a collection, in their order, each with its episode's sampled tokens and turns."""
    counts = {
        members[0].episode: (sum(int(s.mask.sum()) for s in members), sum(s.turns for s in members))
        for members in episodes(samples)
    }
    return [
        replace(sample, episode_tokens=counts[sample.episode][0], episode_turns=counts[sample.episode][1])
        for sample in samples
    ]


def filled(value: Tensor | None) -> Tensor:
    """A field of a sample that an earlier pass has filled in. RuntimeError if none has."""
    if value is None:
        raise RuntimeError("this field of the samples is not filled in yet")
    return value


@dataclass(frozen=True)
class Documents:
    """Lengths of the rollouts that share one packed row, in order; takes the place of an attention mask.

    ``borders`` [b + 1], int32, are where they begin and end, on the micro-batch's device.
    """

    lengths: tuple[int, ...]
    borders: Tensor = field(compare=False, repr=False)

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Documents:
        return cls(tuple(lengths), torch.tensor([0, *lengths]).cumsum(0).to(torch.int32))

    def to(self, device: torch.device | str) -> Documents:
        return replace(self, borders=self.borders.to(device))


@dataclass(frozen=True)
class MicroBatch:
    """Whole rollouts for one forward and backward pass.

    Attributes:
        rollout_ids: b ids, in the order of every per-rollout tensor here.
        tokens: [r, s].
        input_pos: [r, s], each token's position in its own rollout.
        documents: None for padded rows (causal attention; padding is on the right, where nothing looks); the lengths
            of the rollouts in the one row when packed.
        rows: [n], index into the flattened [r * s] of the position whose output predicts each sampled token.
        targets: [n], the sampled tokens.
        rollout_index: [n], 0..b-1.
        turn_index: [n], 0..t-1, dense over the micro-batch.
        turn_rollout: [t], the rollout of each turn.
        rewards, advantages: [b].
        episode_tokens, episode_turns: [b], sampled tokens and agent turns of each rollout's whole episode.
        sampler_logprobs: [n].
        policy_versions: [n].
        old_logprobs, ref_logprobs, token_advantages: [n], or None where the samples have none.
    """

    rollout_ids: tuple[str, ...]
    tokens: Tensor
    input_pos: Tensor
    documents: Documents | None
    rows: Tensor
    targets: Tensor
    rollout_index: Tensor
    turn_index: Tensor
    turn_rollout: Tensor
    rewards: Tensor
    advantages: Tensor
    episode_tokens: Tensor
    episode_turns: Tensor
    sampler_logprobs: Tensor
    policy_versions: Tensor
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    token_advantages: Tensor | None = None

    def to(self, device: torch.device | str) -> MicroBatch:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in values.items() if isinstance(value, Tensor | Documents)
        }
        return replace(self, **moved)

    def inputs(self) -> dict[str, Any]:
        """Keyword arguments of :class:`~loop_recipes.engine.logprobs.LogProbDecoder`."""
        return {
            "tokens": self.tokens,
            "input_pos": self.input_pos,
            "mask": self.documents,
            "rows": self.rows,
            "targets": self.targets,
        }

    def split(self, per_token: Tensor) -> dict[str, Tensor]:
        """Cut a per-token result [n] into the rollouts' own [n_i], by rollout id."""
        counts = torch.bincount(self.rollout_index, minlength=len(self.rollout_ids)).tolist()
        return dict(zip(self.rollout_ids, per_token.split(counts), strict=True))


def collate(samples: Sequence[Sample], pad_id: int, packed: bool) -> MicroBatch:
    """One micro-batch of the given samples, in their order; without samples, an all-ignored one.

    The all-ignored micro-batch is one row of one padding token with n = b = 0: it runs every collective of a real one
    and contributes zero, for ranks that have run out of rollouts.
    """
    lengths = [sample.tokens for sample in samples] or [1]
    if packed:
        tokens = torch.cat([s.token_ids for s in samples])[None] if samples else torch.full((1, 1), pad_id)
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        starts = torch.tensor([0, *lengths[:-1]]).cumsum(0).tolist()
    else:
        width = max(lengths)
        tokens = torch.full((len(lengths), width), pad_id)
        for row, sample in enumerate(samples):
            tokens[row, : sample.tokens] = sample.token_ids
        positions = torch.arange(width).expand(len(lengths), width).contiguous()
        starts = [row * width for row in range(len(lengths))]

    turns_before = 0
    rows, targets, rollout_index, turn_index, turn_rollout = [], [], [], [], []
    episode_tokens, episode_turns = [], []
    for number, (sample, start) in enumerate(zip(samples, starts, strict=False)):
        sampled = sample.mask.nonzero().squeeze(1)
        _, dense = torch.unique(sample.turn_ids[sampled], return_inverse=True)
        turns = int(dense.max()) + 1
        rows.append(start + sampled - 1)
        targets.append(sample.token_ids[sampled])
        rollout_index.append(torch.full_like(sampled, number))
        turn_index.append(turns_before + dense)
        turn_rollout.append(torch.full((turns,), number))
        turns_before += turns
        episode_tokens.append(len(sampled) if sample.episode_tokens is None else sample.episode_tokens)
        episode_turns.append(turns if sample.episode_turns is None else sample.episode_turns)

    return MicroBatch(
        rollout_ids=tuple(sample.rollout_id for sample in samples),
        tokens=tokens,
        input_pos=positions,
        documents=Documents.of(lengths) if packed else None,
        rows=_cat(rows, torch.long),
        targets=_cat(targets, torch.long),
        rollout_index=_cat(rollout_index, torch.long),
        turn_index=_cat(turn_index, torch.long),
        turn_rollout=_cat(turn_rollout, torch.long),
        rewards=torch.tensor([sample.reward for sample in samples], dtype=torch.float32),
        advantages=torch.tensor([sample.advantage for sample in samples], dtype=torch.float32),
        episode_tokens=torch.tensor(episode_tokens, dtype=torch.long),
        episode_turns=torch.tensor(episode_turns, dtype=torch.long),
        sampler_logprobs=_cat([sample.sampler_logprobs for sample in samples], torch.float32),
        policy_versions=_cat([sample.policy_versions for sample in samples], torch.long),
        old_logprobs=_cat_optional(samples, "old_logprobs"),
        ref_logprobs=_cat_optional(samples, "ref_logprobs"),
        token_advantages=_cat_optional(samples, "token_advantages") if samples else None,
    )


def micro_batches(
    samples: Sequence[Sample], token_budget: int, pad_id: int, packed: bool, world_size: int = 1, rank: int = 0
) -> list[MicroBatch]:
    """One rank's micro-batches of at most ``token_budget`` tokens, as many as every other rank gets, longest first.

    They are planned over all ranks (:mod:`~loop_recipes.engine.step_plan`); ``samples`` are those of all of them, in
    the same order on each. A rank that has run out of rollouts gets all-ignored ones.

    Raises:
        ValueError: the budget is not positive, or some of the samples have old or reference log-probs and others have
            none.
    """
    plan = plan_step([sample.tokens for sample in samples], world_size, token_budget, packed)
    return [collate([samples[i] for i in call[rank]], pad_id, packed) for call in plan]


def _cat(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat(list(parts)).to(dtype) if parts else torch.empty(0, dtype=dtype)


def _cat_optional(samples: Sequence[Sample], name: str) -> Tensor | None:
    """The samples' optional per-token tensors joined; None where none has them. Without samples, an empty tensor."""
    values = [getattr(sample, name) for sample in samples]
    missing = [sample.rollout_id for sample, value in zip(samples, values, strict=True) if value is None]
    if missing and len(missing) == len(samples):
        return None
    if missing:
        raise ValueError(f"rollout {missing[0]} has no {name} while others of its micro-batch have")
    return _cat(values, torch.float32)
