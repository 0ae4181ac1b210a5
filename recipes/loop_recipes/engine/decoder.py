"""torchtune's decoders with a log-prob head: they answer with the log-probs of given tokens in place of all logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torchtune.modules import TransformerDecoder
from torchtune.modules.tied_linear import TiedLinear

from loop_recipes.engine.batching import Documents
from loop_recipes.engine.cuda_layers import enable_cuda_layers
from loop_recipes.engine.logprobs import Head
from loop_recipes.engine.packed_attention import enable_packing
from loop_recipes.engine.token_outputs import LogProbModule

if TYPE_CHECKING:
    from loop_recipes.engine.general_decoder import GeneralDecoder  # loads transformers


class LogProbDecoder(LogProbModule, TransformerDecoder):
    """A torchtune decoder that answers with the log-probs of given tokens in place of all logits.

    It takes over an existing decoder's modules, so parameter names, LoRA, ``fully_shard`` and activation checkpointing
    work as there. Call ``fully_shard`` afterwards, on this module as root; do not shard ``output`` on its own.

    Args:
        decoder: the model to take over; its attention learns to accept packed rows.
        head: one of the heads of :mod:`~loop_recipes.engine.logprobs`.

    Raises:
        ValueError: ``output`` is neither a bias-free linear layer nor tied to the embeddings (LoRA on the head, say).
    """

    def __init__(self, decoder: TransformerDecoder, head: Head) -> None:
        linear = isinstance(decoder.output, torch.nn.Linear) and decoder.output.bias is None
        if not linear and not isinstance(decoder.output, TiedLinear):
            raise ValueError(
                f"the decoder's output is a {type(decoder.output).__name__}; log-probs need a linear head without bias "
                "or a tied one (apply_lora_to_output: false)"
            )
        super().__init__(
            tok_embeddings=decoder.tok_embeddings,
            layers=decoder.layers,
            max_seq_len=decoder.max_seq_len,
            num_heads=decoder.num_heads,
            head_dim=decoder.head_dim,
            norm=decoder.norm,
            output=decoder.output,
        )
        self.head = head
        enable_packing(self)
        enable_cuda_layers(self)

    def last_hidden(self, tokens: Tensor, rows: Tensor, input_pos: Tensor | None, mask: Documents | None) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, mask=mask, input_pos=input_pos)
        return self.norm(h.flatten(0, 1).index_select(0, rows))

    def output_weight(self) -> Tensor:
        return self.output.tied_module.weight if isinstance(self.output, TiedLinear) else self.output.weight


def attach_head(decoder: TransformerDecoder | GeneralDecoder, head: Head) -> LogProbDecoder | GeneralDecoder:
    """Put a log-prob head on a decoder; before ``fully_shard`` and activation checkpointing."""
    if isinstance(decoder, TransformerDecoder):
        return LogProbDecoder(decoder, head)
    decoder.head = head
    return decoder
