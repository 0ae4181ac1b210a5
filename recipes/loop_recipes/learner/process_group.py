"""What the ranks of a training job say to each other outside the model: small, typed, never pickled.

Everything here goes over CPU tensors (gloo, also beside NCCL), so that a rank may wait hours for a collection without
tripping NCCL's watchdog. With one process and no process group every call is the identity.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from rollout_server.schema import ConfigError


class RemoteError(RuntimeError):
    """Rank 0 failed; its one-line reason, raised on every rank."""


def init_process_group(device: torch.device, timeout_s: float, always: bool = False) -> None:
    """Join the torchrun job, if this is one; ``always`` makes a group of one otherwise (FSDP needs a group).

    Args:
        timeout_s: longest time a rank may wait for another, e.g. for rank 0 to finish a collection.
    """
    backend = "gloo" if device.type == "cpu" else f"{device.type}:nccl,cpu:gloo"
    timeout = timedelta(seconds=timeout_s)
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend, timeout=timeout)
    elif always:
        dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)


def destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def leave(status: int | str | None) -> NoReturn:
    """``sys.exit(status)`` for a recipe, but in a torchrun job without taking the interpreter down.

    FSDP's meshes keep the process group, so gloo's threads outlive :func:`destroy_process_group`; one that lets go of a
    tensor while the interpreter is taken down ends the process by std::terminate, after all its work was done.
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
    dist.all_reduce(total)
    return total


def any_rank(flag: bool) -> bool:
    """True on every rank when true on one."""
    return bool(sum_over_ranks(torch.tensor([int(flag)])).item())


def gather_bytes(data: bytes) -> list[bytes]:
    """Every rank's bytes, on every rank, in rank order."""
    if not dist.is_initialized():
        return [data]
    size = torch.tensor([len(data)])
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    longest = max(int(other) for other in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(rows, padded)
    return [bytes(row[: int(length)].numpy()) for row, length in zip(rows, sizes, strict=True)]


def on_main_rank(
    work: Callable[[], Any],
    pack: Callable[[Any], Any] = lambda result: result,
    unpack: Callable[[Any], Any] = lambda data: data,
) -> Any:
    """Run ``work`` on rank 0 and give its result to every rank.

    Args:
        pack: makes JSON-able data of a result that is none; called only when there are other ranks.
        unpack: makes the result again, on the other ranks. Neither is asked about None.

    Raises:
        Exception: on rank 0, whatever ``work`` raised; RemoteError (ConfigError for a ConfigError) on the others.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return work()
    if dist.get_rank() != 0:
        answer = json.loads(_broadcast(b""))
        if "error" in answer:
            raise (ConfigError if answer["config"] else RemoteError)(answer["error"])
        return None if answer["result"] is None else unpack(answer["result"])
    try:
        result = work()
    except BaseException as error:
        text = str(error) or type(error).__name__
        _broadcast(json.dumps({"error": text, "config": isinstance(error, ConfigError)}).encode())
        raise
    _broadcast(json.dumps({"result": None if result is None else pack(result)}).encode())
    return result


def _broadcast(data: bytes) -> bytes:
    size = torch.tensor([len(data)])
    dist.broadcast(size, src=0)
    if dist.get_rank() == 0:
        payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    else:
        payload = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(payload, src=0)
    return bytes(payload.numpy())
