"""On each of two ranks: both add up; then rank 0 waits for rank 1, which does not come."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from loop_formats.schema import ConfigError
from loop_recipes.engine.device_check import check_ranks
from loop_recipes.engine.process_group import init_process_group


def wait_in_vain() -> dict[str, Any]:
    """What rank 0 was told, and after how many seconds."""
    device = torch.device("cpu")
    init_process_group(device, 600.0)  # in which both add up
    store = _get_default_store()
    said: dict[str, Any] = {}
    if dist.get_rank() == 0:
        started = time.monotonic()
        try:
            check_ranks(device, deadline_s=2.0)
        except ConfigError as error:
            said = {"error": str(error), "seconds": time.monotonic() - started}
        store.set("seen", "1")
    store.wait(["seen"])
    return said
