"""How the losses of a step's rollouts become one number: the one place where ``update.loss_divisor`` counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from loop_formats.schema import require
from loop_recipes.algorithm.losses import PolicyLoss
from loop_recipes.algorithm.minibatches import minibatch_units
from loop_recipes.config.loop_config import UpdateConfig
from loop_recipes.engine.batching import StepBatch
from loop_recipes.engine.samples import CreditedSample


@dataclass(frozen=True)
class Averaging:
    """The average of a minibatch: a sum over its micro-batches and ranks, divided once.

    Attributes:
        divisor: rollouts (or pairs) of the minibatch, its sampled tokens, or a constant.
        over_tokens: all sampled tokens of the minibatch count alike; otherwise each rollout's own mean comes first.
    """

    divisor: float
    over_tokens: bool

    @classmethod
    def of(cls, minibatch: Sequence[CreditedSample], config: UpdateConfig) -> Self:
        """The average of a minibatch, which is that of all ranks."""
        if config.loss_divisor == "tokens":
            return cls(sum(int(sample.mask.sum()) for sample in minibatch), True)
        return cls(len(minibatch_units(minibatch)) if config.loss_divisor == "mean" else config.loss_divisor, False)

    def part(self, losses: Tensor, batch: StepBatch, are_sums: bool = False) -> Tensor:
        """A micro-batch's part of the average.

        Args:
            losses: [b], each rollout's share of its episode's mean over sampled tokens; or ``are_sums`` over its own.
        """
        whole = losses if are_sums or not self.over_tokens else losses * batch.episode_tokens
        return whole.sum() / self.divisor


def check_divisor(config: UpdateConfig, loss: PolicyLoss, name: str) -> None:
    """Check that the average which ``config`` asks for has a meaning for the loss of this name.

    Raises:
        ConfigError: one line that names the key and the cure.
    """
    whole = "pairs of rollouts" if loss.plan.compares_pairs else f"whole {loss.level}s"
    require(
        config.loss_divisor != "tokens" or (loss.level in ("token", "geometric") and not loss.plan.compares_pairs),
        f"update.loss_divisor: tokens is a mean over tokens, and {name} has terms of {whole}; give mean or a number",
    )
