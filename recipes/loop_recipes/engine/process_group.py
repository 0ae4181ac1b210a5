"""The messages between the ranks of a training job outside the model: small, typed, never pickled.

Everything here goes over CPU tensors and a gloo group of its own, whose long timeout lets a rank wait hours for a
collection. The default group, in which FSDP's collectives run, has a short one. With one process and no process group
every call is the identity.

A rank that fails alone must not wait for the others: they may be in a collective that it will never enter, and
``destroy_process_group`` would wait for that. It prints its traceback, stops its children and exits (:func:`leave`).
The connections that close, and torchrun's SIGTERM, then end the others.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import cached_property
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from loop_formats.schema import ConfigError
from loop_plumbing.process_guard import PR_SET_PDEATHSIG, set_process_control
from loop_plumbing.start import launched
from loop_recipes.run.stop_request import StopRequested

STEP_TIMEOUT_S = 900.0
"""Longest time one rank may come later than another to a collective of an update; NCCL's watchdog ends the job then."""

_waiting: dist.ProcessGroup | None = None

_SHARED_ERRORS: dict[str, type[Exception]] = {"config": ConfigError, "stop": StopRequested}
"""Errors that every rank raises as rank 0 does: a job ends with status 0 only if each of its ranks does."""


class RemoteError(RuntimeError):
    """Rank 0 failed. This is raised on every other rank, with rank 0's one-line reason."""


def init_process_group(device: torch.device, waiting_timeout_s: float) -> None:
    """Join the torchrun job, if there is one, and check that its ranks reach each other.

    Args:
        waiting_timeout_s: longest time a rank may wait for another outside an update, e.g. for rank 0 to finish a
            collection.

    Raises:
        ConfigError: the ranks could not add up a number over their devices.
    """
    global _waiting
    backend = "gloo" if device.type == "cpu" else f"{device.type}:nccl,cpu:gloo"
    timeout = timedelta(seconds=STEP_TIMEOUT_S)
    if dist.is_torchelastic_launched():
        from loop_recipes.engine.device_check import check_ranks  # one process has no others

        set_process_control(PR_SET_PDEATHSIG, signal.SIGTERM)  # torchrun that is killed does not end its ranks
        dist.init_process_group(backend, timeout=timeout)
        _waiting = dist.new_group(backend="gloo", timeout=timedelta(seconds=waiting_timeout_s))
        check_ranks(device)


def destroy_process_group() -> None:
    """Leave the job's group. All ranks must call this together, because it may wait for the others."""
    global _waiting
    if dist.is_initialized():
        dist.destroy_process_group()
    _waiting = None


def launched_rank() -> int:
    """Return this process's rank in its torchrun job, known before the process joins it; 0 without a job."""
    return launched("RANK", 0)


def single_process() -> bool:
    """Return true if no other rank exists."""
    return not dist.is_initialized() or dist.get_world_size() == 1


def leave(status: int | str | None) -> NoReturn:
    """Do ``sys.exit(status)`` for a recipe, but in a torchrun job end without the interpreter's shutdown.

    FSDP's meshes keep the process group, so gloo's threads outlive :func:`destroy_process_group`; a thread that
    releases a tensor while the interpreter shuts down ends the process by std::terminate, after all its work was done.
    """
    if not dist.is_torchelastic_launched():
        sys.exit(status)
    if isinstance(status, str):
        print(status, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))


def sum_over_ranks(values: Tensor) -> Tensor:
    """Sum a CPU tensor over the ranks; every rank gets the result, the input is left as it is."""
    if not dist.is_initialized():
        return values
    total = values.clone()
    dist.all_reduce(total, group=_waiting)
    return total


def any_rank(flag: bool) -> bool:
    """Return true on every rank if ``flag`` is true on one."""
    return bool(sum_over_ranks(torch.tensor([int(flag)])).item())


def gather_bytes(data: bytes) -> list[bytes]:
    """Return every rank's bytes, on every rank, in rank order."""
    if not dist.is_initialized():
        return [data]
    size = torch.tensor([len(data)])
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size, group=_waiting)
    longest = max(int(other) for other in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(rows, padded, group=_waiting)
    return [bytes(row[: int(length)].numpy()) for row, length in zip(rows, sizes, strict=True)]


def on_main_rank(
    work: Callable[[], Any],
    pack: Callable[[Any], Any] = lambda result: result,
    unpack: Callable[[Any], Any] = lambda data: data,
) -> Any:
    """Run ``work`` on rank 0 and give its result to every rank.

    Args:
        pack: turns a result into JSON-able data if it is not; called only if there are other ranks.
        unpack: turns the data back into the result, on the other ranks. Neither is called for None.

    Raises:
        Exception: on rank 0, the error of ``work``. On the other ranks the same error if it is a ConfigError or
            StopRequested, else RemoteError.
    """
    if single_process():
        return work()
    if dist.get_rank() != 0:
        answer = json.loads(_broadcast(b""))
        if "error" in answer:
            raise _SHARED_ERRORS.get(answer["kind"], RemoteError)(answer["error"])
        return None if answer["result"] is None else unpack(answer["result"])
    try:
        result = work()
    except BaseException as error:
        text = str(error) or type(error).__name__
        kind = next((kind for kind, alike in _SHARED_ERRORS.items() if isinstance(error, alike)), None)
        _broadcast(json.dumps({"error": text, "kind": kind}).encode())
        raise
    _broadcast(json.dumps({"result": None if result is None else pack(result)}).encode())
    return result


def _broadcast(data: bytes) -> bytes:
    size = torch.tensor([len(data)])
    dist.broadcast(size, src=0, group=_waiting)
    if dist.get_rank() == 0:
        payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    else:
        payload = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(payload, src=0, group=_waiting)
    return bytes(payload.numpy())


class FromMainRank(Mapping[str, Tensor]):
    """Tensors on rank 0's CPU. Other ranks get a tensor when all ranks ask for it, in the same order.

    Args:
        read: reads all tensors; called only on rank 0, when all ranks ask for the first tensor.
    """

    def __init__(self, read: Callable[[], Mapping[str, Tensor]]) -> None:
        self._read, self._own = read, dict[str, Tensor]()

    @cached_property
    def _known(self) -> dict[str, tuple[list[int], str]]:
        """Shape and dtype of each tensor, on every rank."""

        def work() -> dict[str, Any]:
            self._own |= self._read()
            of_all = self._own.items()
            return {name: (list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in of_all}

        known: dict[str, tuple[list[int], str]] = on_main_rank(work)
        return known

    def __getitem__(self, name: str) -> Tensor:
        shape, dtype = self._known[name]
        if single_process():
            return self._own[name]
        # gloo sends bytes of every kind of number.
        tensor = self._own[name].contiguous() if name in self._own else torch.empty(shape, dtype=getattr(torch, dtype))
        dist.broadcast(tensor.flatten().view(torch.uint8), src=0, group=_waiting)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)
