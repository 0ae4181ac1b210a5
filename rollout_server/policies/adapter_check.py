"""Checks a LoRA adapter in PEFT format against the base model before any server sees it.

vLLM answers 200 to adapters that have no effect (unknown names), sample garbage (a wrong shape) or poison the KV cache
of other requests (a NaN), so all of that is decided here. Weights are read by safetensors only; nothing is unpickled
and torch is not imported.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE)
MAX_CONFIG_BYTES = 1 << 20
MAX_HEADER_BYTES = 16 << 20

# The integer type to view an element as, and its exponent bits: all set means an infinity or a NaN.
FLOATS: dict[str, tuple[type, int]] = {
    "F32": (np.uint32, 0x7F800000),
    "BF16": (np.uint16, 0x7F80),
    "F16": (np.uint16, 0x7C00),
}

# Settings of PEFT that change what an adapter means and that must be off: vLLM does not apply them, or the expected
# names and shapes would be others.
_MUST_BE_OFF = (
    "modules_to_save",
    "use_dora",
    "lora_bias",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "layers_pattern",
    "layer_replication",
    "fan_in_fan_out",
    "exclude_modules",
    "target_parameters",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "megatron_config",
    "use_bdlora",
    "use_qalora",
)


class AdapterError(ValueError):
    """An adapter that must not be served; the message is the one reason."""


@dataclass(frozen=True)
class BaseModel:
    """What the base model's config.json says of the layers that LoRA can wrap.

    ``modules`` maps a module's name to (path inside a layer, input width, output width).
    """

    layers: int
    modules: dict[str, tuple[str, int, int]]

    ARCHITECTURES = (
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
    )

    @classmethod
    def read(cls, folder: str | Path) -> BaseModel:
        """From ``<folder>/config.json``; raises ValueError naming the file and what is missing."""
        file = Path(folder) / "config.json"
        try:
            config = json.loads(file.read_text())
            architecture = (config.get("architectures") or ["none"])[0]
            if architecture not in cls.ARCHITECTURES:
                known = ", ".join(cls.ARCHITECTURES)
                raise ValueError(f"{file}: architecture {architecture} is not one of {known}")
            width, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
            inner, layers = int(config["intermediate_size"]), int(config["num_hidden_layers"])
            head = int(config.get("head_dim") or width // heads)
            keys = int(config.get("num_key_value_heads") or heads) * head
        except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{file} cannot be read as a model's configuration: {error!r}") from error
        attention, mlp = "self_attn", "mlp"
        return cls(
            layers,
            {
                "q_proj": (attention, width, heads * head),
                "k_proj": (attention, width, keys),
                "v_proj": (attention, width, keys),
                "o_proj": (attention, heads * head, width),
                "gate_proj": (mlp, width, inner),
                "up_proj": (mlp, width, inner),
                "down_proj": (mlp, inner, width),
            },
        )

    def shapes(self, target_modules: list[str], rank: int) -> dict[str, tuple[int, int]]:
        """Every tensor of an adapter on ``target_modules``: name to shape. A is [r, in], B is [out, r]."""
        expected = {}
        for layer in range(self.layers):
            for module in target_modules:
                parent, inputs, outputs = self.modules[module]
                prefix = f"base_model.model.model.layers.{layer}.{parent}.{module}"
                expected[f"{prefix}.lora_A.weight"] = (rank, inputs)
                expected[f"{prefix}.lora_B.weight"] = (outputs, rank)
        return expected

    def max_adapter_bytes(self, rank_limit: int) -> int:
        """Size of the largest weights file there can be: all modules, fp32, and its header."""
        elements = sum(rows * columns for rows, columns in self.shapes(list(self.modules), rank_limit).values())
        return 4 * elements + MAX_HEADER_BYTES


def check_adapter(folder: Path, base: BaseModel, rank_limit: int) -> None:
    """Whether ``folder`` holds exactly a LoRA adapter of ``base``.

    Reads the whole weights file into memory (it is bounded by :meth:`BaseModel.max_adapter_bytes`).

    Raises:
        AdapterError: with the first reason found.
    """
    target_modules, rank = _check_config(folder / CONFIG_FILE, base, rank_limit)
    _check_weights(folder / WEIGHTS_FILE, base.shapes(target_modules, rank))


def all_finite(data: bytes | bytearray, dtype: str) -> bool:
    """Whether no element of a tensor's bytes is a NaN or an infinity; ``dtype`` is a key of :data:`FLOATS`."""
    view, exponent = FLOATS[dtype]
    return not bool(np.any((np.frombuffer(data, dtype=view) & exponent) == exponent))


