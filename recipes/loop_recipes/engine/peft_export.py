"""LoRA adapters in and out of PEFT's format, which vLLM and transformers load.

Names are mapped, and values left alone but for one thing: torchtune's Llama and Mistral turn neighbouring channels
where Hugging Face turns those half a head apart, so B of q and k has its rows in another order there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torchtune.modules import TransformerDecoder

from loop_formats.run_files import ADAPTER_CONFIG, ADAPTER_FILES, ADAPTER_WEIGHTS, whole_folder
from loop_formats.schema import ConfigError
from loop_recipes.engine.model import check_adapter, lora_scale, neighbour_heads
from model_families.base_model import BaseModel
from model_families.weight_names import peft_name, tune_name_of_peft
from rollout_server.policies.adapter_check import BASE_DIGEST, read_adapter_config

_PAIRED = re.compile(r".*\.attn\.[qk]_proj\.lora_b\.weight")
"""Whose rows are the channels that rotary positions turn."""


def export_adapter(
    tensors: Mapping[str, Tensor],
    model: TransformerDecoder,
    folder: Path,
    *,
    base_model: str,
    base_digest: str | None,
    dtype: torch.dtype,
) -> Path:
    """Write ``folder`` with PEFT's two files; it appears at once or not at all, and replaces an older one.

    Args:
        tensors: full (not sharded) LoRA weights by their torchtune names, A as [r, in], B as [out, r].
        model: which they act in.
        base_model: where the base checkpoint is, recorded for PEFT.
        base_digest: of its weights, by :func:`~model_families.stored_weights.weights_digest`; recorded beside the
            tensors.
        dtype: of the written weights; float32 masters served in bfloat16 are rounded here, once.
    """
    heads, weights = neighbour_heads(model), {}
    for name, tensor in tensors.items():
        if heads is not None and _PAIRED.fullmatch(name):
            tensor = tensor.unflatten(0, (-1, heads // 2, 2)).transpose(1, 2).flatten(0, 2)
        weights[peft_name(name)] = tensor.to("cpu", dtype).contiguous()
    return _write(weights, folder, *lora_scale(model), base_model, base_digest)


def write_empty_adapter(folder: Path, base_model: str) -> Path:
    """Write an adapter that changes nothing (B = 0), under which a rollout node serves its base model exactly.

    Raises:
        ValueError: ``base_model`` is no folder with a config.json that can be read.
    """
    shapes = BaseModel.read(base_model).adapter_shapes(["q_proj"], rank=1)  # which every node takes
    return _write({name: torch.zeros(shape) for name, shape in shapes.items()}, folder, 1, 1.0, base_model)


def _write(
    weights: Mapping[str, Tensor],
    folder: Path,
    rank: int,
    alpha: float,
    base_model: str,
    base_digest: str | None = None,
) -> Path:
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.split(".lora_")[0].rsplit(".", 1)[1] for name in weights}),
        "bias": "none",
        "inference_mode": True,
    }
    known = {} if base_digest is None else {BASE_DIGEST: base_digest}
    with whole_folder(folder) as partial:
        save_file(dict(weights), partial / ADAPTER_WEIGHTS, metadata={"format": "pt", **known})
        (partial / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder


def read_adapter(folder: Path) -> tuple[dict[str, Tensor], int, float]:
    """Read a PEFT adapter: (LoRA weights by their torchtune names, in PEFT's order of rows; rank; alpha).

    Raises:
        ValueError: a file is missing or damaged, or a rollout node would refuse the adapter's config.
    """
    for name in ADAPTER_FILES:
        if not (folder / name).is_file():
            raise ValueError(f"{folder} is no PEFT adapter: {name} is missing")
    try:
        config = read_adapter_config(folder)
        tensors = {tune_name_of_peft(name): tensor for name, tensor in load_file(folder / ADAPTER_WEIGHTS).items()}
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"adapter {folder}: {error}") from error
    return tensors, config.rank, config.alpha


def load_adapter(folder: Path, model: TransformerDecoder) -> dict[str, Tensor]:
    """A stored PEFT adapter that acts in ``model`` as it acts where it is served: full CPU tensors.

    Raises:
        ConfigError: there is none, or it does not fit the model's LoRA layers; names the first difference.
    """
    try:
        adapter, _, alpha = read_adapter(folder)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    check_adapter(model, adapter, alpha, f"adapter {folder}")
    heads = neighbour_heads(model)
    if heads is not None:
        for name in filter(_PAIRED.fullmatch, adapter):
            adapter[name] = adapter[name].unflatten(0, (-1, 2, heads // 2)).transpose(1, 2).flatten(0, 2)
    return adapter
