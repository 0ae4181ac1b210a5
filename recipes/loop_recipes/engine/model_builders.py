"""Builds the model of `model:` with a `path`: by torchtune's modules where a family here knows how, else by
transformers' own."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from model_families.base_model import BaseModel
from model_families.families.family import ATTENTION_MODULES, check_lora

if TYPE_CHECKING:
    from torchtune.modules import TransformerDecoder

    from loop_recipes.engine.general_decoder import GeneralDecoder


def lora_model(
    path: str,
    lora_rank: int,
    lora_alpha: float,
    lora_attn_modules: Collection[str] = ATTENTION_MODULES,
    apply_lora_to_mlp: bool = True,
    lora_dropout: float = 0.0,
    untried: bool = False,
    max_context: int | None = None,
) -> TransformerDecoder | GeneralDecoder:
    """Build the decoder of the model in the folder ``path``, with LoRA in all of its layers.

    Args:
        lora_attn_modules, apply_lora_to_mlp: the layers that take LoRA, in families that have these names.
        untried: build the model even if no test compares models of its kind.
        max_context: tokens of the longest sequence that servers hold; None is as many as the model has positions.

    Raises:
        ValueError: the folder's model cannot be built, or does not offer this choice of layers.
    """
    base = replace(BaseModel.read(path), context=max_context)
    if base.family is not None:
        from model_families.decoder.builder import lora_decoder  # torchtune, which takes seconds

        check_lora(lora_rank, lora_attn_modules, apply_lora_to_mlp, lora_dropout)
        model = lora_decoder(base, lora_rank, lora_alpha, lora_attn_modules, apply_lora_to_mlp, lora_dropout)
        if base.four_bits is not None:
            from loop_recipes.engine.packed_weights import pack  # few models need it

            pack(model, base)
        return model
    if set(lora_attn_modules) != set(ATTENTION_MODULES) or not apply_lora_to_mlp:
        raise ValueError(
            f"LoRA goes on every linear layer of a {base.model_type}: leave lora_attn_modules and apply_lora_to_mlp out"
        )
    from loop_recipes.engine.general_decoder import general_decoder  # loads transformers

    return general_decoder(path, base, lora_rank, lora_alpha, lora_dropout, untried)
