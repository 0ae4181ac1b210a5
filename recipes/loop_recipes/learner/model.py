"""Builds the model a recipe trains: frozen base in its own dtype, LoRA in float32, sharded by FSDP2 where asked.

torchtune's ``shard_model`` takes no mixed-precision policy, its builders make one RoPE cache per layer (2.15 GB for
Qwen2.5-32B), and its LoRA initialisation depends on the number of ranks; those three steps are done here instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtune import training
from torchtune.modules import TransformerDecoder, TransformerSelfAttentionLayer
from torchtune.modules.attention import MultiHeadAttention
from torchtune.modules.peft import LoRALinear, get_adapter_params, set_trainable_params

from loop_recipes.config.schema import ConfigError, build

_WRAPPER = "_checkpoint_wrapped_module."


def meta_model(component: Mapping[str, Any], dtype: torch.dtype) -> TransformerDecoder:
    """The config's model without storage: base weights in ``dtype`` and frozen, LoRA weights in float32 and trainable.

    Raises:
        ConfigError: the component is not a decoder with LoRA.
    """
    try:
        with training.set_default_dtype(dtype), torch.device("meta"):
            model = build(component)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"model: {component['_component_']} cannot be built: {str(error).splitlines()[0]}") from error
    lora = [module for module in model.modules() if isinstance(module, LoRALinear)]
    if not lora:
        raise ConfigError(f"model: {component['_component_']} has no LoRA layers; name a lora_* builder of torchtune")
    for module in lora:
        module.lora_a.float()
        module.lora_b.float()
    set_trainable_params(model, get_adapter_params(model))
    return model


def check_shapes(model: nn.Module, base: Mapping[str, Tensor], where: str) -> None:
    """Compare the base checkpoint's tensors with the model's.

    Raises:
        ConfigError: names the first tensor that is missing, too many or of another shape.
    """
    expected = {name: tensor for name, tensor in model.state_dict().items() if ".lora_" not in name}
    for name, tensor in expected.items():
        if name not in base:
            raise ConfigError(f"checkpoint {where} lacks {name}; is the config's model the one it was saved from?")
        if base[name].shape != tensor.shape:
            raise ConfigError(
                f"checkpoint {where}: {name} is {list(base[name].shape)}, the config's model wants "
                f"{list(tensor.shape)}; make the sizes under `model` those of its config.json"
            )
    for name in base:
        if name not in expected:
            raise ConfigError(f"checkpoint {where} has {name}, the config's model has not; wrong number of layers?")


def check_adapter(model: nn.Module, adapter: Mapping[str, Tensor]) -> None:
    """Compare an adapter's tensors with the model's LoRA layers.

    Raises:
        ConfigError: names the first tensor that is missing or of another shape.
    """
    for name, parameter in adapter_parameters(model).items():
        if name not in adapter or adapter[name].shape != parameter.shape:
            found = list(adapter[name].shape) if name in adapter else "missing"
            raise ConfigError(
                f"adapter: {name} is {found}, the config's model wants {list(parameter.shape)}; "
                "make lora_rank, lora_attn_modules and apply_lora_to_mlp those it was made with"
            )


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
) -> nn.Module:
    """Build a critic of hidden states [n, width], with full CPU ``weights`` if given.

    It is sharded like the policy, so that their gradients are clipped as one.

    Raises:
        ConfigError: it cannot be built, or the weights are not its own.
    """
    try:
        critic = build(component, width)
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


def share_rope_cache(model: nn.Module) -> None:
    """Let all attention layers of the same head size use one RoPE module, and so one cache."""
    shared: dict[tuple[Any, ...], nn.Module] = {}
    for attention in [module for module in model.modules() if isinstance(module, MultiHeadAttention)]:
        rope = attention.pos_embeddings
        key = (type(rope), rope.dim, rope.max_seq_len, rope.base)
        attention.pos_embeddings = shared.setdefault(key, rope)


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The LoRA weights by their torchtune names, in the model's order, the same on every rank."""
    return {name.replace(_WRAPPER, ""): parameter for name, parameter in get_adapter_params(model).items()}


def new_adapter(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Fresh LoRA weights as full float32 CPU tensors: A uniform in +-1/sqrt(in), B zero.

    The same for every rank and any number of ranks.
    """
    generator = torch.Generator().manual_seed(seed)
    fresh = {}
    for name, parameter in adapter_parameters(model).items():
        fresh[name] = torch.zeros(parameter.shape)
        if name.endswith("lora_a.weight"):
            bound = 1.0 / math.sqrt(parameter.shape[1])
            fresh[name].uniform_(-bound, bound, generator=generator)
    return fresh


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


class AdapterVersions:
    """Keeps the adapter of every policy version that some rollout may still need, each rank its own shard.

    Old log-probs belong to the version that sampled; with ``max_policy_lag`` 1 that can be the one before the newest.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = adapter_parameters(model)
        self._kept: dict[int, dict[str, Tensor]] = {}

    @property
    def versions(self) -> list[int]:
        return sorted(self._kept)

    def keep(self, version: int) -> None:
        """Remember the model's present adapter as ``version``."""
        self._kept[version] = {name: local_part(p.detach()).clone() for name, p in self._parameters.items()}

    def put(self, version: int, adapter: Mapping[str, Tensor]) -> None:
        """Remember full tensors, e.g. from a checkpoint, as ``version``."""
        self._kept[version] = {
            name: local_part(like_parameter(adapter[name], p)).clone() for name, p in self._parameters.items()
        }

    def forget_before(self, version: int) -> None:
        self._kept = {kept: adapter for kept, adapter in self._kept.items() if kept >= version}

    def full(self, version: int) -> dict[str, Tensor]:
        """The whole adapter of a version as CPU tensors; all ranks must call it."""
        with self.active(version):
            return {name: full_tensor(parameter) for name, parameter in self._parameters.items()}

    @contextmanager
    def active(self, version: int) -> Iterator[None]:
        """Put a version's adapter into the model, and the present one back afterwards, bit for bit."""
        present = {name: local_part(p.detach()).clone() for name, p in self._parameters.items()}
        self._copy_in(self._kept[version])
        try:
            yield
        finally:
            self._copy_in(present)

    @torch.no_grad()
    def _copy_in(self, adapter: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            local_part(parameter.detach()).copy_(adapter[name])


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
