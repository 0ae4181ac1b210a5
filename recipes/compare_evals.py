"""`compare-evals A B ...`: evaluations of the same tasks, compared task by task.

Each argument is the output folder of `eval_appworld`; one folder that holds several policies will do. For every way of
sampling, the first policy is compared with each other one.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from loop_recipes.eval_comparison import NamedResults, compare_with_first, comparison_markdown
from loop_recipes.eval_report import read_report


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the console script; returns the exit status."""
    parser = argparse.ArgumentParser(prog="compare-evals", description=__doc__.splitlines()[0])
    parser.add_argument("evaluations", nargs="+", type=Path, metavar="FOLDER", help="output folder of an evaluation")
    parser.add_argument("--output", type=Path, help="folder to write comparison.md and comparison.json into")
    parser.add_argument("--level", type=float, default=0.95, help="level of the intervals (default 0.95)")
    parsed = parser.parse_args(arguments)
    try:
        text, data = _compare(parsed.evaluations, parsed.level)
    except ValueError as error:
        print(f"compare-evals: {error}", file=sys.stderr)
        return 1
    Console().print(Markdown(text))
    if parsed.output is not None:
        parsed.output.mkdir(parents=True, exist_ok=True)
        (parsed.output / "comparison.md").write_text(text)
        (parsed.output / "comparison.json").write_text(json.dumps(data, indent=1) + "\n")
        print(f"written: {parsed.output / 'comparison.md'}, {parsed.output / 'comparison.json'}")
    return 0


def _compare(folders: list[Path], level: float) -> tuple[str, dict]:
    reports, scores = [], []
    for folder in folders:
        report, named = read_report(folder)
        reports.append(report)
        prefix = f"{folder.name}/" if len(folders) > 1 else ""
        scores += [NamedResults(prefix + item.name, item.sampling, item.results) for item in named]
    for key in ("dataset", "limits"):
        values = [json.dumps(report[key], sort_keys=True) for report in reports]
        if len(set(values)) > 1:
            raise ValueError(
                f"the evaluations differ in {key}, so their scores cannot be compared: {', '.join(values)}"
            )
    comparisons = compare_with_first(scores, level=level)
    if not comparisons:
        held = ", ".join(f"{item.name} ({item.sampling})" for item in scores)
        raise ValueError(f"nothing to compare: no two policies were sampled the same way; there are {held}")
    first = reports[0]
    header = {"dataset": first["dataset"], "split": f"{first['split']} ({len(first['tasks'])} tasks)"}
    header["intervals"] = f"{level:.0%} bootstrap, p-values by permutation, both over scenarios; in percentage points"
    return comparison_markdown(comparisons, header), {
        **header,
        "comparisons": [comparison.to_dict() for comparison in comparisons],
    }


if __name__ == "__main__":
    sys.exit(main())
