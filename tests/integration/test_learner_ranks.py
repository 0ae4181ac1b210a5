"""Two and four ranks under FSDP2 load their own parts, and give the loss, gradient and statistics of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import IMPORT_PATH
from support.waiting import COMMAND_S

SUPPORT = Path(__file__).parents[1] / "support"
pytestmark = pytest.mark.integration


def said_by(ranks: int, script: str, *words: object) -> dict:
    """What rank 0 of a script printed last."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [*launcher, str(SUPPORT / script), *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": IMPORT_PATH}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=COMMAND_S)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_equal_one_process(ranks):
    """Tied and untied heads, padded and packed, with and without activation checkpointing; some ranks idle once."""
    worst = said_by(ranks, "learner_ranks.py")
    assert worst["loss"] < 1e-5
    assert worst["gradient"] < 1e-5
    assert worst["statistics"] < 1e-5
    assert worst["idle_calls"] > 0


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_rank_reads_its_own_part_and_one_collective_gathers_all(tmp_path, ranks):
    said = said_by(ranks, "loading_ranks.py", tmp_path / "model.safetensors")
    assert said["equal"]
    assert said["placed_again"]
    assert said["read"] < 1 / ranks + 0.15, "the kernel maps a file by up to 2 MiB at a time"
    assert said["collectives"] == 1
