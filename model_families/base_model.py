"""A base model, as its folder describes it: sizes, weights, the layers that LoRA can wrap, a digest.

Decoders of the families here are described by config.json alone, all others by the headers of their weights too.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loop_formats.run_files import settings_of
from model_families.families.family import FAMILIES, Family, NotBuilt, Rope, read_rope
from model_families.families.general_model import (
    is_expert,
    is_of_tower,
    layer_of,
    module_of,
    shapes_on_disk,
    takes_lora,
    text_config,
)
from model_families.weights.weight_files import weight_files
from model_families.weights.weight_names import EMBEDDING, HEAD

if TYPE_CHECKING:
    from model_families.weights.four_bits import FourBits

MAX_HEADER_BYTES = 16 << 20
_MODEL_FILES = re.compile(
    r"((generation_)?config|tokenizer(_config)?|vocab|chat_template|special_tokens_map|added_tokens)\.json|.*\.jinja"
)
"""Names of the files of configuration and tokenizer, without the notes of other programs."""
_DIGESTED_BYTES = 1 << 20
_BLOCKS, _BLOCK_BYTES = 256, 4096
_KEYS = ("k_proj", "qkv_proj", "kv_a_proj_with_mqa")
"""Last parts of the names of layers whose output is in the KV cache."""
_MXFP4_BYTES = 17 / 32
"""Bytes per number: a block of 32 numbers of four bits has a scale of one byte."""
_GENERATES = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")


def model_digest(folder: str | Path) -> str:
    """Return 16 hex digits that change when the weights or the tokenizer in ``folder`` change.

    The digest covers the name, the size, the first and last MiB and 256 evenly spaced blocks of 4 KiB of each file of
    weights and tokenizer. These samples suffice because training moves all weights; a full read of a large model takes
    minutes. Of configuration files it covers :func:`~loop_formats.run_files.settings_of`.
    """
    files = {path for path in Path(folder).iterdir() if _MODEL_FILES.fullmatch(path.name)}
    with suppress(ValueError):  # no weights that could be read
        files.update(weight_files(folder))
    return files_digest(files)


def files_digest(files: Iterable[Path]) -> str:
    """Return 16 hex digits computed from the name, size and samples of each file, as :func:`model_digest` describes."""
    digest = hashlib.sha256()
    for file in sorted(files):
        if file.name.endswith("config.json"):
            digest.update(settings_of(file))
            continue
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
    """The description of a decoder.

    ``feed_forward`` is the inner width of the MLP. ``tied`` says that the embedding is also the head. ``positions`` is
    the number of tokens that the decoder attends over; a family's sliding window limits this number.

    ``family`` is None if transformers builds the model. ``weights`` maps each name on disk to a shape, [out, in] for a
    linear layer. ``mxfp4`` says that the files hold routed experts in MXFP4: the learner reads them as bf16, vLLM
    serves them in MXFP4. ``four_bits`` describes the layers that have four-bit weights in files, learner and vLLM.
    """

    model_type: str
    layers: int
    width: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_width: int
    vocabulary: int
    tied: bool
    family: Family | None
    positions: int
    norm_eps: float
    rope: Rope
    weights: Mapping[str, tuple[int, ...]] = field(repr=False)
    blanks: tuple[str, ...] = ()
    """Keys of config.json that say nothing and that vLLM would take for settings."""
    mxfp4: bool = False
    four_bits: FourBits | None = None
    context: int | None = None
    """Tokens of the longest sequence that servers hold, where it is known; they choose rotary positions by it."""

    @classmethod
    def read(cls, folder: str | Path, general: bool = False) -> BaseModel:
        """Read ``<folder>/config.json``, and the weights' headers if ``general`` is set or no family builds the model.

        Raises:
            ValueError: something is missing or cannot be built; the message names it and the file.
        """
        file = Path(folder) / "config.json"
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
            architecture = (config.get("architectures") or ["none"])[0]
            family = FAMILIES.get(architecture)
            quantised = [
                f"{key} is {config[key]}"
                for key in ("quantization_config", "quantization")
                if config.get(key) and _quantised_by(config) is None
            ]
            decoder = architecture.endswith(_GENERATES) and not config.get("is_encoder_decoder")
        except (FileNotFoundError, NotADirectoryError) as error:
            from model_families.weights.published import describe_wrong_path  # needed for this error only

            raise ValueError(f"{folder} {describe_wrong_path(folder)}") from error
        except (OSError, AttributeError, TypeError, KeyError, ValueError, RecursionError) as error:
            raise ValueError(f"{file} cannot be read as a model's configuration: {error!r}") from error
        if quantised:
            raise ValueError(
                f"{file}: {quantised[0]}, which cannot be trained; take the model's own weights, or W4A16 of "
                "compressed-tensors"
            )
        if family is None and not decoder:
            raise ValueError(
                f"{file}: {architecture} is not a decoder that generates text, and only those can be trained; take a "
                "model whose architecture ends in ForCausalLM or ForConditionalGeneration"
            )
        try:
            if not general and family is not None and family.objection(config) is None:
                with suppress(NotBuilt):
                    return cls.of_family(config, family)
            return cls._general(Path(folder), config)
        except (AttributeError, IndexError, KeyError, TypeError, ZeroDivisionError, re.error) as error:
            raise ValueError(f"{file} cannot be read as that of a decoder known here: {error!r}") from error
        except ValueError as error:
            raise error if str(error).startswith(str(folder)) else ValueError(f"{file}: {error}") from error

    @classmethod
    def of_family(cls, config: dict[str, Any], family: Family) -> BaseModel:
        """Return the description of a family's model, from the content of its config.json alone."""
        positions, rope = int(config.get("max_position_embeddings") or family.positions), read_rope(config)
        positions, window = max(positions, rope.positions), family.window_of(config)
        sizes = _sizes(config, family.head_width) | {"feed_forward": int(config["intermediate_size"])}
        tied = bool(config.get("tie_word_embeddings"))
        weights = _weights_of_family(family, tied, **sizes)
        return cls(
            **sizes,
            model_type=str(config.get("model_type")),
            tied=tied,
            family=family,
            positions=positions if window is None else min(positions, window),
            norm_eps=float(config.get("rms_norm_eps") or 1e-6),
            rope=rope,
            weights=weights,
            blanks=tuple(key for key in ("quantization_config",) if config.get(key) == {}),
            four_bits=_read_four_bits(config, weights),
        )

    @classmethod
    def _general(cls, folder: Path, config: dict[str, Any]) -> BaseModel:
        _read_four_bits(config, None)
        text, weights = text_config(config), shapes_on_disk(folder)
        inner = text.get("intermediate_size") or text.get("moe_intermediate_size") or 0
        sizes = _sizes(text, None)
        if text.get("kv_lora_rank"):  # latent attention keeps the same of all heads
            sizes["kv_heads"] = 1
        return cls(
            **sizes,
            feed_forward=int(max(inner) if isinstance(inner, list) else inner),
            model_type=str(config.get("model_type")),
            tied=not any(name.endswith(HEAD) for name in weights),
            family=None,
            positions=int(text.get("max_position_embeddings") or 32_768),
            norm_eps=float(text.get("rms_norm_eps") or 1e-6),
            rope=Rope(10_000.0),
            weights=weights,
            mxfp4=_quantised_by(config) == "mxfp4",
        )

    @cached_property
    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """The layers that LoRA can wrap, by their names in transformers and in adapters: [out, in]."""
        return {
            module_of(name): (shape[0], shape[1])
            for name, shape in self.weights.items()
            if takes_lora(name, shape, self.model_type)
        }

    def divides(self, parts: int) -> bool:
        """Return whether the heads of attention can be divided into ``parts``; a key head may be in several parts."""
        return self.heads % parts == 0 and (self.kv_heads % parts == 0 or parts % self.kv_heads == 0)

    @property
    def lora_modules(self) -> tuple[str, ...]:
        """Last parts of the names of :attr:`linear_layers`, in the order of a layer."""
        return tuple(dict.fromkeys(name.rpartition(".")[2] for name in self.linear_layers))

    def adapter_shapes(self, target_modules: Collection[str], rank: int) -> dict[str, tuple[int, int]]:
        """Return the shapes of a PEFT adapter's tensors on ``target_modules``, by name: A is [r, in], B is [out, r]."""
        expected = {}
        for name, (outputs, inputs) in self.linear_layers.items():
            if name.rpartition(".")[2] in target_modules:
                expected[f"base_model.model.{name}.lora_A.weight"] = (rank, inputs)
                expected[f"base_model.model.{name}.lora_B.weight"] = (outputs, rank)
        return expected

    def adapter_parameters(self, rank: int) -> int:
        """Return the number of parameters of an adapter that has ``rank`` on all modules."""
        return rank * sum(map(sum, self.linear_layers.values()))

    def max_adapter_bytes(self, rank_limit: int) -> int:
        """Return the bytes of an adapter's largest possible weights file: all modules in fp32, and the header."""
        return 4 * self.adapter_parameters(rank_limit) + MAX_HEADER_BYTES

    @cached_property
    def _by_layer(self) -> Mapping[int | None, int]:
        """The parameter count of each decoder layer, without norms and biases; key None is for all outside layers."""
        counts: dict[int | None, int] = {}
        for name, shape in self.weights.items():
            if len(shape) > 1 and not is_of_tower(name):
                counts[layer_of(name)] = counts.get(layer_of(name), 0) + math.prod(shape)
        return counts

    @property
    def parameters(self) -> int:
        """Number of parameters of the text's decoder, without norms and biases."""
        return sum(self._by_layer.values())

    @property
    def layer_parameters(self) -> int:
        """Number of parameters of the largest decoder layer."""
        return max(count for layer, count in self._by_layer.items() if layer is not None)

    @property
    def outer_parameters(self) -> int:
        """Number of parameters outside the decoder layers: embedding and head, one matrix if they are tied."""
        return self._by_layer[None]

    @property
    def held_bytes(self) -> float:
        """Bytes of the weights in the learner: bf16, or four bits for weights that are stored in four bits."""
        return 2 * self.parameters - (0.0 if self.four_bits is None else self.four_bits.saved_bytes(self.weights))

    @property
    def served_bytes(self) -> float:
        """Bytes of the weights in a server, which keeps MXFP4 as it is stored."""
        experts = sum(math.prod(shape) for name, shape in self.weights.items() if is_expert(name, shape))
        return self.held_bytes - (2 - _MXFP4_BYTES) * experts * self.mxfp4

    @cached_property
    def _keys(self) -> list[str]:
        """Names of the weights in the decoder's layers whose output goes into the KV cache."""
        made = (name for name in self.weights if name.endswith(".weight") and layer_of(name) is not None)
        return [name for name in made if module_of(name).rpartition(".")[2] in _KEYS]

    @property
    def attention_layers(self) -> list[int]:
        """The numbers of the layers with attention; a hybrid model's other layers keep a recurrent state instead."""
        return [number for number in map(layer_of, self._keys) if number is not None]

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the KV cache per token in bf16, if no layer had a window; recurrent states do not count."""
        width = 0
        for name in self._keys:
            module, rows = module_of(name).rpartition(".")[2], self.weights[name][0]
            if module == "k_proj":  # values are the keys where they have no weight of their own
                rows += self.weights.get(name.replace("k_proj", "v_proj"), (rows,))[0]
            elif module == "qkv_proj":
                rows -= self.heads * self.head_width
            width += rows
        return 2 * width


def _quantised_by(config: Mapping[str, Any]) -> str | None:
    """Return the quantisation method if we can read it (gpt-oss's mxfp4 or compressed-tensors), else None."""
    method = (config.get("quantization_config") or {}).get("quant_method")
    published = method == "mxfp4" and config.get("model_type") == "gpt_oss"
    return method if published or method == "compressed-tensors" else None


def _read_four_bits(config: Mapping[str, Any], weights: Mapping[str, tuple[int, ...]] | None) -> FourBits | None:
    if _quantised_by(config) != "compressed-tensors":
        return None
    from model_families.weights.four_bits import read_four_bits  # rarely needed

    return read_four_bits(config["quantization_config"], weights)


def _sizes(config: Mapping[str, Any], head_width: int | None) -> dict[str, Any]:
    """Read the sizes of a decoder from its config.json. Raises ValueError if a size is below 1."""
    width, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    sizes = {
        "layers": int(config["num_hidden_layers"]),
        "width": width,
        "heads": heads,
        "kv_heads": int(config.get("num_key_value_heads") or heads),
        "head_width": int(config.get("head_dim") or head_width or width // heads),
        "vocabulary": int(config["vocab_size"]),
    }
    if wrong := [f"{name} {size}" for name, size in sizes.items() if size < 1]:
        raise ValueError(f"it says {', '.join(wrong)}, which no decoder has")
    return sizes


def _weights_of_family(
    family: Family,
    tied: bool,
    *,
    layers: int,
    width: int,
    feed_forward: int,
    heads: int,
    kv_heads: int,
    head_width: int,
    vocabulary: int,
) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight by its name in Hugging Face's files, which omit a tied head."""
    query, keys = heads * head_width, kv_heads * head_width
    linear = {
        "self_attn.q_proj": (query, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, query),
        "mlp.gate_proj": (feed_forward, width),
        "mlp.up_proj": (feed_forward, width),
        "mlp.down_proj": (width, feed_forward),
    }
    inside: dict[str, tuple[int, ...]] = {f"{module}.weight": shape for module, shape in linear.items()}
    if family.qkv_bias:
        inside |= {f"{module}.bias": shape[:1] for module, shape in [*linear.items()][:3]}
    inside |= {f"{norm}.weight": (width,) for norm in ("input_layernorm", "post_attention_layernorm")}
    if family.qk_norm:
        inside |= {f"self_attn.{norm}.weight": (head_width,) for norm in ("q_norm", "k_norm")}
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (vocabulary, width)}
    shapes |= {f"model.layers.{layer}.{name}": shape for layer in range(layers) for name, shape in inside.items()}
    shapes["model.norm.weight"] = (width,)
    return shapes if tied else {**shapes, HEAD: (vocabulary, width)}
