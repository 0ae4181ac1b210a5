"""AppWorld worlds: ours (forked, sealed, agent code apart from the databases) beside one stock server per episode.

    python benchmarks/environment.py [--json PATH] [--worlds 8] [--concurrent 8,32,64]

Measured in one run: CPU seconds and wall seconds to have N more worlds ready, proportional set size of each, CPU
seconds per 16-step episode with its grade, and episodes per minute at several numbers of concurrent episodes. CPU
seconds are the figures to trust on a shared machine; wall times are printed for orientation. A stock server is started
for each concurrent episode and serves the next one when that is over; its start counts into the episodes.

CPU seconds are read from /proc: those of all living descendants, and of the children that they have reaped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The root and recipes/ too, because folders of tests/ are called like packages and hide those that are installed.
sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "recipes", "tests"))

from agent_environments.protocol import create_pool

REPOSITORY = Path(__file__).resolve().parents[1]
TICKS = os.sysconf("SC_CLK_TCK")
EPISODE_STEPS = 16
STEP_CODE = "print(apis.supervisor.show_profile())"


@dataclass(frozen=True)
class Row:
    """A measurement; ``case`` is ``<implementation> <size>``."""

    case: str
    metric: str
    value: float
    unit: str


def word_spans(text: str) -> list[tuple[int, int]]:
    return [match.span() for match in re.finditer(r"\S+|\s+", text)]


def family(root_pid: int) -> list[int]:
    """Return ``root_pid`` and all its living descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    pids = [root_pid]
    for pid in pids:
        pids += children.get(pid, [])
    return pids


def cpu_seconds() -> float:
    """Return CPU time of this process's descendants, those that have ended and been waited for included."""
    ticks = 0
    for pid in family(os.getpid()):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        own, reaped = int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])
        ticks += reaped if pid == os.getpid() else own + reaped
    return ticks / TICKS


def proportional_set_size() -> float:
    """Return MiB of all descendants, memory shared by n processes counted as 1/n in each."""
    total = 0
    for pid in family(os.getpid())[1:]:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        match = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
        total += int(match[1]) if match else 0
    return total / 1024


class Meter:
    """CPU and wall seconds between entering and leaving."""

    def __enter__(self) -> Meter:
        self._cpu, self._wall = cpu_seconds(), time.monotonic()
        return self

    def __exit__(self, *raised: object) -> None:
        self.cpu, self.wall = cpu_seconds() - self._cpu, time.monotonic() - self._wall


async def ready_worlds(pool: Any, tasks: list[str], count: int) -> list[Any]:
    """Start ``count`` episodes, each with one step, so that nothing is left to be done lazily."""

    async def one(number: int) -> Any:
        environment = await pool.acquire(f"ready-{number}")
        await environment.start(tasks[number % len(tasks)])
        await environment.step(f"```python\n{STEP_CODE}\n```")
        return environment

    return list(await asyncio.gather(*(one(number) for number in range(count))))


async def episode(pool: Any, task: str) -> None:
    environment = await pool.acquire("episode")
    await environment.start(task)
    for _ in range(EPISODE_STEPS - 1):
        await environment.step(f"```python\n{STEP_CODE}\n```")
    await environment.step("```python\napis.supervisor.complete_task()\n```")
    await environment.grade()
    await environment.close()


