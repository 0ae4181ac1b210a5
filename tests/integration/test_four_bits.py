"""`loop train FILE.py` of a model in four bits: both sides agree as on the same weights written out in bf16."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from loop_formats.run_files import newest_adapter
from loop_formats.run_folder import read_metrics
from loop_recipes.paths import loop_package
from support.four_bits import write_four_bits
from support.waiting import COMMAND_S

pytestmark = [pytest.mark.integration, pytest.mark.timeout(5 * COMMAND_S)]
EVEN = """
from agent_environments.tools import reward


@reward
def even(answer: str) -> bool:
    return len(answer) % 2 == 0


TASKS = [{"id": str(n), "question": f"Say something of {n}."} for n in range(10)]
"""


def test_a_model_in_four_bits_is_trained_and_its_gap_is_that_of_bf16(tmp_path):
    (tmp_path / "even.py").write_text(EVEN)
    shutil.copytree(loop_package("tiny_policy"), tmp_path / "tiny")
    gaps = {}
    for model, words in zip(write_four_bits(tmp_path / "tiny"), ([], ["machine=cpu_bf16"]), strict=True):
        done = subprocess.run(
            [
                *(Path(sys.executable).with_name("loop"), "train", "even.py", "--model", model, *words),
                *("max_iterations=2", "collection.tasks_per_iteration=4"),
            ],
            cwd=tmp_path,
            env={**os.environ, "LOOP_HOME": str(tmp_path / f"home-{model.name}"), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=2 * COMMAND_S,
        )
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        run = tmp_path / f"home-{model.name}/runs/even"
        assert newest_adapter(run) == run / "policies/policy-v0002"
        gaps[model.name] = [line["gap_p99"] for line in read_metrics(run)]
    print(gaps)
    packed, whole = gaps.values()
    assert max(packed) < 1.5 * max(whole) < 0.6
