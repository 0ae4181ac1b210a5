"""ColBench's generated tasks: scores of the expert, of the description alone and of doing nothing, and the costs.

    python experiments/colbench.py                     # 40 tasks of the test split
    python experiments/colbench.py --tasks 80 --json experiments/results/colbench.json

The expert asks for every particular and answers with the reference; *description alone* answers at once, with the
description's code and a guess of each particular. ``tests`` is the share of tests passed. Processor time is that of
this process and of the graders' processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from agent_environments.protocol import Grade
from loop_contrib.colbench.expert import expert_play, hasty_play
from loop_contrib.colbench.pool import ColBenchPool
from loop_contrib.colbench.task import ColBenchTask

PLAYERS: dict[str, Callable[[ColBenchTask], list[str]]] = {
    "expert": expert_play,
    "description_alone": hasty_play,
    "nothing": lambda task: [],
}


def cpu_seconds() -> float:
    """Return user and system time of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


async def play(pool: ColBenchPool, task_id: str, messages: Sequence[str]) -> Grade:
    environment = await pool.acquire(task_id)
    try:
        await environment.start(task_id)
        for message in messages:
            await environment.step(message)
        return await environment.grade()
    finally:
        await environment.close()


async def measure(tasks: int, seed: int) -> list[dict[str, Any]]:
    pool = ColBenchPool(lambda text: [], seed=seed, partial_reward=True, max_worlds=2)
    await pool.open()
    rows: list[dict[str, Any]] = []
    try:
        drawn = random.Random(0).sample(pool.tasks("test"), tasks)
        for name, messages in PLAYERS.items():
            began = cpu_seconds()
            grades = await asyncio.gather(*(play(pool, task, messages(pool.all_tasks[task])) for task in drawn))
            cpu_s = cpu_seconds() - began
            figures = {
                f"{name}_success": (statistics.fmean(grade.success for grade in grades), "fraction"),
                f"{name}_tests": (statistics.fmean(grade.reward for grade in grades), "fraction"),
                f"{name}_cpu_s_per_episode": (cpu_s / tasks, "s"),
            }
            rows += [
                {"case": "ours colbench", "metric": metric, "value": round(value, 4), "unit": unit}
                for metric, (value, unit) in figures.items()
            ]
    finally:
        await pool.close()
    return [*rows, {"case": "ours colbench", "metric": "tasks", "value": tasks, "unit": "tasks"}]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tasks", type=int, default=40, help="drawn from the test split")
    parser.add_argument("--seed", type=int, default=0, help="of the generated tasks")
    parser.add_argument("--json", type=Path, help="file for the rows {case, metric, value, unit}")
    args = parser.parse_args()
    rows = asyncio.run(measure(args.tasks, args.seed))
    for row in rows:
        print(f"{row['case']:16} {row['metric']:34} {row['value']:>8} {row['unit']}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
