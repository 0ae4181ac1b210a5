"""LoRA adapters in and out of PEFT's format (what vLLM and transformers load), for Qwen2 and Qwen2.5.

torchtune 0.6.1 permutes q and k on export as Llama needs it and Qwen2 does not, so the names are mapped here and the
values are left alone.
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

from loop_formats.base_model import BaseModel
from loop_formats.run_files import ADAPTER_CONFIG, ADAPTER_FILES, ADAPTER_WEIGHTS, whole_folder
from rollout_server.policies.adapter_check import read_adapter_config

# torchtune module (inside `layers.{i}.`) -> Hugging Face module (inside `model.layers.{i}.`)
_HF_MODULES = {
    "attn.q_proj": "self_attn.q_proj",
    "attn.k_proj": "self_attn.k_proj",
    "attn.v_proj": "self_attn.v_proj",
    "attn.output_proj": "self_attn.o_proj",
    "mlp.w1": "mlp.gate_proj",
    "mlp.w2": "mlp.down_proj",
    "mlp.w3": "mlp.up_proj",
}
_TUNE_MODULES = {hf: tune for tune, hf in _HF_MODULES.items()}
_TUNE_NAME = re.compile(r"layers\.(\d+)\.(.+)\.lora_([ab])\.weight")
_PEFT_NAME = re.compile(r"base_model\.model\.model\.layers\.(\d+)\.(.+)\.lora_([AB])\.weight")


def peft_name(name: str) -> str:
    """``layers.0.attn.q_proj.lora_a.weight`` -> ``base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight``."""
    match = _TUNE_NAME.fullmatch(name)
    if match is None or match[2] not in _HF_MODULES:
        raise ValueError(f"{name} is no LoRA weight of a Qwen2 decoder layer; only those can be exported")
    return f"base_model.model.model.layers.{match[1]}.{_HF_MODULES[match[2]]}.lora_{match[3].upper()}.weight"


def tune_name(name: str) -> str:
    """The inverse of :func:`peft_name`."""
    match = _PEFT_NAME.fullmatch(name)
    if match is None or match[2] not in _TUNE_MODULES:
        raise ValueError(f"{name} is no LoRA weight of a Qwen2 decoder layer; only those can be read")
    return f"layers.{match[1]}.{_TUNE_MODULES[match[2]]}.lora_{match[3].lower()}.weight"


def export_adapter(
    tensors: Mapping[str, Tensor],
    folder: Path,
    *,
    rank: int,
    alpha: float,
    base_model: str,
    dtype: torch.dtype,
) -> Path:
    """Write ``folder`` with PEFT's two files; it appears at once or not at all, and replaces an older one.

    Args:
        tensors: full (not sharded) LoRA weights by their torchtune names, A as [r, in], B as [out, r].
        base_model: where the base checkpoint is, recorded for PEFT.
        dtype: of the written weights; float32 masters served in bfloat16 are rounded here, once.
    """
    weights = {peft_name(name): tensor.to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
    return _write(weights, folder, rank, alpha, base_model)


def write_empty_adapter(folder: Path, base_model: str) -> Path:
    """Write an adapter that changes nothing (B = 0), under which a rollout node serves its base model exactly.

    Raises:
        ValueError: ``base_model`` is no folder with a config.json that can be read.
    """
    shapes = BaseModel.read(base_model).adapter_shapes(["q_proj"], rank=8)
    return _write({name: torch.zeros(shape) for name, shape in shapes.items()}, folder, 8, 8.0, base_model)


def _write(weights: Mapping[str, Tensor], folder: Path, rank: int, alpha: float, base_model: str) -> Path:
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
    with whole_folder(folder) as partial:
        save_file(dict(weights), partial / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        (partial / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder


def read_adapter(folder: Path) -> tuple[dict[str, Tensor], int, float]:
    """Read a PEFT adapter: (LoRA weights by their torchtune names, rank, alpha).

    Raises:
        ValueError: a file is missing or damaged, or a rollout node would refuse the adapter's config.
    """
    for name in ADAPTER_FILES:
        if not (folder / name).is_file():
            raise ValueError(f"{folder} is no PEFT adapter: {name} is missing")
    try:
        config = read_adapter_config(folder)
        tensors = {tune_name(name): tensor for name, tensor in load_file(folder / ADAPTER_WEIGHTS).items()}
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"adapter {folder}: {error}") from error
    return tensors, config.rank, config.alpha
