"""The optimizer and its schedule as a config names them, and the optimizer's state in and out of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from loop_recipes.config.components import build
from loop_recipes.config.loop_config import LearnerConfig
from loop_recipes.engine.checkpoint import TrainingState
from loop_recipes.engine.model import adapter_parameters, trained_parameters
from loop_recipes.engine.sharding import full_tensors, like_parameter, local_part


def build_optimizer(
    conf: LearnerConfig,
    model: nn.Module,
    further: Mapping[str, nn.Module],
    rates: Mapping[str, float],
    checkpoint: TrainingState | None,
) -> tuple[Optimizer, LRScheduler]:
    """Build the optimizer of the adapter and of further modules, and its schedule over iterations. Both continue from a
    checkpoint, but learning rates and other options are the config's, which may have changed since.

    Args:
        rates: by name, the learning rates of the modules that do not take the adapter's.
    """
    groups: list[dict[str, Any]] = [{"params": list(adapter_parameters(model).values())}]
    for name, module in further.items():
        groups.append({"params": list(module.parameters())})
        if name in rates:
            groups[-1]["lr"] = rates[name]
    optimizer = build(conf.optimizer, groups)
    done = 0
    if checkpoint is not None:
        done = checkpoint.state["iteration"]
        restore_optimizer(optimizer, trained_parameters(model, further), checkpoint.optimizer)
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]  # a schedule that begins in the middle asks for it
    scheduler = build(conf.lr_scheduler, optimizer, num_training_steps=conf.max_iterations, last_epoch=done - 1)
    return optimizer, scheduler


def optimizer_tensors(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the optimizer's state as full CPU tensors named ``<parameter>/<attribute>``; all ranks must call it.

    Raises:
        ValueError: the optimizer keeps something that is not a tensor.
    """
    tensors = {}
    for name, parameter in parameters.items():
        for attribute, value in sorted(optimizer.state.get(parameter, {}).items()):
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"{type(optimizer).__name__} keeps {attribute} as {type(value).__name__}, not a tensor"
                )
            tensors[f"{name}/{attribute}"] = value
    return full_tensors(tensors)


def restore_optimizer(
    optimizer: Optimizer,
    parameters: Mapping[str, nn.Parameter],
    tensors: Mapping[str, Tensor],
) -> None:
    """Load the tensors of :func:`optimizer_tensors` into the optimizer, on any number of ranks."""
    for key, tensor in tensors.items():
        name, _, attribute = key.rpartition("/")
        parameter = parameters[name]
        # Moments are placed like their parameter; AdamW's step counter is on the CPU unless the kernel wants it near.
        near = optimizer.param_groups[0].get("fused") or optimizer.param_groups[0].get("capturable")
        if tensor.shape == parameter.shape:
            placed = like_parameter(tensor, parameter)
        else:
            placed = tensor.to(local_part(parameter).device) if near else tensor
        optimizer.state[parameter][attribute] = placed
