"""Published models of every family: what their config.json says, and small random ones of the same proportions."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from loop_recipes.plan.published_folder import stored_shapes, write_header
from model_families.base_model import BaseModel
from model_families.families.family import FAMILIES
from model_families.weights.published import published
from support.random_policy import write_tokenizer

PUBLISHED = {name: config for name, config in published().items() if config["architectures"][0] in FAMILIES}
PUBLISHED_GENERAL = {name: config for name, config in published().items() if name not in PUBLISHED}
ONE_EACH = ("Qwen2.5-1.5B", "Qwen3-4B", "Llama-3.2-1B", "Mistral-Nemo-2407")
SHRUNK = 16
WORDS = 97
SERVED = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 400, "max_position_embeddings": 2048}
"""Sizes that vLLM serves on a CPU together with heads of 32, 64, 128 and more."""


def small(name: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a small model of the proportions of a published one: same heads, two layers."""
    config = {**PUBLISHED[name], "num_hidden_layers": 2, "vocab_size": WORDS, "max_position_embeddings": 256}
    for key in ("hidden_size", "intermediate_size", "head_dim"):
        if key in config:
            config[key] //= SHRUNK
    if "rope_scaling" in config:
        config["rope_scaling"] = {**config["rope_scaling"], "original_max_position_embeddings": 64}
    return config | changes


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    """``folder`` with this config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def with_config(model: Mapping[str, Any]) -> dict[str, Any]:
    """A ``model`` section whose folder has the published config.json and headers, where its own is not there."""
    if (Path(model["path"]) / "config.json").is_file():
        return dict(model)
    return {**model, "path": _written(Path(model["path"]).name.removesuffix("-Instruct"))}


@cache
def _written(name: str) -> str:
    folder = Path(tempfile.mkdtemp(prefix="loop-config-"))
    return str(write_headers(write_config(folder, published()[name])))


def shapes_of(config: dict[str, Any]) -> Mapping[str, tuple[int, ...]]:
    """The weights of the model of a family's config.json, by their names in its files."""
    return BaseModel.of_family(config, FAMILIES[config["architectures"][0]]).weights


def write_headers(folder: Path, files: int = 1) -> Path:
    """Files of weights in bf16 that are whole by their headers, and of which no byte is written."""
    config = json.loads((folder / "config.json").read_text())
    shapes = shapes_of(config) if config["architectures"][0] in FAMILIES else stored_shapes(folder)
    parts = [f"model-{number:05}-of-{files:05}.safetensors" for number in range(1, files + 1)]
    index = {}
    for number, part in enumerate(parts if files > 1 else ["model.safetensors"]):
        names = list(shapes)[number::files]
        write_header(folder / part, {name: shapes[name] for name in names})
        index |= dict.fromkeys(names, part)
    if files > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def write_model(folder: Path, config: dict[str, Any], seed: int = 0, max_shard_size: str = "1GB") -> Path:
    """A random model of ``config`` in float32 as transformers saves it; scales of norms and biases are not constant."""
    from transformers import AutoConfig, AutoModelForCausalLM  # seconds

    write_config(folder, config)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += torch.randn_like(parameter) * 0.3
            else:
                parameter.normal_(std=1.5 * parameter.shape[1] ** -0.5)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def served(folder: Path, name: str, **changes: Any) -> Path:
    """A random small model of a family with a small tokenizer of ChatML, as vLLM on a CPU serves it."""
    write_model(folder, small(name, **SERVED, **changes))
    write_tokenizer(folder)
    return folder


def section(folder: Path, **changes: Any) -> dict[str, Any]:
    """The ``model`` section of a config that trains the model in ``folder``."""
    return {
        "_component_": "loop_recipes.engine.model_builders.lora_model",
        "path": str(folder),
        "lora_rank": 4,
        "lora_alpha": 8,
        **changes,
    }
