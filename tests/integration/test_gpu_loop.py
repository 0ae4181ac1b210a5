"""The whole loop on one GPU, which trainer and vLLM server share; `make test GPU=1`."""

import json
import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]


def test_the_tiny_policy_trains_for_two_iterations_and_is_served_what_was_trained(tmp_path):
    command = [
        sys.executable,
        "-m",
        "torchtune._cli.tune",
        "run",
        "loop_appworld",
        "--config",
        "loop_appworld/tiny_gpu",
    ]
    words = [f"output_dir={tmp_path}", "max_iterations=2", "collection.tasks_per_iteration=6"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [1, 2]
    for line in lines:
        assert line["gap_verdict"] != "broken", line
        assert line["grad_norm"] > 0
