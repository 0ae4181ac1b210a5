"""Learning curves of the algorithms on the tiny policy: several seeds of each, one table and one picture.

    python experiments/algorithms.py --output runs/algorithms            # all algorithms, rates and five seeds: days
    python experiments/algorithms.py --table-only --records experiments/results/tiny_policy.jsonl --iterations 10 \\
        --ceiling 0.938 --docs docs/results/algorithms.md -- collection.tasks_per_iteration=5      # the tables there
    python experiments/algorithms.py --only loop_token grpo --rate 3e-4 --seeds 0 1 2 --iterations 15
    python experiments/algorithms.py --only loop_token grpo --seeds 0 --rate 3e-4 --iterations 1 --held-out-tasks 3 \\
        -- collection.tasks_per_iteration=2                             # does it run?

Every run is `tune run loop_appworld`, one after another; what follows ``--`` goes to all of them
(``rollout_node.launch=False rollout_node.url=URL``: all on one node, which starts once). What is done is not repeated
and a run that was cut off goes on from its checkpoint, so the same command again finishes the rest. A scored run leaves
a record in ``--records`` (records.py), and the tables and the picture are made of these: with ``--table-only`` of those
that are there, on any machine. A record at the right rate stands for its run, whichever machine made it.

Each algorithm has its learning rate searched first (rate_search.py), unless ``--rate`` says it. The control and LOOP
with credit for turns take LOOP's; the latter run if ``--only`` names them, and ``turn_credit`` needs the critic that
its config names (docs/algorithms.md). All runs start from the same policy on the same world and sample the same
number of rollouts, but for the continuations of ``turn_branches``, which come on top; a seed draws other tasks,
samples and minibatches. The numbers are means over the first and the last five iterations of each run, then over
seeds, with the 95 % interval of Student's t. TGC is that of the last policies on held-out tasks at temperature 1,
with a 95 % bootstrap interval over scenarios; the second table compares each algorithm with the first one, task by
task, and the third shows what the searches found. An algorithm that lacks some of the seeds is in the tables with
those it has; one whose seeds have several rates shows none. ``--ceiling`` draws a line at the success that the
policy's own abilities allow, ``--docs`` puts tables and picture between the two markers in that file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from rate_search import best_rate, next_trial, read_search, search_table
from records import Record, read_record, read_records
from scored_runs import (
    ALGORITHMS,
    EVALUATION,
    WINDOW,
    HeldOut,
    differences,
    figure,
    held_out_score,
    number,
    put_into,
    with_interval,
)

from appworld_adapter.dataset import load_split
from loop_formats.schema import ConfigError
from loop_recipes.config.files import compose, split_words
from loop_recipes.plots.curves import Curve, draw
from loop_recipes.plots.style import lowest
from loop_recipes.steps import StepFailed, Steps, newest_policy

RATE_OF = {"shuffled": "loop_token", "turn_credit": "loop_token", "turn_branches": "loop_token"}
"""Algorithms that have no search of their own: the control would choose by chance, the others are LOOP otherwise."""
BY_DEFAULT = [name for name, algorithm in ALGORITHMS.items() if algorithm.chosen != "algorithm=turn_credit"]


def train(name: str, run: Path, seed: int, rate: float, args: argparse.Namespace) -> Steps:
    """Train a run to its end, unless it is there.

    Raises:
        StepFailed, ConfigError: it failed, or its folder was begun with other options.
    """
    words = [f"optimizer.lr={rate:g}", f"dev_evaluation.every={args.iterations}", "dev_evaluation.max_turns=10"]
    # All rollouts of an iteration, so that every algorithm samples as many.
    words += [f"collection.min_rollouts_per_task={args.rollouts_per_task}", "collection.min_rollouts_fraction=1.0"]
    command = ALGORITHMS[name].command(run, seed, args.iterations, [*words, *args.overrides])
    options = {"seed": seed, "rate": rate, "iterations": args.iterations, "overrides": args.overrides}
    steps = Steps(run, options)
    steps.run("training", command, run / "training.log", training=run, deadline_s=args.run_deadline_s)
    return steps


def numbers_of(run: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the table's numbers of a run, from its metrics."""
    first, last = run[:WINDOW], run[-WINDOW:]
    numbers = {
        "steps": sum(line["steps"] for line in run),
        "reward_first": statistics.fmean(line["reward"] for line in first),
        "reward_last": statistics.fmean(line["reward"] for line in last),
        "success_last": statistics.fmean(line["success"] for line in last),
    }
    numbers["reward_gain"] = numbers["reward_last"] - numbers["reward_first"]
    if "dev_success" in run[-1]:
        numbers["dev_success"] = run[-1]["dev_success"]
    return numbers


