"""A decoder's layers as CUDA wants them, put over torchtune's; on every other device torchtune's own run, bit for bit.

- :class:`PackedAttention`: one call of flash attention for all rollouts of a packed row, keys and values not expanded
  to the number of query heads.
- :class:`FoldedLoRALinear`: LoRA's scale multiplies the activation of width ``rank``, and its product is added by the
  matrix multiplication itself: no pass over [s, out] for either.
- :class:`FusedRMSNorm`: one kernel in the input's precision, which computes in fp32 inside; torchtune's converts to
  fp32 first, and with a weight in half precision torch then falls back to a chain of elementwise kernels.

An H100 has run all of it, uncompiled; the arithmetic is tested on a CPU.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torchtune.modules import MultiHeadAttention, RMSNorm, TransformerDecoder
from torchtune.modules.peft import LoRALinear

from loop_formats.schema import require
from loop_recipes.engine.batching import Documents
from model_families.decoder.attention import NormFirstAttention, heads

HALF = (torch.bfloat16, torch.float16)
VARLEN = {"window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys()
"""Whether this torch's ``varlen_attn`` can do what packed rows need: 2.13's can."""


def enable_cuda_layers(model: TransformerDecoder) -> None:
    """Give the model's attention, LoRA and norm layers these forward passes, and switch off cuDNN's attention.

    Parameters, names and hooks stay. Call before ``fully_shard``. cuDNN builds a plan for each shape and keeps all of
    them; micro-batches have a new shape each time.

    Raises:
        ConfigError: the model has an attention without such a pass, or one that torchtune normalises where no known
            model does.
    """
    for layer in model.layers:
        attention: Any = layer.attn
        require(
            type(attention) in OURS and (isinstance(attention, NormFirstAttention) or attention.q_norm is None),
            f"model: its attention is {type(attention).__name__}, of which no packed rows are known here",
        )
    torch.backends.cuda.enable_cudnn_sdp(False)
    if torch.cuda.is_available() and not VARLEN:
        warnings.warn(
            f"torch {torch.__version__}: varlen_attn takes no window_size or enable_gqa, so packed rows go through "
            "scaled_dot_product_attention rollout by rollout, which is slower; torch 2.13 has both",
            stacklevel=2,
        )
    for module in model.modules():
        ours = OURS.get(type(module))
        if ours is not None:
            module.__class__ = ours


def causal_attention(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    """Attention [s, heads, width] of a packed row's documents, each causally to itself; k and v may have fewer heads.

    A document that goes on from another attends to its beginning too: flash attention takes the queries of a piece as
    the last of its keys.
    """
    borders, longest, seen = documents.borders, documents.longest.shape[0], documents.borders
    if documents.keys is not None:
        k, v, seen = documents.keys.take(k), documents.keys.take(v), documents.keys.borders
    out = varlen_attn(q, k, v, borders, seen, longest, longest, window_size=(-1, 0), enable_gqa=True)
    return cast(Tensor, out)


class PackedAttention(MultiHeadAttention):
    """An attention whose packed rows in half precision on CUDA go through ``varlen_attn``; torchtune's by itself."""

    def forward(
        self, x: Tensor, y: Tensor | None = None, *, mask: object = None, input_pos: Tensor | None = None
    ) -> Tensor:
        dropout = self.training and self.attn_dropout > 0
        if not (VARLEN and isinstance(mask, Documents) and x.is_cuda and x.dtype in HALF) or dropout:
            return super().forward(x, y, mask=mask, input_pos=input_pos)
        return self.packed(x, mask, input_pos)

    def packed(self, x: Tensor, documents: Documents, input_pos: Tensor | None) -> Tensor:
        """Self-attention [1, s, d] of the rollouts of one row, each causally to itself."""
        q, k, v = heads(self, x, input_pos)
        # squeeze, because the gradient of an index would be a copy among zeros.
        q, k, v = q.squeeze(0), k.squeeze(0), v.squeeze(0)
        if documents.part.of > 1:
            q, k, v = documents.part.to_heads(q, k, v)
        packed = causal_attention(q, k, v, documents)
        packed = packed if documents.part.of == 1 else documents.part.to_tokens(packed)
        return self.output_proj(packed.flatten(1)[None])


class PackedNormFirstAttention(PackedAttention, NormFirstAttention):
    """The same of the attention that normalises queries and keys before it rotates them."""


class FoldedLoRALinear(LoRALinear):
    """torchtune's LoRA layer; on CUDA ``x W' + (scale * x A') B'`` with the addition inside the last product."""

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cuda or self._quantize_base or self.disabled:
            return super().forward(x)
        return self.folded(x)

    def folded(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        out = F.linear(rows, self.weight, self.bias)
        narrow = self.lora_a(self.dropout(rows)) * (self.alpha / self.rank)
        return out.addmm_(narrow, self.lora_b.weight.T).unflatten(0, x.shape[:-1])


class FusedRMSNorm(RMSNorm):
    """torchtune's RMSNorm; on CUDA in one kernel where input and weight are of one precision."""

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cuda or x.dtype != self.scale.dtype:
            return super().forward(x)
        return F.rms_norm(x, self.normalized_shape, self.scale, self.eps)


OURS: dict[type[nn.Module], type[nn.Module]] = {
    MultiHeadAttention: PackedAttention,
    NormFirstAttention: PackedNormFirstAttention,
    LoRALinear: FoldedLoRALinear,
    RMSNorm: FusedRMSNorm,
}
