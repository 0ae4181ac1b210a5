"""Ranks of a training job without torchrun, for tests of what ranks compute rather than of how a job is started.

A rank that torchrun starts imports torch and torchtune first: more than ten seconds of work. These are forked from a
process that has imported them once and does nothing else.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.queues import SimpleQueue
from typing import Any
from unittest import mock

from torch.multiprocessing.spawn import start_processes

from rollout_server.inference.server import free_port
from support.processes import IMPORT_PATH
from support.waiting import COMMAND_S


def on_ranks(ranks: int, work: Callable[..., Any], *arguments: Any, machines: int = 1) -> Any:
    """Call ``work(*arguments)`` in every process of a job of so many ranks; returns what rank 0 returned.

    ``work`` is a function of an importable module. It finds this process's environment of now and what torchrun adds to
    it, as of ranks on so many ``machines``, and joins the process group itself.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank failed; with its traceback. The others are ended.
    """
    with mock.patch.dict(os.environ, {"PYTHONPATH": IMPORT_PATH, "OMP_NUM_THREADS": "1"}):
        forkserver.set_forkserver_preload(["loop_appworld", "support.frozen"])
        forkserver.ensure_running()
        environ = dict(os.environ)  # the server has that of the test which started it
    results = multiprocessing.get_context("forkserver").SimpleQueue()
    job = (ranks, ranks // machines, free_port(), environ, results, work, arguments)
    context = start_processes(_rank, job, nprocs=ranks, join=False, daemon=True, start_method="forkserver")
    give_up = time.monotonic() + COMMAND_S
    try:
        while not context.join(timeout=1.0):
            assert time.monotonic() < give_up, f"{ranks} ranks have not ended within {COMMAND_S:g} s"
    finally:
        for process in context.processes:
            process.kill()
    return results.get()


def _rank(
    rank: int,
    ranks: int,
    of_machine: int,
    port: int,
    environ: dict[str, str],
    results: SimpleQueue[Any],
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ |= environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % of_machine),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(of_machine),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "tests",
    }
    result = work(*arguments)
    if rank == 0:
        results.put(result)