async def measure_ready(make: Callable[[int], Any], name: str, count: int) -> list[Row]:
    """Measure readiness and memory of ``count`` worlds beside a first one.

    The start of a pool (the grader; ours also the warm server, stock also one server, which the first world uses)
    is measured apart, as ``fixed``.
    """
    pool = make(count + 1)
    try:
        with Meter() as fixed:
            await pool.open()
            tasks = pool.tasks("train")
            environments = await ready_worlds(pool, tasks, 1)
        before = proportional_set_size()
        with Meter() as starting:
            environments += await ready_worlds(pool, tasks, count)
        memory = proportional_set_size()
        for environment in environments:
            await environment.close()
    finally:
        await pool.close()
    case = f"{name} {count}"
    return [
        Row(case, "fixed_cpu", fixed.cpu, "s"),
        Row(case, "fixed_memory", before, "MiB"),
        Row(case, "ready_cpu_per_world", starting.cpu / count, "s"),
        Row(case, "ready_wall", starting.wall, "s"),
        Row(case, "memory_per_world", (memory - before) / count, "MiB"),
        Row(case, "ready_cpu_total", fixed.cpu + starting.cpu, "s"),
        Row(case, "memory_total", memory, "MiB"),
    ]


async def measure_throughput(make: Callable[[int], Any], name: str, concurrent: int, episodes: int) -> list[Row]:
    pool = make(concurrent)
    try:
        await pool.open()
        tasks = pool.tasks("train")
        with Meter() as meter:
            await asyncio.gather(*(episode(pool, tasks[number % len(tasks)]) for number in range(episodes)))
    finally:
        await pool.close()
    case = f"{name} {concurrent}"
    return [
        Row(case, "episodes_per_minute", 60 * episodes / meter.wall, "1/min"),
        Row(case, "cpu_per_16_step_episode", meter.cpu / episodes, "s"),
    ]


def ratios(rows: list[Row], count: int) -> list[Row]:
    """Return stock over ours: the cost of one more world and, as ``total``, of all with each pool's start."""
    values = {(row.case, row.metric): row.value for row in rows}
    case = f"ours {count}"
    stock = f"stock {count}"
    compared = []
    for name, metric in (
        ("ready_cpu_ratio", "ready_cpu_per_world"),
        ("ready_cpu_total_ratio", "ready_cpu_total"),
        ("memory_ratio", "memory_per_world"),
        ("memory_total_ratio", "memory_total"),
    ):
        compared.append(Row(case, name, values[stock, metric] / values[case, metric], "x"))
    return compared


async def run(arguments: argparse.Namespace) -> list[Row]:
    def maker(backend: str) -> Callable[[int], Any]:
        options = {"python": arguments.python, "root": arguments.root, "prompt": "tiny"}
        return lambda worlds: create_pool(backend, {**options, "max_worlds": worlds}, word_spans)

    ours, stock = maker("appworld"), maker("benchmarks.stock_engine:HttpPool")
    rows: list[Row] = []

    async def add(measurement: Awaitable[list[Row]]) -> None:
        for row in await measurement:
            rows.append(row)
            print(f"{row.case:<10} {row.metric:<26} {row.value:10.3f} {row.unit}", flush=True)

    await add(measure_ready(ours, "ours", arguments.worlds))
    await add(measure_ready(stock, "stock", arguments.worlds))
    for row in ratios(rows, arguments.worlds):
        rows.append(row)
        print(f"{row.case:<10} {row.metric:<26} {row.value:10.2f} {row.unit}")
    for concurrent in arguments.concurrent:
        await add(measure_throughput(ours, "ours", concurrent, max(concurrent, arguments.episodes)))
    if arguments.concurrent:
        await add(measure_throughput(stock, "stock", arguments.worlds, arguments.worlds))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--worlds", type=int, default=8, help="worlds to have ready, of each kind")
    parser.add_argument("--episodes", type=int, default=32, help="episodes per throughput measurement, at least")
    parser.add_argument("--concurrent", default="8,32,64", help="numbers of concurrent episodes; empty: skip")
    parser.add_argument("--python", default=str(REPOSITORY / ".venv-appworld" / "bin" / "python"))
    parser.add_argument("--root", default=str(REPOSITORY / "worlds" / "synthetic"))
    arguments = parser.parse_args()
    arguments.concurrent = [int(number) for number in arguments.concurrent.split(",") if number]
    rows = asyncio.run(run(arguments))
    if arguments.json:
        arguments.json.write_text(json.dumps([vars(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
