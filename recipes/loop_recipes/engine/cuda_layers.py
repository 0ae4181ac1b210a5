"""A decoder's layers as CUDA wants them, put over torchtune's; on every other device torchtune's own run, bit for bit.

- :class:`PackedAttention`: one call of flash attention for all rollouts of a packed row, keys and values not expanded
  to the number of query heads.
- :class:`FoldedLoRALinear`: LoRA's scale multiplies the activation of width ``rank``, and products are added by the
  matrix multiplication itself, backward too: no pass over [s, out] or [s, in] for either.
- :class:`RotatedRope`: heads are rotated in three kernels and turned back in three; torchtune's takes five and, for the
  gradients of slices, eleven.
- :class:`FusedRMSNorm`: one kernel in the input's precision, which computes in fp32 inside; torchtune's converts to
  fp32 first, and with a weight in half precision torch then falls back to a chain of elementwise kernels.

An H100 has run attention and norms, uncompiled; the arithmetic is tested on a CPU.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torchtune.models.qwen2 import Qwen2RotaryPositionalEmbeddings
from torchtune.modules import MultiHeadAttention, RMSNorm, TransformerDecoder
from torchtune.modules.peft import LoRALinear

from loop_formats.schema import require
from loop_recipes.engine.batching import Documents
from loop_recipes.engine.logprobs import HALF
from model_families.decoder.attention import NormFirstAttention, heads
from model_families.decoder.rope import ScaledRope

VARLEN = {"window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys()
"""True if this torch's ``varlen_attn`` can compute packed rows, as 2.13's can."""


def enable_cuda_layers(model: TransformerDecoder) -> None:
    """Give the model's attention, LoRA and norm layers the forward passes of this module.

    Parameters, names and hooks stay. Call before ``fully_shard``.

    Raises:
        ConfigError: the model has an attention without such a pass, or an attention that torchtune normalises at a
            point where no known model does.
    """
    for layer in model.layers:
        attention: Any = layer.attn
        require(
            type(attention) in CUDA_LAYERS and (isinstance(attention, NormFirstAttention) or attention.q_norm is None),
            f"model: its attention is {type(attention).__name__}, for which packed rows are not implemented",
        )
    for module in model.modules():
        ours = CUDA_LAYERS.get(type(module))
        if ours is not None:
            module.__class__ = ours


def on_cuda(x: Tensor) -> bool:
    """Return whether ``x`` is on CUDA, so that layers use these passes; replaced in tests without a GPU."""
    return x.is_cuda


def in_one_call(x: Tensor) -> bool:
    """Return whether attention of a packed row on the device and in the dtype of ``x`` is one ``varlen_attn`` call."""
    return VARLEN and on_cuda(x) and x.dtype in HALF


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float | None = None, window: int | None = None
) -> Tensor:
    """Return the attention [s, heads, width] of a packed row's documents; each attends causally to itself.

    A document that continues a shared beginning attends to that, too: flash attention takes the queries of a piece as
    the last of its keys.

    Args:
        scale: factor of the scores; None is one over the root of the width. ``k`` and ``v`` may have fewer heads.
        window: how many tokens a token attends to, itself included; None means itself and all before.
    """
    borders, longest, key_borders = documents.borders, documents.longest.shape[0], documents.borders
    if documents.keys is not None:
        k, v, key_borders = documents.keys.take(k), documents.keys.take(v), documents.keys.borders
    reach = (-1 if window is None else window - 1, 0)
    out = varlen_attn(q, k, v, borders, key_borders, longest, longest, scale=scale, window_size=reach, enable_gqa=True)
    return cast(Tensor, out)


class PackedAttention(MultiHeadAttention):
    """torchtune's attention, but packed rows in half precision on CUDA go through ``varlen_attn``."""

    def forward(
        self, x: Tensor, y: Tensor | None = None, *, mask: object = None, input_pos: Tensor | None = None
    ) -> Tensor:
        dropout = self.training and self.attn_dropout > 0
        if not (isinstance(mask, Documents) and in_one_call(x)) or dropout:
            return super().forward(x, y, mask=mask, input_pos=input_pos)
        return self.packed(x, mask, input_pos)

    def packed(self, x: Tensor, documents: Documents, input_pos: Tensor | None) -> Tensor:
        """Return the self-attention [1, s, d] of the rollouts of one row; each attends causally to itself."""
        q, k, v = heads(self, x, input_pos)
        # squeeze, because the gradient of an index would be a copy among zeros.
        q, k, v = q.squeeze(0), k.squeeze(0), v.squeeze(0)
        if documents.part.of > 1:
            q, k, v = documents.part.to_heads(q, k, v)
        packed = causal_attention(q, k, v, documents)
        packed = packed if documents.part.of == 1 else documents.part.to_tokens(packed)
        return self.output_proj(packed.flatten(1)[None])


