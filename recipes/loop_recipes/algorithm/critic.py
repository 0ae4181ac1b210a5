"""PPO with a learned critic: the baseline of LOOP's Table 1 (appendix C.5), for token-level advantages.

With gamma = lambda = 1 the generalised advantage of sampled token t is ``R - V(c, x_<t)``: the return minus the
critic's estimate before the token. The critic is a small MLP on the policy's last hidden state at the position that
predicts the token. Those states come detached (:class:`~loop_recipes.engine.token_outputs.TokenOutputs`), so no value
gradient reaches the policy's weights, which the paper found to destabilise training.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from loop_formats.schema import Count, NotNegative, Positive
from loop_recipes.algorithm.credit import TrainedCredit, TrainingRun, with_token_advantages
from loop_recipes.algorithm.method_plan import MethodPlan
from loop_recipes.algorithm.scoring import Scorer
from loop_recipes.engine.batching import MicroBatch, StepBatch
from loop_recipes.engine.samples import ScoredSample


class Critic(TrainedCredit):
    """Value MLP with ReLU, float32, and the paper's schedule for its loss.

    Args:
        hidden_sizes: by default 3072 and 2048 at the paper's model width of 5120, in proportion at other widths.
        coefficient: two weights of the value loss, at iteration 0 and from ``decay_iterations`` on; linear between.
        decay_iterations: see ``coefficient``.
        warmup_iterations: how many first iterations train the critic alone.
        seed: for the initial weights, so that they do not depend on rank or order of construction.
        lr, clip_grad_norm: see :class:`~loop_recipes.algorithm.credit.TrainedCredit`.
    """

    metric = "value_loss"
    figures: ClassVar[Mapping[str, str]] = {"value_loss": "mean squared error of the critic's values"}
    _scorer: Scorer

    def __init__(
        self,
        hidden_sizes: Sequence[int] | None = None,
        coefficient: tuple[float, float] = (0.1, 0.001),
        decay_iterations: Count = 200,
        warmup_iterations: int = 10,
        seed: int = 0,
        lr: NotNegative | None = None,
        clip_grad_norm: Positive | None = None,
    ) -> None:
        super().__init__(lr, clip_grad_norm)
        self.first_coefficient, self.last_coefficient = coefficient
        self.decay_iterations = decay_iterations
        self._hidden_sizes, self._seed = hidden_sizes, seed
        self.plan = MethodPlan(
            keeps_samples_without_signal=True,
            starts_from_rollout_advantage=True,
            policy_rests_iterations=warmup_iterations,
        )

    def make_weights(self, width: int) -> None:
        sizes = [width, *(self._hidden_sizes or (3 * width // 5, 2 * width // 5)), 1]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            layers = [nn.Linear(i, o, dtype=torch.float32) for i, o in itertools.pairwise(sizes)]
        between = [module for layer in layers[:-1] for module in (layer, nn.ReLU())]
        self.mlp = nn.Sequential(*between, layers[-1])

    def setup(self, run: TrainingRun) -> None:
        self._scorer = run.scorer

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the values [n] of detached hidden states [n, d]."""
        return self.mlp(hidden.float()).squeeze(-1)

    def credit(self, samples: list[ScoredSample]) -> list[ScoredSample]:
        """Give each token the return minus the critic's value before the update."""
        model = self._scorer.model

        def advantages(batch: MicroBatch) -> Tensor:
            return token_advantages(self(model(**batch.inputs(), with_hidden=True).hidden), batch)

        by_rollout = self._scorer.per_token(samples, advantages)
        return with_token_advantages(samples, [by_rollout[sample.rollout_id] for sample in samples])

    def further_loss(self, hidden: Tensor, batch: StepBatch) -> Tensor:
        return value_loss(self(hidden), batch)

    def coefficient(self, iteration: int) -> float:
        progress = min(1.0, iteration / self.decay_iterations)
        return self.first_coefficient + progress * (self.last_coefficient - self.first_coefficient)


def token_advantages(values: Tensor, batch: MicroBatch) -> Tensor:
    """Return advantages [n], return minus value, without gradient; values are clipped to the returns' range [0, 1]."""
    return batch.rewards[batch.rollout_index] - values.detach().clamp(0.0, 1.0)


def value_loss(values: Tensor, batch: StepBatch) -> Tensor:
    """Return each rollout's mean [b] of ``(V - R)^2`` over its sampled tokens; V unclipped, with gradient."""
    errors = (values - batch.rewards[batch.rollout_index]).square()
    sums = torch.zeros_like(batch.rewards).index_add(0, batch.rollout_index, errors)
    return sums / batch.episode_tokens
