"""A rollout on its way to the step, as one type for each stage.

:class:`Sample` is a rollout as it came, :class:`CreditedSample` has the advantage of its episode, :class:`ScoredSample`
the learner's log-probs of its tokens. :mod:`~loop_recipes.engine.batching` makes micro-batches of them.

An episode is mostly one rollout. If it is several, each is a sample with the episode's return and advantage. A mean
over an episode is a sum over its samples, each of which is divided by the episode's own counts.

Shapes: s tokens, n sampled tokens, t agent turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from loop_formats.rollout import Rollout
from loop_formats.schema import require
from loop_plumbing.grouping import grouped
from loop_recipes.config.loop_config import AS_GRADED, UpdateConfig


@dataclass(frozen=True)
class Sample:
    """A rollout as the learner sees it.

    Attributes:
        token_ids: [s], the served sequence.
        mask: [s], true exactly where the policy sampled the token; never at position 0.
        turn_ids: [s], 0..t-1 where the mask is true, -1 elsewhere.
        sampler_logprobs: [n], as the sampler reported them; for comparison, never learned from.
        policy_versions: [n], the version that sampled each token.
        reward: the return of the episode.
        collection_id: the id of the rollout's collection; empty for a made-up rollout.
        episode_id: the same for all rollouts of an episode; empty for a rollout that is a whole episode.
        segment: the rollout's number in its episode, from 0.
        turn_rewards: [t], the environment's reward for each single turn, 0 if it gave none. It covers all turns, even
            if the tokens are cut earlier.
        hidden_tokens: tokens at the beginning that only a critic may see; an actor does not train on a sample that has
            any.
    """

    rollout_id: str
    task_id: str
    token_ids: Tensor
    mask: Tensor
    turn_ids: Tensor
    sampler_logprobs: Tensor
    policy_versions: Tensor
    reward: float
    collection_id: str = ""
    episode_id: str = ""
    segment: int = 0
    hidden_tokens: int = 0
    turn_rewards: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not bool(self.mask.any()):
            raise ValueError(f"rollout {self.rollout_id}: no sampled token to learn from")
        if bool(self.mask[0]):
            raise ValueError(f"rollout {self.rollout_id}: the first token counts as sampled, but nothing predicts it")

    @classmethod
    def from_rollout(cls, rollout: Rollout, config: UpdateConfig = AS_GRADED) -> Sample:
        """Make the learner's view of a validated record.

        Args:
            config: defines the return.
        """
        by_turn = config.episode_return == "reward"
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
            reward=config.return_of(rollout),
            collection_id=rollout.collection_id,
            episode_id=rollout.episode_id,
            segment=rollout.segment,
            turn_rewards=tuple((turn.reward or 0.0) if by_turn else 0.0 for turn in rollout.turns),
        )

    def beginning(self, length: int) -> Self:
        """Return the sample cut to its first ``length`` tokens; a shorter sample stays whole.

        Raises:
            ValueError: none of these tokens was sampled.
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

    def only_turn(self, number: int) -> Self:
        """Return the sample cut after its sampled turn ``number`` (from 0), the only turn to learn from then."""
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
        """The number of agent turns with a sampled token."""
        return len(torch.unique(self.turn_ids[self.mask]))

    @property
    def episode(self) -> str:
        """The id of the sample's episode."""
        return self.episode_id or self.rollout_id


@dataclass(frozen=True)
class CreditedSample(Sample):
    """A sample whose group is complete.

    Attributes:
        advantage: the episode's advantage; 1 or -1 in a preference pair.
        episode_tokens, episode_turns: sampled tokens and agent turns of the whole episode.
        pair: the name of the episode's preference pair; empty without a pair.
        token_advantages: [n], one for each token, in place of ``advantage``; None if all tokens have ``advantage``.
    """

    advantage: float = field(kw_only=True)
    episode_tokens: int = field(kw_only=True)
    episode_turns: int = field(kw_only=True)
    pair: str = field(default="", kw_only=True)
    token_advantages: Tensor | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class ScoredSample(CreditedSample):
    """A sample with log-probs of the learner. A sample that the learner only imitates needs none.

    Attributes:
        old_logprobs: [n], the learner's own log-probs under the sampling version, or those of the reference for a loss
            on pairs.
        ref_logprobs: [n], log-probs under the base model; None without a KL term.
        entropies: [n], in nats, of each token's distribution; None unless ``update.exact_entropy`` asks.
    """

    old_logprobs: Tensor = field(kw_only=True)
    ref_logprobs: Tensor | None = field(default=None, kw_only=True)
    entropies: Tensor | None = field(default=None, kw_only=True)


AnySample = TypeVar("AnySample", bound=Sample)


def episodes(samples: Iterable[AnySample]) -> list[list[AnySample]]:
    """Group the samples by episode, in the order of each episode's first sample."""
    return list(grouped((sample.episode, sample) for sample in samples).values())


def credited(members: Sequence[Sample], advantage: float, pair: str = "") -> list[CreditedSample]:
    """Return the samples of one whole episode with its advantage."""
    tokens, turns = sum(int(sample.mask.sum()) for sample in members), sum(sample.turns for sample in members)
    return [
        CreditedSample(
            **_of_stage(sample, Sample), advantage=advantage, episode_tokens=tokens, episode_turns=turns, pair=pair
        )
        for sample in members
    ]


def scored(
    sample: CreditedSample, old_logprobs: Tensor, ref_logprobs: Tensor | None = None, entropies: Tensor | None = None
) -> ScoredSample:
    """Return the sample with log-probs and entropies [n] of its sampled tokens."""
    before = _of_stage(sample, CreditedSample)
    return ScoredSample(**before, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs, entropies=entropies)


def _of_stage(sample: Sample, stage: type[Sample]) -> dict[str, Any]:
    """Return by name only the sample's fields that ``stage`` has, so that a trained sample can be trained on again."""
    return {each.name: getattr(sample, each.name) for each in fields(stage)}


def training_samples(rollouts: Sequence[Rollout], config: UpdateConfig) -> list[Sample]:
    """Return the samples of the rollouts; ``config`` defines the return and the length at which a sample is cut.

    A rollout without a sampled token within ``max_tokens_per_rollout`` has nothing to learn from and is left out.

    Raises:
        ConfigError: no rollout is left.
    """
    samples = [Sample.from_rollout(rollout, config) for rollout in rollouts]
    length = config.max_tokens_per_rollout
    if length is None:
        return samples
    cut = [sample.beginning(length) for sample in samples if bool(sample.mask[:length].any())]
    require(
        cut,
        f"update.max_tokens_per_rollout is {length}, and none of {len(samples)} rollouts has a sampled token so early; "
        "it must be longer than their prompts",
    )
    return cut


def made_up(name: str, length: int, vocab_size: int, generator: torch.Generator) -> ScoredSample:
    """Make a rollout of random tokens. All tokens except the first count as sampled."""
    mask = torch.arange(length) > 0
    return ScoredSample(
        rollout_id=name,
        task_id="stress",
        token_ids=torch.randint(vocab_size, (length,), generator=generator),
        mask=mask,
        turn_ids=mask.long() - 1,
        sampler_logprobs=torch.zeros(length - 1),
        policy_versions=torch.zeros(length - 1, dtype=torch.long),
        reward=0.0,
        advantage=1.0,
        episode_tokens=length - 1,
        episode_turns=1,
        old_logprobs=torch.zeros(length - 1),
        ref_logprobs=torch.zeros(length - 1),
    )
