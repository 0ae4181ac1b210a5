"""Preference pairs and their losses, DPO and DMPO, as log-likelihoods whose weights are held constant during a step.

The loss of a pair is ``-log sigmoid(Delta)`` with

    Delta = beta * (sum over the chosen rollout's tokens of phi (l - ref) - the same sum of the rejected one),

``l`` a sampled token's log-prob, ``ref`` its log-prob under the reference policy, ``phi`` the weight of its turn. Its
gradient is that of ``- sum of w l`` over the tokens of both, where ``w = +- beta phi sigmoid(-Delta)`` is a constant.
So a pass without gradient gives every rollout's ``l``, from which come the weights, and the backward pass takes single
rollouts: how they are packed, cut into micro-batches and dealt to ranks does not matter.

The reference's log-probs are ``old_logprobs``: of the policy that sampled, or of the one a fixed set's training began
with.

A loss may add ``nll`` times the chosen rollout's cross-entropy, the mean over its sampled tokens of ``- l``, which adds
``nll / n`` to the weights of its n tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid

from loop_formats.schema import Count, NotNegative, Positive
from loop_plumbing.grouping import grouped
from loop_recipes.algorithm.losses import LogLikelihood
from loop_recipes.algorithm.method_plan import MethodPlan
from loop_recipes.engine.samples import ScoredSample, episodes


@dataclass(frozen=True)
class ReturnPairs:
    """Pairs the rollouts of a task by their returns: the best with the worst, the second best with the second worst,
    and so on while the two returns differ by more than ``threshold`` (LOOP, section 5.3, DMPO).

    The advantage is 1 for the chosen rollout of a pair, -1 for the rejected rollout, and 0 for a rollout without a
    partner.

    Args:
        threshold: a pair's returns differ by more than this; not negative.
        per_task: the most pairs of a task; None makes as many as there are.
    """

    threshold: NotNegative = 0.0
    per_task: Count | None = None

    def pairs(self, rewards: Tensor, groups: Tensor) -> list[tuple[int, int]]:
        """Return pairs of indices, (chosen rollout, rejected rollout); no rollout is in two pairs."""
        all_pairs = []
        for group in groups.unique():
            ranked = sorted((groups == group).nonzero().flatten().tolist(), key=lambda i: (rewards[i].item(), i))
            candidates = zip(reversed(ranked), ranked[: len(ranked) // 2], strict=False)
            pairs = [pair for pair in candidates if rewards[pair[0]] - rewards[pair[1]] > self.threshold]
            all_pairs += pairs[: self.per_task]
        return all_pairs

    def __call__(self, rewards: Tensor, groups: Tensor) -> Tensor:
        advantages = torch.zeros(len(rewards))
        for chosen, rejected in self.pairs(rewards, groups):
            advantages[chosen], advantages[rejected] = 1.0, -1.0
        return advantages


@dataclass(frozen=True)
class PairComparison:
    """The rollouts of a minibatch compared with each other, as the policy stands now.

    Attributes:
        weights: by rollout id, the weights [n] of the sampled tokens' log-probs. The weighted log-likelihood has the
            same gradient as the losses.
        losses: [p], float64, one for each pair; the minibatch's loss is their sum.
        metrics: values [p] by name, as in :class:`~loop_recipes.algorithm.losses.LossOutput`.
    """

    weights: dict[str, Tensor]
    losses: Tensor
    metrics: dict[str, Tensor]

    def weighted(self, samples: Sequence[ScoredSample]) -> list[ScoredSample]:
        """Return the samples with the comparison's weights as token advantages."""
        return [replace(sample, token_advantages=self.weights[sample.rollout_id]) for sample in samples]


