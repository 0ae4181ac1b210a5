"""Attention of transformers' models in packed rows: each document to itself, and to the beginning that it goes on from.

transformers calls one function for every attention of a model, with what differs between models as arguments: the
scale, a sliding window, a cap, sinks. It is registered under a name of its own, for which transformers builds no mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from loop_recipes.engine.batching import Documents
from loop_recipes.engine.cuda_layers import causal_attention, in_one_call

ATTENTION_NAME = "loop_documents"
Pieces = TypeVar("Pieces")
BLOCK_QUERIES = 512
"""Queries that are computed together where a window or a cap needs it: with a window they meet the keys of their block
and of the window before it alone."""
MOST_SCORES = 1 << 27
"""The most scores in memory at a time where a cap or sinks need them; many keys make blocks of fewer queries."""
WIDEST_HEAD = 256  # that ``varlen_attn`` computes on CUDA


class Row(Generic[Pieces]):
    """The documents of the row that is being computed; a layer sets them around its own forward pass."""

    documents: Pieces | None = None

    @contextmanager
    def __call__(self, documents: Pieces | None) -> Iterator[None]:
        before, self.documents = self.documents, documents
        try:
            yield
        finally:
            self.documents = before


packed_row = Row[Documents]()
"""Holds the documents of the packed row in work; None for a padded row."""


@torch.compiler.disable
def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return causal attention. A padded row is computed whole, as no token attends to the padding on its right.

    Args:
        query: [r, heads, s, d]; key and value may have fewer heads.
        sliding_window: how many tokens a token attends to, itself included; None means itself and all before.
        softcap: a tanh keeps scores below this bound.
        s_aux: [heads], scores of sinks, which take their share of the weights and give nothing.
        others: arguments that do not change attention; an argument that would change it is refused.

    Returns:
        [r, s, heads, d], and no weights.

    Raises:
        ValueError: attention has a bias of positions.
    """
    if others.get("position_bias") is not None:
        raise ValueError(f"attention of {type(module).__name__} has a bias of positions, which is not computed here")
    documents = packed_row.documents
    if documents is None:
        whole = _attend(query, key, value, scaling, sliding_window, softcap, s_aux)
        return whole.transpose(1, 2).contiguous(), None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [s, heads, d]
    part = documents.part
    if part.of > 1:
        q, k, v = part.to_heads(q, k, v)
        s_aux = None if s_aux is None else s_aux.unflatten(0, (part.of, -1))[part.number]
    out = _packed(q, k, v, documents, scaling, sliding_window, softcap, s_aux)
    return (out if part.of == 1 else part.to_tokens(out))[None], None


def _packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    scale: float | None,
    window: int | None,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return the attention of a packed row [s, heads, d]."""
    if cap is None and q.shape[-1] == v.shape[-1] <= WIDEST_HEAD and in_one_call(q):
        if sinks is None:
            return causal_attention(q, k, v, documents, scale, window)
        if documents.keys is not None:
            k, v = documents.keys.take(k), documents.keys.take(v)
        return _WithSinks.apply(_Packed(documents, scale, window), sinks, q, k, v)
    lengths = key_lengths = documents.lengths
    if documents.keys is not None:
        k, v, key_lengths = documents.keys.take(k), documents.keys.take(v), documents.keys.lengths
    whole = (x.transpose(0, 1)[None] for x in (q, k, v))
    split = [x.split(list(sizes), 2) for x, sizes in zip(whole, (lengths, key_lengths, key_lengths), strict=True)]
    done = [_attend(q, k, v, scale, window, cap, sinks) for q, k, v in zip(*split, strict=True)]
    return torch.cat(done, dim=2)[0].transpose(0, 1)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    window: int | None,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return the attention of queries [r, heads, s, d] at the last s positions to all positions."""
    own, tokens = q.shape[2], k.shape[2]
    scores = cap is not None or (sinks is not None and not q.is_cpu)
    if not scores and own == tokens and (window is None or tokens <= window):
        return _by_mask(q, k, v, None, scale, sinks)
    before, done = tokens - own, []
    width = tokens if window is None else min(tokens, window + BLOCK_QUERIES)
    rows = min(BLOCK_QUERIES, max(1, MOST_SCORES // (q.shape[0] * q.shape[1] * width))) if scores else BLOCK_QUERIES
    for begin in range(0, own, rows):
        end = min(begin + rows, own)
        first = 0 if window is None else max(0, before + begin + 1 - window)
        last = before + end
        places, keys = (torch.arange(*ends, device=q.device) for ends in ((before + begin, last), (first, last)))
        distance = places[:, None] - keys
        mask = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        block = q[:, :, begin:end], k[:, :, first:last], v[:, :, first:last], mask, scale
        if scores:
            # Computed again in the backward pass: kept, those of all blocks would be quadratic in the tokens.
            done.append(checkpoint(_by_scores, *block, cap, sinks, use_reentrant=False, preserve_rng_state=False))
        else:
            done.append(_by_mask(*block, sinks))
    return torch.cat(done, dim=2)


def _by_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, sinks: Tensor | None) -> Tensor:
    """Return attention with ``mask``; without a mask, causal attention of queries at all positions."""
    if sinks is None:
        several = q.shape[1] != k.shape[1]
        return scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=several)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    added = None if mask is None else torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    return _WithSinks.apply(_OnCpu(added, scale), sinks, q, k, v)


