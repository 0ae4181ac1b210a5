"""Every part of benchmarks/gpu.py, at its tiny size on a CPU, so that its first GPU does not find a typo."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import IMPORT_PATH
from support.waiting import COMMAND_S

SCRIPT = Path(__file__).parents[2] / "benchmarks/gpu.py"


@pytest.mark.integration
def test_every_part_runs_and_the_same_command_goes_on(tmp_path):
    results = tmp_path / "gpu.json"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--size", "tiny", "--json", str(results)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": IMPORT_PATH}

    def run(*words):
        done = subprocess.run([*command, *words], env=environment, capture_output=True, text=True, timeout=COMMAND_S)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    said = run()
    rows = json.loads(results.read_text())
    metrics = {(row["case"].split()[0], row["metric"]): row["value"] for row in rows}
    assert metrics["ours_tiled", "logprob_error"] < 1e-4
    assert metrics["ours_tiled", "gradient_repeats_that_differ"] == 0
    assert metrics["ours_tiled", "seconds"] > 0
    assert metrics["ours", "packed_logprob_difference"] < 0.05
    assert metrics["ours", "resumed_adapter_difference"] == 0
    assert metrics["ours", "update_seconds"] > 0
    assert {row["unit"] for row in rows} <= {"", "s", "MiB", "GiB", "nats", "tokens/s"}
    # Kernels for CUDA say why they do not run here, in one line each.
    left_out = [line for line in said.splitlines() if "left out" in line]
    assert left_out
    assert all("CUDA" in line or "cut_cross_entropy" in line or "triton" in line for line in left_out), left_out

    before = results.read_text()
    assert "done before" in run("--parts", "exactness", "update")
    assert results.read_text() == before
