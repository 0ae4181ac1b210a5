"""A base model: a digest of its files and, from its config.json, the layers that LoRA can wrap and all sizes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

ARCHITECTURES = ("Qwen2ForCausalLM",)
"""What can be served and trained: a learner that names or orders weights otherwise would train another policy."""
LORA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The layers of a decoder that LoRA can wrap."""
MAX_HEADER_BYTES = 16 << 20
_MODEL_FILES = (".json", ".jinja", ".safetensors", ".bin")
_DIGESTED_BYTES = 1 << 20


def model_digest(folder: str | Path) -> str:
    """16 hex digits that other weights or another tokenizer in the same folder change.

    They come from the name, size, first and last MiB of every file: training moves all weights, and all of a large
    model takes minutes to read.
    """
    digest = hashlib.sha256()
    for file in sorted(path for path in Path(folder).iterdir() if path.suffix in _MODEL_FILES):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as content:
            digest.update(content.read(_DIGESTED_BYTES))
            content.seek(max(_DIGESTED_BYTES, size - _DIGESTED_BYTES))
            digest.update(content.read())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class BaseModel:
    """A decoder's sizes; ``feed_forward`` is the inner width of the MLP, ``tied``: the embedding is the head too."""

    layers: int
    width: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_width: int
    vocabulary: int
    tied: bool

    @classmethod
    def read(cls, folder: str | Path) -> BaseModel:
        """From ``<folder>/config.json``.

        Raises:
            ValueError: names the file, and what is missing or of another architecture than :data:`ARCHITECTURES`.
        """
        file = Path(folder) / "config.json"
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
            architecture = (config.get("architectures") or ["none"])[0]
        except (OSError, AttributeError, TypeError, KeyError, ValueError, RecursionError) as error:
            raise ValueError(f"{file} cannot be read as a model's configuration: {error!r}") from error
        if architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise ValueError(f"{file}: {architecture} cannot be trained; take a model whose architecture is {known}")
        try:
            width, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
            return cls(
                layers=int(config["num_hidden_layers"]),
                width=width,
                feed_forward=int(config["intermediate_size"]),
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_width=int(config.get("head_dim") or width // heads),
                vocabulary=int(config["vocab_size"]),
                tied=bool(config.get("tie_word_embeddings")),
            )
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise ValueError(f"{file} cannot be read as a model's configuration: {error!r}") from error

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
