"""The advantage of a rollout, spread over its turns by how much better or worse each of them was; in no paper.

With A_k of LOOP for rollout k, and credits c_t of its turns from a critic or from Monte-Carlo continuations, each token
of turn t gets

    A_k + strength * s * (c_t - mean over the rollout's sampled tokens of c)

so over the tokens of a rollout the advantages still have the mean A_k. ``s`` is 1 for credits in units of the return,
which Monte-Carlo values are. A critic's log-ratios have no unit: there ``s`` gives the centred credits of all trained
tokens of a collection the standard deviation that the A_k have over them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from loop_formats.schema import Positive
from loop_recipes.algorithm.credit import Credit, with_token_advantages
from loop_recipes.algorithm.method_plan import MethodPlan
from loop_recipes.engine.samples import CreditedSample, ScoredSample


class TurnCredit(Credit):
    """Base of credits that spread a rollout's advantage over its turns. A subclass computes the credit of each turn.

    Args:
        strength: factor, above 0, of the centred credits that are added to the advantage.
    """

    plan = MethodPlan(starts_from_rollout_advantage=True)
    same_scale: ClassVar[bool]
    """The ``s`` above; False is 1."""

    def __init__(self, strength: Positive = 1.0) -> None:
        self._strength = strength

    def credits(self, samples: Sequence[ScoredSample]) -> Mapping[str, Tensor]:
        """Return rollout id -> credits [t] of its turns, from the first turn on. Some rollouts may be missing."""
        raise NotImplementedError

    def credit(self, samples: list[ScoredSample]) -> list[ScoredSample]:
        own = spread(samples, self.credits(samples), self._strength, self.same_scale)
        return with_token_advantages(samples, own)


def spread(
    samples: Sequence[CreditedSample], credits: Mapping[str, Tensor], strength: float, same_scale: bool
) -> list[Tensor]:
    """Return the advantages of the sampled tokens, [n] float32 for each sample.

    Args:
        credits: rollout id -> credits [t] of its turns. A rollout without credits keeps A_k for all its tokens.
        same_scale: True computes the ``s`` above; False sets ``s`` to 1.
    """
    centred = [_centred(sample, credits.get(sample.rollout_id)) for sample in samples]
    if same_scale and samples:
        own = torch.cat([torch.full_like(each, s.advantage) for s, each in zip(samples, centred, strict=True)])
        strength *= (own.std(correction=0) / torch.cat(centred).std(correction=0).clamp(min=1e-12)).item()
    return [(sample.advantage + strength * each).float() for sample, each in zip(samples, centred, strict=True)]


def _centred(sample: CreditedSample, credits: Tensor | None) -> Tensor:
    """Return for each sampled token its turn's credit minus the mean over the rollout's tokens, [n] float64."""
    turns = sample.turn_ids[sample.mask]
    if credits is None:
        return torch.zeros(len(turns), dtype=torch.float64)
    token_credits = credits.double()[turns]
    return token_credits - token_credits.mean()
