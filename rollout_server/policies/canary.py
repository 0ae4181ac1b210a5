"""The canary: log-probs by which a server proves that it computes with the weights that the trainer means."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from loop_formats.schema import STRICT, Positive, Some, require

NEARER = 4.0
CERTAIN, SHARE = 5.0, 0.1


@dataclass(frozen=True, config=STRICT)
class Canary:
    """Log-probs that the trainer computed with its weights; they prove that the servers have the same weights.

    With the right weights, two programs in half precision agree on most tokens to 0.01, but differ on a few by half a
    nat or more. So no single token decides, but four figures over all tokens: the mean and the 90th percentile of the
    differences, whether the servers are nearer to another version than to this version, and how much of the change
    between these two versions they show. The last figure needs no bound on the noise: it finds an adapter that is read
    in a wrong order even if the adapter's whole effect is smaller than half precision's rounding.

    Attributes:
        logprobs: ``logprobs[i]`` is the log-prob of ``token_ids[positions[i]]`` given all ids before it.
        tolerance: the largest allowed 90th percentile of abs(served - expected), in nats.
        mean_tolerance: the largest allowed mean of the same differences; None means ``tolerance``.
        others: log-probs of the same tokens under other versions that a server could have by mistake: the one before
            this, and the base model.
    """

    token_ids: list[Annotated[int, Field(ge=0, lt=2**31)]]
    positions: Some[Annotated[int, Field(ge=1)]]
    logprobs: list[float]
    tolerance: Positive = 0.05
    mean_tolerance: Positive | None = None
    others: tuple[list[float], ...] = ()

    def __post_init__(self) -> None:
        require(max(self.positions) < len(self.token_ids), "positions must be indices of token_ids from 1 on")
        for values in (self.logprobs, *self.others):
            require(len(values) == len(self.positions), f"{len(self.positions)} positions and {len(values)} logprobs")

    def objection(self, served: list[float]) -> str | None:
        """Return why the served log-probs at ``positions`` cannot come from these weights; None if they can."""
        computed, expected, *others = np.array([served, self.logprobs, *self.others], dtype=float)
        gaps = np.abs(computed - expected)
        mean, p90 = gaps.mean(), np.sort(gaps)[round(0.9 * (len(gaps) - 1))]
        mean_tolerance = self.tolerance if self.mean_tolerance is None else self.mean_tolerance
        if mean > mean_tolerance or p90 > self.tolerance:
            return (
                f"differs from the trainer's log-probs by {mean:.3g} in the mean and {p90:.3g} at the 90th percentile "
                f"(tolerances {mean_tolerance:.3g} and {self.tolerance:.3g})"
            )
        for other in others:
            # A token is evidence for one of the two versions by at most their difference. If all is right, the sum is
            # negative by more than NEARER norms of the differences with a probability below exp(-NEARER^2 / 2)
            # (Hoeffding), and far more rarely with noise that is not made to deceive.
            evidence, change = (np.abs(computed - other) - gaps).sum(), expected - other
            if evidence < -NEARER * np.linalg.norm(change):
                return "is nearer to the log-probs of another policy version than to those of this one"
            # Noise has no sign of its own. If all is right, the sum is further from 0 than CERTAIN norms with a
            # probability below 2 exp(-CERTAIN^2 / 2), by the same inequality.
            missing, whole = (expected - computed) * change, (change**2).sum()
            certain = abs(missing.sum()) > CERTAIN * np.linalg.norm(missing)
            if certain and abs(missing.sum()) > SHARE * whole:
                return (
                    f"makes {1 - missing.sum() / whole:.0%} of the change from another version that the trainer's "
                    "adapter makes"
                )
        return None