class PackedNormFirstAttention(PackedAttention, NormFirstAttention):
    """:class:`PackedAttention` that normalises queries and keys before it rotates them."""


class FoldedLoRA(torch.autograd.Function):
    """``x W' + bias + (scale * x A') B'`` of rows x [s, in] with frozen W and bias. W is made from its parts in the
    forward pass, and again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Any, a: Tensor, b: Tensor, scale: float, whole: Any, *parts: Any) -> Tensor:
        narrow = F.linear(x, a) * scale
        out = F.linear(x, whole(*parts), bias)
        add_product(out, narrow, b.T)
        ctx.save_for_backward(x, narrow, a, b, *parts)
        ctx.scale, ctx.whole = scale, whole
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, narrow, a, b, *parts = ctx.saved_tensors
        of_narrow = (gradient @ b) * ctx.scale
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = gradient @ ctx.whole(*parts)
            add_product(of_x, of_narrow, a)
        return of_x, None, of_narrow.T @ x, gradient.T @ narrow, None, None, *[None for _ in parts]


@torch.library.custom_op("loop_recipes::add_product", mutates_args=("out",))
def add_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right`` to ``out``. torch.compile keeps this operator. It would replace ``addmm_`` with a product
    that is not in place, for which torch first copies ``out``."""
    out.addmm_(left, right)


class FoldedLoRALinear(LoRALinear):
    """torchtune's LoRA layer, in the precision of its input. Without dropout :class:`FoldedLoRA` computes it.

    Both give the same up to rounding, and on a CPU to the last bit if alpha / rank is a power of two.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.disabled:
            return self.product(x)
        # A rank without others casts its masters here; FSDP2 casts those of several ranks.
        a, b = (factor.weight.to(x.dtype) for factor in (self.lora_a, self.lora_b))
        scale = self.alpha / self.rank
        if not isinstance(self.dropout, nn.Identity):
            return self.product(x) + scale * F.linear(F.linear(self.dropout(x), a), b)
        out = cast(Tensor, FoldedLoRA.apply(x.flatten(0, -2), self.bias, a, b, scale, *self.frozen()))
        return out.unflatten(0, x.shape[:-1])

    def product(self, x: Tensor) -> Tensor:
        """Multiply by the frozen weight alone."""
        return F.linear(x, self.weight, self.bias)

    def frozen(self) -> tuple[Any, ...]:
        """Return the function that makes the frozen weight [out, in], and the parts to call it with."""
        return _itself, self.weight


def _itself(weight: Tensor) -> Tensor:
    return weight


class RotatedHeads(torch.autograd.Function):
    """Rotary positions of halves: ``x cos + y sin``, where y is x [b, s, heads, width] with its two halves swapped.

    ``cos`` and ``sin`` are [b, s, 1, width]; the sines of the first half are negative. The backward pass turns heads
    back with as few kernels; the gradients of slices would be copies among zeros.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(gradient, cos, sin, -1), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin, value=direction)


class RotatedRope(Qwen2RotaryPositionalEmbeddings):
    """torchtune's rotary positions of halves; on CUDA :class:`RotatedHeads` computes them."""

    def forward(self, x: Tensor, input_pos: Tensor | None = None) -> Tensor:
        if not on_cuda(x) or input_pos is None:
            return super().forward(x, input_pos)
        return self.rotated(x, input_pos)

    def rotated(self, x: Tensor, input_pos: Tensor) -> Tensor:
        cos, sin = self.cache[input_pos].to(x.dtype).unsqueeze(-2).chunk(2, dim=-1)
        first, second = sin.chunk(2, dim=-1)
        return cast(Tensor, RotatedHeads.apply(x, cos, torch.cat((-first, second), dim=-1)))


class RotatedScaledRope(RotatedRope, ScaledRope):
    """:class:`RotatedRope` with scaled frequencies."""


class FusedRMSNorm(RMSNorm):
    """torchtune's RMSNorm; on CUDA one kernel if input and weight have the same precision."""

    def forward(self, x: Tensor) -> Tensor:
        if not on_cuda(x) or x.dtype != self.scale.dtype:
            return super().forward(x)
        return F.rms_norm(x, self.normalized_shape, self.scale, self.eps)


CUDA_LAYERS: dict[type[nn.Module], type[nn.Module]] = {
    MultiHeadAttention: PackedAttention,
    NormFirstAttention: PackedNormFirstAttention,
    LoRALinear: FoldedLoRALinear,
    Qwen2RotaryPositionalEmbeddings: RotatedRope,
    ScaledRope: RotatedScaledRope,
    RMSNorm: FusedRMSNorm,
}
