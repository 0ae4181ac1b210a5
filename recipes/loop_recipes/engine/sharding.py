"""Storage for the model, whole or sharded by FSDP2, and tensors that may be sharded.

torchtune's ``shard_model`` takes no mixed-precision policy, so the layers are sharded here.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.attention import varlen  # noqa: F401 - registers its operator
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn
from torchtune import training
from torchtune.modules import TransformerDecoder

from loop_formats.schema import require
from loop_plumbing.start import launched
from loop_recipes.engine import cuda_layers
from loop_recipes.engine.model import AnyDecoder, share_rope_cache
from loop_recipes.engine.process_group import single_process

ATTENTION = [
    torch.ops.torch_attn._varlen_attn.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]
"""The operators that may compute attention here."""


def place_model(
    model: AnyDecoder,
    base: Mapping[str, Tensor],
    adapter: Mapping[str, Tensor],
    device: torch.device,
    dtype: torch.dtype,
    *,
    activation_checkpointing: bool = False,
    keep_attention: bool = False,
    activation_offloading: bool = False,
    compile_layers: bool = False,
    attention: str = "fa2",
) -> AnyDecoder:
    """Give a meta model its storage: shard it over ranks, load base and adapter (full CPU tensors), fill RoPE caches.

    Each rank takes its own rows of the tensors. It reads no other rows of tensors mapped from a file, such as those of
    torchtune's checkpointer. A device never holds the whole of a sharded tensor.

    Layers are compiled one by one, inside recomputation and FSDP's gathering, so that one compilation serves them all.

    Args:
        keep_attention: activation checkpointing keeps attention's outputs, so that only the rest is computed again.
        activation_offloading: a layer's input, which activation checkpointing keeps, waits in the host's memory.
        attention: see :func:`choose_back_ends`.

    Base and adapter compute in ``dtype`` while the adapter's masters, gradients and their reduction over ranks stay
    float32. FSDP2 casts the masters of several ranks; on one rank, which holds the model whole, its layers cast them
    (:class:`~loop_recipes.engine.cuda_layers.FoldedLoRALinear`).
    """
    require(
        cuda_layers.VARLEN or device.type != "cuda" or not compile_layers,
        f"compile: torch {torch.__version__} would compile each number of rollouts anew: give false, or torch 2.13",
    )
    general = not isinstance(model, TransformerDecoder)
    choose_back_ends(attention, model, device, dtype)
    share_rope_cache(model)
    if compile_layers:
        compile_each_layer(model)
    if activation_checkpointing:
        numbers = model.base.attention_layers if general else range(len(model.layers))
        keeps = {model.layers[number] for number in numbers} if keep_attention else set()
        keep = _checkpoint_on_host if activation_offloading else partial(checkpoint, use_reentrant=False)

        def wrap(layer: nn.Module) -> nn.Module:
            # torch checks every operation of a layer that keeps some, which costs time where there is nothing to keep.
            contexts = partial(create_selective_checkpoint_contexts, ATTENTION) if layer in keeps else noop_context_fn
            return checkpoint_wrapper(layer, checkpoint_fn=keep, context_fn=contexts)

        layers = {type(layer) for layer in model.layers}
        training.set_activation_checkpointing(model, auto_wrap_policy=layers, checkpoint_wrapper_fn=wrap)
    if not single_process():
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        mesh = sharding_mesh(device)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    loaded = {}
    for name, parameter in model.state_dict().items():
        rows = _own_rows(adapter[name] if name in adapter else base[name], parameter)
        # A base that nothing changes may stay in the file's pages; an adapter must be the model's own.
        rows = rows.to(device, parameter.dtype, copy=name in adapter).contiguous()
        loaded[name] = _placed_like(rows, parameter)
    model.load_state_dict(loaded, assign=True)
    if general:
        from loop_recipes.engine.general_decoder import load_buffers  # loads transformers

        load_buffers(model, loaded, lambda name: base[name].to(device))
    for module in model.modules():
        if callable(fill := getattr(module, "rope_init", None)):
            with device:
                fill()
    training.validate_no_params_on_meta_device(model)
    return model


def choose_back_ends(attention: str, model: AnyDecoder, device: torch.device, dtype: torch.dtype) -> None:
    """Choose the kernels of attention in this process, for a decoder of either kind.

    cuDNN is excluded. It keeps a plan for every shape that it meets, and each micro-batch has a new shape.

    Args:
        attention: the choice for packed rows on CUDA, as in :func:`~loop_recipes.engine.flash_attention.use_attention`.

    Raises:
        ConfigError: ``attention`` is ``fa4``, which is not available here or computes wrongly.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    if torch.cuda.is_available() and not cuda_layers.VARLEN:
        warnings.warn(
            f"torch {torch.__version__}: varlen_attn takes no window_size or enable_gqa, so packed rows go through "
            "scaled_dot_product_attention rollout by rollout, which is slower; torch 2.13 has both",
            stacklevel=2,
        )
    if isinstance(model, TransformerDecoder):
        if device.type == "cuda" or attention == "fa4":
            from loop_recipes.engine.flash_attention import use_attention  # kernels that a CPU does not have

            use_attention(attention, model, device, dtype)
    else:
        require(attention != "fa4", "attention is fa4, which is for models of torchtune's modules: give fa2")


