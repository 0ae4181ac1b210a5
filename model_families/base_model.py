"""A base model, as its folder describes it: family, sizes, the layers that LoRA can wrap, weight files, a digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_families import llama, mistral, qwen2, qwen3
from model_families.family import Family, Rope, read_rope
from model_families.weight_names import EMBEDDING, HEAD

FAMILIES = {each.FAMILY.architecture: each.FAMILY for each in (qwen2, qwen3, llama, mistral)}
"""What can be served and trained, by its name in config.json."""
LORA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The layers of a decoder that LoRA can wrap."""
MAX_HEADER_BYTES = 16 << 20
_MODEL_FILES = (".json", ".jinja", ".safetensors", ".bin")
_DIGESTED_BYTES = 1 << 20
_BLOCKS, _BLOCK_BYTES = 256, 4096


def model_digest(folder: str | Path) -> str:
    """16 hex digits that other weights or another tokenizer in the same folder change.

    They come from the name and size of every file, its first and last MiB, and 256 blocks of 4 KiB at even distances
    in between: training moves all weights, and all of a large model takes minutes to read.
    """
    return files_digest(path for path in Path(folder).iterdir() if path.suffix in _MODEL_FILES)


def files_digest(files: Iterable[Path]) -> str:
    """16 hex digits of files by name, size and samples of their bytes, as :func:`model_digest` describes them."""
    digest = hashlib.sha256()
    for file in sorted(files):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as content:
            digest.update(content.read(_DIGESTED_BYTES))
            for block in range(_BLOCKS if size > 2 * _DIGESTED_BYTES else 0):
                content.seek(size * block // _BLOCKS)
                digest.update(content.read(_BLOCK_BYTES))
            content.seek(max(_DIGESTED_BYTES, size - _DIGESTED_BYTES))
            digest.update(content.read())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class BaseModel:
    """A decoder, described.

    ``feed_forward`` is the inner width of the MLP, ``tied``: the embedding is the head too. ``positions`` are as many
    as it attends over: a context that a sliding window does not cut is as without one.
    """

    layers: int
    width: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_width: int
    vocabulary: int
    tied: bool
    family: Family
    positions: int
    norm_eps: float
    rope: Rope
    blanks: tuple[str, ...] = ()
    """Keys of config.json that say nothing and that vLLM would take for settings."""

    @classmethod
    def read(cls, folder: str | Path) -> BaseModel:
        """From ``<folder>/config.json``.

        Raises:
            ValueError: names the file, and what is missing or cannot be built.
        """
        file = Path(folder) / "config.json"
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
            architecture = (config.get("architectures") or ["none"])[0]
            family = FAMILIES.get(architecture)
        except (OSError, AttributeError, TypeError, KeyError, ValueError, RecursionError) as error:
            raise ValueError(f"{file} cannot be read as a model's configuration: {error!r}") from error
        if family is None:
            known = ", ".join(FAMILIES)
            raise ValueError(f"{file}: {architecture} cannot be trained; take a model whose architecture is {known}")
        if objection := family.objection(config):
            raise ValueError(f"{file}: {objection}, which cannot be trained; take another model of the family")
        try:
            return cls._described(config, family)
        except (AttributeError, KeyError, TypeError, ZeroDivisionError) as error:
            raise ValueError(f"{file} cannot be read as a model's configuration: {error!r}") from error
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error

    @classmethod
    def _described(cls, config: dict[str, Any], family: Family) -> BaseModel:
        width, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        positions, rope = int(config.get("max_position_embeddings") or family.positions), read_rope(config)
        positions, window = max(positions, rope.positions), family.window_of(config)
        return cls(
            layers=int(config["num_hidden_layers"]),
            width=width,
            feed_forward=int(config["intermediate_size"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_width=int(config.get("head_dim") or family.head_width or width // heads),
            vocabulary=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings")),
            family=family,
            positions=positions if window is None else min(positions, window),
            norm_eps=float(config.get("rms_norm_eps") or 1e-6),
            rope=rope,
            blanks=tuple(key for key in ("quantization_config",) if config.get(key) == {}),
        )

    @property
    def modules(self) -> dict[str, tuple[str, int, int]]:
        """The layers that LoRA can wrap: name -> (path inside a decoder layer, input width, output width)."""
        query, keys = self.heads * self.head_width, self.kv_heads * self.head_width
        return {
            "q_proj": ("self_attn", self.width, query),
            "k_proj": ("self_attn", self.width, keys),
            "v_proj": ("self_attn", self.width, keys),
            "o_proj": ("self_attn", query, self.width),
            "gate_proj": ("mlp", self.width, self.feed_forward),
            "up_proj": ("mlp", self.width, self.feed_forward),
            "down_proj": ("mlp", self.feed_forward, self.width),
        }

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight by its name in Hugging Face's files: [out, in] of a layer, [width] of a norm; a tied head is
        none."""
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocabulary, self.width)}
        for layer in range(self.layers):
            before = f"model.layers.{layer}"
            for module, (parent, inputs, outputs) in self.modules.items():
                shapes[f"{before}.{parent}.{module}.weight"] = (outputs, inputs)
                if self.family.qkv_bias and module in ("q_proj", "k_proj", "v_proj"):
                    shapes[f"{before}.{parent}.{module}.bias"] = (outputs,)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                shapes[f"{before}.{norm}.weight"] = (self.width,)
            for norm in ("q_norm", "k_norm") if self.family.qk_norm else ():
                shapes[f"{before}.self_attn.{norm}.weight"] = (self.head_width,)
        shapes["model.norm.weight"] = (self.width,)
        return shapes if self.tied else {**shapes, HEAD: (self.vocabulary, self.width)}

    def adapter_shapes(self, target_modules: list[str], rank: int) -> dict[str, tuple[int, int]]:
        """Every tensor of a PEFT adapter on ``target_modules``: name to shape. A is [r, in], B is [out, r]."""
        expected = {}
        for layer in range(self.layers):
            for module in target_modules:
                parent, inputs, outputs = self.modules[module]
                prefix = f"base_model.model.model.layers.{layer}.{parent}.{module}"
                expected[f"{prefix}.lora_A.weight"] = (rank, inputs)
                expected[f"{prefix}.lora_B.weight"] = (outputs, rank)
        return expected

    def adapter_parameters(self, rank: int) -> int:
        """Of an adapter on all modules."""
        return self.layers * rank * sum(inputs + outputs for _, inputs, outputs in self.modules.values())

    def max_adapter_bytes(self, rank_limit: int) -> int:
        """Size of the largest weights file there can be: all modules, fp32, and its header."""
        return 4 * self.adapter_parameters(rank_limit) + MAX_HEADER_BYTES

    @property
    def parameters(self) -> int:
        """Norms and biases are left out."""
        return self.layers * self.layer_parameters + self.outer_parameters

    @property
    def layer_parameters(self) -> int:
        """Of one decoder layer."""
        return sum(inputs * outputs for _, inputs, outputs in self.modules.values())

    @property
    def outer_parameters(self) -> int:
        """Of the embedding and the head, which are one matrix if they are tied."""
        return self.vocabulary * self.width * (1 if self.tied else 2)

    @property
    def kv_bytes_per_token(self) -> int:
        """In bf16, over all layers."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_width