def _by_scores(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None, cap: float | None, sinks: Tensor | None
) -> Tensor:
    """Return attention by its definition, with a softmax in fp32."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if cap is not None:
        scores = (scores / cap).tanh() * cap
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores.dtype)], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
    return weights[..., : k.shape[2]] @ v


# Both flash kernels know no sinks. They return the output and ``lse`` [..., heads, s], the logarithm of the divisor of
# a query's weights; ``per_query`` gives ``lse`` the form that multiplies the output.


@dataclass(frozen=True)
class _Packed:
    """``varlen_attn`` of a packed row [s, heads, d] on CUDA."""

    documents: Documents
    scale: float | None
    window: int | None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, _ = torch.ops.torch_attn._varlen_attn(q, k, v, *self._row(), self.scale, self._reach(), True)
        return out, lse

    def backward(self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> list[Tensor]:
        random = torch.zeros(2, dtype=torch.uint64, device=q.device)  # for dropout, which is off
        arguments = gradient, q, k, v, out, lse, *self._row(), random, self.scale, self._reach()
        return list(torch.ops.torch_attn._varlen_attn_backward(*arguments))

    def _row(self) -> tuple[Tensor, Tensor, int, int, bool]:
        """Return the borders of queries and keys, the longest of each, and true if there is no window."""
        borders, longest = self.documents.borders, self.documents.longest.shape[0]
        key_borders = borders if self.documents.keys is None else self.documents.keys.borders
        return borders, key_borders, longest, longest, self.window is None

    def _reach(self) -> list[int]:
        return [-1 if self.window is None else self.window - 1, 0]

    def per_query(self, lse: Tensor) -> Tensor:
        return lse.T[:, :, None]


@dataclass(frozen=True)
class _OnCpu:
    """The kernel for CPUs, of [r, heads, s, d]. ``added`` [s, keys] is added to scores; without it they are causal."""

    added: Tensor | None
    scale: float | None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = kernel(q, k, v, 0.0, self.added is None, attn_mask=self.added, scale=self.scale)
        return out, lse

    def backward(self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> list[Tensor]:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        arguments = gradient, q, k, v, out, lse, 0.0, self.added is None
        return list(kernel(*arguments, attn_mask=self.added, scale=self.scale))

    def per_query(self, lse: Tensor) -> Tensor:
        return lse[..., None]


class _WithSinks(torch.autograd.Function):
    """Exact attention with frozen sinks by a kernel that knows no sinks.

    A sink adds ``exp(sink)`` to the divisor of a query's weights: ``lse' = logaddexp(lse, sink)``, and ``out' =
    out exp(lse - lse')``. From these two the kernel's own backward pass computes the right weights and gradients.
    """

    @staticmethod
    def forward(ctx: Any, kernel: _Packed | _OnCpu, sinks: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = kernel.forward(q, k, v)
        whole = torch.logaddexp(lse, sinks.detach().to(lse.dtype)[:, None])
        out = (out * kernel.per_query((lse - whole).exp())).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, whole)
        ctx.kernel = kernel
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None, *ctx.kernel.backward(gradient, *ctx.saved_tensors)


AttentionInterface.register(ATTENTION_NAME, attention)
