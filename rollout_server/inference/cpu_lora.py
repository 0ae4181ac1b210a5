"""LoRA in vLLM's CPU build: two matrix products for each adapter of a batch, and kernels for mixtures of experts. For
vLLM's worker process alone.

vLLM's own operators for CPUs gather an adapter's two matrices once for every token. With a small policy that is most of
the engine's work, although nearly always all tokens of a batch are for the same policy version.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as moe
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.platforms.cpu import CpuPlatform


class GroupedLora(PunicaWrapperCPU):
    """vLLM's LoRA arithmetic, done for all tokens of an adapter at once. Tokens of the base model stay unchanged."""

    _tokens_of: dict[int, Tensor | slice]
    """Slot of an adapter -> the tokens of the batch that are for it."""

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Find the tokens of each adapter; vLLM calls this before each step."""
        super().update_metadata(*args, **kwargs)
        slots = self.token_lora_indices
        there = [int(slot) for slot in torch.unique(slots)]
        one = len(there) == 1
        self._tokens_of = {slot: slice(None) if one else (slots == slot).nonzero()[:, 0] for slot in there if slot >= 0}

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **kwargs: Any,
    ) -> None:
        """Add ``scale * x A^T B^T`` to ``y`` in place. Each slice of the output has its own A and B.

        Args:
            y: [tokens, sum of ``output_slices``].
            x: [tokens, in].
            lora_a_stacked: [slots, 1, rank, in] each.
            lora_b_stacked: [slots, 1, slice, rank] each.
        """
        for slot, tokens in self._tokens_of.items():
            inputs, begin = x[tokens], 0
            for lora_a, lora_b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                low = scale * (inputs.float() @ lora_a[slot, 0].T.float())
                y[tokens, begin : begin + width] += low.to(y.dtype) @ lora_b[slot, 0].T.to(y.dtype)
                begin += width


class CpuLora:
    """A worker extension without methods. Because of it, vLLM imports this module before loading the model."""


def _punica_wrapper(cls: type[CpuPlatform]) -> str:
    return f"{GroupedLora.__module__}.{GroupedLora.__qualname__}"


CpuPlatform.get_punica_wrapper = classmethod(_punica_wrapper)  # type: ignore[assignment, method-assign]
_select = moe.select_unquantized_moe_backend  # type: ignore[attr-defined]


def _without_lora(moe_config: FusedMoEConfig) -> Any:
    """Return the kernels for experts without LoRA, since no expert has LoRA here.

    With ``--enable-lora`` vLLM 0.32 takes Triton's kernels even on a CPU, and dies at the first request (module
    'triton.language' has no attribute 'float32').
    """
    return _select(replace(moe_config, is_lora_enabled=False))


moe.select_unquantized_moe_backend = _without_lora  # type: ignore[attr-defined]
