"""FSDP2 on a job's only rank, beside which the model that is not sharded can be put."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch.distributed as dist

from loop_recipes.algorithm import learner
from loop_recipes.engine import sharding
from loop_recipes.engine.process_group import destroy_process_group


@contextmanager
def sharded_on_one_rank() -> Iterator[None]:
    """Have models sharded as with several ranks, over gloo."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with ExitStack() as stack:
            for module in (learner, sharding):
                stack.enter_context(mock.patch.object(module, "single_process", return_value=False))
            yield
    finally:
        destroy_process_group()
