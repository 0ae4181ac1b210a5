"""The families that torchtune's modules build: the common build of their decoders, and their config.json.

All are dense decoders of one build, which :mod:`model_families.decoder` makes: RMSNorm, rotary positions,
attention with shared keys, a gated MLP of SiLU. A family says what differs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

ROPE_SCALINGS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "default": frozenset(),
        "linear": frozenset({"factor"}),
        "llama3": frozenset(
            {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
        ),
        "yarn": frozenset({"factor", "original_max_position_embeddings", "beta_fast", "beta_slow"}),
    }
)
"""Kinds of rotary scaling -> the numbers that each takes."""
_OPTIONAL = frozenset({"beta_fast", "beta_slow"})
ATTENTION_MODULES = ("q_proj", "k_proj", "v_proj", "output_proj")
"""Layers of attention that may have LoRA, by torchtune's names."""


def check_lora(
    lora_rank: int,
    lora_attn_modules: Collection[str] = ATTENTION_MODULES,
    apply_lora_to_mlp: bool = True,
    lora_dropout: float = 0.0,
    **others: object,
) -> None:
    """Check the keys of a model section that choose its LoRA layers; ``others`` are its other keys.

    Raises:
        ValueError: a module is unknown, no layer is chosen, or the rank or the dropout is out of range.
    """
    if isinstance(lora_attn_modules, str | Mapping):
        raise ValueError(f"lora_attn_modules must be a list, not {lora_attn_modules!r}")
    if unknown := sorted(set(lora_attn_modules) - set(ATTENTION_MODULES)):
        raise ValueError(f"lora_attn_modules has {unknown[0]!r}; there are {', '.join(ATTENTION_MODULES)}")
    if not lora_attn_modules and not apply_lora_to_mlp:
        raise ValueError("no layer has LoRA: name some in lora_attn_modules, or give apply_lora_to_mlp=True")
    if lora_rank < 1:
        raise ValueError(f"lora_rank is {lora_rank}; it must be at least 1")
    if not 0 <= lora_dropout < 1:
        raise ValueError(f"lora_dropout is {lora_dropout}; it must be at least 0 and below 1")


@dataclass(frozen=True)
class Rope:
    """Rotary positions: the base of the frequencies, and the scaling of the frequencies for longer contexts."""

    base: float
    kind: str = "default"
    scaling: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the kind, by the names of config.json."""

    @property
    def positions(self) -> int:
        """The number of positions after YaRN has scaled the original ones; 0 without YaRN. Some model cards add YaRN to
        a config.json that still states the original number; transformers accepts that."""
        if self.kind != "yarn":
            return 0
        return int(self.scaling["factor"] * self.scaling["original_max_position_embeddings"])


@dataclass(frozen=True)
class Family:
    """The properties that all decoders of one architecture share.

    Attributes:
        architecture: the name of the architecture in config.json.
        qkv_bias: the projections to queries, keys and values have a bias.
        qk_norm: queries and keys are normalised head by head, before they are rotated.
        positions: the number of positions if config.json does not say.
        head_width: the head width if config.json does not say; None means the width divided by the number of heads.
        window: tokens over which attention reaches, unless config.json names another number; None means all.
        windowed: whether the window applies if config.json has no ``use_sliding_window``.
        required: keys of config.json that, if present, must have one of these values.
        vllm_args: command-line arguments of every vLLM server for this architecture.
    """

    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    positions: int = 32_768
    head_width: int | None = None
    window: int | None = None
    windowed: bool = True
    required: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    vllm_args: tuple[str, ...] = ()

    def objection(self, config: Mapping[str, Any]) -> str | None:
        """Return the setting (``key is value``) that prevents building a model of this config.json, or None."""
        for key, allowed in (_OF_ALL | dict(self.required)).items():
            if key in config and config[key] not in allowed:
                return f"{key} is {config[key]!r}"
        for kind in config.get("layer_types") or []:
            if kind not in ("full_attention", "sliding_attention"):
                return f"layer_types has {kind!r}"
        return None

    def window_of(self, config: Mapping[str, Any]) -> int | None:
        """Return the sliding window in tokens, even if only some layers have it; None without a window."""
        if not config.get("use_sliding_window", self.windowed):
            return None
        window = config.get("sliding_window", self.window)
        return None if window is None else int(window)


_OF_ALL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1.0, None),
}


FAMILIES = {
    family.architecture: family
    for family in (
        # Qwen2 and Qwen2.5.
        Family("Qwen2ForCausalLM", qkv_bias=True, window=4096, windowed=False),
        # Qwen3, dense (0.6B to 32B, those of July 2025 included).
        Family(
            "Qwen3ForCausalLM",
            qk_norm=True,
            head_width=128,
            window=4096,
            windowed=False,
            required={"attention_bias": (False, None)},
        ),
        # Llama 2 to 3.3, and what is built like it, as SmolLM2; from 3.1 on its positions are scaled.
        Family("LlamaForCausalLM", positions=2048, required={"attention_bias": (False, None)}),
        # Mistral (7B, Nemo). The first 7B, and what was made of it, has a sliding window. Its folders also hold the
        # weights in a format of its own, which vLLM would take.
        Family(
            "MistralForCausalLM",
            positions=131_072,
            window=4096,
            vllm_args=("--config-format", "hf", "--tokenizer-mode", "hf"),
        ),
    )
}
"""The families by their names in config.json; transformers builds all other decoders."""


class NotBuilt(ValueError):
    """A model that torchtune's modules cannot build."""


def read_rope(config: Mapping[str, Any]) -> Rope:
    """Read the rotary positions of a config.json, spelled as in transformers 5 (``rope_parameters``) or before.

    Raises:
        NotBuilt: we do not build this scaling, or a number in it.
        ValueError: the scaling lacks a number, or config.json has two scalings that differ.
    """
    newer, older = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    read = {"rope_type": older.get("type"), **older}
    lost = sorted(key for key, value in newer.items() if read.get(key) != value)
    if older and lost:
        raise ValueError(
            f"rope_scaling and rope_parameters differ in {', '.join(lost)}, and transformers and vLLM read the first "
            "alone; put the scaling into rope_parameters"
        )
    own = {"rope_theta": config.get("rope_theta")} | (older or newer)
    numbers = {key: value for key, value in own.items() if value is not None}
    kinds = {numbers.pop(key) for key in ("rope_type", "type") if key in numbers} or {"default"}
    base = float(numbers.pop("rope_theta", 10_000.0))
    if numbers.pop("partial_rotary_factor", 1.0) != 1.0:
        raise NotBuilt("partial_rotary_factor cannot be other than 1")
    kind = " and ".join(sorted(map(str, kinds)))
    if kind not in ROPE_SCALINGS:
        raise NotBuilt(f"rotary scaling {kind!r} cannot be built; those that can: {', '.join(ROPE_SCALINGS)}")
    known = ROPE_SCALINGS[kind]
    if strange := sorted(set(numbers) - known):
        raise NotBuilt(f"rotary scaling {kind!r} with {', '.join(strange)} cannot be built")
    if missing := sorted(known - set(numbers) - _OPTIONAL):
        raise ValueError(f"rotary scaling {kind!r} lacks {', '.join(missing)}")
    return Rope(base, kind, {key: float(value) for key, value in numbers.items()})
