"""Checks the weights in a model's folder against its description: names, shapes, and whose they are.

No tensor is loaded and torch is not imported, but for rows of a head that is stored beside the embedding it is tied to.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from model_families.base_model import BaseModel, files_digest
from model_families.families.general_model import layer_of
from model_families.weights.weight_files import StoredTensor, check_one_set, read_header, weight_files
from model_families.weights.weight_names import EMBEDDING, HEAD, PACKED_TYPES

COMPARED_ROWS = 1024
"""Number of rows of a head and an embedding that are compared."""
_WRAPPED = {
    "_orig_mod.": "saved from a model that torch.compile made: save its _orig_mod",
    "base_model.model.": "saved from a model of PEFT: save what merge_and_unload() returns",
    "module.": "saved from a wrapper such as DDP: save its module",
    "model.language_model.": "the language part of a larger model: save it as a model of its own",
    "language_model.": "the language part of a larger model: save it as a model of its own",
    "pretrained_model.": "saved from TRL's model with a value head: save its pretrained_model",
}
"""Prefix of the names -> the program that wrote it, and the cure."""
_NEVER_PLAIN = ("_orig_mod.", "base_model.model.", "module.", "pretrained_model.")
"""The prefixes that no model itself has."""
_QUANTISED = re.compile(
    r".*\.(qweight|qzeros|scales|g_idx|biases|weight_packed|weight_scale(_inv)?|(weight\.)?(absmax|quant_map|SCB))(\..*)?"
)
"""Names of what GPTQ, AWQ, MLX, compressed-tensors, FP8 and bitsandbytes keep beside a weight."""
_WHOLE = frozenset({"F64", "F32", "F16", "BF16"})


def weights_digest(folder: str | Path) -> str | None:
    """Return 16 hex digits that change when the weights in ``folder`` change, but not when its tokenizer does.

    Return None if no weights with Hugging Face's names can be read, as in torchtune's own checkpoints.
    """
    try:
        return files_digest(weight_files(folder))
    except (OSError, ValueError):
        return None


def check_finite(folder: str | Path) -> None:
    """Check that no weight in ``folder`` is inf or nan. Reads all weights, and needs torch.

    Raises:
        ValueError: a weight is inf or nan; the message names the file and the tensor.
    """
    for file in weight_files(folder):
        with safe_open(file, "pt") as content:
            for name in read_header(file):
                tensor = content.get_tensor(name)
                ends = tensor.aminmax() if tensor.is_floating_point() and tensor.numel() else ()
                if not all(end.isfinite() for end in ends):
                    raise ValueError(f"{file}: {name} holds inf or nan; save it anew, in bf16 if it is float16")


def check_weights(folder: str | Path, base: BaseModel) -> None:
    """Check the weights in ``folder`` against ``base``, its description: files, names, shapes and a tied head.

    Raises:
        ValueError: the weights do not fit; the message names the file, the fault and the cure in one line.
    """
    folder, on_disk = Path(folder), dict[str, StoredTensor]()
    for file in check_one_set(folder):
        on_disk |= read_header(file)
    if base.family is None:
        return _check_general(folder, on_disk, base)
    expected = base.weights if base.four_bits is None else base.four_bits.stored(base.weights)
    stored = {name: tensor for name, tensor in on_disk.items() if not name.endswith("rotary_emb.inv_freq")}
    head = stored.pop(HEAD, None) if base.tied else None
    _check_names(folder, stored, expected)
    for name, shape in expected.items():
        _check_tensor(name, stored[name], shape)
    if head is not None and not _alike(head, stored[EMBEDDING]):
        raise ValueError(
            f"{folder}: {HEAD} is not {EMBEDDING}, to which config.json ties it (tie_word_embeddings); make it false"
        )


def _check_general(folder: Path, stored: Mapping[str, StoredTensor], base: BaseModel) -> None:
    """Check that a model without a family has whole, plain weights, and config.json's numbers of layers and words.

    The learner checks everything else, because that needs transformers.
    """
    bare = {name.removeprefix(prefix) for name in stored for prefix in _NEVER_PLAIN if name.startswith(prefix)}
    strange = [
        name for name in stored if name.startswith(_NEVER_PLAIN) or _QUANTISED.fullmatch(name) or ".lora_" in name
    ]
    if strange:
        raise ValueError(f"{stored[strange[0]].file}: {_kind(strange, stored, dict.fromkeys(bare))}")
    layers = {layer_of(name) for name in stored} - {None}
    if missing := sorted(set(range(base.layers)) - layers):
        raise ValueError(
            f"{folder} lacks layer {missing[0]} of the {base.layers} that config.json says; are config.json and "
            "weights of one model?"
        )
    for name, tensor in stored.items():
        if base.mxfp4 and name not in base.weights and tensor.dtype == "U8":  # blocks and scales
            continue
        words = base.vocabulary if name.endswith("embed_tokens.weight") and layer_of(name) is None else None
        _check_tensor(name, tensor, tensor.shape if words is None else (words, *tensor.shape[1:]))


def _check_names(folder: Path, stored: Mapping[str, StoredTensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    strange = [name for name in stored if name not in expected]
    missing = [name for name in expected if name not in stored]
    if strange:
        raise ValueError(f"{stored[strange[0]].file}: {_kind(strange, stored, expected)}")
    if missing == [HEAD]:
        raise ValueError(
            f"{folder} holds no {HEAD}, and config.json does not tie it to the embedding: make tie_word_embeddings "
            "true if they are the same, or copy the weights anew"
        )
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"{folder} lacks the weight {missing[0]}{more}; are config.json and weights of one model?")


def _kind(strange: Sequence[str], stored: Mapping[str, StoredTensor], expected: Mapping[str, Any]) -> str:
    """Return one text: the kind of weights with these names, and the cure."""
    name = strange[0]
    for prefix, kind in _WRAPPED.items():
        if any(
            each.removeprefix(prefix) in expected or f"model.{each.removeprefix(prefix)}" in expected
            for each in strange
            if each.startswith(prefix)
        ):
            return f"{next(each for each in strange if each.startswith(prefix))} is {kind}"
    if any(".lora_" in each or ".base_layer." in each for each in strange):
        return f"{name} is part of an adapter that is not merged: save what merge_and_unload() returns"
    if any(map(_QUANTISED.fullmatch, strange)):
        return "the weights are quantised, which cannot be trained; take the model's own"
    if any(each.startswith(("v_head.", "value_head.", "score.", "classifier.")) for each in strange):
        return f"{name} is a value or reward head: save the model without it"
    more = f" ({len(strange)} such weights)" if len(strange) > 1 else ""
    return f"{name} is not a weight of the model that config.json describes{more}"


def _check_tensor(name: str, tensor: StoredTensor, shape: tuple[int, ...]) -> None:
    if tensor.dtype not in (PACKED_TYPES.get(name.rpartition(".")[2]) or _WHOLE):
        raise ValueError(
            f"{tensor.file}: {name} is {tensor.dtype}: the weights are quantised, which cannot be trained; take the "
            "model's own"
        )
    if tensor.shape == shape:
        return
    cure = "are config.json and weights of one model?"
    if name.endswith((EMBEDDING, HEAD)) and tensor.shape[1:] == shape[1:]:
        cure = f"if tokens were added, make vocab_size {tensor.shape[0]}"
    raise ValueError(f"{tensor.file}: {name} is {list(tensor.shape)}, and config.json says {list(shape)}; {cure}")


def _alike(one: StoredTensor, other: StoredTensor) -> bool:
    """Return whether some rows of two tensors are equal. The learner compares all rows, also of different types."""
    if one.shape != other.shape:
        return False
    if one.dtype != other.dtype:
        return True
    with safe_open(one.file, "pt") as first, safe_open(other.file, "pt") as second:  # numpy has no bfloat16
        head, embedding = first.get_slice(HEAD), second.get_slice(EMBEDDING)
        step = max(1, one.shape[0] // COMPARED_ROWS)
        return all(head[row].equal(embedding[row]) for row in range(0, one.shape[0], step))
