"""Where runs lie, and which one a path means.

Imports the standard library alone, because every program that imports torch imports it, by the recipes' registration.
"""

import os
from pathlib import Path

METRICS_FILE = "metrics.jsonl"
"""In a run's folder: a line an iteration, which :mod:`loop_recipes.run.metrics` writes."""


def loop_home() -> Path:
    """The folder that holds ``worlds/``, ``.venv-appworld/`` and ``runs/``."""
    if os.environ.get("LOOP_HOME"):
        return Path(os.environ["LOOP_HOME"]).expanduser().resolve()
    checkout = Path(__file__).resolve().parents[1]
    return checkout if (checkout / "pyproject.toml").exists() else Path.cwd()


def distinct_names(paths: list[Path]) -> list[str]:
    """The last part of the paths in which all differ: a and b of runs/a/evaluation and runs/b/evaluation."""
    parts = [path.resolve().parts[::-1] for path in paths]
    for names in zip(*parts, strict=False):
        if len(set(names)) == len(paths):
            return list(names)
    return [str(path) for path in paths]


def run_meant(path: Path) -> str:
    """The question that offers the training runs which ``path``, that is none, may stand for: the one around it, the
    one of its name in ``runs``, or the first two within it; it begins with a semicolon. "" where there are none."""

    def runs(*patterns: str) -> list[Path]:
        return [file.parent for pattern in patterns for file in sorted(path.glob(f"{pattern}/{METRICS_FILE}"))]

    name = str(path).removesuffix(".py")  # a file of functions has its run there too
    around = (*path.absolute().parents, Path("runs") / name, loop_home() / "runs" / name)
    found = [folder for folder in around if (folder / METRICS_FILE).is_file()][:1] or runs("*", "*/*")[:2]
    return f"; did you mean {' or '.join(map(str, found))}?" if found else ""
