"""Checks a LoRA adapter in PEFT format against the base model before any server sees it.

vLLM answers 200 to adapters that have no effect (unknown names), sample garbage (a wrong shape) or poison the KV cache
of other requests (a NaN), so all of that is decided here. Weights are read by safetensors only; nothing is unpickled
and torch is not imported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from loop_formats.run_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from model_families.base_model import BaseModel
from model_families.stored_weights import weights_digest

MAX_CONFIG_BYTES = 1 << 20
BASE_DIGEST = "base_model_digest"
"""The key of the base weights' digest, in the metadata of the adapter's weights: PEFT refuses unknown keys in its
config."""

# The integer type to view an element as, and its exponent bits: all set means an infinity or a NaN.
FLOAT_TYPES: dict[str, tuple[type, int]] = {
    "F32": (np.uint32, 0x7F800000),
    "BF16": (np.uint16, 0x7F80),
    "F16": (np.uint16, 0x7C00),
}

# Settings of PEFT that do not change the effect of an adapter, or are checked one by one. The tensors show the modules
# that it acts on: the config may name the same by a pattern, by whole paths, or by exclusion.
_MAY_BE_ANYTHING = frozenset(
    {
        "peft_type",
        "r",
        "lora_alpha",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "bias",
        "init_lora_weights",
        "task_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "lora_dropout",
        "megatron_core",
        "qalora_group_size",
    }
)
# All others must be off, those of a later PEFT too: vLLM does not apply them, the learner does not, or the names and
# shapes of the tensors would be others. These are off where they are false; none is where it is 0.
_SWITCHES = frozenset(
    {"fan_in_fan_out", "use_rslora", "use_dora", "use_qalora", "use_bdlora", "lora_bias", "ensure_weight_tying"}
)
_INITIALISATIONS = frozenset({"gaussian", "orthogonal", "eva", "mica"})
"""Initialisations of PEFT that leave the base model as it is; all others take a part of it away."""
_LARGEST_ALPHA = 1e9
_MODULE = re.compile(r"base_model\.model\.(.+)\.lora_[AB]\.weight")


class AdapterError(ValueError):
    """An adapter must not be served; the message gives one reason."""


@dataclass(frozen=True)
class AdapterConfig:
    """The facts of an adapter's config: plain LoRA of one ``rank`` and ``alpha``.

    ``listed`` and ``excluded`` name the modules (or the ends of their paths) that PEFT adapts or leaves out. If the
    config has a pattern, they are None and empty. ``layers`` are the adapted layers; None means all.
    """

    rank: int
    alpha: float
    listed: list[str] | None
    excluded: list[str]
    layers: list[int] | None


def check_adapter(folder: Path, base: BaseModel, rank_limit: int) -> None:
    """Check that ``folder`` holds exactly a LoRA adapter of ``base``.

    Reads the whole weights file into memory (it is bounded by :meth:`BaseModel.max_adapter_bytes`).

    Raises:
        AdapterError: the adapter is not valid; the message gives the first reason found.
    """
    config = read_adapter_config(folder)
    if config.rank > rank_limit:
        raise AdapterError(f"{ADAPTER_CONFIG}: rank {config.rank} is over the limit {rank_limit} (model.lora_rank)")
    try:
        tensors = dict(safetensors.deserialize((folder / ADAPTER_WEIGHTS).read_bytes()))
    except safetensors.SafetensorError as error:
        raise AdapterError(f"{ADAPTER_WEIGHTS} is not a whole safetensors file: {error}") from error
    _check_modules(config, tensors, base)
    there = {name.split(".lora_")[0].rpartition(".")[2] for name in tensors}
    modules = [module for module in base.lora_modules if module in there] or base.lora_modules
    _check_weights(tensors, base.adapter_shapes(modules, config.rank))


def other_base(folder: Path, base_model: str) -> str | None:
    """Return a message if an adapter was trained on other weights than those in ``base_model``.

    Returns:
        The message; None for the same weights, or if the adapter (of another program) or the folder has no digest.

    Raises:
        AdapterError: the adapter cannot be read.
    """
    try:
        with safetensors.safe_open(folder / ADAPTER_WEIGHTS, "np") as file:
            theirs = (file.metadata() or {}).get(BASE_DIGEST)
    except (OSError, safetensors.SafetensorError) as error:
        raise AdapterError(f"{folder / ADAPTER_WEIGHTS} cannot be read: {error}") from error
    if theirs is None or (ours := weights_digest(base_model)) is None or theirs == ours:
        return None
    return f"was trained on other base weights (digest {theirs}) than those in {base_model} ({ours})"


def all_finite(data: bytes | bytearray, dtype: str) -> bool:
    """Return whether no element of a tensor's bytes is NaN or infinite; ``dtype`` is a key of :data:`FLOAT_TYPES`."""
    view, exponent = FLOAT_TYPES[dtype]
    return not bool(np.any((np.frombuffer(data, dtype=view) & exponent) == exponent))


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read the config of a PEFT adapter. It must be plain LoRA, which vLLM and the learner apply in the same way.

    Raises:
        AdapterError: the adapter is not plain LoRA; the message gives the first reason.
    """
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{ADAPTER_CONFIG} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{ADAPTER_CONFIG} must be a JSON object")
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"{ADAPTER_CONFIG}: peft_type is {_short(config.get('peft_type'))}, must be 'LORA'")
    rank = config.get("r")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise AdapterError(f"{ADAPTER_CONFIG}: r is {_short(rank)}, must be a whole number above 0")
    alpha = config.get("lora_alpha")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha <= _LARGEST_ALPHA:
        raise AdapterError(f"{ADAPTER_CONFIG}: lora_alpha is {_short(alpha)}, must be a number above 0")
    for key, value in config.items():
        switched_off = key in _SWITCHES and value is False
        if not (key in _MAY_BE_ANYTHING or value is None or switched_off or value in ([], {}, "")):
            raise AdapterError(f"{ADAPTER_CONFIG}: {_short(key)} is {_short(value)}; it must be absent, off or empty")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"{ADAPTER_CONFIG}: bias is {_short(config['bias'])}, must be 'none'")
    initial = config.get("init_lora_weights", True)
    if not (isinstance(initial, bool) or initial in _INITIALISATIONS):
        raise AdapterError(f"{ADAPTER_CONFIG}: init_lora_weights {_short(initial)} changes the base model")
    listed, excluded = config.get("target_modules"), config.get("exclude_modules") or []
    return AdapterConfig(
        rank,
        float(alpha),
        listed=None if isinstance(listed, str) else _list_of("target_modules", listed, str),
        excluded=[] if isinstance(excluded, str) else _list_of("exclude_modules", excluded, str),
        layers=_layers(config.get("layers_to_transform")),
    )


def _layers(layers: Any) -> list[int] | None:
    if layers is None or layers == []:
        return None
    return _list_of("layers_to_transform", [layers] if isinstance(layers, int) else layers, int)


def _list_of(key: str, value: Any, kind: type) -> list[Any]:
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        raise AdapterError(f"{ADAPTER_CONFIG}: {key} is {_short(value)}, must be a list of {kind.__name__}")
    return value


def _check_modules(config: AdapterConfig, tensors: Mapping[str, Any], base: BaseModel) -> None:
    """Check that PEFT, like vLLM, would adapt every module for which the adapter has tensors."""
    if config.layers is not None and (omitted := set(range(base.layers)) - set(config.layers)):
        raise AdapterError(
            f"{ADAPTER_CONFIG}: layers_to_transform leaves out layer {min(omitted)}; it must name all or none"
        )
    listed, excluded = (None if names is None else frozenset(names) for names in (config.listed, config.excluded))
    for path in {match[1] for name in tensors if (match := _MODULE.fullmatch(name))}:
        words = path.split(".")
        ends = {".".join(words[first:]) for first in range(len(words))}
        if (listed is not None and not ends & listed) or (excluded and ends & excluded):
            raise AdapterError(
                f"{ADAPTER_WEIGHTS} has tensors of {path[:200]}, which {ADAPTER_CONFIG} leaves out "
                "(target_modules, exclude_modules)"
            )


def _check_weights(tensors: Mapping[str, Any], expected: dict[str, tuple[int, int]]) -> None:
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
        if dtype not in FLOAT_TYPES:
            raise AdapterError(f"{ADAPTER_WEIGHTS}: {name} is {dtype}, must be one of {', '.join(FLOAT_TYPES)}")
        if not all_finite(tensor["data"], dtype):
            raise AdapterError(f"{ADAPTER_WEIGHTS}: {name} holds a NaN or an infinity")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
