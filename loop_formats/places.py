"""The places of runs, and the run that a path means.

Imports the standard library alone, because every program that imports torch imports it, by the recipes' registration.
"""

import difflib
import os
from collections.abc import Sequence
from pathlib import Path

METRICS_FILE = "metrics.jsonl"
"""The file in a run's folder with a line an iteration, which :mod:`loop_recipes.run.metrics` writes."""


def loop_home() -> Path:
    """Return the folder that holds ``worlds/``, ``.venv-appworld/`` and ``runs/``."""
    if os.environ.get("LOOP_HOME"):
        return Path(os.environ["LOOP_HOME"]).expanduser().resolve()
    checkout = Path(__file__).resolve().parents[1]
    return checkout if (checkout / "pyproject.toml").exists() else Path.cwd()


def distinct_names(paths: list[Path]) -> list[str]:
    """Return the last part in which all paths differ: a and b for runs/a/evaluation and runs/b/evaluation."""
    parts = [path.resolve().parts[::-1] for path in paths]
    for names in zip(*parts, strict=False):
        if len(set(names)) == len(paths):
            return list(names)
    return [str(path) for path in paths]


def labelled_paths(texts: Sequence[str]) -> list[tuple[str, list[Path]]]:
    """Parse each ``[label=]PATH[,PATH...]`` into (label, paths); several paths are seeds of one setting. The default
    label is the part in which the first path differs from the first paths of the other texts.

    Raises:
        ValueError: a text has the same path twice.
    """
    parsed = [split_label(text) for text in texts]
    for text, (_, paths) in zip(texts, parsed, strict=True):
        if len({path.resolve() for path in paths}) < len(paths):
            raise ValueError(f"{text}: a folder stands twice in it, and is one seed; name each once")
    folders = [paths[0].parent if paths[0].is_file() else paths[0] for _, paths in parsed]
    names = distinct_names(folders) if len(folders) > 1 else [folders[0].resolve().name]
    return [(label or name, paths) for (label, paths), name in zip(parsed, names, strict=True)]


def split_label(text: str) -> tuple[str, list[Path]]:
    """Parse ``[label=]PATH[,PATH...]`` into its label ("" if it has none) and its paths. The name of an existing path
    may contain = and commas. Otherwise the first = ends the label."""
    starts = [0, *(place + 1 for place, letter in enumerate(text) if letter == "=")]
    for start in starts:
        if paths := _existing(text[start:].split(",")):
            return text[: max(0, start - 1)], paths
    label, _, names = text.partition("=") if "=" in text else ("", "", text)
    return label, [Path(name) for name in names.split(",")]


def _existing(pieces: list[str]) -> list[Path]:
    """Join ``pieces`` with commas into paths that exist, and return these paths; [] if that is impossible."""
    for count in range(len(pieces), 0, -1):
        path = Path(",".join(pieces[:count]))
        if path.exists() and str(path) != ".":
            if count == len(pieces):
                return [path]
            if rest := _existing(pieces[count:]):
                return [path, *rest]
    return []


def run_meant(path: Path) -> str:
    """Return a semicolon and a question that offers runs in place of ``path``, which is not a run: the run around the
    path, the run of the same name in ``runs``, the first two runs within the path, or runs beside it with nearly the
    same name; "" if there are none."""

    def runs(*patterns: str) -> list[Path]:
        return [file.parent for pattern in patterns for file in sorted(path.glob(f"{pattern}/{METRICS_FILE}"))]

    name = str(path).removesuffix(".py")  # a file of functions has its run there too
    around = (*path.absolute().parents, Path("runs") / name, loop_home() / "runs" / name)
    known = [folder for folder in around if folder != path and (folder / METRICS_FILE).is_file()]
    offered = known[:1] or runs("*", "*/*")[:2]
    if not offered:
        beside = {run.name: run for file in path.parent.glob(f"*/{METRICS_FILE}") if (run := file.parent) != path}
        offered = [beside[name] for name in difflib.get_close_matches(path.name, beside, n=2, cutoff=0.75)]
    return f"; did you mean {' or '.join(map(str, offered))}?" if offered else ""
