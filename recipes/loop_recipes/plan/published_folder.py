"""The folder of a published model whose weights are not here: config.json, and headers without a byte of weights.

The planner reads it as it would read the model's own folder.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.core_model_loading import revert_weight_conversion

from model_families.families.family import FAMILIES
from model_families.weights.published import published_config


@contextmanager
def folder_to_plan(path: str | Path) -> Iterator[str | None]:
    """Yield the model's folder ``path`` if it exists, else a temporary folder with the sizes of the published model of
    that name. Yield None if the name is not known."""
    if (Path(path) / "config.json").is_file():
        yield str(path)
        return
    config = published_config(path)
    if config is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="loop-published-") as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config))
        if config["architectures"][0] not in FAMILIES:
            write_header(folder / "model.safetensors", stored_shapes(folder))
        yield name


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights that a folder's config.json describes, by their names in its files."""
    config = AutoConfig.from_pretrained(folder)
    auto = AutoModelForImageTextToText if hasattr(config, "text_config") else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config)
    stored = revert_weight_conversion(model, dict(model.named_parameters()))
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    if getattr(config, "quantization_config", None):
        for name in [name for name in shapes if name.endswith("_proj") and len(shapes[name]) == 3]:
            experts, inputs, outputs = shapes.pop(name)
            shapes[f"{name}_blocks"] = (experts, outputs, inputs // 32, 16)
            shapes[f"{name}_scales"] = (experts, outputs, inputs // 32)
    return shapes


def write_header(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Write a file of bf16 or MXFP4 weights that its header shows as complete, but that takes no room on the disk."""
    header, end = {}, 0
    for name, shape in shapes.items():
        packed = name.endswith(("_blocks", "_scales"))
        begin, end = end, end + (1 if packed else 2) * math.prod(shape)
        header[name] = {"dtype": "U8" if packed else "BF16", "shape": shape, "data_offsets": [begin, end]}
    content = json.dumps(header).encode()
    with file.open("wb") as target:
        target.write(len(content).to_bytes(8, "little") + content)
        target.truncate(8 + len(content) + end)
