"""gpt-oss in MXFP4 as it is published: routed experts in blocks of 32 numbers of four bits with a scale of a byte."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from support import tiny_models
from support.tiny_models import write_random

LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""The numbers that three bits can say; the fourth is the sign."""


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes of numbers [..., 32 g]: blocks [..., g, 16], the low bits the first of a pair, and scales [..., g]."""
    groups = weight.unflatten(-1, (-1, 32))
    power = (groups.abs().amax(-1) / 6).log2().ceil().clamp(-127, 127)
    scaled = groups / power.exp2()[..., None]
    nearest = (scaled.abs()[..., None] - LEVELS).abs().argmin(-1) + 8 * (scaled < 0)
    return (nearest[..., 0::2] + 16 * nearest[..., 1::2]).to(torch.uint8), (power + 127).to(torch.uint8)


def numbers(blocks: Tensor, scales: Tensor) -> Tensor:
    """What they stand for, [..., 32 g], by the definition, in fp32."""
    pairs = torch.stack([blocks % 16, blocks // 16], dim=-1).flatten(-2).long()
    return ((1 - 2 * (pairs // 8)) * LEVELS[pairs % 8] * (scales.float() - 127).exp2()[..., None]).flatten(-2)


def write_mxfp4(folder: Path, seed: int = 0) -> dict[str, Tensor]:
    """Write a random gpt-oss as it is published; returns its experts as they are to be read, by their names.

    On disk they are [experts, out, in / 32, ...], in transformers [experts, in, out].
    """
    with mock.patch.dict(tiny_models.PLAIN, hidden_size=64, intermediate_size=64):
        file = write_random("gpt_oss", folder, seed) / "model.safetensors"
    stored, read = {}, {}
    for name, tensor in load_file(file).items():
        if name.endswith("_proj") and tensor.dim() == 3:
            blocks, scales = quantised(tensor.transpose(1, 2))
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            read[name] = numbers(blocks, scales).transpose(1, 2)
        else:
            stored[name] = tensor.bfloat16()
    save_file(stored, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    plan = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.embed_tokens"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": plan}))
    return read
