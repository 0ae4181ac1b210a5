"""LOOP with an agent of one's own, through the endpoint, against LOOP with the node's own loop.

    python experiments/agent_curve.py --output runs/agent_curve [--json PATH]        # three seeds of each: hours
    python experiments/agent_curve.py --seeds 0 1 2 --agent-seeds 0

Both sides train the tiny policy in the synthetic world: ``tiny_cpu``, and ``tiny_cpu world=agent``, whose
episodes are played by a program of forty lines with OpenAI's client. Complete runs are not repeated, runs that
were cut off go on, and words after ``--`` go to all runs.

Three things are printed. First both curves: mean reward by iteration, the lowest to the highest seed of the node's own
loop beside each run of the agent. Then, for each figure of a run, the range in which one more seed of the node's own
loop would lie with 95 % (Student's t prediction interval; two seeds at least), and whether the agent's runs lie in it.
Then, where both sides have a seed, how many rollouts of each iteration are the same token for token. In the first both
sample from the same policy with the same seeds, so a difference is the servers' rounding or a defect. Later ones differ
too once early stop has cut off other episodes (``collection.min_rollouts_fraction=1.0`` cuts off none).
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from algorithms import numbers_of
from scored_runs import Algorithm, t_quantile

from loop_formats.ids import parse_collection_id
from loop_formats.run_files import find_logs, read_rollouts
from loop_formats.run_folder import read_metrics
from loop_formats.schema import ConfigError
from loop_recipes.steps import StepFailed, Steps

OWN_LOOP = Algorithm("the node's own loop")
AGENT = Algorithm("agent through the endpoint", "world=agent")
FIGURES = ("reward_first", "reward_last", "reward_gain", "success_last")

Run = Sequence[dict[str, Any]]
"""The lines of a run's metrics."""


def train(side: Algorithm, run: Path, seed: int, args: argparse.Namespace) -> None:
    """Train a run to its end.

    Raises:
        StepFailed, ConfigError: it failed, or its folder was begun with other options.
    """
    steps = Steps(run, {"seed": seed, "iterations": args.iterations, "overrides": args.overrides})
    command = side.command(run, seed, args.iterations, args.overrides)
    steps.run("training", command, run / "training.log", training=run, deadline_s=args.run_deadline_s)


def finished_iterations(run: Path) -> int:
    try:
        return max((line["iteration"] for line in read_metrics(run)), default=0)
    except ValueError:  # there is no run
        return 0


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Return Student's t prediction interval of 95 % for one more value; (-inf, inf) for a single value."""
    if len(values) < 2:
        return -math.inf, math.inf
    half = t_quantile(len(values) - 1) * statistics.stdev(values) * math.sqrt(1 + 1 / len(values))
    mean = statistics.fmean(values)
    return mean - half, mean + half


@dataclass(frozen=True)
class Comparison:
    """A figure: that of each run, and whether the agent's lie in the spread of the other side's seeds.

    ``inside`` is None where a single seed shows no spread.
    """

    figure: str
    own_loop: list[float]
    agent: list[float]

    @property
    def inside(self) -> bool | None:
        low, high = spread(self.own_loop)
        return None if math.isinf(low) else all(low <= value <= high for value in self.agent)

    def __str__(self) -> str:
        low, high = spread(self.own_loop)
        verdict = {None: "one seed shows no spread", True: "inside", False: "OUTSIDE"}[self.inside]
        cells = [" ".join(f"{value:.3f}" for value in values) for values in (self.own_loop, self.agent)]
        where = "-" if self.inside is None else f"{low:.3f} to {high:.3f}"
        return f"| {self.figure} | {cells[0]} | {where} | {cells[1]} | {verdict} |"


def comparisons(own_loop: Sequence[Run], agent: Sequence[Run]) -> list[Comparison]:
    own, others = ([numbers_of(run) for run in runs] for runs in (own_loop, agent))
    return [
        Comparison(figure, [numbers[figure] for numbers in own], [numbers[figure] for numbers in others])
        for figure in FIGURES
    ]


def curves(own_loop: Sequence[Run], agent: Sequence[Run]) -> str:
    """Return the mean reward by iteration, as a Markdown table."""
    lines = ["| iteration | the node's own loop, lowest to highest | agent, each run |", "|---|---|---|"]
    for place, several in enumerate(zip(*own_loop, strict=False)):
        rewards = [line["reward"] for line in several]
        others = " ".join(f"{run[place]['reward']:.3f}" for run in agent if place < len(run))
        lines.append(f"| {several[0]['iteration']} | {min(rewards):.3f} to {max(rewards):.3f} | {others} |")
    return "\n".join(lines)


