"""A base model's weights out of its folder, by torchtune's names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model_families.base_model import BaseModel
from model_families.weights.weight_files import weight_files
from model_families.weights.weight_names import EMBEDDING, HEAD, SHAPE, tune_name


def load_weights(folder: str | Path, base: BaseModel) -> dict[str, Tensor]:
    """Load all weights of the model in ``folder`` as CPU tensors, which stay in the files' pages until they are read.

    Raises:
        ValueError: a file is missing or damaged, a name belongs to no decoder, or config.json ties the head to the
            embedding although the two differ.
    """
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        tensors |= read_tensors(file)
    head = tensors.pop(HEAD, None) if base.tied else None
    if head is not None and not torch.equal(head, tensors.get(EMBEDDING, head[:0])):
        raise ValueError(
            f"{folder}: {HEAD} is not {EMBEDDING}, to which config.json ties it (tie_word_embeddings); make it false"
        )
    left = ("rotary_emb.inv_freq", SHAPE)
    return {tune_name(name): tensor for name, tensor in tensors.items() if not name.endswith(left)}


def read_tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of a file with its name. Raises ValueError if the file cannot be read."""
    try:
        with safe_open(file, framework="pt", device="cpu") as content:
            for name in content.keys():  # noqa: SIM118
                yield name, content.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file} cannot be read: {str(error).splitlines()[0]}; copy it anew") from error
