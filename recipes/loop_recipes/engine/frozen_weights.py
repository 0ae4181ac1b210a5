"""Moves a model's frozen weights to the host's memory while other programs use its device, and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from loop_recipes.engine.sharding import local_part


class FrozenWeights:
    """The weights that a model never changes; each rank has its own part.

    The weights leave the device by freeing their storage, and return by filling it again. So every tensor and view on
    them stays valid, FSDP2's too. The copy on the host is made once, in pinned memory if the device is a GPU.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._host: dict[str, Tensor] = {}

    @torch.no_grad()
    def to_host(self) -> None:
        """Move the weights to the host, and free the device's memory for other processes."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # the last layers stay gathered after a pass without gradients
        users = Counter(weight.untyped_storage().data_ptr() for _, weight in self._weights())
        for name, weight in self._weights():
            storage = weight.untyped_storage()
            if storage.nbytes() == 0:  # not here
                continue
            if not storage.resizable() or users[storage.data_ptr()] > 1:  # on a CPU: pages of a file
                weight.set_(weight.clone())  # type: ignore[call-overload]
                storage = weight.untyped_storage()
            host_copy = self._host.get(name)
            if host_copy is None or host_copy.nbytes != storage.nbytes():
                host_copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=weight.is_cuda)
                self._host[name] = host_copy.copy_(_bytes(weight))
            storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @torch.no_grad()
    def to_device(self) -> None:
        """Move the weights back to the device, bit for bit as they were."""
        for name, weight in self._weights():
            if name in self._host and weight.untyped_storage().nbytes() == 0:
                weight.untyped_storage().resize_(self._host[name].nbytes)
                _bytes(weight).copy_(self._host[name], non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._model.named_parameters():
            if not parameter.requires_grad:
                yield name, local_part(parameter)


def _bytes(weight: Tensor) -> Tensor:
    """Return all of a tensor's storage, which FSDP2 may have padded."""
    storage = weight.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=weight.device).set_(storage, 0, (storage.nbytes(),), (1,))
