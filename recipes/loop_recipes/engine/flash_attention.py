"""FlashAttention-4 for packed rows on Hopper and Blackwell: the kernels that vLLM's wheel for CUDA brings.

torch computes ``varlen_attn`` by FlashAttention-2 until it is given a module with ``_flash_attn_fwd`` and
``_flash_attn_bwd``, as this one is. The operator stays the same, so activation checkpointing keeps it and a compiled
layer calls it as before. Kernels are compiled once in a process for the model's heads; rows of other lengths share
them, except the shortest rows and rows of more than 256 rollouts.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from functools import cache, partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    register_flash_attention_impl,
    restore_flash_attention_impl,
)
from torch.nn.attention._fa4 import register_flash_attention_fa4
from torchtune.modules import TransformerDecoder

from loop_formats.schema import require
from loop_recipes.engine.batching import Documents
from loop_recipes.engine.cuda_layers import causal_attention
from loop_recipes.engine.logprobs import HALF

CAPABILITIES = (9, 10)
"""Major compute capabilities for which torch takes these kernels."""
TRIED = ((9, 128),)
"""Major compute capability and width of the heads with which this project has run them; ``auto`` tries no others."""
DOCUMENT_TOKENS = (300, 120)  # enough for the kernels of longer rows
SHARED_TOKENS = 200  # of the first document, from which the second goes on
LARGEST_ERROR = 0.02
"""The largest allowed error in half precision, as a share of the largest value; FlashAttention-2's is below 0.01."""
KERNELS = "vllm.vllm_flash_attn.cute.interface"


def use_attention(choice: str, model: TransformerDecoder, device: torch.device, dtype: torch.dtype) -> None:
    """Choose this process's kernels for packed rows by ``choice``: ``auto``, ``fa2`` or ``fa4``.

    The kernels of FlashAttention-4 are compiled for the model's heads, in ten seconds, and compared with fp32. If that
    fails, ``auto`` falls back on FlashAttention-2 with a warning. ``auto`` tries them only on Hopper with heads of 128.

    Raises:
        ConfigError: ``choice`` is ``fa4``, which is not available here or computes wrongly.
    """
    if choice == "fa2":
        return
    layer: Any = model.layers[0].attn
    problem = _missing(device, dtype)
    if choice == "auto" and (problem or (torch.cuda.get_device_capability(device)[0], layer.head_dim) not in TRIED):
        return
    if problem is None:
        problem = _failure((layer.num_heads, layer.num_kv_heads, layer.head_dim), device, dtype)
    if problem is not None:
        require(choice == "auto", f"attention is fa4, but {problem}; give attention: fa2")
        warnings.warn(f"attention is FlashAttention-2, not 4: {problem}", stacklevel=2)


def _missing(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the reason why FlashAttention-4 cannot be tried, or None."""
    if device.type != "cuda" or dtype not in HALF:
        return f"FlashAttention-4 computes in half precision on CUDA, not in {dtype} on {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if major not in CAPABILITIES:
        return f"this GPU has compute capability {major}.{minor}, and FlashAttention-4 is for 9.x and 10.x"
    return None


def _failure(heads: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> str | None:
    """Register the kernels with torch and compare a row. On failure restore FlashAttention-2 and return the reason."""
    try:
        activate()
        with warnings.catch_warnings():
            # The compiler's message about an unused argument is long.
            warnings.filterwarnings("ignore", "Argument aux_data")
            error = largest_error(heads, device, dtype)
    except Exception as failure:  # Compilers raise errors of many kinds.
        problem = f"its kernels, of vLLM's wheel for CUDA, fail: {type(failure).__name__}: {failure}".splitlines()[0]
    else:
        if error <= LARGEST_ERROR:
            return None
        problem = f"its kernels are wrong by {error:.2g} of the largest value for heads {heads}"
    if current_flash_attention_impl() is not None:
        restore_flash_attention_impl()
    return problem


def activate() -> None:
    """Make torch compute ``varlen_attn`` on CUDA with this module's kernels, in this process."""
    _kernels()
    register_flash_attention_impl("FA4", register_fn=partial(register_flash_attention_fa4, __name__))
    activate_flash_attention_impl("FA4")


def largest_error(heads: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest error of ``varlen_attn``'s output and gradients for a packed row, over the largest value.

    Args:
        heads: query heads, key heads and their width.
    """
    queries, keys, width = heads
    generator = torch.Generator(device).manual_seed(0)
    rows = [
        torch.randn(sum(DOCUMENT_TOKENS), count, width, generator=generator, device=device, dtype=dtype)
        for count in (queries, keys, keys, queries)
    ]
    first, second = torch.arange(sum(DOCUMENT_TOKENS)).split(DOCUMENT_TOKENS)
    key_places = [first, torch.cat([first[:SHARED_TOKENS], second])]
    documents = Documents.of(DOCUMENT_TOKENS, keys=key_places).to(device)

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal_attention(q, k, v, documents)

    def one_by_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        done = []
        for places, own in zip(key_places, DOCUMENT_TOKENS, strict=True):
            queries, keys, values = (x[places].transpose(0, 1) for x in (q, k, v))
            whole = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
            done.append(whole[:, -own:])
        return torch.cat(done, dim=1).transpose(0, 1)

    computed, exact = (
        _with_gradients(compute, *(row.to(at) for row in rows))
        for compute, at in ((packed, dtype), (one_by_one, torch.float32))
    )
    errors = [
        ((ours - theirs).abs().max() / theirs.abs().max()).item() for ours, theirs in zip(computed, exact, strict=True)
    ]
    return max(errors)


def _with_gradients(compute: Any, q: Tensor, k: Tensor, v: Tensor, upstream: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = compute(*leaves)
    return [x.float() for x in (out.detach(), *torch.autograd.grad(out, leaves, upstream))]


@cache
def _kernels() -> ModuleType:
    """Import vLLM's module of kernels without the rest of vLLM, which would patch torch's compiler."""
    package, _, rest = KERNELS.partition(".")
    for name in (package, f"{package}.{rest.partition('.')[0]}"):
        spec = None if name in sys.modules else find_spec(name)
        if spec is not None:
            bare = ModuleSpec(name, None, is_package=True)
            bare.submodule_search_locations = spec.submodule_search_locations
            sys.modules[name] = module_from_spec(bare)
    return importlib.import_module(KERNELS)


def _flash_attn_fwd(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Return output and normalisers alone, as torch expects; the kernels return more."""
    return _kernels()._flash_attn_fwd(*args, **options)[:2]


def _flash_attn_bwd(*args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _kernels()._flash_attn_bwd(*args, **options)
