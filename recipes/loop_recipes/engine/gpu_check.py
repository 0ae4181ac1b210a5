"""Checks that this machine's GPUs can train, and that the ranks of a job can talk to each other.

A problem is one line that names it and the cure.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from loop_formats.schema import ConfigError, require
from loop_plumbing.breakage import first_line
from rollout_server.inference.command import EXACT_PINNED

OLDEST_CAPABILITY = (8, 0)
ALL_REDUCE_DEADLINE_S = 120.0
"""Seconds for the ranks' first collective, in which NCCL connects them."""
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
ALLOCATOR_SETTINGS = f"expandable_segments:True,{EXACT_PINNED}"


def set_allocator() -> None:
    """Set CUDA's allocator up, unless the user did. Micro-batches differ in length, so without this its memory falls to
    pieces, and pinned memory is rounded up to powers of two.

    In this process alone: a launched rollout node does not inherit it, and vLLM must not have it all.
    """
    if not any(os.environ.get(name) for name in ALLOCATOR_VARIABLES):
        torch._C._accelerator_setAllocatorSettings(ALLOCATOR_SETTINGS)


def check_starts(start: Callable[[], None]) -> None:
    """Check that torch can begin to use CUDA; torch itself names a driver's problem.

    Args:
        start: ``torch.cuda.init``.

    Raises:
        ConfigError: it cannot.
    """
    try:
        start()
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device: CUDA cannot be used: {first_line(error)}; look at nvidia-smi") from error


def check_count(gpus: int, ranks: int) -> None:
    """Check that each rank of this machine has a GPU.

    Raises:
        ConfigError: there are fewer GPUs than ranks.
    """
    require(gpus > 0, "device: torch finds no GPU; look at nvidia-smi, and at CUDA_VISIBLE_DEVICES if it is set")
    require(
        gpus >= ranks,
        f"device: {ranks} ranks on this machine need as many GPUs, and torch finds {gpus}; lower --nproc_per_node, or "
        "look at CUDA_VISIBLE_DEVICES",
    )


def check_capability(own: tuple[int, int]) -> None:
    """Check that a GPU can do bf16 and flash attention for packed rows, as trainer and vLLM need.

    Raises:
        ConfigError: its compute capability is below 8.0.
    """
    require(
        own >= OLDEST_CAPABILITY,
        f"device: this GPU has compute capability {own[0]}.{own[1]}; bf16 and flash attention need 8.0 (A100, L4, "
        "RTX 30 or newer)",
    )


def check_ranks(device: torch.device, deadline_s: float = ALL_REDUCE_DEADLINE_S) -> None:
    """Check that the ranks of a job can add up a number over their devices; every rank must call it.

    Raises:
        ConfigError: not within ``deadline_s``, or the sum is wrong.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    ranks, backend = dist.get_world_size(), dist.get_backend_config()
    ones = torch.ones(1, device=device)
    problem = f"{ranks} ranks could not add up a number over {device.type} ({backend}) in {deadline_s:.0f} s"
    cure = "look for a rank that has ended; NCCL_DEBUG=INFO and NCCL_SOCKET_IFNAME show and choose the network"
    ended: queue.Queue[float | RuntimeError] = queue.Queue()

    def add_up() -> None:
        try:
            dist.all_reduce(ones)
            ended.put(ones.item())
        except RuntimeError as error:
            ended.put(error)

    # Ranks connect inside the call, which waits for them as long as the whole group's time-out.
    threading.Thread(target=add_up, daemon=True).start()
    try:
        total = ended.get(timeout=deadline_s)
    except queue.Empty:
        raise ConfigError(f"{problem}; {cure}") from None
    if isinstance(total, RuntimeError):
        raise ConfigError(f"{problem}: {first_line(total)}; {cure}") from total
    require(total == ranks, f"{ranks} ranks added up to {total:g} over {device.type} ({backend}); {cure}")
