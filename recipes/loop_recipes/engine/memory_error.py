"""The line for a rank whose device has no memory left."""

from __future__ import annotations

import re

import torch
from torchtune.utils import get_world_size_and_rank

from loop_recipes.engine.diagnostics import peak_memory_gib


def out_of_memory(
    error: torch.OutOfMemoryError,
    micro_batch_tokens: int,
    device: torch.device,
    then: str = "collection.limits.max_context",
) -> str:
    """Return the line for a rank whose device has no memory left, with the keys that lower its need:
    ``update.micro_batch_tokens``, and ``then``."""
    free = re.search(r"Tried to allocate [^.]*\.\d+ \w+", str(error))
    return (
        f"out of memory on {device} of rank {get_world_size_and_rank()[1]}, in micro-batches of up to "
        f"{micro_batch_tokens} tokens, peak {peak_memory_gib(device):.1f} GiB{_held_by_others(device)}"
        f"{f' ({free[0]})' if free else ''}: lower update.micro_batch_tokens, then {then}; "
        "`loop check` shows what takes how much"
    )


def _held_by_others(device: torch.device) -> str:
    """Return the device's memory that is not this trainer's: where others fill it, no key of its config helps."""
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return f" of {total / 2**30:.1f}, of which CUDA and other programs hold {others / 2**30:.1f}"
