"""The worlds under their own interpreter: expert and do-nothing scores, episodes a minute and CPU time an episode.

    python experiments/worlds.py                       # all worlds, 64 tasks of each one's test split
    python experiments/worlds.py --worlds textcraft --json experiments/results/worlds.json
    python experiments/worlds.py --table --json experiments/results/worlds.json   # that of docs/environments.md

The expert's commands are played in a collection of all tasks at once, through the pool as a rollout node uses it
(``ours``), and one after another in a plain loop inside the world's interpreter (``bare``). Finding the expert's
commands is not timed. The plain loop has one Java machine where the pool has ``--machines``, so compare the two by CPU
time there, not by episodes a minute. CPU time is that of this process, the workers and their Java machines; memory is
what an episode's process, and what it started, hold in the end, most of which forked processes share. ``--json`` adds
to the rows of other worlds that are in the file. The interpreter needs bfcl-eval and mpmath besides what
``make environments`` installs. tau2's user is scripted: he asks for help once and ends the
conversation when he is spoken to.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from agent_environments.protocol import Grade, create_pool
from loop_contrib.worlds.pool import WorldPool
from loop_contrib.worlds.world_process import WorldProcess
from loop_plumbing.process_guard import descendants

REPOSITORY = Path(__file__).parents[1]


@dataclass(frozen=True)
class World:
    """A world to play: its section of a config, and what no play shows."""

    name: str
    licence: str
    rewards: str = "0 or 1"
    options: Mapping[str, Any] = field(default_factory=dict)
    idle: tuple[str, ...] = ()
    """Commands for doing nothing. A world that needs some is a conversation, which no plain loop plays."""


TAU2 = "MIT, Apache-2.0"
SPLITS = ("train", "dev", "test")
SENTENCE = (json.dumps([{"text": "I cannot help you."}]),)
WORLDS = {
    "textcraft": World("textcraft", "MIT"),
    "babyai": World("babyai", "MIT"),
    "textworldexpress": World("textworldexpress", "Apache-2.0", "0 to 1"),
    "scienceworld": World("scienceworld", "Apache-2.0", "0 to 1"),
    "bfcl": World("bfcl", "Apache-2.0"),
    "tau2-airline": World("tau2", TAU2, options={"domain": "airline", "user": {}}, idle=SENTENCE),
    "tau2-retail": World("tau2", TAU2, options={"domain": "retail", "user": {}}, idle=SENTENCE),
    "tau2-telecom-solo": World("tau2", TAU2, options={"domain": "telecom"}),
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
    """The time that some episodes took."""

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
    """Return user and system time of this process and all below it, ended ones too: each episode has one."""
    total = sum(os.times()[:4])
    for pid in descendants(os.getpid()):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(map(int, fields[11:15])) / CLOCK_TICKS
    return total


def memory_mb(pid: int) -> float:
    """Return the MB that a process and all below it hold now."""
    pages = 0
    for each in [pid, *descendants(pid)]:
        with contextlib.suppress(OSError):  # it has ended
            pages += int(Path(f"/proc/{each}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextlib.asynccontextmanager
async def scripted_user() -> AsyncIterator[str]:
    """Yield the address of an endpoint that plays tau2's user."""

    async def answer(request: web.Request) -> web.Response:
        roles = [message["role"] for message in (await request.json())["messages"]]
        text = "I need help." if roles.count("user") == 1 else "###STOP###"
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": text}}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


async def play(pool: WorldPool, task: str, commands: Sequence[str], sizes: list[float] | None = None) -> Grade:
    environment = await pool.acquire(task)
    try:
        await environment.start(task)
        for command in commands:
            if (await environment.step(pool.message(command))).done:
                break
        grade = await environment.grade()
        if sizes is not None and isinstance(line := environment._line, WorldProcess):
            sizes.append(memory_mb(line.pid))
        return grade
    finally:
        await environment.close()


async def collect(
    pool: WorldPool, plans: Sequence[tuple[str, Sequence[str]]], sizes: list[float] | None = None
) -> list[Grade]:
    return list(await asyncio.gather(*(play(pool, task, commands, sizes) for task, commands in plans)))


Plans = list[tuple[str, list[str]]]


