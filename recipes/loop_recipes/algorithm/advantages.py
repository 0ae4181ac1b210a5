"""Advantages: the comparison of a rollout's return with others, by which it moves the policy.

Every component maps ``(rewards [b], groups [b])`` to advantages [b]. A group holds the rollouts of one task that were
really finished (four to six of six under early stop); its real size n enters the formulas, never the number asked for.
A group of one has nothing to be compared with: its advantage is 0, and the low-advantage filter drops it.

Two kinds have one method more. A :class:`TokenAdvantage` also gives every token its own, from log-probs that are known
only later. A :class:`PairingAdvantage` also finds the pairs that a preference loss compares.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from loop_recipes.algorithm.method_plan import MethodPlan
from loop_recipes.engine.samples import ScoredSample, episodes

SMALLEST_SPREAD = 1e-7
"""The smallest divisor of advantages: rewards without any spread have the advantage 0 instead of 0/0. It is not a
smoothing term."""


class Advantage(Protocol):
    """The interface of every component for advantages."""

    def __call__(self, rewards: Tensor, groups: Tensor) -> Tensor:
        """Return the advantages [b] of rollouts with these returns [b]; ``groups`` [b] numbers their tasks."""


@runtime_checkable
class TokenAdvantage(Advantage, Protocol):
    """An advantage that also gives each sampled token its own. No filter applies then, and no critic can be used.
    Samples have ``ref_logprobs`` if the component's ``plan`` says ``needs_reference``, or if there is no ``plan``."""

    def token_advantages(self, samples: Sequence[ScoredSample]) -> list[Tensor]:
        """Return float32 advantages [n] for each sample. The samples are a whole collection, with ``old_logprobs`` and
        the base model's ``ref_logprobs``."""


@runtime_checkable
class PairingAdvantage(Advantage, Protocol):
    """An advantage that also pairs a task's rollouts, for a loss that compares pairs; 1 and -1 in a pair, else 0."""

    def pairs(self, rewards: Tensor, groups: Tensor) -> list[tuple[int, int]]:
        """Return pairs of indices, (chosen rollout, rejected rollout); no rollout is in two pairs."""


