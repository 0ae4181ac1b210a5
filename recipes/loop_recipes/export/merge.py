"""Adds an adapter to a base model's weights and writes them file by file: no more than one is in memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from loop_formats.run_files import copy_folder
from loop_recipes.engine.model import DTYPES
from loop_recipes.engine.peft_export import read_adapter
from model_families.base_model import BaseModel
from model_families.decoder.weights import read_tensors
from model_families.families.general_model import module_of
from model_families.weights.weight_files import INDEX, SAFETENSORS, weight_files

_BESIDE = ("*.json", "*.jinja", "*.model", "*.txt", "*.py", "LICENSE*", "NOTICE*", "additional_chat_templates")
"""Patterns of the files that a merged model's folder copies from its base model's."""


def merge(base_folder: Path, adapter_folder: Path, folder: Path, dtype: str) -> None:
    """Fill ``folder`` with the base model, with the adapter added to its weights: W + alpha / r B A.

    The sum is taken in float32 and rounded once. A weight that the adapter does not change keeps its type if the
    model's type and ``dtype`` are both half precision: some models hold a few weights in float32 on purpose.

    Args:
        dtype: "bf16" or "fp32", of the merged weights.

    Raises:
        ValueError: a file cannot be read, or no file has the weight of one of the adapter's modules; one line.
    """
    described = BaseModel.read(base_folder)
    if described.four_bits is not None:
        raise ValueError(
            f"the weights of {base_folder} are of four bits, into which no adapter goes exactly: export the adapter as "
            "it is, without merge"
        )
    tensors, rank, alpha = read_adapter(adapter_folder)
    left = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in tensors}
    settings = json.loads((base_folder / "config.json").read_text(encoding="utf-8"))
    stored_type = settings.get("dtype") or settings.get("torch_dtype")
    wide = dtype == "fp32" or stored_type in (None, "float32")
    target = DTYPES[dtype]

    def merged(name: str, weight: Tensor) -> Tensor:
        module = module_of(name)
        if module not in left or not name.endswith(".weight"):
            return weight.to(target) if wide and weight.is_floating_point() else weight
        left.discard(module)
        a, b = (tensors[f"base_model.model.{module}.lora_{letter}.weight"].float() for letter in "AB")
        return torch.addmm(weight.float(), b, a, alpha=alpha / rank).to(target)

    files = weight_files(base_folder)
    places: dict[str, str] = {}
    size = 0
    for number, file in enumerate(files, start=1):
        name = SAFETENSORS if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        written = {key: merged(key, tensor).contiguous() for key, tensor in read_tensors(file)}
        save_file(written, folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys(written, name)
        size += sum(tensor.nbytes for tensor in written.values())
    if left:
        raise ValueError(
            f"{base_folder} holds no weight {min(left)} of its own, to which the adapter could be added "
            f"({described.model_type}): export the adapter as it is, without merge"
        )
    if len(files) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": places}
        (folder / f"{SAFETENSORS}{INDEX}").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for pattern in _BESIDE:
        for path in base_folder.glob(pattern):
            if not path.name.endswith(INDEX):
                (copy_folder if path.is_dir() else shutil.copyfile)(path, folder / path.name)
    _set_type(settings, str(target).removeprefix("torch."))
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _set_type(settings: dict[str, object], dtype: str) -> None:
    """Write the type of the weights into a config.json, and into its sections that name one."""
    settings["torch_dtype" if "torch_dtype" in settings else "dtype"] = dtype
    for section in settings.values():
        if isinstance(section, dict):
            for key in {"dtype", "torch_dtype"} & section.keys():
                section[key] = dtype