def same_rollouts(one: Path, other: Path) -> dict[int, tuple[int, int]]:
    """Return iteration -> (rollouts that are the same token for token, rollouts that both runs made)."""
    first, second = _served(one), _served(other)
    counts: dict[int, tuple[int, int]] = {}
    for key in sorted(first.keys() & second.keys()):
        same, made = counts.get(key[0], (0, 0))
        counts[key[0]] = (same + (first[key] == second[key]), made + 1)
    return counts


def _served(run: Path) -> dict[tuple[int, str, int, int], list[int]]:
    """Return (iteration, task, index, segment) -> token ids that a run trained on."""
    names = {log: parse_collection_id(log.stem) for log in find_logs(run)}
    return {
        (name.iteration, rollout.task_id, rollout.index, rollout.segment): rollout.token_ids
        for log, name in names.items()
        if name.is_training and name.iteration is not None
        for rollout in read_rollouts(log)
    }


def rows(compared: Sequence[Comparison], same: Mapping[int, Mapping[int, tuple[int, int]]]) -> list[dict[str, Any]]:
    """Return the numbers of it all, {case, metric, value, unit}; ``same`` by seed and iteration."""
    numbers = [
        {"case": f"{case} tiny", "metric": one.figure, "value": round(statistics.fmean(values), 4), "unit": "fraction"}
        for one in compared
        for case, values in (("own_loop", one.own_loop), ("ours_agent", one.agent))
    ]
    if first := [counts[1] for counts in same.values() if 1 in counts]:
        share = round(sum(equal for equal, _ in first) / sum(made for _, made in first), 4)
        numbers.append(
            {"case": "ours_agent tiny", "metric": "same_rollouts_iteration_1", "value": share, "unit": "fraction"}
        )
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/agent_curve"), help="folder of all runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the node's own loop")
    parser.add_argument("--agent-seeds", type=int, nargs="+", help="of the agent; else the same")
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument("--run-deadline-s", type=float, default=10_800.0)
    parser.add_argument("--json", type=Path, help="write the numbers there")
    parser.add_argument("overrides", nargs="*", help="key=value, after --, for all runs")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("agent_curve: stopped; the same command goes on"))
    agent_seeds = args.agent_seeds or args.seeds

    def folder_of(side: Algorithm, seed: int) -> Path:
        return args.output / f"{'tiny_cpu_agent' if side is AGENT else 'tiny_cpu'}-seed{seed}"

    for side, seeds in ((OWN_LOOP, args.seeds), (AGENT, agent_seeds)):
        for seed in seeds:
            folder = folder_of(side, seed)
            if finished_iterations(folder) < args.iterations:
                started = time.monotonic()
                try:
                    train(side, folder, seed, args)
                except (StepFailed, ConfigError) as error:
                    sys.exit(f"agent_curve: {folder}: {error}; the same command tries it again")
                print(f"{folder}: done ({time.monotonic() - started:.0f} s)", flush=True)

    own_loop = [read_metrics(folder_of(OWN_LOOP, seed))[: args.iterations] for seed in args.seeds]
    agent = [read_metrics(folder_of(AGENT, seed))[: args.iterations] for seed in agent_seeds]
    compared = comparisons(own_loop, agent)
    print(curves(own_loop, agent))
    print(f"\n| figure | {OWN_LOOP.label}, each seed | 95 % of its seeds | {AGENT.label}, each seed | |")
    print("|---|---|---|---|---|")
    print(*compared, sep="\n")
    same: dict[int, dict[int, tuple[int, int]]] = {}
    for seed in sorted({*args.seeds} & {*agent_seeds}):
        same[seed] = same_rollouts(folder_of(OWN_LOOP, seed), folder_of(AGENT, seed))
        counts = ", ".join(f"{iteration}: {equal} of {made}" for iteration, (equal, made) in same[seed].items())
        print(f"\nseed {seed}, rollouts that are the same token for token, by iteration: {counts or 'no log'}")
    if args.json:
        args.json.write_text(json.dumps(rows(compared, same), indent=1) + "\n")


if __name__ == "__main__":
    main()
