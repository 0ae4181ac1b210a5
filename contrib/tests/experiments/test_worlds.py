"""experiments/worlds.py: the table of what was measured, and whose processor time counts."""

import subprocess
import sys

import pytest

from support.experiment_scripts import load_experiment


@pytest.fixture
def worlds():
    return load_experiment("worlds")


def test_the_table_has_the_worlds_that_were_measured(worlds):
    values = {"train_tasks": 30, "test_tasks": 20, "nothing_reward": 0.375, "expert_reward": 1.0}
    values |= {"cpu_s_per_episode": 1.234, "memory_mb": 94.94}
    rows = [{"case": "ours tau2-airline", "metric": name, "value": value} for name, value in values.items()]
    old = {"case": "ours babyai", "metric": "tasks", "value": 64}
    *_, line = worlds.table([old, *rows]).splitlines()
    assert line == "| `tau2-airline` | 30, none, 20 | 0 or 1 | 0.38 | 1 | 1.2 | 95 | MIT, Apache-2.0 |"
    assert "babyai" not in worlds.table([old, *rows]), "its memory is not known"


def test_processes_that_have_ended_count(worlds):
    """Each episode has a process of its own, which is gone when the time is read."""
    before = worlds.cpu_seconds()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True)
    assert worlds.cpu_seconds() - before >= 0.25
