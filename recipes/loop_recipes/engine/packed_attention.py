"""Attention for packed rows: each rollout of the row attends to itself only. cuda_layers.py replaces it on CUDA in half
precision.

Everything in a transformer but attention treats tokens one by one, so a packed row needs no mask there. For attention
the row is cut at the rollouts' borders and each piece goes through torch's own ``scaled_dot_product_attention`` with
``is_causal=True``, on a CPU its flash kernel. Nothing can leak, since a piece never meets its neighbours' keys; no
[s, s] mask is built; and no work is spent on masked-out blocks. Rollouts are a thousand tokens and longer, so one
kernel launch for each costs nothing that shows. A piece that goes on from another takes that one's keys before its own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torchtune.modules import MultiHeadAttention

from loop_recipes.engine.batching import Documents


def enable_packing(model: nn.Module) -> None:
    """Let every attention of ``model`` accept :class:`~loop_recipes.engine.batching.Documents` in place of a mask."""
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            module._attention_call = _by_document(module._attention_call)


def _by_document(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap torchtune's attention call so that packed rows are computed document by document, all others as before."""

    def call(
        q: Tensor, k: Tensor, v: Tensor, mask: object, dropout_p: float, is_causal: bool
    ) -> Tensor:  # [b, h, s, d] each
        if not isinstance(mask, Documents):
            return attention(q, k, v, mask=mask, dropout_p=dropout_p, is_causal=is_causal)
        shared = mask.part.of > 1
        if shared:
            q, k, v = (x.transpose(0, 1)[None] for x in mask.part.to_heads(*(x[0].transpose(0, 1) for x in (q, k, v))))
        spans = mask.lengths
        if mask.keys is not None:
            spans, (k, v) = mask.keys.lengths, (mask.keys.take(x.transpose(0, 2)).transpose(0, 2) for x in (k, v))
        pieces = zip(q.split(list(mask.lengths), dim=2), *(x.split(list(spans), dim=2) for x in (k, v)), strict=True)
        done = torch.cat([_attention(q, k, v, dropout_p) for q, k, v in pieces], dim=2)
        return mask.part.to_tokens(done[0].transpose(0, 1)).transpose(0, 1)[None] if shared else done

    # A compiled layer calls it as it is: the number of rollouts changes, and each would be a graph of its own.
    return torch.compiler.disable(call)


def _attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
    """Return the attention of queries at the last positions to all positions."""
    own, every = q.shape[2], k.shape[2]
    if own == every:
        return scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True)
    # torch's own causal_lower_right is a kind of tensor that selective checkpointing does not know.
    mask = q.new_ones(own, every, dtype=torch.bool).tril(every - own)
    return scaled_dot_product_attention(q, k, v, mask, dropout_p=dropout_p)
