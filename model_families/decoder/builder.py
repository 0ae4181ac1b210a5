"""A decoder with LoRA, built as the folder of its base model says."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import cast

from torch import nn
from torchtune.models.qwen2 import Qwen2RotaryPositionalEmbeddings
from torchtune.modules import (
    FeedForward,
    MultiHeadAttention,
    RMSNorm,
    TiedLinear,
    TransformerDecoder,
    TransformerSelfAttentionLayer,
)
from torchtune.modules.peft import LoRALinear

from model_families.base_model import BaseModel
from model_families.decoder.attention import NormFirstAttention
from model_families.decoder.rope import ScaledRope
from model_families.families.family import Family


def lora_decoder(
    base: BaseModel,
    lora_rank: int,
    lora_alpha: float,
    lora_attn_modules: Collection[str],
    apply_lora_to_mlp: bool,
    lora_dropout: float,
) -> TransformerDecoder:
    """Return the decoder of a family's model, with the LoRA layers that the keys (see ``check_lora``) choose."""

    def linear(lora: bool, inputs: int, outputs: int, bias: bool = False) -> nn.Module:
        if lora:
            return LoRALinear(inputs, outputs, lora_rank, lora_alpha, lora_dropout, use_bias=bias)
        return nn.Linear(inputs, outputs, bias=bias)

    rope = (
        Qwen2RotaryPositionalEmbeddings(base.head_width, base.positions, base.rope.base)
        if base.rope.kind == "default"
        else ScaledRope(base.rope, base.head_width, base.positions)
    )
    layers = [
        TransformerSelfAttentionLayer(
            attn=_attention(base, rope, lambda name, *sizes: linear(name in lora_attn_modules, *sizes)),
            mlp=FeedForward(
                gate_proj=linear(apply_lora_to_mlp, base.width, base.feed_forward),
                down_proj=linear(apply_lora_to_mlp, base.feed_forward, base.width),
                up_proj=linear(apply_lora_to_mlp, base.width, base.feed_forward),
            ),
            sa_norm=RMSNorm(base.width, eps=base.norm_eps),
            mlp_norm=RMSNorm(base.width, eps=base.norm_eps),
        )
        for _ in range(base.layers)
    ]
    embedding = nn.Embedding(base.vocabulary, base.width)
    return TransformerDecoder(
        tok_embeddings=embedding,
        layers=nn.ModuleList(layers),
        max_seq_len=base.positions,
        num_heads=base.heads,
        head_dim=base.head_width,
        norm=RMSNorm(base.width, eps=base.norm_eps),
        output=TiedLinear(embedding) if base.tied else nn.Linear(base.width, base.vocabulary, bias=False),
    )


def _attention(base: BaseModel, rope: nn.Module, linear: Callable[..., nn.Module]) -> MultiHeadAttention:
    family = cast(Family, base.family)
    queries, keys, bias = base.heads * base.head_width, base.kv_heads * base.head_width, family.qkv_bias
    norm, kind = family.qk_norm, NormFirstAttention if family.qk_norm else MultiHeadAttention
    return kind(
        embed_dim=base.width,
        num_heads=base.heads,
        num_kv_heads=base.kv_heads,
        head_dim=base.head_width,
        q_proj=linear("q_proj", base.width, queries, bias),
        k_proj=linear("k_proj", base.width, keys, bias),
        v_proj=linear("v_proj", base.width, keys, bias),
        output_proj=linear("output_proj", queries, base.width),
        pos_embeddings=rope,
        q_norm=RMSNorm(base.head_width, eps=base.norm_eps) if norm else None,
        k_norm=RMSNorm(base.head_width, eps=base.norm_eps) if norm else None,
        max_seq_len=base.positions,
    )
