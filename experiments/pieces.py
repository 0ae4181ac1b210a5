"""A run of LOOP on the tiny policy with each small piece that peers have, beside LOOP without it and the control.

    python experiments/pieces.py --output runs/pieces                     # each piece not run so far
    python experiments/pieces.py --output runs/pieces --table-only --json experiments/results/pieces.json

What follows ``--`` goes to all runs. They sample as many rollouts as LOOP's ten iterations in
``experiments/results/tiny_policy.jsonl``, whose five seeds say how far runs without any piece lie apart: one run ranks
nothing, but it shows a piece that harms where it should not matter. Refill spends its rollouts in fewer iterations.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from records import Record, read_records
from scored_runs import WINDOW, Algorithm, number

from loop_formats.places import METRICS_FILE
from loop_formats.run_folder import read_metrics
from loop_formats.schema import ConfigError
from loop_recipes.config.files import split_words
from loop_recipes.steps import StepFailed, Steps, newest_policy

ITERATIONS, TASKS, ROLLOUTS = 10, 5, 6
BUDGET = ITERATIONS * TASKS * ROLLOUTS
RECORDS = Path(__file__).parent / "results/tiny_policy.jsonl"
WITHOUT, TEACHER = "none", "teacher"
LOOP = Algorithm("LOOP")
DISTILLATION = "loop_contrib.distillation.distillation.Distillation"


def corrected(component: str) -> str:
    """Return the word that corrects for the sampler by this component, whose arguments may follow its name."""
    return f"loss.sampler_correction={{_component_: loop_recipes.algorithm.sampler_correction.{component}}}"


def distilled(output: Path) -> str:
    """Return the word that makes the last policy of the run without a piece the teacher."""
    return f"credit.teacher={{_component_: {DISTILLATION}, adapter: {newest_policy(output / WITHOUT)}}}"


@dataclass(frozen=True)
class Piece:
    """A run: its name in the table, the words that it adds, and the metric to look at."""

    label: str
    words: tuple[str, ...]
    metric: str


PIECES = {
    WITHOUT: Piece("LOOP", (), "clip_fraction"),
    "tis": Piece("TIS, tokens", (corrected("TruncatedWeights"),), "correction_weight"),
    "tis_sequence": Piece("TIS, sequences", (corrected("TruncatedWeights, ratio_of: sequence"),), "correction_weight"),
    "icepop": Piece("IcePop", (corrected("RatioMask"),), "correction_cut"),
    "dppo": Piece("DPPO", (corrected("DivergenceMask"), "loss.clip=none"), "correction_cut"),
    "dapo": Piece("DAPO's clip", ("loss.eps_high=0.28",), "clip_fraction"),
    "gspo": Piece("GSPO", ("loss.level=geometric", "loss.eps=3e-4", "loss.eps_high=4e-4"), "clip_fraction"),
    "cispo": Piece("CISPO", ("loss.clip=cispo", "loss.eps_high=4"), "clip_fraction"),
    "refill": Piece("refill", ("collection.refill_budget=1.5",), "refilled_groups"),
    "rest": Piece("rest", ("collection.rest_iterations=5",), "resting_tasks"),
    TEACHER: Piece("distillation beside LOOP", (), "teacher_kl"),
}


def within_budget(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the iterations whose rollouts, those thrown away included, are within the budget."""
    spent = itertools.accumulate(line["all_rollouts"] for line in lines)
    return [line for line, so_far in zip(lines, spent, strict=True) if so_far <= BUDGET]


def rows_of(case: str, lines: list[dict[str, Any]], metric: str | None = None) -> list[dict[str, Any]]:
    last = lines[-WINDOW:]
    values = {
        "reward_first": statistics.fmean(line["reward"] for line in lines[:WINDOW]),
        "reward_last": statistics.fmean(line["reward"] for line in last),
        "success_last": statistics.fmean(line["success"] for line in last),
        "steps": sum(line["steps"] for line in lines),
        "iterations": len(lines),
    }
    if metric is not None:
        values[metric] = statistics.fmean(line[metric] for line in lines if metric in line)
    return [number(case, name, value, "") for name, value in values.items()]


def reference(name: str, label: str) -> list[dict[str, Any]]:
    """Return rows of the lowest and the highest seed of an algorithm that was run without any piece."""
    records: list[Record] = read_records(RECORDS, [name], range(5), BUDGET)[name]
    by_last = sorted(
        records, key=lambda record: statistics.fmean(line["reward"] for line in record.iterations[-WINDOW:])
    )
    return [
        row
        for which, record in (("lowest", by_last[0]), ("highest", by_last[-1]))
        for row in rows_of(f"{label}, {which} of {len(records)} seeds", record.iterations)
    ]


def run_all(output: Path, overrides: list[str]) -> list[str]:
    """Run what is missing; returns what failed."""
    failures = []
    for name, piece in PIECES.items():
        run = output / name
        words = [f"collection.tasks_per_iteration={TASKS}", f"collection.min_rollouts_per_task={ROLLOUTS}"]
        words += ["collection.min_rollouts_fraction=1.0", "optimizer.lr=6e-4", *piece.words]
        try:
            words += [distilled(output)] if name == TEACHER else []
            steps = Steps(run, {"overrides": overrides})
            command = LOOP.command(run, 0, ITERATIONS, [*words, *overrides])
            steps.run("training", command, run / "training.log", training=run, deadline_s=5400.0)
        except (StepFailed, ConfigError) as error:
            failures.append(f"{name}: {error}")
            print(failures[-1], flush=True)
    return failures


def table(output: Path) -> list[dict[str, Any]]:
    rows = [*reference("loop_token", "LOOP"), *reference("shuffled", "shuffled")]
    for name, piece in PIECES.items():
        file = output / name / METRICS_FILE
        if file.exists() and (lines := within_budget(read_metrics(file))):
            rows += rows_of(piece.label, lines, piece.metric)
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/pieces"), help="folder of all runs")
    parser.add_argument("--table-only", action="store_true", help="of the runs that are there; train nothing")
    parser.add_argument("--json", type=Path, help="write the rows there")
    words, overrides = split_words(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(words)
    failures = [] if options.table_only else run_all(options.output.resolve(), overrides)
    rows = table(options.output)
    print("| run | figure | |\n|---|---|---|")
    for row in rows:
        print(f"| {row['case']} | {row['metric']} | {row['value']:.4g} |")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if failures:
        sys.exit(f"pieces: {len(failures)} run(s) failed; the same command tries them again")


if __name__ == "__main__":
    main()