def _checkpoint_on_host(layer: Callable[..., Any], *inputs: Tensor, **options: Any) -> Any:
    """Run torch's ``checkpoint`` of a layer and keep the layer's inputs in host memory, pinned if they are a GPU's."""
    with save_on_cpu(pin_memory=inputs[0].is_cuda):
        return checkpoint(layer, *inputs, use_reentrant=False, **options)


def sharding_mesh(device: torch.device) -> DeviceMesh:
    """Return the mesh of ranks for FSDP2. The last dimension holds one copy of the model, in equal parts.

    Each machine of several ranks has a copy of its own, so that layers are gathered inside the machine, and only the
    gradients of trained weights go between machines (HSDP). Machines of one rank hold one copy together.
    """
    ranks, here = dist.get_world_size(), launched("LOCAL_WORLD_SIZE", 1)
    if 1 < here < ranks:
        return init_device_mesh(device.type, (ranks // here, here), mesh_dim_names=("machine", "rank"))
    return init_device_mesh(device.type, (ranks,))


def compile_each_layer(model: AnyDecoder, backend: str | Callable[..., Any] | None = None) -> None:
    """Compile each layer at its first call, for any number of tokens and rollouts.

    torchtune's ``compile_model`` would begin with the first sizes that it meets. If a layer is compiled too often,
    torch raises here; by default it would silently go on without compiling.

    Args:
        backend: None takes ``TORCH_COMPILE_BACKEND``, else inductor, as torchtune does.
    """
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    for layer in model.layers:
        layer.compile(backend=backend or os.environ.get("TORCH_COMPILE_BACKEND", "inductor"), dynamic=True)


def full_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return whole CPU copies of tensors that may be sharded, with one collective for each dtype.

    All ranks must call this with the same names. Sharded tensors are sharded by rows over the last dimension of one
    mesh, as in FSDP2.
    """
    sharded = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    whole: dict[str, Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in sharded.values()):
        whole |= _gathered({name: tensor for name, tensor in sharded.items() if tensor.dtype == dtype})
    return {name: whole[name] if name in whole else tensor.detach().cpu().clone() for name, tensor in tensors.items()}


@torch.no_grad()
def _gathered(sharded: Mapping[str, DTensor]) -> dict[str, Tensor]:
    """Return whole tensors of one dtype. Ranks send their rows one after the other, padded to the same number."""
    mesh = next(iter(sharded.values())).device_mesh
    ranks = mesh.size(-1)
    parts = []
    for tensor in sharded.values():
        rows = tensor.to_local()
        padded = rows.new_zeros(math.ceil(tensor.shape[0] / ranks), *tensor.shape[1:])
        padded[: len(rows)] = rows
        parts.append(padded.flatten())
    mine = torch.cat(parts)
    everyones = mine.new_empty(ranks * len(mine))
    dist.all_gather_single(everyones, mine, group=mesh.get_group(mesh.ndim - 1))
    columns = everyones.view(ranks, -1).cpu().split([len(rows) for rows in parts], dim=1)
    return {
        name: column.reshape(-1, *tensor.shape[1:])[: tensor.shape[0]].clone()
        for (name, tensor), column in zip(sharded.items(), columns, strict=True)
    }


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's storage of a possibly sharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like_parameter(full: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return a copy of ``full`` on the device of ``parameter``, sharded like ``parameter``."""
    rows = _own_rows(full, parameter).to(local_part(parameter).device, copy=True)
    return _placed_like(rows, parameter)


def _own_rows(full: Tensor, like: Tensor) -> Tensor:
    """Return a view of the rows of ``full`` that this rank holds if the tensor is sharded like ``like``."""
    if not isinstance(like, DTensor):
        return full
    parts, rank = full.chunk(like.device_mesh.size(-1)), like.device_mesh.get_local_rank(like.device_mesh.ndim - 1)
    return parts[rank] if rank < len(parts) else full[:0]


def _placed_like(rows: Tensor, like: Tensor) -> Tensor:
    """Return the tensor, sharded like ``like``, of which this rank holds ``rows``."""
    if not isinstance(like, DTensor):
        return rows
    return DTensor.from_local(
        rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def clip_grad_norm(parameters: list[nn.Parameter], limit: float | None, scale: float = 1.0) -> float:
    """Clip the joint gradient norm to ``limit`` (None: only measure). Return the norm before, equal on all ranks.

    The gradients are those of a loss times ``scale``, and are first divided by ``scale``.
    """
    if scale != 1.0:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(scale)
    norm = torch.nn.utils.clip_grad_norm_(parameters, math.inf if limit is None else limit)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
