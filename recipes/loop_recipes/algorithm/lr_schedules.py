"""Learning-rate schedules over iterations, for ``lr_scheduler._component_``; beside torchtune's cosine schedule.

A recipe steps them once per iteration (collection and update), because the number of optimizer steps in an iteration
varies with how many rollouts carry signal.
"""

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def linear_with_warmup(
    optimizer: Optimizer, num_training_steps: int, num_warmup_steps: int = 0, last_epoch: int = -1
) -> LambdaLR:
    """Rise to the optimizer's lr over ``num_warmup_steps`` (the first step is not zero), then fall to zero linearly."""

    def factor(step: int) -> float:
        if step < num_warmup_steps:
            return (step + 1) / (num_warmup_steps + 1)
        return max(0.0, (num_training_steps - step) / max(1, num_training_steps - num_warmup_steps))

    return LambdaLR(optimizer, factor, last_epoch)


def constant_with_warmup(
    optimizer: Optimizer, num_training_steps: int, num_warmup_steps: int = 0, last_epoch: int = -1
) -> LambdaLR:
    """Rise to the optimizer's lr over ``num_warmup_steps``, then stay there; ``num_training_steps`` is ignored."""
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (num_warmup_steps + 1)), last_epoch)
