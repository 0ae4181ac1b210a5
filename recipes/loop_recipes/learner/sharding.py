"""Storage for the model and the critic, whole or sharded by FSDP2, and tensors that may be sharded.

torchtune's ``shard_model`` takes no mixed-precision policy, so the layers are sharded here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtune import training
from torchtune.modules import TransformerDecoder, TransformerSelfAttentionLayer

from loop_recipes.config.components import build
from loop_recipes.learner.critic import Critic
from loop_recipes.learner.model import share_rope_cache
from rollout_server.schema import ConfigError


def place_model(
    model: TransformerDecoder,
    base: Mapping[str, Tensor],
    adapter: Mapping[str, Tensor],
    device: torch.device,
    dtype: torch.dtype,
    *,
    activation_checkpointing: bool = False,
    shard: bool = False,
) -> TransformerDecoder:
    """Give a meta model its storage: shard it if asked, load base and adapter (full CPU tensors), fill RoPE caches.

    Sharded, base and adapter compute in ``dtype`` while the adapter's masters, gradients and their reduction over
    ranks stay float32; the base is not stored twice.
    """
    share_rope_cache(model)
    if activation_checkpointing:
        training.set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
    if shard:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    training.load_from_full_model_state_dict(model, {**base, **adapter}, device)
    for module in model.modules():
        if hasattr(module, "rope_init"):
            with device:
                module.rope_init()
    training.validate_no_params_on_meta_device(model)
    return model


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
        fully_shard(critic, mesh=dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),)))
    return critic


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a possibly sharded tensor, as a CPU copy of its own; all ranks must call it."""
    tensor = tensor.detach()
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.cpu().clone()


def local_part(tensor: Tensor) -> Tensor:
    """This rank's storage of a possibly sharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like_parameter(full: Tensor, parameter: nn.Parameter) -> Tensor:
    """``full`` placed as ``parameter`` is: on its device, sharded as it is sharded."""
    full = full.to(local_part(parameter).device)
    if isinstance(parameter, DTensor):
        return distribute_tensor(full, parameter.device_mesh, parameter.placements)
    return full.clone()


def clip_grad_norm(parameters: list[nn.Parameter], limit: float | None, scale: float = 1.0) -> float:
    """Clip the joint gradient norm to ``limit`` (None: only measure); returns the norm before, equal on all ranks.

    Gradients of a loss times ``scale`` are divided by it first.
    """
    if scale != 1.0:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(scale)
    norm = torch.nn.utils.clip_grad_norm_(parameters, math.inf if limit is None else limit)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
