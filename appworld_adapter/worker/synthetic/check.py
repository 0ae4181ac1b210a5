"""Runs three scripted agents through the real engine on every task of a dataset and prints what each is paid.

    .venv-appworld/bin/python appworld_adapter/worker/synthetic/check.py --root worlds/synthetic [--every 3]

``reference`` plays the reference solution turn by turn, ``nothing`` does nothing, ``complete`` only calls
complete_task. Exits with 1 unless the reference solves every task, the other two solve none, and ``complete`` is paid
no more than ``nothing``.
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

AGENTS = ("reference", "nothing", "complete")


def play(task_id: str, agent: str, turns: list[dict[str, str]]) -> tuple[float, bool, list[str]]:
    """Reward (fraction of requirements passed), success and the outputs of one agent on one task."""
    from appworld import AppWorld

    blocks = {
        "reference": [turn["code"] for turn in turns],
        "nothing": [],
        "complete": ["apis.supervisor.complete_task()"],
    }[agent]
    with AppWorld(task_id=task_id, experiment_name=agent) as world:
        outputs = [world.execute(block) for block in blocks]
        verdict = world.evaluate().to_dict()
    gc.freeze()  # The engine keeps much of every world it opened; without this each collection walks all of them.
    return len(verdict["passes"]) / verdict["num_tests"], verdict["success"], outputs


def main() -> None:
    parser = argparse.ArgumentParser(description="Check a synthetic dataset with scripted agents.")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--split", nargs="+", default=["train", "dev", "test_normal", "test_challenge"])
    parser.add_argument("--agent", nargs="+", choices=AGENTS, default=list(AGENTS))
    parser.add_argument("--every", type=int, default=1, help="check only every n-th task of a split")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    data = arguments.root.resolve() / "data"
    name = json.loads((arguments.root / "dataset.json").read_text(encoding="utf-8"))["name"]
    # The engine writes an experiment beside data/; a temporary root keeps the dataset itself untouched.
    temporary = tempfile.mkdtemp(prefix="synthetic-check-")
    os.symlink(data, os.path.join(temporary, "data"))
    os.environ["APPWORLD_ROOT"] = temporary
    wrong = []
    try:
        print(f"{'split':<16}{'agent':<12}{'tasks':>6}{'mean reward':>13}{'solved':>8}   ({name})")
        for split in arguments.split:
            task_ids = (data / "datasets" / f"{split}.txt").read_text(encoding="utf-8").split()[:: arguments.every]
            rewards = collections.defaultdict(dict)
            for task_id in task_ids:
                turns = json.loads((data / "tasks" / task_id / "ground_truth" / "turns.json").read_text())
                for agent in arguments.agent:
                    reward, success, outputs = play(task_id, agent, turns)
                    rewards[agent][task_id] = reward
                    if success != (agent == "reference") or any("Execution failed" in output for output in outputs):
                        wrong.append(f"{task_id} {agent}: success {success}, last output {outputs[-1:]}")
                if {"nothing", "complete"} <= rewards.keys():
                    idle, completing = rewards["nothing"][task_id], rewards["complete"][task_id]
                    if completing > idle:
                        wrong.append(f"{task_id}: complete_task alone is paid {completing}, doing nothing {idle}")
            for agent, paid in rewards.items():
                mean = sum(paid.values()) / len(paid)
                solved = sum(reward == 1 for reward in paid.values())
                print(f"{split:<16}{agent:<12}{len(paid):>6}{mean:>13.3f}{solved:>8}", flush=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if wrong:
        sys.exit("\n".join(["check.py: the dataset is not as it should be:", *wrong]))


if __name__ == "__main__":
    main()
