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
from loop_recipes.engine.token_outputs import TokenOutputs, check_length, token_outputs

if TYPE_CHECKING:
    from loop_recipes.engine.general_decoder import GeneralDecoder  # loads transformers


class LogProbDecoder(TransformerDecoder):
    """A torchtune decoder that answers with the log-probs of given tokens in place of all logits.

    It takes over the modules of an existing decoder, so parameter names, LoRA, ``fully_shard`` (call it after, on this
    module as root) and activation checkpointing work as they do there. The head's weight is read inside the root's own
    forward, where FSDP2 has gathered it; do not shard ``output`` on its own.

    Args:
        decoder: the model to take over; its attention learns to accept packed rows.
        head: one of the heads of :mod:`~loop_recipes.engine.logprobs`.

    Raises:
        ValueError: ``output`` is neither a bias-free linear layer nor tied to the embeddings (LoRA on the head, say).
    """

    scale: float = 1.0
    cap: float | None = None

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

    def forward(
        self,
        tokens: Tensor,
        *,
        rows: Tensor,
        targets: Tensor,
        own: Tensor | None = None,
        input_pos: Tensor | None = None,
        mask: Documents | Tensor | None = None,
        with_entropy: bool = False,
        with_hidden: bool = False,
    ) -> TokenOutputs:
        """Return log-probs of the targets, and the other outputs that the arguments ask for.

        Args:
            tokens: [r, s].
            rows: [n], index into the flattened [r * s] of the position that predicts each target.
            targets: [n].
            own: [m], the targets that the rows [m] here predict, where ranks share a packed row; None: all.
            input_pos: [r, s], positions below ``max_seq_len``; None means each row counts from 0.
            mask: None for causal attention, the documents of a packed row, or whatever torchtune's decoder takes.
            with_entropy, with_hidden: compute these too; they are None otherwise.

        Raises:
            ValueError: a rollout is longer than ``max_seq_len``.
        """
        check_length(tokens, mask, self.max_seq_len)
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, mask=mask, input_pos=input_pos)
        h = self.norm(h.flatten(0, 1).index_select(0, rows))
        weight = self.output.tied_module.weight if isinstance(self.output, TiedLinear) else self.output.weight
        return token_outputs(self, h, weight, targets, own, mask, with_entropy, with_hidden)


def attach_head(decoder: TransformerDecoder | GeneralDecoder, head: Head) -> LogProbDecoder | GeneralDecoder:
    """Put a log-prob head on a decoder; before ``fully_shard`` and activation checkpointing."""
    if isinstance(decoder, TransformerDecoder):
        return LogProbDecoder(decoder, head)
    decoder.head = head
    return decoder
