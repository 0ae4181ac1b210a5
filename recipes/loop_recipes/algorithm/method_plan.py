"""The plan of a method of learning: its needs, which its parts declare to the update."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Self


@dataclass(frozen=True)
class MethodPlan:
    """The needs of a method. Each loss and credit declares its needs as ``plan``; an advantage of single tokens may
    do so, too. Preflight, refill and update read the joint plan of
    :class:`~loop_recipes.algorithm.method.Method`.

    Attributes:
        compares_pairs: the loss compares the rollouts of a pair, which the advantage makes, before each step.
        sums_tokens: the loss of a rollout is a sum over its tokens, not its share of their mean.
        sees_hidden_information: the loss trains a critic, which may see what the agent does not.
        needs_reference: the method reads ``ref_logprobs``, which cost a pass.
        keeps_samples_without_signal: the method also learns from rollouts that the filter would leave out.
        starts_from_rollout_advantage: a credit starts from the one advantage of a rollout, so no component before may
            have given tokens different advantages.
        policy_rests_iterations: the number of first iterations that train the weights of a credit alone.
    """

    compares_pairs: bool = False
    sums_tokens: bool = False
    sees_hidden_information: bool = False
    needs_reference: bool = False
    keeps_samples_without_signal: bool = False
    starts_from_rollout_advantage: bool = False
    policy_rests_iterations: int = 0

    @classmethod
    def joined(cls, plans: Iterable[Self]) -> Self:
        """Return the plan of all parts together: each need that one of them has, and the longest rest."""
        every = list(plans)
        return cls(**{each.name: max(getattr(plan, each.name) for plan in every) for each in fields(cls)})
