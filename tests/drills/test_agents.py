"""Drill: a whole agent as its package comes is trained for two iterations, its policy behind a real vLLM.

make drills K=agents

The tiny policy calls no tool, which mini-swe-agent answers with a complaint, so that an episode is three turns in three
sequences. Of the episodes of a task every other one is paid, so each iteration has something to learn from.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from loop_formats.run_files import find_logs, read_rollouts
from loop_recipes.paths import loop_package
from support import whole_agents
from support.waiting import COMMAND_S

pytestmark = [pytest.mark.integration, pytest.mark.drill, pytest.mark.timeout(3600)]
TASKS = ("t_1", "t_2")
GRADE = """
import json, os, pathlib
counted = os.open(pathlib.Path(__file__).with_name(os.environ["TASK_ID"]), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
os.write(counted, b".")
print(json.dumps({"reward": os.lseek(counted, 0, os.SEEK_CUR) % 2}))
"""
SMALL = (
    "node.model.max_context=4096",
    "collection.tasks_per_iteration=2",
    "collection.rollouts_per_task=4",
    "collection.min_rollouts_per_task=4",
    "update.minibatch_rollouts=8",
    "update.micro_batch_tokens=4096",
)


@pytest.fixture
def world(tmp_path):
    """What is said of the node's environment, in a file of its own."""
    for task in TASKS:
        (tmp_path / "tasks" / task).mkdir(parents=True)
        (tmp_path / "tasks" / task / "prompt.md").write_text(f"Say something about {task}.\n")
    (tmp_path / "grade.py").write_text(GRADE)
    environment = {
        "name": "harness",
        "agent": "mini-swe-agent",
        "agent_program": whole_agents.install("mini-swe-agent", tmp_path / "program"),
        "task_files": str(tmp_path / "tasks"),
        "tasks": {"train": list(TASKS), "dev": ["t_1"]},
        "grade_command": ["{python}", str(tmp_path / "grade.py")],
        "max_worlds": 4,
    }
    limits = {"max_turns": 3, "max_tokens_per_turn": 40, "max_context": 4096, "episode_deadline_s": 600.0}
    file = tmp_path / "world.yaml"  # JSON is YAML
    file.write_text(json.dumps({"node": {"environment": environment}, "collection": {"limits": limits}}))
    return file


def test_mini_swe_agent_is_trained_for_two_iterations(world, tmp_path):
    program = Path(sys.executable).with_name("loop")
    words = ("train", "cpu", f"world={world}", f"model.path={loop_package('tiny_policy')}", *SMALL)
    found = subprocess.run(
        [program, *words, "output_dir=run", "max_iterations=2"],
        cwd=tmp_path,
        env={**os.environ, "LOOP_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
    )
    assert found.returncode == 0, f"{found.stdout[-2000:]}\n{found.stderr[-3000:]}"
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    print([(line["reward"], line["steps"], line["gap_p99"], line["sequences"]) for line in lines])
    assert [line["reward"] for line in lines] == [0.5, 0.5]
    assert all(line["steps"] and line["gap_verdict"] == "ok" for line in lines)
    rollouts = [rollout for log in find_logs(tmp_path / "run") for rollout in read_rollouts(log)]
    assert {version for rollout in rollouts for version in rollout.policy_versions} == {0, 1}
    assert all(rollout.extra["harness"]["exit_status"] == 0 for rollout in rollouts)
