"""The whole loop on a real rollout node: `tune run` starts it, trains on what it sends, and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loop_formats.run_files import only_logs
from loop_plumbing.process_guard import descendants
from support.families import section, served
from support.processes import IMPORT_PATH, alive
from support.small_runs import launched_node, replay_config
from support.waiting import COMMAND_S, block_until

pytestmark = pytest.mark.integration


def wide_heads(folder: Path) -> dict[str, Any]:
    """A policy whose heads are wider than its width divided by their number, from its folder."""
    model = served(folder, "Qwen3-4B", hidden_size=96, head_dim=32)
    node = launched_node({"name": "counter"}, max_num_seqs=16)
    node["node"]["model"] |= {"path": str(model)}
    return {**node, "model": section(model, lora_rank=8, lora_alpha=16), "checkpointer": None}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.drill)])
def test_log_probs_agree_over_a_swap_and_a_stop_leaves_no_process(tmp_path, request, ranks):
    """Of a family's own decoder; on two ranks of torchtune's, where every head has its share of the width."""
    policy = wide_heads(tmp_path / "wide") if ranks == 1 else launched_node({"name": "counter"}, max_num_seqs=16)
    config = replay_config(
        tmp_path,
        iterations=50,
        **policy,
        # A random policy earns the same everywhere; made-up advantages make every iteration change the adapter.
        advantage={"_component_": "support.small_runs.ByPosition"},
        optimizer={"_component_": "torch.optim.AdamW", "lr": 1e-2, "weight_decay": 0.0},
        dev_evaluation={"every": 1},
    )
    launcher = ["--nproc_per_node", str(ranks)] if ranks > 1 else []
    process = subprocess.Popen(
        [sys.executable, "-m", "torchtune._cli.tune", "run", *launcher, "loop_appworld", "--config", str(config)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": IMPORT_PATH},
    )
    request.addfinalizer(process.kill)
    metrics = tmp_path / "run/metrics.jsonl"

    def trained() -> bool:
        return metrics.exists() and metrics.read_text().count("\n") >= 3

    block_until(lambda: trained() or process.poll() is not None, COMMAND_S)
    assert process.poll() is None, process.communicate()[0]
    family = descendants(process.pid)
    assert len(family) >= 2, "the node and its vLLM server"
    if ranks == 1:
        process.send_signal(signal.SIGTERM)
    else:  # torchrun ends with status 1 on SIGTERM, whatever its ranks do
        (tmp_path / "run/stop").touch()
    output, _ = process.communicate(timeout=COMMAND_S)
    assert process.returncode == 0, output
    assert "resume_from_checkpoint=True goes on" in output or "asked to" in output
    assert not any(map(alive, family))

    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["policy_version"] for line in lines] == list(range(1, len(lines) + 1))
    for line in lines:
        assert line["gap_max"] < 1e-4, line
        assert line["gap_verdict"] == "ok"
    # The policy moves far in three iterations: had an old one been served, the gap would show it.
    assert lines[-1]["clip_fraction"] > 0.01
    collections = tmp_path / "run/node/collections"
    for line in lines[:-1]:  # each iteration scores the policy before it while it updates
        assert line["dev_iteration"] == line["iteration"] - 1
        (log,) = (log for log in only_logs(collections.iterdir()) if f"-i{line['dev_iteration']:04d}-dev-" in log.name)
        rollouts = [json.loads(text) for text in log.read_text().splitlines()]
        assert len(rollouts) == 6, "one of each dev task"
        assert {turn["policy_version"] for rollout in rollouts for turn in rollout["turns"]} == {line["dev_iteration"]}
        assert line["dev_reward"] == pytest.approx(sum(rollout["reward"] for rollout in rollouts) / 6)
    last = lines[-1]["iteration"]
    assert (tmp_path / f"run/policies/policy-v{last:04d}/adapter_model.safetensors").exists()
    assert (tmp_path / f"run/checkpoints/iteration_{last:04d}/state.json").exists()
    (first,) = (log for log in only_logs(collections.glob("made-up-i0001-*")) if "-dev-" not in log.name)
    assert first.read_text().count("\n") == lines[0]["rollouts"]
