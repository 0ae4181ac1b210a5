"""Small random models of every kind that transformers builds here, by transformers' own config classes.

Their weights are large enough that each layer moves the logits: what a wrong mask changes is seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

_SIZES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
PLAIN: dict[str, Any] = _SIZES["plain"]
KINDS: dict[str, dict[str, Any]] = _SIZES["kinds"]
"""``model_type`` -> what its config has beside :data:`PLAIN`."""
WORDS, WINDOW = PLAIN["vocab_size"], KINDS["mistral"]["sliding_window"]
SEVERAL: dict[str, str] = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""Models of text and pictures: ``model_type`` -> that of their text."""


def config_of(kind: str, **changes: Any) -> Any:
    """The config of a small model of the kind ``kind``, with ``changes`` of that of its text."""
    if kind in SEVERAL:
        text = PLAIN | KINDS[SEVERAL[kind]] | changes
        return AutoConfig.for_model(kind, text_config=text, vision_config=_small_tower(kind))
    return AutoConfig.for_model(kind, **(PLAIN | KINDS.get(kind, {}) | changes))


def _small_tower(kind: str) -> Mapping[str, Any]:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"image_size": 16, "patch_size": 8, "depth": 1, "num_heads": 2, "out_hidden_size": PLAIN["hidden_size"]}
    return sizes


def random_model(kind: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model of the kind with random weights."""
    torch.manual_seed(seed)
    config = config_of(kind, **changes)
    auto = AutoModelForImageTextToText if kind in SEVERAL else AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "norm" not in name:
                parameter.normal_(0.0, 0.5 if "embed" in name else 1.2 * parameter.shape[-1] ** -0.5)
            elif name.endswith((".bias", "sinks", "dt_bias")):
                parameter.normal_(0.0, 0.5)
    return model


def write_random(kind: str, folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Write a random model of the kind as transformers writes it, with ``changes`` of its config."""
    random_model(kind, seed, **changes).save_pretrained(folder)
    return folder
