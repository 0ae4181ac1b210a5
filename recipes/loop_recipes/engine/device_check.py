"""Checks that the device which a config names can train: it is there, and it computes.

The checks run before anything is loaded. A problem is one line that names it and the cure.
"""

from __future__ import annotations

import torch

from loop_formats.schema import ConfigError, require
from loop_plumbing.breakage import first_line, raised_as
from loop_plumbing.start import launched


def training_device(name: str, dtype: torch.dtype = torch.float32) -> torch.device:
    """Return the device that a config names, the rank's own if there are several, once it has computed in ``dtype``.

    Raises:
        ConfigError: it cannot be used here.
    """
    from torchtune import utils  # takes seconds

    if torch.device(name).type == "cuda":
        from loop_recipes.engine import gpu_check  # only GPUs need it

        require(torch.version.cuda, "device: torch is a CPU build here; install the CUDA one with `make setup GPU=1`")
        gpu_check.check_count(torch.cuda.device_count(), launched("LOCAL_WORLD_SIZE", 1))
        gpu_check.set_allocator()
        gpu_check.check_starts(torch.cuda.init)
    with raised_as(ConfigError, f"device {name!r} cannot be used: ", RuntimeError, AssertionError):
        device = utils.get_device(name)
    require(
        device.type == torch.device(name).type,
        f"device {name!r} cannot be used: torch sees only a {device.type} here",
    )
    if device.type == "cuda":
        gpu_check.check_capability(torch.cuda.get_device_capability(device))
    check_matmul(device, dtype)
    return device


def check_matmul(device: torch.device, dtype: torch.dtype) -> None:
    """Check that the device multiplies matrices in ``dtype``.

    Raises:
        ConfigError: it fails, or its result is wrong.
    """
    try:
        ones = torch.ones(64, 64, device=device, dtype=dtype)
        result = (ones @ ones).float().cpu()
    except RuntimeError as error:
        raise ConfigError(
            f"device {device} cannot multiply matrices in {dtype}: {first_line(error)}; is another program on it, or "
            "the driver broken?"
        ) from error
    require(bool((result == 64).all()), f"device {device} multiplies matrices in {dtype} wrongly; take another")
