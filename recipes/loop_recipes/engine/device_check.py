"""Checks that the device which a config names can train, and that the ranks of a job can talk to each other.

The device's checks run before anything is loaded. A problem is one line that names it and the cure.
"""

from __future__ import annotations

import os
import queue
import threading

import torch
import torch.distributed as dist

from loop_formats.schema import ConfigError, require
from loop_plumbing.breakage import first_line, raised_as
from loop_plumbing.start import launched
from rollout_server.inference.command import EXACT_PINNED

OLDEST_CAPABILITY = (8, 0)
ALL_REDUCE_DEADLINE_S = 120.0
"""Seconds for the ranks' first collective, in which NCCL connects them."""
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
ALLOCATOR_SETTINGS = f"expandable_segments:True,{EXACT_PINNED}"
"""Micro-batches differ in length, so without these the memory falls to pieces, and pinned memory is rounded up to
powers of two. They are set in this process alone: vLLM must not have them all."""


def training_device(name: str, dtype: torch.dtype = torch.float32) -> torch.device:
    """Return the device that a config names (of several GPUs, the rank's own), after a test computation in ``dtype``.

    Raises:
        ConfigError: the device cannot be used here.
    """
    from torchtune import utils  # takes seconds

    if torch.device(name).type == "cuda":
        _begin_cuda(torch.cuda.device_count(), launched("LOCAL_WORLD_SIZE", 1))
    with raised_as(ConfigError, f"device {name!r} cannot be used: ", RuntimeError, AssertionError):
        device = utils.get_device(name)
    require(
        device.type == torch.device(name).type,
        f"device {name!r} cannot be used: torch sees only a {device.type} here",
    )
    if device.type == "cuda":
        own = torch.cuda.get_device_capability(device)
        require(
            own >= OLDEST_CAPABILITY,
            f"device: this GPU has compute capability {own[0]}.{own[1]}; bf16 and flash attention need 8.0 (A100, L4, "
            "RTX 30 or newer)",
        )
    check_matmul(device, dtype)
    return device


def _begin_cuda(gpus: int, ranks: int) -> None:
    """Set up CUDA's allocator, unless the user did, and begin to use CUDA. torch's error names a driver's problem."""
    require(torch.version.cuda, "device: torch is a CPU build here; install the CUDA one with `make setup GPU=1`")
    require(gpus > 0, "device: torch finds no GPU; look at nvidia-smi, and at CUDA_VISIBLE_DEVICES if it is set")
    require(
        gpus >= ranks,
        f"device: {ranks} ranks on this machine need as many GPUs, and torch finds {gpus}; lower --nproc_per_node, or "
        "look at CUDA_VISIBLE_DEVICES",
    )
    if not any(os.environ.get(name) for name in ALLOCATOR_VARIABLES):
        torch._C._accelerator_setAllocatorSettings(ALLOCATOR_SETTINGS)
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device: CUDA cannot be used: {first_line(error)}; look at nvidia-smi") from error


def check_matmul(device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError unless the device multiplies matrices in ``dtype``, with the right result."""
    try:
        ones = torch.ones(64, 64, device=device, dtype=dtype)
        result = (ones @ ones).float().cpu()
    except RuntimeError as error:
        raise ConfigError(
            f"device {device} cannot multiply matrices in {dtype}: {first_line(error)}; is another program on it, or "
            "the driver broken?"
        ) from error
    require(bool((result == 64).all()), f"device {device} multiplies matrices in {dtype} wrongly; take another")


def check_ranks(device: torch.device, deadline_s: float = ALL_REDUCE_DEADLINE_S) -> None:
    """Check that the ranks of a job can add up a number over their devices; every rank must call it.

    Raises:
        ConfigError: no sum within ``deadline_s``, or a wrong one.
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
