"""The worlds under their own interpreter: expert and do-nothing scores, episodes a minute and CPU time an episode.

    python experiments/worlds.py                       # all worlds, 64 tasks of each one's test split
    python experiments/worlds.py --worlds textcraft --json experiments/results/worlds.json

The expert's commands are played in a collection of all tasks at once, through the pool as a rollout node uses it
(``ours``), and one after another in a plain loop inside the world's interpreter (``bare``). Finding the expert's
commands is not timed. The plain loop has one Java machine where the pool has ``--machines``, so compare the two by CPU
time there, not by episodes a minute. CPU time is that of this process, the workers and their Java machines. ``--json``
adds to the rows of other worlds that are in the file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_environments.protocol import Grade, create_pool
from loop_contrib.worlds.pool import WorldPool
from loop_plumbing.process_guard import descendants

REPOSITORY = Path(__file__).parents[1]
WORLDS: dict[str, dict[str, Any]] = {
    **{name: {"name": name} for name in ("textcraft", "babyai", "textworldexpress", "scienceworld")},
    "tau2-telecom-solo": {"name": "tau2", "domain": "telecom"},
}
JAVA_WORLDS = ("textworldexpress", "scienceworld")
CONCURRENCY = 64
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")

BARE = """
import importlib, json, os, sys
sys.path.insert(0, os.path.dirname(sys.argv[1]))
module = importlib.import_module(os.path.basename(sys.argv[1])[:-3])
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
requests = os.fdopen(os.dup(0))
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
world = module._world() if hasattr(module, "_world") else next(
    kind for name, kind in vars(module).items() if name.endswith("World") and hasattr(kind, "expert")
)()
for line in requests:
    solved = 0
    for task, commands in json.loads(line):
        episode = world.start(task)
        for command in commands:
            if episode.step(command).done:
                break
        solved += episode.grade()[1]
        episode.close()
    print(solved, file=answers, flush=True)
os._exit(0)
"""


@dataclass
class Measure:
    """What it took to play some episodes."""

    episodes: int
    wall_s: float
    cpu_s: float

    def rows(self, case: str) -> list[dict[str, Any]]:
        return [
            row(case, "episodes_per_minute", 60 * self.episodes / self.wall_s, "1/min"),
            row(case, "cpu_s_per_episode", self.cpu_s / self.episodes, "s"),
        ]


def row(case: str, metric: str, value: float, unit: str) -> dict[str, Any]:
    return {"case": case, "metric": metric, "value": round(value, 4), "unit": unit}


def cpu_seconds() -> float:
    """User and system time of this process and of all below it that live."""
    total = time.process_time()
    for pid in descendants(os.getpid()):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += (int(fields[11]) + int(fields[12])) / CLOCK_TICKS
    return total


async def play(pool: WorldPool, task: str, commands: Sequence[str]) -> Grade:
    environment = await pool.acquire(task)
    try:
        await environment.start(task)
        for command in commands:
            if (await environment.step(pool.message(command))).done:
                break
        return await environment.grade()
    finally:
        await environment.close()


async def collect(pool: WorldPool, plans: Sequence[tuple[str, Sequence[str]]]) -> list[Grade]:
    return list(await asyncio.gather(*(play(pool, task, commands) for task, commands in plans)))


async def ours(
    name: str, args: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[tuple[str, list[str]]], WorldPool]:
    """The rows of one world, the expert's plans and the pool, closed."""
    places = {"max_worlds": args.machines} if name in JAVA_WORLDS else {}
    options = {**WORLDS[name], "python": args.python, **places}
    pool = create_pool(options.pop("name"), options, lambda text: [])
    assert isinstance(pool, WorldPool)
    await pool.open()
    try:
        tasks = [task for task in pool.tasks(args.split) if not args.only or task.startswith(tuple(args.only))]
        tasks = random.Random(0).sample(tasks, min(args.tasks, len(tasks)))
        plans = [(task, await pool.expert(task)) for task in tasks]
        nothing = await collect(pool, [(task, []) for task in tasks])  # also brings up all workers
        cpu, began = cpu_seconds(), time.monotonic()
        expert = await collect(pool, plans)
        measure = Measure(len(plans), time.monotonic() - began, cpu_seconds() - cpu)
    finally:
        await pool.close()
    case = f"ours {name}"
    rows = [
        row(case, "tasks", len(tasks), "tasks"),
        row(case, "commands_per_episode", statistics.fmean(len(commands) for _, commands in plans), "commands"),
        row(case, "expert_success", statistics.fmean(grade.success for grade in expert), "fraction"),
        row(case, "nothing_success", statistics.fmean(grade.success for grade in nothing), "fraction"),
        row(case, "nothing_reward", statistics.fmean(grade.reward for grade in nothing), "fraction"),
        *measure.rows(case),
    ]
    return rows, plans, pool


def bare(case: str, pool: WorldPool, python: str, plans: Any) -> list[dict[str, Any]]:
    """The same plans in a loop inside the world's interpreter; the first one twice, to warm up as ours did."""
    process = subprocess.Popen(
        [python, "-c", BARE, str(pool.kind.worker), *pool.arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONHASHSEED": "0", **pool.kind.environment()},
        text=True,
    )
    requests, answers = process.stdin, process.stdout
    assert requests is not None
    assert answers is not None

    def ask(part: Any) -> None:
        requests.write(json.dumps(part) + "\n")
        requests.flush()
        if not answers.readline():
            raise RuntimeError(f"the bare loop of {case} ended")

    try:
        ask(plans[:1])
        cpu, began = cpu_seconds(), time.monotonic()
        ask(plans)
        return Measure(len(plans), time.monotonic() - began, cpu_seconds() - cpu).rows(f"bare {case}")
    finally:
        for pid in descendants(process.pid):
            os.kill(pid, 9)
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=list(WORLDS))
    parser.add_argument("--python", default=str(REPOSITORY / ".venv-worlds" / "bin" / "python"))
    parser.add_argument("--split", default="test")
    parser.add_argument("--tasks", type=int, default=CONCURRENCY, help="drawn from the split; all are played at once")
    parser.add_argument("--only", nargs="+", help="beginnings of the task ids to draw from")
    parser.add_argument("--machines", type=int, default=4, help="Java machines, where each episode has one")
    parser.add_argument("--json", type=Path, help="file for the rows {case, metric, value, unit}")
    args = parser.parse_args()
    for name in args.worlds:
        rows, plans, pool = asyncio.run(ours(name, args))
        rows += bare(name, pool, args.python, plans)
        for line in rows:
            print(f"{line['case']:24} {line['metric']:22} {line['value']:>10} {line['unit']}", flush=True)
        if args.json:
            before = json.loads(args.json.read_text()) if args.json.exists() else []
            kept = [line for line in before if line["case"].split()[1] != name]
            args.json.write_text(json.dumps(kept + rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
