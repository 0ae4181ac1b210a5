"""Checks a LoRA adapter in PEFT format against the base model before any server sees it.

vLLM answers 200 to adapters that have no effect (unknown names), sample garbage (a wrong shape) or poison the KV cache
of other requests (a NaN), so all of that is decided here. Weights are read by safetensors only; nothing is unpickled
and torch is not imported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from rollout_server.base_model import BaseModel
from rollout_server.run_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS

MAX_CONFIG_BYTES = 1 << 20

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


def check_adapter(folder: Path, base: BaseModel, rank_limit: int) -> None:
    """Whether ``folder`` holds exactly a LoRA adapter of ``base``.

    Reads the whole weights file into memory (it is bounded by :meth:`BaseModel.max_adapter_bytes`).

    Raises:
        AdapterError: with the first reason found.
    """
    target_modules, rank = _check_config(folder / ADAPTER_CONFIG, base, rank_limit)
    _check_weights(folder / ADAPTER_WEIGHTS, base.adapter_shapes(target_modules, rank))


def all_finite(data: bytes | bytearray, dtype: str) -> bool:
    """Whether no element of a tensor's bytes is a NaN or an infinity; ``dtype`` is a key of :data:`FLOATS`."""
    view, exponent = FLOATS[dtype]
    return not bool(np.any((np.frombuffer(data, dtype=view) & exponent) == exponent))


def _check_config(file: Path, base: BaseModel, rank_limit: int) -> tuple[list[str], int]:
    try:
        config = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{ADAPTER_CONFIG} is not JSON: {error}") from error
    if not isinstance(config, Mapping):
        raise AdapterError(f"{ADAPTER_CONFIG} must be a JSON object")
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"{ADAPTER_CONFIG}: peft_type is {_short(config.get('peft_type'))}, must be 'LORA'")
    rank = config.get("r")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise AdapterError(f"{ADAPTER_CONFIG}: r is {_short(rank)}, must be a whole number above 0")
    if rank > rank_limit:
        raise AdapterError(f"{ADAPTER_CONFIG}: rank {rank} is over the limit {rank_limit} (model.lora_rank)")
    alpha = config.get("lora_alpha")
    # Compared, not asked for math.isfinite: that fails on a whole number of 400 digits.
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha <= sys.float_info.max:
        raise AdapterError(f"{ADAPTER_CONFIG}: lora_alpha is {_short(alpha)}, must be a number above 0")
    modules = config.get("target_modules")
    if not isinstance(modules, list) or not modules or not all(isinstance(module, str) for module in modules):
        raise AdapterError(f"{ADAPTER_CONFIG}: target_modules must be a list of module names")
    unknown = sorted(set(modules) - set(base.modules))
    if unknown:
        known = ", ".join(base.modules)
        raise AdapterError(f"{ADAPTER_CONFIG}: unknown target module {_short(unknown[0])}; known: {known}")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"{ADAPTER_CONFIG}: bias is {_short(config['bias'])}, must be 'none'")
    if config.get("init_lora_weights", True) not in (True, False, "gaussian"):
        raise AdapterError(
            f"{ADAPTER_CONFIG}: init_lora_weights {_short(config['init_lora_weights'])} changes the base model"
        )
    for key in _MUST_BE_OFF:
        if config.get(key):
            raise AdapterError(f"{ADAPTER_CONFIG}: {key} is {_short(config[key])}; it must be absent or empty")
    return sorted(set(modules)), rank


def _check_weights(file: Path, expected: dict[str, tuple[int, int]]) -> None:
    try:
        tensors = dict(safetensors.deserialize(file.read_bytes()))
    except safetensors.SafetensorError as error:
        raise AdapterError(f"{ADAPTER_WEIGHTS} is not a whole safetensors file: {error}") from error
    missing, unexpected = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if unexpected:
        cure = f"; expected names such as {missing[0]}" if missing else ""
        raise AdapterError(
            f"{ADAPTER_WEIGHTS}: {len(unexpected)} unexpected tensors, first {unexpected[0][:200]}{cure}"
        )
    if missing:
        raise AdapterError(f"{ADAPTER_WEIGHTS}: {len(missing)} tensors are missing, first {missing[0]}")
    for name, tensor in tensors.items():
        shape, dtype = tuple(tensor["shape"]), tensor["dtype"]
        if shape != expected[name]:
            raise AdapterError(f"{ADAPTER_WEIGHTS}: {name} has shape {list(shape)}, must be {list(expected[name])}")
        if dtype not in FLOATS:
            raise AdapterError(f"{ADAPTER_WEIGHTS}: {name} is {dtype}, must be one of {', '.join(FLOATS)}")
        if not all_finite(tensor["data"], dtype):
            raise AdapterError(f"{ADAPTER_WEIGHTS}: {name} holds a NaN or an infinity")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
