"""Whether this machine's devices can train: found, and able to compute and to talk to each other."""

from __future__ import annotations

import torch
from torchtune import utils

from rollout_server.schema import ConfigError


def training_device(name: str) -> torch.device:
    """The device that a config names, this rank's own where there are several.

    Raises:
        ConfigError: it cannot be used here.
    """
    try:
        device = utils.get_device(name)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} cannot be used: {error}") from error
    if device.type != torch.device(name).type:
        raise ConfigError(f"device {name!r} cannot be used: torch sees only a {device.type} here")
    return device
