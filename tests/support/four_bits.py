"""Models in four bits as compressed-tensors writes them (W4A16), and what they stand for, by its own code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.families import served, small, write_model


def settings(group: int = 32, symmetric: bool = True) -> dict[str, Any]:
    """The quantization_config of such a model."""
    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group}
    weights |= {"dynamic": False, "actorder": None, "block_structure": None, "observer": "minmax"}
    groups = {"group_0": {"targets": ["Linear"], "input_activations": None, "weights": weights}}
    own = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"}
    return {**own, "ignore": ["lm_head"], "kv_cache_scheme": None, "config_groups": groups}


def _scheme(group: int, symmetric: bool) -> QuantizationScheme:
    weights = QuantizationArgs(num_bits=4, strategy="group", group_size=group, symmetric=symmetric)
    return QuantizationScheme(targets=["Linear"], weights=weights)


def packed(
    weight: Tensor, group: int = 32, symmetric: bool = True, scales: torch.dtype = torch.bfloat16
) -> dict[str, Tensor]:
    """The tensors that are stored of a weight [out, in], by the last parts of their names."""
    scheme = _scheme(group, symmetric)
    groups = weight.float().unflatten(1, (-1, group))
    scale, zero_point = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
    own = {"weight": weight.to(scales), "weight_scale": scale.to(scales)}
    own["weight_zero_point"] = zero_point.to(torch.int8)
    return PackedQuantizationCompressor.compress(own, scheme)


def whole(parts: dict[str, Tensor], group: int, symmetric: bool, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The weight that they stand for, with scales of ``dtype``, as vLLM reads them."""
    own = parts | {"weight_scale": parts["weight_scale"].to(dtype)}
    return PackedQuantizationCompressor.decompress(own, _scheme(group, symmetric))["weight"]


def write_four_bits(
    source: Path, group: int = 32, symmetric: bool = True, dtype: torch.dtype = torch.bfloat16
) -> tuple[Path, Path]:
    """Write two folders beside the model in ``source``: layers in four bits, and what they stand for in ``dtype``."""
    folders = [source.with_name(f"{source.name}-{name}") for name in ("w4a16", "whole")]
    stored: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            parts = packed(tensor, group, symmetric)
            stored[0].update({name.replace("weight", part): each for part, each in parts.items()})
            stored[1][name] = whole(parts, group, symmetric, dtype)
        else:
            stored[0][name] = stored[1][name] = tensor.bfloat16()
    told = ({"quantization_config": settings(group, symmetric)}, {})
    for folder, tensors, added in zip(folders, stored, told, strict=True):
        shutil.copytree(source, folder)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"} | added))
    return folders[0], folders[1]


def random_four_bits(
    folder: Path, name: str = "Qwen2.5-1.5B", words: bool = False, **changes: Any
) -> tuple[Path, Path]:
    """The two folders of a small random model of a published one's proportions, with a tokenizer if it is to have
    ``words``."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    if words:
        return write_four_bits(served(folder, name, **sizes), **changes)
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    return write_four_bits(write_model(folder, small(name, **sizes)), **changes)
