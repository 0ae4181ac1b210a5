"""Weights for the gap between sampler and learner, which compute one policy's log-probs in two ways.

Tokens are drawn from the sampler's probabilities mu, while the learner takes them for draws from its own. Let k be the
learner's probability of a token, under the version that sampled it, divided by mu. The weights here are k, cut where k
is too large to be trusted. They are constants: a loss multiplies advantages by them. A masked token has weight 0, but
still counts in the number of tokens by which a mean is divided.

The first two are for a gap that comes from arithmetic; :class:`DivergenceMask` also limits how far the update may go,
and takes the place of a clip.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from loop_formats.schema import Positive
from loop_recipes.engine.batching import StepBatch

RatioOf = Literal["token", "sequence"]


class Weights(NamedTuple):
    """``values`` [n] of the sampled tokens, fp32; ``cut`` [n] is true where the ratio was truncated or masked."""

    values: Tensor
    cut: Tensor


class SamplerCorrection(Protocol):
    """The interface of every component for ``loss.sampler_correction``.

    ``ratio_of`` is the unit that has one weight: a token, or all sampled tokens of a sequence.
    """

    ratio_of: RatioOf

    def __call__(self, logprobs: Tensor, batch: StepBatch) -> Weights:
        """Return the weights of the tokens. ``logprobs`` [n] are the present learner's, without gradient."""


@dataclass(frozen=True)
class TruncatedWeights:
    """``min(k, cap)``: truncated importance sampling (TIS; Yao et al., 2025, "Your efficient RL framework secretly
    brings you off-policy RL training").

    Args:
        ratio_of: ``token``, or ``sequence`` for the product of k over a sequence's sampled tokens.
        cap: the largest weight.
    """

    ratio_of: RatioOf = "token"
    cap: Positive = 2.0

    def __call__(self, logprobs: Tensor, batch: StepBatch) -> Weights:
        log_ratio = _log_ratio(self.ratio_of, batch)
        limit = torch.tensor(self.cap).log().item()
        return Weights(log_ratio.clamp(max=limit).exp(), log_ratio > limit)


@dataclass(frozen=True)
class RatioMask:
    """k where ``low <= k <= high``, otherwise 0 (IcePop; Ling team, arXiv 2510.18855).

    Args:
        ratio_of: as in :class:`TruncatedWeights`.
        low, high: the bounds.
    """

    ratio_of: RatioOf = "token"
    low: float = 0.5
    high: float = 5.0

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise ValueError(f"low and high must be bounds with 0 <= low < high, but are {self.low} and {self.high}")

    def __call__(self, logprobs: Tensor, batch: StepBatch) -> Weights:
        log_ratio = _log_ratio(self.ratio_of, batch)
        low, high = torch.tensor([self.low, self.high]).log().tolist()
        return _masked(log_ratio, (log_ratio < low) | (log_ratio > high))


@dataclass(frozen=True)
class DivergenceMask:
    """k, or 0 where the learner's policy is further than ``limit`` from the sampler's and the step would increase the
    distance: up from above (A > 0) or down from below (A < 0) (DPPO, arXiv 2602.04879).

    The divergence counts two outcomes, "this token" and "any other". It is computed with the policy in training, so the
    mask changes from step to step. With ``clip: none`` the weighted ratio is ``pi / mu``, as in the paper.

    Args:
        divergence: ``tv``, total variation ``abs(pi - mu)``, or ``kl``, ``KL(mu, pi)``.
        limit: the paper's delta; its values are 0.2 for ``tv`` and 0.05 for ``kl``.
    """

    divergence: Literal["tv", "kl"] = "tv"
    limit: Positive = 0.2
    ratio_of = "token"

    def __call__(self, logprobs: Tensor, batch: StepBatch) -> Weights:
        ours, theirs = logprobs.double(), batch.sampler_logprobs.double()
        further = (batch.advantages_of_tokens() * (ours - theirs)) > 0
        return _masked(_log_ratio("token", batch), further & (self._distance(ours, theirs) > self.limit))

    def _distance(self, ours: Tensor, theirs: Tensor) -> Tensor:
        if self.divergence == "tv":
            return (ours.exp() - theirs.exp()).abs()
        others, others_theirs = (torch.log1p(-each.clamp(max=-1e-12).exp()) for each in (ours, theirs))
        return theirs.exp() * (theirs - ours) + others_theirs.exp() * (others_theirs - others)


def _log_ratio(ratio_of: RatioOf, batch: StepBatch) -> Tensor:
    """Return log k [n] of each token, or the sum of log k over the token's sequence."""
    if batch.old_logprobs is None:
        raise ValueError("a sampler correction needs the learner's log-probs of the policy that sampled: old_logprobs")
    log_ratio = batch.old_logprobs.float() - batch.sampler_logprobs.float()
    if ratio_of == "token":
        return log_ratio
    return torch.zeros_like(batch.advantages).index_add(0, batch.rollout_index, log_ratio)[batch.rollout_index]


def _masked(log_ratio: Tensor, cut: Tensor) -> Weights:
    """Return the weights, 0 where cut. The cut comes before exp, so that a masked ratio may be beyond fp32."""
    return Weights(torch.where(cut, -torch.inf, log_ratio).exp(), cut)
