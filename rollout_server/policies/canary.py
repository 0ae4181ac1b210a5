"""The canary: log-probs by which a server proves that it computes with the weights that the trainer means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from rollout_server.policies.adapter_check import AdapterError

NEARER = 4.0
CERTAIN, SHARE = 5.0, 0.1
MAX_NUMBER = 2.0**31
"""The largest number in a canary. Ids, positions and nats are far smaller; a larger int may not fit a float."""


@dataclass(frozen=True)
class Canary:
    """Log-probs the trainer computed with the weights it means: a proof that the servers compute with the same.

    Two programs in half precision agree on most tokens to 0.01 and differ on a few by half a nat and more, with the
    right weights. So no single token decides, but four figures of all of them: the mean and the 90th percentile of
    the differences, whether the servers are nearer to another version than to this one, and how much of the change
    from another version to this one they make. The last needs no bound on the noise: it finds an adapter that is
    read in another order although its whole effect is smaller than the rounding of half precision.

    Attributes:
        logprobs: ``logprobs[i]`` is the log-prob of ``token_ids[positions[i]]`` given all ids before it.
        tolerance: the 90th percentile of abs(served - expected), in nats, may be this large.
        mean_tolerance: so may their mean; None means ``tolerance``.
        others: log-probs of the same tokens under other versions that a server could have by mistake: the one before
            this, and the base model.
    """

    token_ids: list[int]
    positions: list[int]
    logprobs: list[float]
    tolerance: float = 0.05
    mean_tolerance: float | None = None
    others: tuple[list[float], ...] = ()

    def objection(self, served: list[float]) -> str | None:
        """Return why log-probs of the tokens at ``positions`` are not of these weights; None if they may be."""
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

    @classmethod
    def from_dict(cls, data: Any, max_context: int) -> Canary:
        """Read a canary from JSON. Raises AdapterError, which names the wrong key."""
        if not isinstance(data, Mapping) or set(data) - {field.name for field in fields(cls)}:
            raise AdapterError(
                "canary must be an object with token_ids, positions, logprobs and perhaps tolerance, mean_tolerance "
                "and others"
            )

        def numbers(key: str, kind: Any, values: Any) -> list:
            if not isinstance(values, list) or not all(
                isinstance(value, kind) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER for value in values
            ):
                raise AdapterError(f"canary.{key} must be a list of finite numbers")
            return values

        token_ids, positions = (numbers(key, int, data.get(key)) for key in ("token_ids", "positions"))
        logprobs = numbers("logprobs", int | float, data.get("logprobs"))
        others = data.get("others", [])
        if not isinstance(others, list):
            raise AdapterError("canary.others must be a list of lists of log-probs")
        others = [numbers("others", int | float, other) for other in others]
        if not 2 <= len(token_ids) < max_context or min(token_ids) < 0:
            raise AdapterError(f"canary.token_ids must be 2 to {max_context - 1} ids of 0 or more")
        if not positions or not all(1 <= position < len(token_ids) for position in positions):
            raise AdapterError("canary.positions must be indices of token_ids from 1 on")
        for values in (logprobs, *others):
            if len(values) != len(positions):
                raise AdapterError(f"canary has {len(positions)} positions and {len(values)} logprobs")
        limits = {key: data[key] for key in ("tolerance", "mean_tolerance") if data.get(key) is not None}
        for key, value in limits.items():
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= MAX_NUMBER:
                raise AdapterError(f"canary.{key} must be a number above 0")
        return cls(token_ids, positions, logprobs, **limits, others=tuple(others))
