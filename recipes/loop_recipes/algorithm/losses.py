"""Policy losses: per-rollout values of the clipped objective, of plain REINFORCE and of the log-likelihood.

A loss takes the learner's log-probs [n] of the sampled tokens of a micro-batch and returns one value per rollout [b].
The caller (:class:`~loop_recipes.algorithm.minibatches.Averaging`) adds them up over micro-batches and ranks and
divides once, so that neither split nor ranks can change the total. Everything is computed in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor, nn

from loop_formats.schema import NotNegative, Positive
from loop_recipes.algorithm.method_plan import MethodPlan
from loop_recipes.engine.batching import StepBatch

if TYPE_CHECKING:
    from loop_recipes.algorithm.sampler_correction import SamplerCorrection

Level = Literal["token", "turn", "trajectory", "geometric"]
ClipForm = Literal["symmetric", "reciprocal", "cispo", "none"]


@dataclass(frozen=True)
class LossOutput:
    """The result of a loss.

    Attributes:
        per_rollout_loss: [b], to be minimised, with gradient; a rollout's share of the mean over its episode's terms.
        log_ratio: one entry per importance ratio (of a token, turn or rollout, by the level), without gradient.
        clipped: of the shape of ``log_ratio``, true where the clipped branch was taken.
        ratio_index: [n], the index of each sampled token's entry in ``log_ratio`` and ``clipped``.
        token_log_ratio: [n], one entry per token at every level, without gradient.
        metrics: further metrics by name, each with any number of values, without gradient. The mean of all values of an
            iteration is logged; the loss explains the names in its ``figures``.
    """

    per_rollout_loss: Tensor
    log_ratio: Tensor
    clipped: Tensor
    ratio_index: Tensor
    token_log_ratio: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


class PolicyLoss(nn.Module):
    """The base of all policy losses: it takes means over a rollout's tokens and has two options, both off by default.

    With ``kl_coefficient`` > 0 each rollout's loss gains ``kl_coefficient`` times the mean over its sampled tokens of
    ``exp(d) - d - 1``, d = reference log-prob - log-prob (the non-negative estimator of GRPO, arXiv 2402.03300, eq. 4).

    ``sampler_correction`` weighs the advantages (never the KL term) for the gap between sampler and learner; see
    :mod:`~loop_recipes.algorithm.sampler_correction`.
    """

    plan = MethodPlan()
    """Its needs, declared to the update."""
    figures: ClassVar[Mapping[str, str]] = {
        "reference_kl": "mean KL term against the base model, where the loss has one",
        "correction_weight": "mean weight of a sampled token by loss.sampler_correction",
        "correction_cut": "share of sampled tokens whose ratio of learner to sampler it truncated or masked",
    }
    """The keys that it may add to ``metrics.jsonl``, each with its sentence."""
    level: Level = "token"
    """The unit of its importance ratios. Unless it is ``token``, tokens cannot have advantages of their own."""

    def __init__(self, kl_coefficient: NotNegative = 0.0, sampler_correction: SamplerCorrection | None = None) -> None:
        super().__init__()
        self.kl_coefficient, self.sampler_correction = kl_coefficient, sampler_correction
        if kl_coefficient > 0:
            self.plan = replace(self.plan, needs_reference=True)

    def _weighed(
        self, advantage: Tensor, index: Tensor, logprobs: Tensor, batch: StepBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return one advantage for each ratio, times its weight if there is a correction, and the correction's metrics.

        Args:
            index: [n], for each sampled token the ratio that it counts in; all tokens of one ratio have one weight.
        """
        if self.sampler_correction is None:
            return advantage, {}
        weights = self.sampler_correction(logprobs.detach(), batch)
        metrics = {"correction_weight": weights.values, "correction_cut": weights.cut}
        return advantage * torch.zeros_like(advantage).scatter(0, index, weights.values), metrics

    def _with_kl(self, output: LossOutput, logprobs: Tensor, batch: StepBatch) -> LossOutput:
        """Return the output with the KL term, if there is one, added to its losses."""
        if self.kl_coefficient == 0:
            return output
        if batch.ref_logprobs is None:
            raise ValueError("a KL term needs reference log-probs: set ref_logprobs on the samples")
        difference = batch.ref_logprobs.float() - logprobs
        kl = _mean_over_tokens(torch.exp(difference) - difference - 1.0, batch)
        loss = output.per_rollout_loss + self.kl_coefficient * kl
        return replace(output, per_rollout_loss=loss, metrics={**output.metrics, "reference_kl": kl.detach()})


