"""Attention that normalises queries and keys before it rotates them, as Qwen3 does.

torchtune's rotates first. The learned scales differ from channel to channel, so the order matters, and no shape tells.
"""

from __future__ import annotations

from torch import Tensor
from torchtune.modules import MultiHeadAttention


def heads(attention: MultiHeadAttention, x: Tensor, input_pos: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries [b, s, heads, head_width], keys and values [b, s, kv_heads, head_width] of ``x`` [b, s, d].
    Queries and keys are rotated, after the norms if the attention has any."""
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    q, k, v = (project(x).unflatten(-1, (-1, attention.head_dim)) for project in projections)
    if attention.q_norm is not None and attention.k_norm is not None:
        q, k = attention.q_norm(q), attention.k_norm(k)
    if attention.pos_embeddings is not None:
        q, k = (attention.pos_embeddings(states, input_pos=input_pos) for states in (q, k))
    return q, k, v


class NormFirstAttention(MultiHeadAttention):
    """torchtune's self-attention, but with the norms before the rotation and without a KV cache."""

    def forward(
        self, x: Tensor, y: Tensor | None = None, *, mask: object = None, input_pos: Tensor | None = None
    ) -> Tensor:
        q, k, v = (states.transpose(1, 2) for states in heads(self, x, input_pos))
        shared = self.num_heads // self.num_kv_heads
        k, v = (states.repeat_interleave(shared, dim=1) for states in (k, v))
        dropout = self.attn_dropout if self.training else 0.0
        out = self._attention_call(q, k, v, mask=mask, dropout_p=dropout, is_causal=mask is None)
        return self.output_proj(out.transpose(1, 2).flatten(2))
