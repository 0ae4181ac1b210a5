"""Learning curves of the algorithms on the tiny policy: several seeds of each, one table and one picture.

    python benchmarks/algorithms.py --output runs/algorithms                    # all algorithms x three seeds: hours
    python benchmarks/algorithms.py --output runs/algorithms --docs docs/results.md
    python benchmarks/algorithms.py --only loop_token grpo --seeds 0 --iterations 1 -- collection.tasks_per_iteration=2

Every run is `tune run loop_appworld` with its own rollout node, one after another; what follows ``--`` goes to all of
them (``rollout_node.launch=False rollout_node.url=URL``: all on one node, which starts once). A run that is complete is
not repeated and one that was cut off goes on from its checkpoint, so the same command again finishes the rest, and
makes the table of what there is.

All runs start from the same policy on the same world; a seed draws other tasks, samples and minibatches. The numbers
are means over the first and the last five iterations of each run, then over seeds, with the 95 % interval of Student's
t; ``dev success`` is one greedy rollout of every dev task after the last iteration.
``--docs`` puts table and picture between the two markers in that file.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from loop_recipes.learner.run_metrics import read_metrics
from loop_recipes.plots.curves import Curve, draw

BEGIN, END = "<!-- algorithms: begin -->", "<!-- algorithms: end -->"
WINDOW = 5
# 97.5 % quantiles of Student's t by degrees of freedom; beyond ten seeds the normal's is near enough.
T_QUANTILE = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class Algorithm:
    """A row of the table: its name there, the config it runs, what the small scale changes in it."""

    label: str
    config: str
    overrides: tuple[str, ...] = field(default=())


ALGORITHMS = {
    "loop_token": Algorithm("LOOP (token)", "tiny_cpu"),
    "loop_turn": Algorithm("LOOP (turn)", "loop_turn"),
    "loop_bandit": Algorithm("LOOP (bandit)", "loop_bandit"),
    "loop_rwnorm": Algorithm("LOOP RwNorm", "loop_rwnorm"),
    "rloo": Algorithm("RLOO", "rloo"),
    "grpo": Algorithm("GRPO", "grpo"),
    "grpo_no_kl": Algorithm("GRPO no KL", "grpo_no_kl"),
    # The paper's ten iterations of critic warm-up are a twentieth of its run.
    "ppo_critic": Algorithm("PPO (critic)", "ppo_critic", ("critic.warmup_iterations={twentieth}",)),
    "shuffled": Algorithm("shuffled (control)", "tiny_cpu", ("advantage=loop_recipes.learner.advantages.Shuffled",)),
}


def finished_iterations(run: Path) -> int:
    try:
        return max((line["iteration"] for line in read_metrics(run)), default=0)
    except ValueError:  # there is no run
        return 0


def train(algorithm: Algorithm, run: Path, seed: int, args: argparse.Namespace) -> str | None:
    """One run to its end, output in ``<run>.log``; returns why it failed, or None."""
    run.parent.mkdir(parents=True, exist_ok=True)
    overrides = [word.format(twentieth=max(1, round(args.iterations / 20))) for word in algorithm.overrides]
    command = [Path(sys.executable).with_name("tune"), "run", "loop_appworld"]
    command += ["--config", f"loop_appworld/{algorithm.config}", f"output_dir={run.resolve()}", f"seed={seed}"]
    command += [f"max_iterations={args.iterations}", f"dev_evaluation.every={args.iterations}"]
    command += ["dev_evaluation.max_turns=10", "stop.iterations_without_signal=null", "resume_from_checkpoint=True"]
    command += [*overrides, *args.overrides]
    log = run.with_name(f"{run.name}.log")
    with log.open("ab") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            status = process.wait(timeout=args.run_deadline_s)
        except BaseException as error:
            process.terminate()  # saves after the update in hand, stops its node
            process.wait(timeout=300)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return f"not done after {args.run_deadline_s:.0f} s (--run-deadline-s); see {log}"
    if status or finished_iterations(run) < args.iterations:
        last = next((line for line in reversed(log.read_text().splitlines()) if line.strip()), "no output")
        return f"status {status}: {last}"
    return None


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean over seeds and half the width of its 95 % interval (nan for one seed)."""
    if len(values) < 2:
        return statistics.fmean(values), math.nan
    quantile = T_QUANTILE[len(values) - 1] if len(values) <= len(T_QUANTILE) else 1.96
    return statistics.fmean(values), quantile * statistics.stdev(values) / math.sqrt(len(values))


def numbers_of(run: Sequence[dict[str, Any]]) -> dict[str, float]:
    """What the table says about one run, from its metrics."""
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


