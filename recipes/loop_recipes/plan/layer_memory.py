"""Bytes that a layer of a model takes and moves at work, counted on shapes: no weights, no GPU.

The tensors that transformers' layers save for their backward pass differ from kind to kind: a copy of each token for
each of its experts, chunks in fp32 for delta nets. So the layers run, on fake tensors.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from loop_recipes.engine.batching import Documents
from loop_recipes.engine.general_attention import MOST_SCORES
from loop_recipes.engine.general_decoder import GeneralDecoder

DOCUMENT, LONG = 64, 256
"""Tokens of each short document of a row, whose attention scores are small, and of the long one, to measure them."""


_MOVE_NOTHING = ("_unsafe_view", "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
"""Operators that neither read nor write, beside views."""


class LiveBytes(TorchDispatchMode):
    """Counts ``live`` and ``peak`` bytes of storages made inside or given to :meth:`add`, FSDP's resizing included.

    ``moved`` is the sum of the bytes that each operator reads and writes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.moved = 0
        self._sizes = WeakIdKeyDictionary()

    def __enter__(self) -> LiveBytes:
        resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            if storage in self._sizes:
                self._count(storage, self._sizes[storage])

        self._patch = mock.patch.object(torch.UntypedStorage, "resize_", counted)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._patch.stop()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self.add(value)
        if not func.is_view and func.overloadpacket.__name__ not in _MOVE_NOTHING:
            self.moved += sum(
                _size(value) for value in tree_leaves((args, kwargs, result)) if isinstance(value, Tensor)
            )
        return result

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage not in self._sizes:
            size = self._sizes[storage] = [0]
            self._count(storage, size)
            weakref.finalize(storage, self._free, size)

    def _count(self, storage: torch.UntypedStorage, size: list[int]) -> None:
        self.live += storage.nbytes() - size[0]
        size[0] = storage.nbytes()
        self.peak = max(self.peak, self.live)

    def _free(self, size: list[int]) -> None:
        self.live -= size[0]


@dataclass(frozen=True)
class LayerBytes:
    """Peak bytes of a layer's forward and backward pass: ``token`` for each token, ``block`` for any number of tokens.

    ``moved`` are the bytes of activations that all layers together read and write in both passes, for each token.
    """

    token: float
    block: float
    moved: float = 0.0


def _size(tensor: Tensor) -> int:
    """Return a tensor's bytes; an expanded dimension is read once."""
    own = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(own) * tensor.element_size()


def layer_bytes(model: GeneralDecoder) -> LayerBytes:
    """Count the bytes that a layer of the largest kind takes, and the bytes that all layers move.

    Args:
        model: without storage; it cannot be used afterwards.

    Raises:
        ValueError: a layer cannot be run on shapes alone.
    """
    kinds = model.kinds()
    model.text.layers = model.layers[: max(kinds) + 1]
    runs = [layer.forward for layer in model.layers]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            model.to_empty(device="cpu")
            tokens, blocks, moved = [], [], 0.0
            # Last, without any layer: the bytes outside of layers.
            for kind, count in [*kinds.items(), (None, -sum(kinds.values()))]:
                for number, layer in enumerate(model.layers):
                    layer.forward = runs[number] if number == kind else _passed_on
                few, many, one = (
                    _counted(model, lengths, fake) for lengths in ([DOCUMENT] * 2, [DOCUMENT] * 4, [LONG])
                )
                tokens.append((many.peak - few.peak) / (2 * DOCUMENT))
                pairs = LONG**2 - 4 * DOCUMENT**2
                blocks.append(max(0, one.peak - many.peak) / pairs * MOST_SCORES / model.num_heads)
                moved += count * (many.moved - few.moved) / (2 * DOCUMENT)
    except RuntimeError as error:
        raise ValueError(f"a layer of a {model.base.model_type} does not run on shapes alone: {error}") from error
    return LayerBytes(max(tokens), max(blocks), moved)


def _passed_on(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return hidden_states


def _counted(model: GeneralDecoder, lengths: list[int], fake: FakeTensorMode) -> LiveBytes:
    """Count the bytes of a forward and a backward pass over a row of documents of these lengths."""
    ids = fake.from_tensor(torch.zeros(1, sum(lengths), dtype=torch.long))
    places = fake.from_tensor(torch.cat([torch.arange(length) for length in lengths])[None])
    begin = model.tok_embeddings.register_forward_hook(lambda module, given, out: out.requires_grad_())
    with LiveBytes() as counted, begin:
        row = {"position_ids": places, "documents": Documents.of(lengths)}
        model.text(input_ids=ids, use_cache=False, **row).last_hidden_state.sum().backward()
    return counted
