"""Evaluations of the same tasks, compared task by task: `tune run compare_evals`, or `compare-evals` for short.

    compare-evals runs/a/evaluation runs/b/evaluation
    compare-evals runs/a/evaluation runs/b/evaluation output=runs/comparison level=0.9
    tune run compare_evals --config compare_evals/default runs/a/evaluation runs/b/evaluation

Each folder is an output of `eval_appworld`; one folder that holds several policies will do. For every way of sampling,
the first policy is compared with each other one.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf
from rich.console import Console
from rich.markdown import Markdown

from loop_recipes.evaluation.comparison import NamedResults, compare_with_first, comparison_markdown
from loop_recipes.evaluation.report import read_report
from rollout_server.config import ConfigError, from_mapping


@dataclass(frozen=True)
class CompareConfig:
    """``output``: folder for comparison.md and comparison.json, null for none; the others are of the bootstrap."""

    output: str | None = None
    level: float = 0.95
    resamples: int = 10_000

    def __post_init__(self) -> None:
        if not 0.5 <= self.level < 1.0 or self.resamples < 100:
            raise ConfigError("level must be 0.5 to below 1, and resamples at least 100")


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the console script and of `tune run`; returns the exit status."""
    parser = argparse.ArgumentParser(prog="compare-evals", description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="+", metavar="FOLDER | key=value", help="evaluations; output, level, resamples")
    parser.add_argument("--config", type=Path, help="YAML file with the keys output, level and resamples")
    parsed = parser.parse_args(arguments)
    folders = [Path(word) for word in parsed.words if "=" not in word or Path(word).is_dir()]
    try:
        conf = _config(parsed.config, [word for word in parsed.words if Path(word) not in folders])
        text, data = _compare(folders, conf)
    except (ValueError, OSError) as error:
        print(f"compare-evals: {error}", file=sys.stderr)
        return 1
    console = Console() if sys.stdout.isatty() else Console(width=140)  # a log file has no width of its own
    console.print(Markdown(text))
    if conf.output is not None:
        output = Path(conf.output)
        output.mkdir(parents=True, exist_ok=True)
        (output / "comparison.md").write_text(text)
        (output / "comparison.json").write_text(json.dumps(data, indent=1) + "\n")
        print(f"written: {output / 'comparison.md'}, {output / 'comparison.json'}")
    return 0


def _config(file: Path | None, overrides: list[str]) -> CompareConfig:
    parts = [OmegaConf.load(file)] if file is not None else []
    merged = OmegaConf.merge(*parts, OmegaConf.from_dotlist(overrides))
    return from_mapping(CompareConfig, OmegaConf.to_container(merged, resolve=True))


def _compare(folders: list[Path], conf: CompareConfig) -> tuple[str, dict]:
    if not folders:
        raise ValueError("give the output folder of an evaluation, or several")
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
    comparisons = compare_with_first(scores, level=conf.level, resamples=conf.resamples)
    if not comparisons:
        held = ", ".join(f"{item.name} ({item.sampling})" for item in scores)
        raise ValueError(f"nothing to compare: no two policies were sampled the same way; there are {held}")
    first = reports[0]
    header = {"dataset": first["dataset"], "split": f"{first['split']} ({len(first['tasks'])} tasks)"}
    header["intervals"] = (
        f"{conf.level:.0%} bootstrap, p-values by permutation, both over scenarios; in percentage points"
    )
    return comparison_markdown(comparisons, header), {
        **header,
        "comparisons": [comparison.to_dict() for comparison in comparisons],
    }


if __name__ == "__main__":
    sys.exit(main())
