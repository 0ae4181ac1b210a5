"""Run under torchrun with two ranks: both add up; then rank 0 waits for rank 1, which does not come."""

import json
import time

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from loop_recipes.learner.device_check import check_ranks
from loop_recipes.learner.process_group import init_process_group, leave
from rollout_server.schema import ConfigError


def main() -> None:
    device = torch.device("cpu")
    init_process_group(device, 600.0)  # in which both add up
    store = _get_default_store()
    if dist.get_rank() == 0:
        started = time.monotonic()
        try:
            check_ranks(device, deadline_s=2.0)
        except ConfigError as error:
            print(json.dumps({"error": str(error), "seconds": time.monotonic() - started}), flush=True)
        store.set("seen", "1")
    store.wait(["seen"])
    leave(0)


if __name__ == "__main__":
    main()