async def ours(name: str, args: argparse.Namespace) -> tuple[list[dict[str, Any]], Plans, WorldPool]:
    """Measure one world; returns its rows, the expert's plans and the pool, closed."""
    world = WORLDS[name]
    options = {**world.options, "python": args.python}
    if name in JAVA_WORLDS:
        options["max_worlds"] = args.machines
    async with scripted_user() as url:
        if "user" in options:
            options["user"] = {"url": url, "model": "user", "api_key_env": None}
        pool = create_pool(world.name, options, lambda text: [])
        assert isinstance(pool, WorldPool)
        return *await measured(name, pool, args), pool


async def measured(name: str, pool: WorldPool, args: argparse.Namespace) -> tuple[list[dict[str, Any]], Plans]:
    megabytes: list[float] = []
    await pool.open()
    try:
        tasks = [task for task in pool.tasks(args.split) if not args.only or task.startswith(tuple(args.only))]
        tasks = random.Random(0).sample(tasks, min(args.tasks, len(tasks)))
        plans = [(task, await pool.expert(task)) for task in tasks]
        nothing = await collect(pool, [(task, WORLDS[name].idle) for task in tasks])  # also brings up all workers
        cpu, began = cpu_seconds(), time.monotonic()
        expert = await collect(pool, plans, megabytes)
        measure = Measure(len(plans), time.monotonic() - began, cpu_seconds() - cpu)
        sizes = {split: len(pool.tasks(split)) for split in SPLITS if split in pool._splits}
    finally:
        await pool.close()
    case = f"ours {name}"
    rows = [
        *(row(case, f"{split}_tasks", size, "tasks") for split, size in sizes.items()),
        row(case, "tasks", len(tasks), "tasks"),
        row(case, "commands_per_episode", statistics.fmean(len(commands) for _, commands in plans), "commands"),
        row(case, "expert_success", statistics.fmean(grade.success for grade in expert), "fraction"),
        row(case, "expert_reward", statistics.fmean(grade.reward for grade in expert), "fraction"),
        row(case, "nothing_success", statistics.fmean(grade.success for grade in nothing), "fraction"),
        row(case, "nothing_reward", statistics.fmean(grade.reward for grade in nothing), "fraction"),
        row(case, "memory_mb", max(megabytes), "MB"),
        *measure.rows(case),
    ]
    return rows, plans


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the worlds that were measured, as Markdown."""
    heads = ["world", "tasks: train, dev, test", "reward", "nothing", "expert", "CPU-s", "MB", "licence"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name, world in WORLDS.items():
        figures = {each["metric"]: each["value"] for each in rows if each["case"] == f"ours {name}"}
        if "memory_mb" not in figures:
            continue
        sizes = ", ".join(str(figures.get(f"{split}_tasks", "none")) for split in SPLITS)
        earned = [f"{figures[f'{who}_reward']:.2g}" for who in ("nothing", "expert")]
        cost = [f"{figures['cpu_s_per_episode']:.2g}", f"{figures['memory_mb']:.0f}"]
        lines.append("| " + " | ".join([f"`{name}`", sizes, world.rewards, *earned, *cost, world.licence]) + " |")
    return "\n".join(lines)


def bare(case: str, pool: WorldPool, python: str, plans: Any) -> list[dict[str, Any]]:
    """Play the same plans in a loop inside the world's interpreter; the first one twice, to warm up as ours did."""
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

    def ask(batch: Any) -> None:
        requests.write(json.dumps(batch) + "\n")
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
    parser.add_argument("--table", action="store_true", help="print the table of the rows in --json and play nothing")
    args = parser.parse_args()
    if args.table:
        if args.json is None:
            parser.error("--table needs --json")
        print(table(json.loads(args.json.read_text())))
        return
    for name in args.worlds:
        rows, plans, pool = asyncio.run(ours(name, args))
        if not WORLDS[name].idle:
            rows += bare(name, pool, args.python, plans)
        for line in rows:
            print(f"{line['case']:24} {line['metric']:22} {line['value']:>10} {line['unit']}", flush=True)
        if args.json:
            before = json.loads(args.json.read_text()) if args.json.exists() else []
            others = [line for line in before if line["case"].split()[1] != name]
            args.json.write_text(json.dumps(others + rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
