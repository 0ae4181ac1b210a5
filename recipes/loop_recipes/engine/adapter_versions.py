"""The adapters of the policy versions that some rollout may still need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from loop_recipes.engine.model import adapter_parameters
from loop_recipes.engine.sharding import full_tensors, like_parameter, local_part


class AdapterVersions:
    """Keeps the adapters of the policy versions that some rollout may still need; each rank keeps its own shard.

    Old log-probs belong to the version that sampled. With ``max_policy_lag`` 1 it may be the last but one.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = adapter_parameters(model)
        self._adapters: dict[int, dict[str, Tensor]] = {}

    @property
    def versions(self) -> list[int]:
        return sorted(self._adapters)

    def keep(self, version: int) -> None:
        """Remember the model's present adapter as ``version``."""
        self._adapters[version] = {name: local_part(p.detach()).clone() for name, p in self._parameters.items()}

    def put(self, version: int, adapter: Mapping[str, Tensor]) -> None:
        """Remember full tensors, e.g. from a checkpoint, as ``version``."""
        self._adapters[version] = {
            name: local_part(like_parameter(adapter[name], p)).clone() for name, p in self._parameters.items()
        }

    def forget_before(self, version: int) -> None:
        """Drop the versions older than ``version``."""
        self._adapters = {number: adapter for number, adapter in self._adapters.items() if number >= version}

    def forget(self, version: int) -> None:
        """Drop one version."""
        del self._adapters[version]

    def full(self, version: int) -> dict[str, Tensor]:
        """Return the whole adapter of a version as CPU tensors; all ranks must call it."""
        with self.active(version):
            return full_tensors(self._parameters)

    @contextmanager
    def active(self, version: int) -> Iterator[None]:
        """Put a version's adapter into the model, and afterwards restore the present adapter, bit for bit."""
        present = {name: local_part(p.detach()).clone() for name, p in self._parameters.items()}
        self._copy_in(self._adapters[version])
        try:
            yield
        finally:
            self._copy_in(present)

    @torch.no_grad()
    def _copy_in(self, adapter: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            local_part(parameter.detach()).copy_(adapter[name])
