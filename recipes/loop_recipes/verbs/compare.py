"""Compares evaluations of the same tasks, task by task.

    loop compare runs/a/evaluation runs/b/evaluation
    loop compare runs/a/evaluation runs/b/evaluation --out runs/comparison --level 0.9
    loop compare LOOP=runs/a0/evaluation,runs/a1/evaluation GRPO=runs/b0/evaluation,runs/b1/evaluation

Each folder is an output of `loop eval`. For every sampling, the first policy is compared with every other; one
folder with several policies is enough. A policy's name begins with its path's differing part. Folders joined by commas
are seeds of one setting: they are pooled, and the interval includes their differences.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from loop_formats.places import labelled_paths, split_label
from loop_formats.run_files import to_json, write_whole
from loop_formats.run_folder import read_description
from loop_recipes.config.arguments import verb_parser
from loop_recipes.evaluation.comparison import compare_with_first, comparison_document, pool_seeds
from loop_recipes.evaluation.report import read_report
from loop_recipes.evaluation.scores import NamedResults
from loop_recipes.evaluation.tables import Document, print_document, to_markdown
from loop_recipes.terminal import console


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = verb_parser("compare", __doc__)
    shape = "[LABEL=]FOLDER[,FOLDER...]"
    parser.add_argument("sides", nargs="+", metavar=shape, help="output of an evaluation, or of one for each seed")
    parser.add_argument("--out", type=Path, help="folder for comparison.md and comparison.json")
    parser.add_argument("--level", type=float, default=0.95, help="confidence of the bootstrap intervals (0.95)")
    parser.add_argument("--resamples", type=int, default=10_000, help="number of bootstrap samples (10000)")
    options = parser.parse_args(arguments)
    if not 0.5 <= options.level < 1.0:
        parser.error(f"--level is {options.level:g}; it must be 0.5 to below 1")
    if options.resamples < 100:
        parser.error(f"--resamples is {options.resamples}; it must be at least 100")
    try:
        document, data = _compare(options.sides, options.level, options.resamples)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            write_whole(options.out / "comparison.md", to_markdown(document))
            write_whole(options.out / "comparison.json", to_json(data, indent=1) + "\n")
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    print_document(console(sys.stdout), document)
    folders = [str(path) for side in options.sides for path in split_label(side)[1]]
    print(f"to see a task's rollouts by each policy, two beside each other:\n    loop view {shlex.join(folders)}")
    if len(folders) > 1:
        print("there, below the list: all rollouts as those of one run")
    if options.out is not None:
        print(f"written: {options.out / 'comparison.md'}, {options.out / 'comparison.json'}")
    return 0


def _compare(texts: list[str], level: float, resamples: int) -> tuple[Document, dict[str, Any]]:
    sides = labelled_paths(texts)
    described = [read_description(folder) for _, folders in sides for folder in folders]
    environment = described[0]
    scores: list[NamedResults] = []
    evaluations: dict[Path, tuple[Mapping[str, Any], list[NamedResults]]] = {}
    for label, folders in sides:
        for folder in folders:
            evaluation = read_report(folder)
            if same := next((other for other, earlier in evaluations.items() if earlier == evaluation), None):
                raise ValueError(f"{folder} is {same}, or holds a copy of it; give each evaluation once")
            evaluations[folder] = evaluation
        if len(folders) > 1:
            scores += pool_seeds(label, [evaluations[folder][1] for folder in folders])
        else:
            prefix = f"{label}/" if len(sides) > 1 else ""
            scores += [replace(item, name=prefix + item.name) for item in evaluations[folders[0]][1]]
    reports = [report for report, _ in evaluations.values()]
    for key in ("dataset", "limits", "environment_turns"):
        values = [json.dumps(report.get(key, {}), sort_keys=True) for report in reports]
        if len(set(values)) > 1:
            raise ValueError(
                f"the evaluations differ in {key}, so their scores cannot be compared: {', '.join(values)}"
            )
    fingerprint = [each.whole_identity for each in described]
    if changed := [name for name in fingerprint[0] if len({each.get(name) for each in fingerprint}) > 1]:
        raise ValueError(
            f"the evaluations were graded by different {' and '.join(changed)} of the environment, so their scores "
            "cannot be compared; evaluate both again as it is now"
        )
    groups = reports[0].get("groups")
    comparisons = compare_with_first(scores, groups, environment, level=level, resamples=resamples)
    if not comparisons:
        names = ", ".join(f"{item.name} ({item.sampling})" for item in scores)
        raise ValueError(f"nothing to compare: no two policies were sampled the same way; there are {names}")
    first = reports[0]
    header = {"dataset": first["dataset"], "split": f"{first['split']} ({len(first['tasks'])} tasks)"}
    header["intervals"] = (
        f"{level:.0%} bootstrap, p-values by permutation, both over {environment.groups}; in percentage points"
    )
    if any(item.seeds for item in scores):
        header["seeds"] = "intervals and p-values also hold, by Student's t, how far the seeds of a setting differ"
    return comparison_document(comparisons, header, environment), {
        **header,
        "comparisons": [asdict(comparison) for comparison in comparisons],
    }
