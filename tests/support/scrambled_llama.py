"""A Llama as torchtune builds it whose adapter is served with queries and keys in torchtune's order of rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from loop_recipes.engine.model import meta_model, new_adapter
from loop_recipes.engine.peft_export import _PAIRED
from loop_recipes.engine.sharding import place_model
from model_families.base_model import BaseModel
from model_families.decoder.weights import load_weights
from support.families import WORDS, section, small, write_model
from support.small_runs import random_adapter


def logprobs(folder: Path, tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log-probs [tokens] under the base model, with the adapter that is meant, and with the scrambled one."""
    write_model(folder, small("Llama-3.2-1B", max_position_embeddings=tokens + 1))
    ids = torch.randint(0, WORDS, (1, tokens + 1), generator=torch.Generator().manual_seed(1))
    shapes = new_adapter(meta_model(section(folder), torch.float32), 0)
    meant = random_adapter(shapes, seed=1, scale=0.02)
    width = BaseModel.read(folder).head_width
    scrambled = {
        name: tensor.unflatten(0, (-1, 2, width // 2)).transpose(1, 2).flatten(0, 2)
        if _PAIRED.fullmatch(name)
        else tensor
        for name, tensor in meant.items()
    }
    found = []
    for adapter in ({name: tensor * 0 for name, tensor in meant.items()}, meant, scrambled):
        model = meta_model(section(folder), torch.float32)
        place_model(model, load_weights(folder, BaseModel.read(folder)), adapter, torch.device("cpu"), torch.float32)
        with torch.no_grad():
            logits = model(ids)[0, :-1].log_softmax(-1)
        found.append(logits.gather(1, ids[0, 1:, None])[:, 0].double().numpy())
    base, right, wrong = found
    return base, right, wrong