@dataclass(frozen=True)
class Column:
    title: str
    digits: int = 3
    unit: str = "fraction"


COLUMNS = {
    "steps": Column("optimizer steps", digits=0, unit="steps"),
    "reward_first": Column("reward, first 5"),
    "reward_last": Column("reward, last 5"),
    "reward_gain": Column("gain"),
    "success_last": Column("success, last 5"),
    "dev_success": Column("dev success, greedy"),
}


def table(records: Mapping[str, Sequence[Record]]) -> tuple[str, list[dict[str, Any]]]:
    """Return the tables in Markdown, and the numbers as rows {case, metric, value, unit}.

    Args:
        records: those of each algorithm, at least one; the first algorithm is what others are compared with.
    """
    head = ["algorithm", "seeds", "rate", *(column.title for column in COLUMNS.values()), "TGC, held out"]
    lines, rows = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"], []
    for name, seeds in records.items():
        case, rates = f"ours_{name} tiny", {record.rate for record in seeds}
        cells = [ALGORITHMS[name].label, str(len(seeds)), f"{rates.pop():g}" if len(rates) == 1 else "-"]
        per_run = [numbers_of(record.iterations) for record in seeds]
        for key, column in COLUMNS.items():
            values = [numbers[key] for numbers in per_run if key in numbers]
            cells.append(with_interval(values, column.digits) if values else "-")
            rows += [number(case, key, statistics.fmean(values), column.unit)] if values else []
        success = held_out_score(record.results for record in seeds).success
        rows.append(number(case, "tgc", success.mean, "percent"))
        lines.append(f"| {' | '.join([*cells, figure(success)])} |")
    if len(records) > 1:
        results = {ALGORITHMS[name].label: [record.results for record in seeds] for name, seeds in records.items()}
        lines += ["", *differences(results)]
    return "\n".join(lines), rows


def curve(name: str, seeds: Sequence[Record]) -> Curve:
    return Curve(ALGORITHMS[name].label, [[line | {"dataset": r.dataset} for line in r.iterations] for r in seeds])


def picture(curves: dict[str, Curve], path: Path, ceiling: float | None = None) -> None:
    """Draw the share of rollouts that solve over iterations, a panel an algorithm, the first one behind the others."""
    columns = min(3, len(curves))
    height = math.ceil(len(curves) / columns)
    drawing, grid = plt.subplots(
        height, columns, figsize=(4 * columns, 2.8 * height), squeeze=False, sharex=True, sharey=True
    )
    reference = next(iter(curves.values()))
    for axes, curve in zip(grid.flat, curves.values(), strict=False):
        if curve is not reference:
            draw(axes, reference, "success", "#999999", WINDOW)
        draw(axes, curve, "success", "#0072B2", WINDOW)
        if ceiling is not None:
            axes.axhline(ceiling, color="#D55E00", lw=1, ls="--")
        axes.set_title(curve.label, fontsize=10)
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.25, lw=0.5)
    for axes in grid.flat[len(curves) :]:
        axes.set_visible(False)
    for axes in lowest(grid):
        axes.set_xlabel("iteration")
        axes.tick_params(labelbottom=True)
    for axes in grid[:, 0]:
        axes.set_ylabel("share that solves")
    datasets = ", ".join(sorted(set().union(*(curve.datasets for curve in curves.values()))))
    note = f"{datasets}: points: means of the seeds; line: their average over {WINDOW} iterations; "
    note += f"band: lowest to highest seed; grey: {reference.label}"
    note += "" if ceiling is None else "; dashed: the policy's ceiling"
    drawing.suptitle(note, fontsize=9, x=0.01, ha="left")
    drawing.tight_layout()
    drawing.savefig(path, dpi=120)
    plt.close(drawing)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/algorithms"), help="folder of all runs")
    parser.add_argument("--records", type=Path, help="file of what is kept of them (OUTPUT/records.jsonl)")
    parser.add_argument("--only", nargs="+", choices=list(ALGORITHMS), default=BY_DEFAULT)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--rate", type=float, help="of all these algorithms; else each one's is searched")
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument("--held-out-tasks", type=int, help="the first of test_normal only")
    parser.add_argument("--ceiling", type=float, help="success that the policy's abilities allow, drawn as a line")
    parser.add_argument("--table-only", action="store_true", help="of the runs that are complete; train nothing")
    parser.add_argument("--run-deadline-s", type=float, default=5400.0)
    parser.add_argument("--docs", type=Path, help="put tables and picture between the markers in this file")
    parser.add_argument("--json", type=Path, help="write the rows there")
    return parser


