"""What a method of learning needs of the update, declared by its parts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Self


@dataclass(frozen=True)
class MethodPlan:
    """What a method needs. A loss and a credit each declare their part of it as ``plan``, and so may an advantage that
    gives tokens their own; preflight, refill and update read what :class:`~loop_recipes.algorithm.method.Method` joins.

    Attributes:
        compares_pairs: the loss compares the rollouts of a pair, which the advantage makes, before each step.
        sums_tokens: the loss of a rollout is a sum over its tokens, not its share of their mean.
        sees_hidden_information: the loss trains a critic, which may see what the agent does not.
        needs_reference: ``ref_logprobs`` are read, which cost a pass.
        keeps_samples_without_signal: all rollouts are learned from, also those whose advantage the filter would leave
            out.
        starts_from_rollout_advantage: a credit starts from the one advantage of a rollout, so that nothing may have
            given tokens their own before.
        policy_rests_iterations: for so many first iterations the weights of a credit are trained alone.
    """

    compares_pairs: bool = False
    sums_tokens: bool = False
    sees_hidden_information: bool = False
    needs_reference: bool = False
    keeps_samples_without_signal: bool = False
    starts_from_rollout_advantage: bool = False
    policy_rests_iterations: int = 0

    @classmethod
    def joined(cls, parts: Iterable[Self]) -> Self:
        """Return what all parts need together: what one of them needs, and the longest rest."""
        every = list(parts)
        return cls(**{each.name: max(getattr(part, each.name) for part in every) for each in fields(cls)})
