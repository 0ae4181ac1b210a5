"""PPO with a learned critic: the baseline of LOOP's Table 1 (appendix C.5), for token-level advantages.

With gamma = lambda = 1 the generalised advantage of sampled token t is ``R - V(c, x_<t)``: the return less what the
critic expected before the token. The critic is a small MLP on the policy's last hidden state at the position that
predicts the token. Those states come detached (:class:`~loop_recipes.engine.decoder.TokenOutputs`), so no value
gradient reaches the policy's weights, which the paper found to destabilise training.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from loop_formats.schema import ConfigError
from loop_recipes.config.components import build
from loop_recipes.engine.batching import MicroBatch, StepBatch
from loop_recipes.engine.sharding import sharding_mesh


class Critic(nn.Module):
    """Value MLP with ReLU, float32, and the paper's schedule for its loss.

    Sharded training: call ``fully_shard`` on it beside the policy, and treat its loss like the policy's.

    Args:
        width: d of the policy's hidden states; the recipe gives it.
        hidden_sizes: by default the paper's 3072 and 2048 for its width of 5120, in proportion for others.
        coefficient: of the value loss, at iteration 0 and from ``decay_iterations`` on, linear between.
        decay_iterations: see ``coefficient``.
        warmup_iterations: how many first iterations train the critic alone.
        seed: of the initial weights, so that they do not depend on rank or order of construction.
    """

    def __init__(
        self,
        width: int,
        hidden_sizes: Sequence[int] | None = None,
        coefficient: tuple[float, float] = (0.1, 0.001),
        decay_iterations: int = 200,
        warmup_iterations: int = 10,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if decay_iterations < 1:
            raise ValueError(f"decay_iterations must be at least 1, but is {decay_iterations}")
        self.first_coefficient, self.last_coefficient = coefficient
        self.decay_iterations, self.warmup_iterations = decay_iterations, warmup_iterations
        sizes = [width, *(hidden_sizes or (3 * width // 5, 2 * width // 5)), 1]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layers = [nn.Linear(i, o, dtype=torch.float32) for i, o in itertools.pairwise(sizes)]
        between = [module for layer in layers[:-1] for module in (layer, nn.ReLU())]
        self.mlp = nn.Sequential(*between, layers[-1])

    def forward(self, hidden: Tensor) -> Tensor:
        """Values [n] of detached hidden states [n, d]."""
        return self.mlp(hidden.float()).squeeze(-1)

    def coefficient(self, iteration: int) -> float:
        """Weight of the value loss at an iteration counted from 0."""
        progress = min(1.0, iteration / self.decay_iterations)
        return self.first_coefficient + progress * (self.last_coefficient - self.first_coefficient)

    def trains_alone(self, iteration: int) -> bool:
        """Whether the policy rests at this iteration."""
        return iteration < self.warmup_iterations


def token_advantages(values: Tensor, batch: MicroBatch) -> Tensor:
    """[n]: return less value, the value clipped to the range of returns, [0, 1]; no gradient."""
    return batch.rewards[batch.rollout_index] - values.detach().clamp(0.0, 1.0)


def value_loss(values: Tensor, batch: StepBatch) -> Tensor:
    """[b]: mean over each rollout's sampled tokens of ``(V - R)^2``, unclipped values, with gradient."""
    errors = (values - batch.rewards[batch.rollout_index]).square()
    sums = torch.zeros_like(batch.rewards).index_add(0, batch.rollout_index, errors)
    return sums / batch.episode_tokens


def place_critic(
    component: Mapping[str, Any], width: int, weights: Mapping[str, Tensor] | None, device: torch.device, shard: bool
) -> Critic:
    """Build a critic of hidden states [n, width], with full CPU ``weights`` if given.

    It is sharded like the policy, so that their gradients are clipped as one.

    Raises:
        ConfigError: it cannot be built, or the weights are not its own.
    """
    try:
        critic: Critic = build(component, width)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"critic: {error}") from error
    if weights is not None:
        expected = {name: tensor.shape for name, tensor in critic.state_dict().items()}
        if expected != {name: tensor.shape for name, tensor in weights.items()}:
            raise ConfigError("critic: the checkpoint's critic has other sizes; make critic what it was in that run")
        critic.load_state_dict(dict(weights))
    critic.to(device)
    if shard:
        fully_shard(critic, mesh=sharding_mesh(device))
    return critic
