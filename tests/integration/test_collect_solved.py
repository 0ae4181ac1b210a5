"""`loop-collect-solved` on a real rollout node: what it solved, and a second start that samples nothing anew."""

import os
import subprocess
import sys

import pytest

from rollout_server.run_files import find_logs, read_rollouts
from support.processes import IMPORT_PATH
from support.small_runs import launched_node, replay_config
from support.waiting import COMMAND_S

pytestmark = pytest.mark.integration


def test_what_was_sampled_is_found_again(tmp_path):
    config = replay_config(tmp_path, iterations=1, rollout_node=launched_node({"name": "counter"}, max_num_seqs=16))
    command = [sys.executable, "-m", "loop_recipes.launch.collect_solved", "--config", str(config)]
    command += ["--temperatures", "0.5", "1.0", "--attempts", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": IMPORT_PATH}

    def collect() -> str:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=COMMAND_S)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    first = collect()
    logs = {log.name: log.read_bytes() for log in find_logs(tmp_path / "run/node")}
    sampled = [rollout for log in find_logs(tmp_path / "run/node") for rollout in read_rollouts(log)]
    assert {rollout.temperature for rollout in sampled} == {0.5, 1.0}
    assert len({rollout.collection_id for rollout in sampled}) == 4
    solved = [rollout for log in find_logs(tmp_path / "run/solved") for rollout in read_rollouts(log)]
    assert solved == [rollout for rollout in sampled if rollout.reward >= 1.0]
    assert f"{len(solved)} rollouts solved" in first
    assert collect() == first
    assert {log.name: log.read_bytes() for log in find_logs(tmp_path / "run/node")} == logs, "nothing was sampled anew"
