"""LoRA adapters in and out of PEFT's format, which vLLM and transformers load.

Names are mapped, and values stay the same with one exception: torchtune's Llama and Mistral rotate neighbouring
channels, and Hugging Face rotates channels half a head apart. So B of q and k has its rows in another order there.
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
from loop_plumbing.breakage import raised_as
from loop_recipes.engine.model import AnyDecoder, adapter_parameters, check_adapter, lora_scale, neighbour_heads
from model_families.base_model import BaseModel
from model_families.families.general_model import TOWERS, is_of_tower
from model_families.weights.weight_names import peft_name
from rollout_server.policies.adapter_check import BASE_DIGEST, read_adapter_config

_PAIRED = re.compile(r".*\.attn\.[qk]_proj\.lora_b\.weight")
"""Names of weights whose rows are the channels that rotary positions turn."""


def export_adapter(
    tensors: Mapping[str, Tensor],
    model: AnyDecoder,
    folder: Path,
    *,
    base_model: str,
    base_digest: str | None,
    dtype: torch.dtype,
) -> Path:
    """Write ``folder`` with PEFT's two files. It appears at once or not at all, and replaces an older folder.

    Args:
        tensors: full (not sharded) LoRA weights by their torchtune names, A as [r, in], B as [out, r].
        model: the model with these weights.
        base_model: where the base checkpoint is, recorded for PEFT.
        base_digest: the :func:`~model_families.stored_weights.weights_digest` of its weights; recorded beside the
            tensors.
        dtype: the dtype of the written weights; float32 masters served in bfloat16 are rounded here, once.
    """
    heads, weights = neighbour_heads(model), {}
    for name, tensor in tensors.items():
        if heads is not None and _PAIRED.fullmatch(name):
            tensor = tensor.unflatten(0, (-1, heads // 2, 2)).transpose(1, 2).flatten(0, 2)
        weights[_name_in_peft(model, name)] = tensor.to("cpu", dtype).contiguous()
    base = None if isinstance(model, TransformerDecoder) else model.base
    return _write(weights, folder, *lora_scale(model), base_model, base, base_digest)


def _name_in_peft(model: AnyDecoder, name: str) -> str:
    return peft_name(name) if isinstance(model, TransformerDecoder) else model.peft_name(name)


def write_empty_adapter(folder: Path, base_model: str) -> Path:
    """Write an adapter that changes nothing (B = 0), under which a rollout node serves its base model exactly.

    Raises:
        ValueError: ``base_model`` is not a folder with a config.json that can be read.
    """
    base = BaseModel.read(base_model)
    shapes = base.adapter_shapes(base.lora_modules[:1], rank=1)  # which every node takes
    return _write({name: torch.zeros(shape) for name, shape in shapes.items()}, folder, 1, 1.0, base_model, base)


def _write(
    weights: Mapping[str, Tensor],
    folder: Path,
    rank: int,
    alpha: float,
    base_model: str,
    base: BaseModel | None,
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
    if base is not None and any(map(is_of_tower, base.weights)):
        config["exclude_modules"] = f".*({'|'.join(map(re.escape, TOWERS))}).*"  # whose layers have the same last names
    with whole_folder(folder) as partial:
        save_file(dict(weights), partial / ADAPTER_WEIGHTS, metadata={"format": "pt", **known})
        _sort_metadata(partial / ADAPTER_WEIGHTS)
        (partial / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder


def _sort_metadata(file: Path) -> None:
    """Sort the file's metadata, which safetensors writes in varying order, so that the same adapter has the same
    bytes."""
    with file.open("r+b") as content:
        length = int.from_bytes(content.read(8), "little")
        header = json.loads(content.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        content.seek(8)
        content.write(json.dumps(header, separators=(",", ":")).encode().ljust(length))


def read_adapter(folder: Path) -> tuple[dict[str, Tensor], int, float]:
    """Read a PEFT adapter: (LoRA weights by PEFT's names; rank; alpha).

    Raises:
        ValueError: a file is missing or damaged, or a rollout node would refuse the adapter's config.
    """
    for name in ADAPTER_FILES:
        if not (folder / name).is_file():
            raise ValueError(f"{folder} is not a PEFT adapter: {name} is missing")
    with raised_as(ValueError, f"adapter {folder}: ", OSError, ValueError, SafetensorError):
        config = read_adapter_config(folder)
        tensors = load_file(folder / ADAPTER_WEIGHTS)
    return tensors, config.rank, config.alpha


def load_adapter(folder: Path, model: AnyDecoder) -> dict[str, Tensor]:
    """Read a PEFT adapter as full CPU tensors. With them ``model`` computes what a server with the adapter computes.

    Raises:
        ConfigError: the adapter is missing, or does not fit the model's LoRA layers; names the first difference.
    """
    own = {_name_in_peft(model, name): name for name in adapter_parameters(model)}
    with raised_as(ConfigError):
        tensors, _, alpha = read_adapter(folder)
    adapter = {own.get(name, name): tensor for name, tensor in tensors.items()}
    check_adapter(model, adapter, alpha, f"adapter {folder}")
    heads = neighbour_heads(model)
    if heads is not None:
        for name in filter(_PAIRED.fullmatch, adapter):
            adapter[name] = adapter[name].unflatten(0, (-1, 2, heads // 2)).transpose(1, 2).flatten(0, 2)
    return adapter