def table(curves: dict[str, Curve]) -> tuple[str, list[dict[str, Any]]]:
    """The table in Markdown, and its numbers as rows {case, metric, value, unit}."""
    head = ["algorithm", "seeds", *(column.title for column in COLUMNS.values())]
    lines, rows = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"], []
    for name, curve in curves.items():
        cells = [curve.label, str(len(curve.runs))]
        per_run = [numbers_of(run) for run in curve.runs]
        for key, column in COLUMNS.items():
            values = [numbers[key] for numbers in per_run if key in numbers]
            if not values:
                cells.append("-")
                continue
            mean, half = interval(values)
            cells.append(" ± ".join(f"{value:.{column.digits}f}" for value in (mean, half) if not math.isnan(value)))
            rows.append({"case": f"ours_{name} tiny", "metric": key, "value": round(mean, 4), "unit": column.unit})
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines), rows


def picture(curves: dict[str, Curve], path: Path) -> None:
    """Mean reward over iterations, a panel an algorithm, with the first one behind each of the others."""
    columns = min(3, len(curves))
    height = math.ceil(len(curves) / columns)
    figure, grid = plt.subplots(
        height, columns, figsize=(4 * columns, 2.8 * height), squeeze=False, sharex=True, sharey=True
    )
    reference = next(iter(curves.values()))
    for axes, curve in zip(grid.flat, curves.values(), strict=False):
        if curve is not reference:
            draw(axes, reference, "reward", "#999999", WINDOW)
        draw(axes, curve, "reward", "#0072B2", WINDOW)
        axes.set_title(curve.label, fontsize=10)
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.25, lw=0.5)
    for axes in grid.flat[len(curves) :]:
        axes.set_axis_off()
    for axes in grid[-1]:
        axes.set_xlabel("iteration")
    for axes in grid[:, 0]:
        axes.set_ylabel("mean reward")
    datasets = ", ".join(sorted(set().union(*(curve.datasets for curve in curves.values()))))
    note = f"{datasets}: moving average over {WINDOW} iterations; band: lowest to highest seed; grey: {reference.label}"
    figure.suptitle(note, fontsize=9, x=0.01, ha="left")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def put_into(document: Path, text: str, image: Path) -> None:
    """Replace what stands between the markers of ``document``; the picture goes into ``images`` beside it."""
    content = document.read_text()
    if BEGIN not in content or END not in content:
        sys.exit(f"algorithms: {document} lacks the lines {BEGIN} and {END}; put them where the table shall stand")
    images = document.with_name("images")
    images.mkdir(exist_ok=True)
    shutil.copyfile(image, images / image.name)
    section = f"{BEGIN}\n{text}\n\n![learning curves of the algorithms](images/{image.name})\n{END}"
    document.write_text(re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: section, content, flags=re.DOTALL))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/algorithms"), help="folder of all runs")
    parser.add_argument("--only", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument("--table-only", action="store_true", help="of the runs that are complete; train nothing")
    parser.add_argument("--run-deadline-s", type=float, default=5400.0)
    parser.add_argument("--docs", type=Path, help="put table and picture between the markers in this file")
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("overrides", nargs="*", help="key=value, after --, for all runs")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("algorithms: stopped; the same command goes on"))

    failures = []
    # A seed of every algorithm first, so that a run cut short can be compared too.
    for seed in [] if args.table_only else args.seeds:
        for name in args.only:
            run = args.output / f"{name}-seed{seed}"
            if finished_iterations(run) >= args.iterations:
                continue
            started = time.monotonic()
            failure = train(ALGORITHMS[name], run, seed, args)
            print(f"{run}: {failure or 'done'} ({time.monotonic() - started:.0f} s)", flush=True)
            failures += [failure] if failure else []

    curves = {}
    for name in args.only:
        runs = [args.output / f"{name}-seed{seed}" for seed in args.seeds]
        complete = [read_metrics(run) for run in runs if finished_iterations(run) >= args.iterations]
        if complete:
            curves[name] = Curve(ALGORITHMS[name].label, complete)
    if not curves:
        sys.exit("algorithms: no run is complete")
    text, rows = table(curves)
    image = args.output / "algorithms.png"
    picture(curves, image)
    (args.output / "algorithms.md").write_text(text + "\n")
    print(f"{text}\n{image}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if args.docs:
        put_into(args.docs, text, image)
    if failures:
        sys.exit(f"algorithms: {len(failures)} run(s) failed; the same command tries them again")


if __name__ == "__main__":
    main()