def run_all(args: argparse.Namespace, held_out: HeldOut) -> list[str]:
    """Search the learning rates, train, score and write the records; returns what failed."""
    failures: list[str] = []

    def attempt(name: str, run: Path, seed: int, rate: float, score: bool) -> None:
        started, what = time.monotonic(), f"{name}, seed {seed} at {rate:g}"
        try:
            steps = train(name, run, seed, rate, args)
            evaluation = run / EVALUATION if score else None
            if evaluation:
                held_out.score(steps, evaluation, newest_policy(run), seed, args.run_deadline_s)
            Record.of_run(name, seed, args.budget, run, [run / "node"], evaluation).write(args.records)
        except (StepFailed, ConfigError) as error:
            failures.append(f"{what}: {error}")
            print(failures[-1], flush=True)
        print(f"{what}: {time.monotonic() - started:.0f} s", flush=True)

    def search(name: str) -> float | None:
        """Return the learning rate that the search finds; None if a run of it failed."""
        while (trial := next_trial(trials := read_search(args.records, name, args.budget))) is not None:
            rate, seed = trial
            run = args.output / "search" / f"{name}-lr{rate:g}-seed{seed}"
            attempt(name, run, seed, rate, score=False)
            if read_record(args.records, name, seed, args.budget, searched=rate) is None:
                return None
        return best_rate(trials)

    rates = {name: args.rate or search(name) for name in dict.fromkeys(RATE_OF.get(name, name) for name in args.only)}
    # A seed of every algorithm first, so that a run cut short can be compared too.
    for seed, name in itertools.product(args.seeds, args.only):
        rate, run = rates[RATE_OF.get(name, name)], args.output / f"{name}-seed{seed}"
        if rate is None:
            failures.append(f"{name}, seed {seed}: no learning rate is chosen")
            continue
        record = read_record(args.records, name, seed, args.budget)
        if record is None or record.rate != rate or run.exists():
            attempt(name, run, seed, rate, score=True)
    return failures


def main(arguments: list[str] | None = None) -> None:
    words, overrides = split_words(sys.argv[1:] if arguments is None else arguments)
    args = parser().parse_args(words)
    args.output, args.overrides = args.output.resolve(), overrides
    args.records = args.records or args.output / "records.jsonl"
    try:
        config = compose("tiny_cpu", overrides)
        args.rollouts_per_task = config.collection.rollouts_per_task
        args.budget = args.iterations * config.collection.tasks_per_iteration * args.rollouts_per_task
        failures = []
        if not args.table_only:
            world = config.node.environment.root
            failures = run_all(args, HeldOut(load_split(world, "test_normal")[: args.held_out_tasks]))
        records = read_records(args.records, args.only, args.seeds, args.budget)
    except (ConfigError, OSError) as error:
        sys.exit(f"algorithms: {error}")
    if not records:
        sys.exit(f"algorithms: {args.records} holds no record of these algorithms and seeds")
    text, rows = table(records)
    searches = {name: search for name in args.only if (search := read_search(args.records, name, args.budget))}
    text += f"\n\n{search_table(searches)}" if searches else ""
    # A selection has a name of its own, so that several documents can have their pictures.
    stem = "algorithms" if args.only == BY_DEFAULT else f"algorithms_{'_'.join(args.only)}"
    args.output.mkdir(parents=True, exist_ok=True)
    image = args.output / f"{stem}.png"
    picture({name: curve(name, seeds) for name, seeds in records.items()}, image, args.ceiling)
    image.with_suffix(".md").write_text(text + "\n")
    print(f"{text}\n{image}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if args.docs:
        put_into(args.docs, "algorithms", text, image, "learning curves of the algorithms")
    if failures:
        sys.exit(f"algorithms: {len(failures)} run(s) failed; the same command tries them again")


if __name__ == "__main__":
    main()
