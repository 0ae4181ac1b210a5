"""Weights of four bits in W4A16 of compressed-tensors: their description in config.json, and their files.

A weight [out, in] is (number - zero point) * scale, rounded to the type that is computed in. Its numbers are stored in
``weight_packed`` [out, in / 8], int32 of eight along the input, the lowest bits first; a group of them along the input
shares a scale of ``weight_scale`` [out, in / group]. The zero point is 8, or stored in ``weight_zero_point``
[out / 8, in / group], int32 of eight along the output. ``weight_shape`` [2] is the weight's shape.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from model_families.weights.weight_names import EMBEDDING, HEAD, PACKED, SCALE, SHAPE, ZERO_POINT

_DEFAULTS = {"type": "int", "symmetric": True, "strategy": "group", "dynamic": False}
_GROUPS = (32, 64, 128)
_TAKEN: Mapping[str, Collection[Any]] = {
    "format": ("pack-quantized",),
    "kv_cache_scheme": (None,),
    "transform_config": (None, {}),
    "input_activations": (None,),
    "output_activations": (None,),
    "num_bits": (4,),
    "type": ("int",),
    "strategy": ("group",),  # vLLM scales whole rows after the product, whose weights are then not rounded
    "group_size": _GROUPS,
    "symmetric": (True, False),
    "dynamic": (False,),
    "actorder": (None, False, "weight", "static"),
}
"""Keys of quantization_config, its one group and that group's weights -> their values that both sides compute alike."""


PUBLISHED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 128}}},
}
"""The quantization_config of a published model whose name says that it is in W4A16."""


@dataclass(frozen=True)
class FourBits:
    """The names of the layers with four-bit weights, and the count of numbers that share a scale.

    ``symmetric`` says that all zero points are 8.
    """

    modules: frozenset[str]
    group: int
    symmetric: bool

    def stored(self, weights: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor in the files of a model that has these ``weights``."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in weights.items():
            module = name.removesuffix(".weight")
            parts = self.parts(*shape) | {SHAPE: (2,)} if module in self.modules else {}
            shapes |= {f"{module}.{suffix}": own for suffix, own in parts.items()} or {name: shape}
        return shapes

    def parts(self, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors that store a weight [outputs, inputs]."""
        groups = inputs // self.group
        shapes: dict[str, tuple[int, ...]] = {PACKED: (outputs, inputs // 8), SCALE: (outputs, groups)}
        return shapes if self.symmetric else {**shapes, ZERO_POINT: (outputs // 8, groups)}

    @staticmethod
    def check_computed_in(half: bool) -> None:
        """Check that the layers multiply in half precision.

        Raises:
            ValueError: the layers multiply in another precision; one line.
        """
        if not half:
            raise ValueError(
                "the model's weights are of four bits, with which vLLM computes in half precision: give dtype=bf16 "
                "adapter_dtype=bf16 node.model.dtype=bfloat16"
            )

    def undivided(self, weights: Mapping[str, tuple[int, ...]], parts: int) -> str | None:
        """Return a short name of the units that cannot be divided into ``parts``; None if all can be divided."""
        uneven = any(weights[f"{module}.weight"][1] % (self.group * parts) for module in self.modules)
        return f"groups of {self.group} weights" if uneven else None

    def saved_bytes(self, weights: Mapping[str, tuple[int, ...]]) -> float:
        """Return how many bytes smaller than in bf16 the ``weights`` are."""
        of_a_group = 2 + 0.5 * (not self.symmetric)
        packed = sum(math.prod(weights[f"{module}.weight"]) for module in self.modules)
        return packed * (2 - 0.5 - of_a_group / self.group)


def read_four_bits(settings: Mapping[str, Any], weights: Mapping[str, tuple[int, ...]] | None) -> FourBits:
    """Read a quantization_config of compressed-tensors.

    Args:
        weights: the model's weights by their names in Hugging Face's files; None if transformers builds the model.

    Raises:
        ValueError: the config has another format than W4A16, or does not fit a layer.
    """
    if weights is None:
        raise ValueError(
            "weights of compressed-tensors are read of Qwen2, Qwen3, Llama and Mistral alone, as torchtune's modules "
            "build them: take the model's own weights"
        )
    groups = [*settings["config_groups"].values()]
    values: dict[str, Any] = dict(_DEFAULTS)
    for section in (settings, groups[0], groups[0]["weights"]):
        values |= {key: value for key, value in section.items() if value is not None}
    wrong = [f"{key} {values.get(key)!r}" for key, taken in _TAKEN.items() if values.get(key) not in taken]
    if wrong or len(groups) > 1:
        raise ValueError(
            f"quantization_config has {(wrong or [f'{len(groups)} config_groups'])[0]}, which cannot be trained; take "
            f"W4A16 of compressed-tensors in groups of {', '.join(map(str, _GROUPS))}, or the model's own weights"
        )
    modules = frozenset(
        name.removesuffix(".weight")
        for name, shape in weights.items()
        if len(shape) == 2
        and _meant(values["targets"], name, "Embedding" if name == EMBEDDING else "Linear")
        and not _meant(values.get("ignore", ()), name)
    )
    four_bits = FourBits(modules, values["group_size"], values["symmetric"])
    for module in sorted(modules):
        outputs, inputs = weights[f"{module}.weight"]
        if f"{module}.weight" in (EMBEDDING, HEAD):
            raise ValueError(f"quantization_config quantises {module}, which is read whole: name it under ignore")
        if outputs % 32 or inputs % four_bits.group:
            raise ValueError(
                f"{module} is [{outputs}, {inputs}]; in four bits outputs are a multiple of 32, and inputs of the "
                f"group, {four_bits.group}: take the model's own weights"
            )
    return four_bits


def _meant(targets: Collection[str], weight: str, kind: str | None = None) -> bool:
    """Return whether one of ``targets`` (names, patterns or a kind of layers) matches the layer of this weight."""
    module = weight.removesuffix(".weight")
    return any(
        target in (kind, module) or (target.startswith("re:") and re.match(target[3:], module)) for target in targets
    )
