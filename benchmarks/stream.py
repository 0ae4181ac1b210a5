"""Rollouts kept an hour by a stream of groups, and with the next iteration asked for ahead: a real run of each.

    python benchmarks/stream.py [--slots 128] [--rounds 1] [--json results.json]

The tiny policy in a real vLLM on the CPU, on a node of --slots episodes at a time, in an environment that sleeps: the
durations of ``scheduling.py`` (long-tailed, a factor a task and one a rollout), scaled to a median of --median-s, in
two turns of eight tokens. Its rewards are chance, so that every iteration updates, in one step, which takes a small
part of what sampling does: where it is the update that is waited for, no way to collect is faster. --iterations
iterations of 40 tasks x 6 rollouts, with ``max_policy_lag: 1``, and with ``stream: true`` and ``max_policy_lag: 4``, in
turns for --rounds.

``kept_per_hour`` are rollouts that were trained on, over the seconds of the run's lines but the first, in which vLLM
compiles; ``kept_per_hour_ratio`` is that of the stream over that of lag 1. ``cores_used`` is the processor time of all
of the run's processes, their start included, over the seconds that it lasted: near the machine's cores it is these that
are measured. ``policy_lag`` is the largest of the lines', ``dropped_share`` is of episodes that were cut off, of all.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from agent_environments.counter import CounterEnvironment, CounterPool
from agent_environments.description import Description
from agent_environments.protocol import Grade, Message, Requirement, StepResult, TokenSpans

ROOT = Path(__file__).resolve().parents[1]
TASKS, TURNS = 160, 2
TASK_SIGMA, ROLLOUT_SIGMA = 0.5, 0.7
MODES = {
    "lag_1": ["collection.max_policy_lag=1"],
    "ours_stream": ["collection.stream=true", "collection.max_policy_lag=4"],
}


class SleepingPool(CounterPool):
    """Lends worlds whose turns take as long as chance, by the task and the rollout's id, has them."""

    dataset = "sleeping"
    description = Description()

    def __init__(self, token_spans: TokenSpans, median_s: float, max_worlds: int = 1024) -> None:
        super().__init__(token_spans, max_worlds)
        self.median_s = median_s

    def tasks(self, split: str) -> list[str]:
        return [f"task_{number}" for number in range(TASKS)]

    def check_tasks(self, task_ids: Sequence[str]) -> None:
        """Accept all tasks."""

    async def acquire(self, episode_id: str) -> SleepingEnvironment:
        await self._slots.take()
        return SleepingEnvironment(self, episode_id)


class SleepingEnvironment(CounterEnvironment):
    def __init__(self, pool: SleepingPool, episode_id: str) -> None:
        super().__init__(pool)
        self._chance, self._median_s, self._seconds = random.Random(episode_id), pool.median_s, 0.0

    async def start(self, task_id: str) -> list[Message]:
        of_task = random.Random(task_id).gauss(0.0, TASK_SIGMA)
        self._seconds = self._median_s * math.exp(of_task + self._chance.gauss(0.0, ROLLOUT_SIGMA))
        return [Message("user", task_id)]

    async def step(self, action: str) -> StepResult:
        await asyncio.sleep(self._seconds / TURNS)
        return StepResult("go on", done=False)

    async def grade(self) -> Grade:
        solved = self._chance.random() < 0.5
        return Grade(float(solved), solved, (Requirement("it was lucky", solved),))


def processor_seconds(pid: int) -> dict[int, float]:
    """Return the seconds that a process and all below it have used so far, by their ids."""
    seconds: dict[int, float] = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in (root := psutil.Process(pid), *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                seconds[process.pid] = times.user + times.system
    return seconds


def train(mode: str, folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """Train in a run of its own; returns its metrics."""
    words = {
        "output_dir": folder,
        "max_iterations": args.iterations,
        "node.environment": f"{{name: 'benchmarks.stream:SleepingPool', median_s: {args.median_s}}}",
        "node.max_concurrent_episodes": args.slots,
        "node.servers.max_num_seqs": args.slots,
        "collection.split": "train",
        "collection.tasks_per_iteration": 40,
        "collection.limits": f"{{max_turns: {TURNS}, max_tokens_per_turn: 8, max_context: 512}}",
        "dev_evaluation.every": 0,
        "update.epochs": 1,
        "update.minibatch_rollouts": "null",
        "update.exact_entropy": "false",
        "update.token_statistics": "false",
        "sampler_gap": "{ok: 1000.0, broken: 1000.0}",
    }
    began, used = time.monotonic(), dict[int, float]()
    command = [str(Path(sys.executable).with_name("loop")), "train", "tiny_cpu", *MODES[mode]]
    with (folder.parent / f"{folder.name}.txt").open("w") as output:
        command += [f"{key}={value}" for key, value in words.items()]
        with subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT) as run:
            while run.poll() is None:
                used |= processor_seconds(run.pid)
                time.sleep(1.0)
    if run.returncode:
        raise SystemExit(f"{mode} ended with {run.returncode}: {output.name}")
    wall = time.monotonic() - began
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    counted = lines[1:]
    return {
        "kept_per_hour": sum(line["rollouts"] for line in counted) / sum(line["seconds"] for line in counted) * 3600,
        "cores_used": sum(used.values()) / wall,
        "policy_lag": max(line["policy_lag"] for line in lines),
        "dropped_rollouts": sum(line["dropped_rollouts"] for line in lines)
        / sum(line["all_rollouts"] for line in lines),
        "seconds_waiting": sum(line["seconds_waiting"] for line in counted),
        "seconds_updating": sum(line["seconds_updating"] for line in counted),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--median-s", type=float, default=6.0)
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where the runs are kept")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(args.rounds):
            for mode in MODES:
                results[mode].append(train(mode, (args.folder or Path(temporary)).resolve() / f"{mode}_{number}", args))
                print(mode, {name: round(value, 3) for name, value in results[mode][-1].items()}, flush=True)
    rows = []
    units = {"kept_per_hour": "1/h", "seconds_waiting": "s", "seconds_updating": "s"}
    for mode, runs in results.items():
        case = f"{mode} {args.slots}_slots_median_{args.median_s:g}_s"
        metrics = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        rows += [{"case": case, "metric": m, "value": v, "unit": units.get(m, "")} for m, v in metrics.items()]
    ratios = [ours["kept_per_hour"] / lag["kept_per_hour"] for lag, ours in zip(*results.values(), strict=True)]
    case = f"ours_stream {args.slots}_slots_median_{args.median_s:g}_s"
    rows.append({"case": case, "metric": "kept_per_hour_ratio", "value": statistics.median(ratios), "unit": "x"})
    for row in rows:
        print(f"{row['case']:42}{row['metric']:24}{row['value']:12.3f} {row['unit']}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