class ClippedPolicyLoss(PolicyLoss):
    """The clipped importance-weighted objective ``min(r A, g(A))`` at one of four levels (LOOP, eqs. 4-5, 9-10).

    - ``token``: one ratio per sampled token; mean over a rollout's sampled tokens (eq. 10, the paper's best).
    - ``turn``: one ratio per agent turn, the product over its tokens; mean over the rollout's turns. The paper gives no
      equation for it; this normaliser is our choice.
    - ``trajectory``: one ratio per rollout, the product over all its sampled tokens (eqs. 8-9).
    - ``geometric``: one ratio per rollout, the geometric mean over its sampled tokens (GSPO, arXiv 2507.18071, eq. 7).

    Args:
        level: as above.
        clip: the range of the ratio. ``symmetric`` is the paper's trust region 1 - eps .. 1 + eps;
            ``reciprocal`` is 1/(1+eps) .. 1+eps; ``none`` sets no bound. ``cispo`` bounds the weight of a token in
            ``min(r, 1 + eps) A log p`` and keeps its gradient (CISPO, arXiv 2506.13585, eqs. 4 and 5; no lower bound).
        eps: its half-width; in (0, 1) for ``symmetric``.
        eps_high: takes the place of ``eps`` in the upper bound (DAPO, arXiv 2503.14476, eq. 10).
        kl_coefficient, sampler_correction: see :class:`PolicyLoss`. A correction of tokens needs the level ``token``.
    """

    def __init__(
        self,
        level: Level = "token",
        clip: ClipForm = "symmetric",
        eps: Positive = 0.1,
        kl_coefficient: NotNegative = 0.0,
        eps_high: Positive | None = None,
        sampler_correction: SamplerCorrection | None = None,
    ) -> None:
        super().__init__(kl_coefficient, sampler_correction)
        if clip == "symmetric" and eps >= 1:
            raise ValueError(f"eps {eps} is outside the range of the {clip} clip form")
        if level != "token" and clip == "cispo":
            raise ValueError(f"clip: cispo weighs tokens; it needs level: token, not {level}")
        if level != "token" and sampler_correction is not None and sampler_correction.ratio_of == "token":
            raise ValueError(f"sampler_correction weighs tokens; level: {level} needs one with ratio_of: sequence")
        self.level, self.clip = level, clip
        self.low = {"symmetric": 1.0 - eps, "reciprocal": 1.0 / (1.0 + eps)}.get(clip, 0.0)
        self.high = math.inf if clip == "none" else 1.0 + (eps if eps_high is None else eps_high)

    def forward(self, logprobs: Tensor, batch: StepBatch) -> LossOutput:
        """Return the clipped loss of a micro-batch.

        Args:
            logprobs: [n], fp32, of ``batch.targets`` under the policy being trained.
            batch: with ``old_logprobs`` [n] of the policy that sampled.

        Raises:
            ValueError: no old log-probs, per-token advantages with a coarser level, or an episode of several sequences
                at the levels ``trajectory`` and ``geometric``.
        """
        if batch.old_logprobs is None:
            raise ValueError("the clipped objective needs the sampling policy's log-probs: set old_logprobs")
        logprobs = logprobs.float()
        token_log_ratio = logprobs - batch.old_logprobs.float()
        rollouts, turns = len(batch.advantages), len(batch.turn_rollout)
        if self.level == "token":
            index, log_ratio, advantage = _each_token(batch), token_log_ratio, batch.advantages_of_tokens()
        elif batch.token_advantages is not None:
            raise ValueError(f"per-token advantages need level: token, not {self.level}")
        elif self.level == "turn":
            index, log_ratio = batch.turn_index, _sum_by(token_log_ratio, batch.turn_index, turns)
            advantage = batch.advantages[batch.turn_rollout]
        else:
            own = torch.bincount(batch.rollout_index, minlength=rollouts)
            if bool((own != batch.episode_tokens).any()):
                raise ValueError("one ratio per rollout needs episodes of one sequence; choose level: token or turn")
            index, log_ratio = batch.rollout_index, _sum_by(token_log_ratio, batch.rollout_index, rollouts)
            log_ratio = log_ratio / batch.episode_tokens if self.level == "geometric" else log_ratio
            advantage = batch.advantages

        advantage, metrics = self._weighed(advantage, index, logprobs, batch)
        if self.clip == "cispo":
            terms, clipped = self._with_bounded_weights(log_ratio, advantage, logprobs)
        else:
            terms, clipped = self._clipped(log_ratio, advantage)
        if self.level == "token":
            objective = _mean_over_tokens(terms, batch)
        elif self.level == "turn":
            objective = _sum_by(terms, batch.turn_rollout, rollouts) / batch.episode_turns
        else:
            objective = terms
        ratios = log_ratio.detach(), clipped, index, token_log_ratio.detach()
        return self._with_kl(LossOutput(-objective, *ratios, metrics), logprobs, batch)

    def _clipped(self, log_ratio: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``min(r A, g(A))``, and a mask that is true where ``g(A)`` was the smaller.

        For A > 0 the bound is high * A, taken where r > high; for A < 0 it is low * A, taken where r < low. The branch
        is chosen before exp, so that a ratio beyond fp32 on the clipped side gives its bound and no gradient, not nan.
        """
        ratio_bound = torch.where(advantage > 0, self.high, self.low)
        outside = torch.where(advantage > 0, log_ratio > ratio_bound.log(), log_ratio < ratio_bound.log())
        clipped = outside & (advantage != 0)
        idle = clipped | (advantage == 0)
        ratio = torch.where(idle, torch.zeros_like(log_ratio), log_ratio).exp()
        return torch.where(clipped, ratio_bound * advantage, ratio * advantage), clipped

    def _with_bounded_weights(self, log_ratio: Tensor, advantage: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``min(r, high) A log p``, the minimum a constant, and a mask that is true where r was bounded."""
        limit = math.log(self.high)
        weight = log_ratio.detach().clamp(max=limit).exp()
        return weight * advantage * logprobs, (log_ratio.detach() > limit) & (advantage != 0)


class Reinforce(PolicyLoss):
    """``mean over a rollout's sampled tokens of A log p`` (LOOP, eq. 2), for strictly on-policy methods.

    One gradient step per collection; with :class:`~loop_recipes.algorithm.advantages.LeaveOneOut` this is RLOO. Old
    log-probs are not needed; where the batch has them they only feed the ratio statistics.
    """

    def forward(self, logprobs: Tensor, batch: StepBatch) -> LossOutput:
        """Return the loss of a micro-batch.

        Args:
            logprobs: [n], fp32, of ``batch.targets`` under the policy being trained.
            batch: the micro-batch.
        """
        logprobs = logprobs.float()
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs.float()
        log_ratio = logprobs.detach() - old
        index = _each_token(batch)
        advantage, metrics = self._weighed(batch.advantages_of_tokens(), index, logprobs, batch)
        objective = self.of_rollouts(advantage * logprobs, batch)
        clipped = torch.zeros_like(log_ratio, dtype=torch.bool)
        return self._with_kl(LossOutput(-objective, log_ratio, clipped, index, log_ratio, metrics), logprobs, batch)

    def of_rollouts(self, terms: Tensor, batch: StepBatch) -> Tensor:
        """Return the objective [b] of each rollout from the terms [n] of its sampled tokens."""
        return _mean_over_tokens(terms, batch)


class LogLikelihood(Reinforce):
    """``- sum over a rollout's sampled tokens of w log p``: the cross-entropy of its tokens where all weights are 1.

    The weights are the advantages: with :class:`~loop_recipes.algorithm.advantages.Solved` the successful rollouts are
    learned by heart and the others left out (rejection sampling, expert iteration). ``update.loss_divisor: tokens``
    makes it the mean over the tokens of a minibatch.
    """

    plan = MethodPlan(sums_tokens=True)

    def __init__(self) -> None:
        super().__init__()

    def of_rollouts(self, terms: Tensor, batch: StepBatch) -> Tensor:
        return _sum_by(terms, batch.rollout_index, len(batch.advantages))


def _each_token(batch: StepBatch) -> Tensor:
    """Return 0..n-1, the ratio index [n] of a loss with one ratio per token."""
    return torch.arange(len(batch.targets), device=batch.targets.device)


def _sum_by(values: Tensor, index: Tensor, size: int) -> Tensor:
    return torch.zeros(size, dtype=values.dtype, device=values.device).index_add(0, index, values)


def _mean_over_tokens(values: Tensor, batch: StepBatch) -> Tensor:
    """Reduce [n] to [b]: each rollout's share of the mean over all sampled tokens of its episode."""
    return _sum_by(values, batch.rollout_index, len(batch.advantages)) / batch.episode_tokens