class PreferenceLoss(LogLikelihood):
    """The base of losses on pairs; each subclass says how much a token counts.

    Args:
        beta: how strongly the policy is held to the reference; above 0.
        nll: weight of the chosen rollout's cross-entropy; 0 leaves it out.
    """

    plan = MethodPlan(compares_pairs=True)
    figures: ClassVar[Mapping[str, str]] = {
        "preference_margin": "mean over all steps' pairs of Delta before the step; 0 while the policy is the reference",
        "preference_accuracy": "share of them with Delta above 0",
    }

    def __init__(self, beta: Positive = 0.1, nll: NotNegative = 0.0) -> None:
        super().__init__()
        self.beta, self.nll = beta, nll

    def token_weights(self, turns: Tensor) -> Tensor:
        """Return phi [n] of a rollout's sampled tokens, float64.

        Args:
            turns: [n], the turn of each token, ascending; not every number needs to occur.
        """
        raise NotImplementedError

    def compare(self, samples: Sequence[ScoredSample], logprobs: Mapping[str, Tensor]) -> PairComparison:
        """Compare the rollouts of a minibatch before its step: the loss [p] of each pair, its Delta as
        ``preference_margin``, and token weights.

        Args:
            samples: whole pairs, with the reference policy's log-probs as ``old_logprobs``.
            logprobs: [n] of each rollout's sampled tokens under the policy in training, by rollout id.

        Raises:
            ValueError: a sample without the other one of its pair.
        """
        weights: dict[str, Tensor] = {}
        margins, likelihood_losses = [], []
        for name, members in grouped((sample.pair, sample) for sample in samples).items():
            sides = episodes(members)
            if not name or sorted(side[0].advantage for side in sides) != [-1.0, 1.0]:
                raise ValueError(f"rollout {members[0].rollout_id} must be in a pair: one chosen rollout, one rejected")
            signed, moved = [], []
            for side in sides:
                now, old = _of_episode(side, logprobs), torch.cat([sample.old_logprobs for sample in side])
                moved.append(now - old.double())
                signed.append(side[0].advantage * self.beta * self.token_weights(_turns(side)))
            margin = sum((weight * move).sum() for weight, move in zip(signed, moved, strict=True))
            margins.append(torch.as_tensor(margin))
            for side, weight in zip(sides, signed, strict=True):
                chosen = side[0].advantage > 0
                likelihood = self.nll / len(weight) if chosen else 0.0
                of_side = (weight * torch.sigmoid(-margins[-1]) + likelihood).float()
                counts = [len(logprobs[sample.rollout_id]) for sample in side]
                weights |= {s.rollout_id: own for s, own in zip(side, of_side.split(counts), strict=True)}
                if chosen:
                    likelihood_losses.append(-self.nll * _of_episode(side, logprobs).mean())
        deltas = torch.stack(margins)
        metrics = {"preference_margin": deltas, "preference_accuracy": (deltas > 0).double()}
        return PairComparison(weights, torch.stack(likelihood_losses) - logsigmoid(deltas), metrics)


def _turns(side: Sequence[ScoredSample]) -> Tensor:
    """Return the turn [n] of each sampled token of an episode. It ascends: a sequence's turns follow the last one's."""
    before, turns = 0, []
    for sample in side:
        turns.append(before + sample.turn_ids[sample.mask])
        before = int(turns[-1].max()) + 1
    return torch.cat(turns)


def _of_episode(side: Sequence[ScoredSample], logprobs: Mapping[str, Tensor]) -> Tensor:
    """Return the log-probs [n] of all sampled tokens of an episode, float64."""
    return torch.cat([logprobs[sample.rollout_id] for sample in side]).double()


class DPO(PreferenceLoss):
    """DPO over the agent's tokens of whole episodes (arXiv 2305.18290, eq. 7). All turns count alike, phi = 1; with
    rollouts of one turn it is DPO itself."""

    def token_weights(self, turns: Tensor) -> Tensor:
        return torch.ones(len(turns), dtype=torch.float64)


class DMPO(PreferenceLoss):
    """Direct multi-turn preference optimization (arXiv 2406.14868): later turns count less,
    ``phi(t, T) = gamma^t (1 - gamma^(T-t)) / (1 - gamma^T)``, with t from 0 and T the turns of the rollout itself;
    for gamma = 1 that is ``(T - t) / T``. The turns of an episode of several sequences are counted one sequence after
    the other.

    Args:
        beta: see :class:`PreferenceLoss`.
        gamma: in (0, 1].
    """

    def __init__(self, beta: Positive = 0.1, gamma: Annotated[float, Field(gt=0, le=1)] = 0.7) -> None:
        super().__init__(beta)
        self.gamma = gamma

    def token_weights(self, turns: Tensor) -> Tensor:
        numbers, index = torch.unique(turns, return_inverse=True)
        return self.turn_weights(len(numbers))[index]

    def turn_weights(self, turns: int) -> Tensor:
        """Return phi [t] in float64 for the turns of a rollout of that many turns."""
        t = torch.arange(turns, dtype=torch.float64)
        if self.gamma == 1.0:
            return (turns - t) / turns
        return (self.gamma**t - self.gamma**turns) / (1.0 - self.gamma**turns)
