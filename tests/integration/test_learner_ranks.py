"""Two and four ranks under FSDP2 give the loss, gradient and statistics of one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import IMPORT_PATH
from support.waiting import COMMAND_S

SCRIPT = Path(__file__).parents[1] / "support/learner_ranks.py"


@pytest.mark.integration
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_equal_one_process(ranks):
    """Tied and untied heads, padded and packed, with and without activation checkpointing; some ranks idle once."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", str(SCRIPT)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": IMPORT_PATH}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=COMMAND_S)
    assert done.returncode == 0, done.stderr[-2000:]
    worst = json.loads(done.stdout.strip().splitlines()[-1])
    assert worst["loss"] < 1e-5
    assert worst["gradient"] < 1e-5
    assert worst["statistics"] < 1e-5
    assert worst["idle_calls"] > 0
