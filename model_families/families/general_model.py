"""A decoder that no family here builds, described by its config.json and the headers of its weights.

transformers builds it in the learner and vLLM serves it, so nothing of its inside is repeated here: its linear layers
are those whose weights the files name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model_families.weights.weight_files import read_header, weight_files

# fmt: off
COMPARED = frozenset({
    "deepseek_v3", "exaone4", "falcon_h1", "gemma2", "gemma3", "gemma3_text", "gemma4", "gemma4_text", "glm4",
    "glm4_moe", "glm4_moe_lite", "gpt_oss", "granite", "granitemoehybrid", "hunyuan_v1_dense", "lfm2", "lfm2_moe",
    "llama", "ministral3", "mistral", "olmo2", "olmo3", "phi3", "qwen2", "qwen3", "qwen3_5", "qwen3_5_moe",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3",
})
# fmt: on
"""``model_type`` of the models that tests compare with transformers' own forward pass, packed and one by one."""
NOT_REACHED = frozenset({"kv_b_proj", "gate", "router", "shared_expert_gate", "embed_tokens", "lm_head"})
"""Parts of names of matrices that LoRA leaves alone: routers, and kv_b_proj, to which vLLM 0.32 does not apply it and
says nothing."""
LEFT_OUT = {"glm4": frozenset({"gate_up_proj"}), "falcon_h1": frozenset({"out_proj"})}
"""``model_type`` -> matrices that LoRA leaves alone too: one that vLLM 0.32 has in two, and so takes no LoRA of it, and
one for which PEFT 0.18 refuses an adapter."""
_LAYER = re.compile(r"layers\.(\d+)\.")
_BEFORE_4_52 = re.compile(r"^language_model\.model\.")
TOWERS = ("vision", "visual", "audio", "mtp.")
"""Parts of names of what is not the text's decoder."""
_BLOCKS, _SCALES = "_blocks", "_scales"
"""Ends of the names of the two parts of a weight in MXFP4: [..., g, 16] bytes of two numbers each, [..., g] scales."""


def shapes_on_disk(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight in ``folder`` by its name on disk. A weight in MXFP4 has its unpacked shape.

    Raises:
        ValueError: the folder has no weights, or a file is damaged.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(folder):
        shapes |= {name: tensor.shape for name, tensor in read_header(file).items()}
    for name in [name for name in shapes if is_mxfp4(name)]:
        *outer, groups, size = shapes.pop(name)
        if shapes.pop(name.removesuffix(_BLOCKS) + _SCALES, None) != (*outer, groups):
            raise ValueError(f"{folder}: {name} has no scale for each block; are the files of one model?")
        shapes[name.removesuffix(_BLOCKS)] = (*outer, groups * size * 2)
    return shapes


def is_mxfp4(name: str) -> bool:
    """Return whether the tensor of this name holds the blocks of a weight in MXFP4."""
    return name.endswith(f"_proj{_BLOCKS}")


def layer_of(name: str) -> int | None:
    """Return the number of the decoder layer that holds the weight of this name, or None."""
    match = _LAYER.search(name)
    return None if match is None or is_of_tower(name) else int(match[1])


def is_expert(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether the weight of this name belongs to one routed expert, or to all routed experts of a layer."""
    return ".experts." in name or (len(shape) == 3 and "conv" not in name and layer_of(name) is not None)


def is_of_tower(name: str) -> bool:
    """Return whether this weight or module belongs to a part that reads images or sound, or predicts further tokens."""
    return any(tower in name for tower in TOWERS)


def takes_lora(name: str, shape: tuple[int, ...], model_type: str) -> bool:
    """Return whether LoRA can adapt this weight: one of a linear decoder layer, except routers and experts."""
    if len(shape) != 2 or layer_of(name) is None or ".experts." in name or not name.endswith(".weight"):
        return False
    left_alone = NOT_REACHED | LEFT_OUT.get(model_type, frozenset())
    return left_alone.isdisjoint(name.split("."))


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config.json that describes the decoder: ``text_config`` if there is one, else all."""
    return config.get("text_config") or config


def module_of(weight: str) -> str:
    """Return the layer of this weight by its name in transformers and vLLM. Only folders that transformers wrote before
    4.52, such as Gemma 3's, have other names on disk."""
    return _BEFORE_4_52.sub("model.language_model.", weight.removesuffix(".weight"))