def _check_config(file: Path, base: BaseModel, rank_limit: int) -> tuple[list[str], int]:
    try:
        config = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{CONFIG_FILE} is not JSON: {error}") from error
    if not isinstance(config, Mapping):
        raise AdapterError(f"{CONFIG_FILE} must be a JSON object")
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"{CONFIG_FILE}: peft_type is {_short(config.get('peft_type'))}, must be 'LORA'")
    rank = config.get("r")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise AdapterError(f"{CONFIG_FILE}: r is {_short(rank)}, must be a whole number above 0")
    if rank > rank_limit:
        raise AdapterError(f"{CONFIG_FILE}: rank {rank} is over the limit {rank_limit} (model.lora_rank)")
    alpha = config.get("lora_alpha")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha) or alpha <= 0:
        raise AdapterError(f"{CONFIG_FILE}: lora_alpha is {_short(alpha)}, must be a number above 0")
    modules = config.get("target_modules")
    if not isinstance(modules, list) or not modules or not all(isinstance(module, str) for module in modules):
        raise AdapterError(f"{CONFIG_FILE}: target_modules must be a list of module names")
    unknown = sorted(set(modules) - set(base.modules))
    if unknown:
        known = ", ".join(base.modules)
        raise AdapterError(f"{CONFIG_FILE}: unknown target module {_short(unknown[0])}; known: {known}")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"{CONFIG_FILE}: bias is {_short(config['bias'])}, must be 'none'")
    if config.get("init_lora_weights", True) not in (True, False, "gaussian"):
        raise AdapterError(
            f"{CONFIG_FILE}: init_lora_weights {_short(config['init_lora_weights'])} changes the base model"
        )
    for key in _MUST_BE_OFF:
        if config.get(key):
            raise AdapterError(f"{CONFIG_FILE}: {key} is {_short(config[key])}; it must be absent or empty")
    return sorted(set(modules)), rank


def _check_weights(file: Path, expected: dict[str, tuple[int, int]]) -> None:
    try:
        tensors = dict(safetensors.deserialize(file.read_bytes()))
    except safetensors.SafetensorError as error:
        raise AdapterError(f"{WEIGHTS_FILE} is not a whole safetensors file: {error}") from error
    missing, unexpected = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if unexpected:
        cure = f"; expected names such as {missing[0]}" if missing else ""
        raise AdapterError(f"{WEIGHTS_FILE}: {len(unexpected)} unexpected tensors, first {unexpected[0][:200]}{cure}")
    if missing:
        raise AdapterError(f"{WEIGHTS_FILE}: {len(missing)} tensors are missing, first {missing[0]}")
    for name, tensor in tensors.items():
        shape, dtype = tuple(tensor["shape"]), tensor["dtype"]
        if shape != expected[name]:
            raise AdapterError(f"{WEIGHTS_FILE}: {name} has shape {list(shape)}, must be {list(expected[name])}")
        if dtype not in FLOATS:
            raise AdapterError(f"{WEIGHTS_FILE}: {name} is {dtype}, must be one of {', '.join(FLOATS)}")
        if not all_finite(tensor["data"], dtype):
            raise AdapterError(f"{WEIGHTS_FILE}: {name} holds a NaN or an infinity")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
