"""The scale of rewards that are not in [0, 1]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ROUNDING = 1e-9
"""The rounding error of a sum of weights, as a share of the scale."""


@dataclass(frozen=True)
class Scale:
    """The lowest and the highest possible reward; the highest means success.

    Raises:
        ValueError: the lowest reward is not below the highest, or one of them is infinite.
    """

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if not self.low < self.high < float("inf") or self.low == float("-inf"):
            raise ValueError(f"a scale is [lowest, highest], two numbers, not [{self.low!r}, {self.high!r}]")

    @classmethod
    def of(cls, limits: Sequence[float] | None) -> Scale:
        """Read a scale from a config's value; None stands for [0, 1]. Raises ValueError."""
        if limits is None:
            return cls()
        if not isinstance(limits, list | tuple) or len(limits) != 2 or not all(map(_is_number, limits)):
            raise ValueError(f"a scale is [lowest, highest], two numbers, not {limits!r}")
        return cls(*map(float, limits))

    def share(self, reward: float) -> float:
        """Map a reward on this scale to [0, 1].

        Raises:
            ValueError: the reward is not on the scale.
        """
        share = (reward - self.low) / (self.high - self.low)
        if not -ROUNDING <= share <= 1.0 + ROUNDING:
            raise ValueError(f"the reward {reward!r} is not from {self.low:g} to {self.high:g}: give its scale")
        return 1.0 if share >= 1.0 - ROUNDING else max(0.0, share)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