def _group_statistics(values: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return three float64 tensors [b]: the size, mean and population variance of each rollout's group."""
    if values.shape != groups.shape or values.ndim != 1:
        raise ValueError(f"rewards {list(values.shape)} and groups {list(groups.shape)} must be vectors of one length")
    _, index = torch.unique(groups, return_inverse=True)
    values = values.double()
    sums = torch.zeros(len(values), dtype=torch.float64, device=values.device)
    size = sums.index_add(0, index, torch.ones_like(values))[index]
    mean = sums.index_add(0, index, values)[index] / size
    variance = sums.index_add(0, index, (values - mean) ** 2)[index] / size
    return size, mean, variance


@dataclass(frozen=True)
class LeaveOneOut:
    """``A_k = R_k - mean of the group's other returns = n/(n-1) (R_k - mean_i R_i)`` (LOOP, eq. 3)."""

    def __call__(self, rewards: Tensor, groups: Tensor) -> Tensor:
        size, mean, _ = _group_statistics(rewards, groups)
        return (size / (size - 1).clamp(min=1) * (rewards - mean)).float()


@dataclass(frozen=True)
class StdNormalized:
    """``A_k = (R_k - mean_i R_i) / std_i R_i``, population standard deviation (GRPO, arXiv 2402.03300).

    Args:
        leave_one_out: the baseline is the mean of the group's other returns, which makes every advantage n/(n-1) times
            as large. LOOP's section 4.2 describes GRPO and RwNorm in this way, and the code of LOOP's authors agrees.
            The caption of LOOP's Table 1 and GRPO's paper use the mean of the whole group.
    """

    leave_one_out: bool = False

    def __call__(self, rewards: Tensor, groups: Tensor) -> Tensor:
        size, mean, variance = _group_statistics(rewards, groups)
        factor = size / (size - 1).clamp(min=1) if self.leave_one_out else 1.0
        return (factor * (rewards - mean) / variance.sqrt().clamp(min=SMALLEST_SPREAD)).float()


@dataclass(frozen=True)
class BatchNormalized:
    """Returns less a baseline, divided by the standard deviation over the whole batch (REINFORCE++, arXiv 2501.03262).

    Args:
        group_baseline: subtract each group's mean first (the paper's variant for several rollouts a prompt); otherwise
            the batch's mean is the baseline.
    """

    group_baseline: bool = False

    def __call__(self, rewards: Tensor, groups: Tensor) -> Tensor:
        _, mean, _ = _group_statistics(rewards, groups)
        centred = rewards.double() - (mean if self.group_baseline else rewards.double().mean())
        return (centred / centred.square().mean().sqrt().clamp(min=SMALLEST_SPREAD)).float()


@dataclass(frozen=True)
class ReturnToGo:
    """Each token's return to go with a KL penalty inside, normalised over the batch's tokens (REINFORCE++, arXiv
    2501.03262). The last token earns the return, and every token ``- kl_coefficient * KL_i``. Without a discount,

        A_t = R - kl_coefficient * sum over the sequence's sampled tokens i >= t of (log pi_old(i) - log pi_ref(i))

    less its mean over all sampled tokens of the collection, divided by their population standard deviation.

    The rollout's one advantage, for the filter and the viewer, is the normalised return alone.

    Args:
        kl_coefficient: the paper's beta.
    """

    kl_coefficient: float = 0.01
    plan: ClassVar[MethodPlan] = MethodPlan(needs_reference=True)

    def __call__(self, rewards: Tensor, groups: Tensor) -> Tensor:
        return BatchNormalized()(rewards, groups)

    def token_advantages(self, samples: Sequence[ScoredSample]) -> list[Tensor]:
        """See :meth:`TokenAdvantage.token_advantages`."""
        penalties = [sample.old_logprobs - _reference(sample) for sample in samples]
        returns = [
            sample.reward - self.kl_coefficient * penalty.double().flip(0).cumsum(0).flip(0)
            for sample, penalty in zip(samples, penalties, strict=True)
        ]
        every = torch.cat(returns)
        spread = every.std(correction=0).clamp(min=SMALLEST_SPREAD)
        return [((each - every.mean()) / spread).float() for each in returns]


@dataclass(frozen=True)
class TurnReturns:
    """Each turn's reward to go, less the other rollouts' mean at the same turn; for environments that give rewards per
    turn (``StepResult.reward``). For turn t of rollout k, with turn rewards r and the episode's own reward R,

        G_kt = grade * R_k + sum over turns i >= t of r_ki
        A_kt = G_kt - mean over the task's other rollouts j of G_jt

    where G_jt is 0 if rollout j ended before turn t: nothing was left to earn. The baseline is a function of the other
    rollouts alone, so the sum over turns of ``A_kt grad log p`` is unbiased, however many turns they have. A mean over
    only the rollouts that reach turn t is biased. Few rollouts reach late turns; such a mean shrinks the gradient
    there, whether rollout k is in it or 0 stands for a mean of no others.

    The rollout's one advantage, for the viewer, is :class:`LeaveOneOut` of R alone.

    Args:
        grade: the factor of R, which is added after the last turn; 0 if R is already the sum of the turns' rewards.
    """

    grade: float = 1.0
    plan: ClassVar[MethodPlan] = MethodPlan()

    def __call__(self, rewards: Tensor, groups: Tensor) -> Tensor:
        return LeaveOneOut()(rewards, groups)

    def token_advantages(self, samples: Sequence[ScoredSample]) -> list[Tensor]:
        """See :meth:`TokenAdvantage.token_advantages`."""
        returns: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
        first_turn: dict[str, int] = {}
        for members in episodes(sorted(samples, key=lambda sample: sample.segment)):
            rewards: list[float] = []
            for sample in members:
                first_turn[sample.rollout_id] = len(rewards)
                rewards += sample.turn_rewards
            rewards[-1] += self.grade * members[0].reward
            to_go = torch.tensor(rewards, dtype=torch.float64).flip(0).cumsum(0).flip(0)
            returns[members[0].task_id][members[0].episode] = to_go
        advantages: dict[str, Tensor] = {}
        for of_task in returns.values():
            advantages |= zip(of_task, leave_one_out_by_turn(list(of_task.values())), strict=True)
        return [
            advantages[sample.episode][first_turn[sample.rollout_id] + sample.turn_ids[sample.mask]].float()
            for sample in samples
        ]


def leave_one_out_by_turn(returns: Sequence[Tensor]) -> list[Tensor]:
    """Return the returns to go [t] of each rollout of a task, less the others' mean; an ended rollout counts as 0."""
    padded = pad_sequence(list(returns), batch_first=True)
    others = (padded.sum(0) - padded) / max(1, len(returns) - 1)
    advantages = padded - others if len(returns) > 1 else torch.zeros_like(padded)
    return [row[: len(own)] for row, own in zip(advantages, returns, strict=True)]


def _reference(sample: ScoredSample) -> Tensor:
    if sample.ref_logprobs is None:
        raise ValueError(f"rollout {sample.rollout_id} has no log-probs under the base model")
    return sample.ref_logprobs


@dataclass(frozen=True)
class Solved:
    """1 for a rollout that solved its task (return 1), 0 for any other: the filter of expert iteration and rejection
    sampling (LOOP, appendices C.2 and C.3)."""

    def __call__(self, rewards: Tensor, groups: Tensor) -> Tensor:
        return (rewards >= 1.0).float()


@dataclass(frozen=True)
class Shuffled:
    """A negative control: :class:`LeaveOneOut` advantages, each given to some other rollout of the collection.

    Spread, filter and gradient sizes stay the same, only the credit is wrong: a policy must not learn. The order is
    drawn from the rewards and ``seed``, so that a resumed run draws the same order.
    """

    seed: int = 0

    def __call__(self, rewards: Tensor, groups: Tensor) -> Tensor:
        advantages = LeaveOneOut()(rewards, groups)
        content = rewards.double().numpy().tobytes() + groups.long().numpy().tobytes()
        generator = torch.Generator().manual_seed(zlib.crc32(content, self.seed))
        return advantages[torch.randperm(len(advantages), generator=generator)]
