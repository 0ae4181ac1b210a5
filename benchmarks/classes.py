"""Classes of faults: whether the tests of each fail on the packages of an earlier commit and pass on those of today.

    python benchmarks/classes.py BASE [--only WORD] [--json results.json]

A test says which class it is of by ``@pytest.mark.fault("what went wrong, in a user's words")``. All that say so run
twice: in this checkout, and in a work tree of the commit BASE into which this checkout's ``tests`` are copied, and
those packages that BASE does not have. A test of today that BASE's packages have no names for cannot be imported there,
which is told apart from one that ran and failed. Ends 1 unless each class has a test that did not pass then, and all of
its tests pass now.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 3600.0
_LINKS = (".venv", ".venv-appworld", ".venv-worlds", ".triton", "worlds", "models")
"""What git does not hold, and tests may use."""
_NO_SUCH_NAME = "has no such name"


@contextmanager
def work_tree(base: str) -> Iterator[Path]:
    """A work tree of the commit ``base`` with the tests of this checkout, removed in the end."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "base"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), base], check=True)
        try:
            shutil.rmtree(tree / "tests")
            shutil.copytree(ROOT / "tests", tree / "tests", ignore=shutil.ignore_patterns("__pycache__"))
            shutil.copy(ROOT / "pyproject.toml", tree)
            for package in ROOT.glob("*/__init__.py"):
                if not (tree / package.parent.name).exists():
                    shutil.copytree(package.parent, tree / package.parent.name)
            for name in _LINKS:
                if (ROOT / name).exists() and not (tree / name).exists():
                    (tree / name).symlink_to(ROOT / name)
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def run_tests(tree: Path, only: str) -> list[dict[str, Any]]:
    """Run the marked tests of ``tree`` against its own packages.

    Args:
        only: an expression of pytest's ``-k``; "" chooses all.

    Returns:
        A row a test, {"test", "class", "outcome", "why"}; of a file that cannot be imported {"test": its path,
        "class": None, "outcome": "failed", "why"}.
    """
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        paths = [str(tree), str(tree / "recipes"), str(tree / "tests")]
        command = [
            sys.executable,
            str(Path(__file__).resolve()),
            "--tree",
            str(tree),
            "--json",
            str(rows),
            "--only",
            only,
        ]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=tree, env=environment, timeout=DEADLINE_S, stdout=sys.stderr, check=False)
        return json.loads(rows.read_text(encoding="utf-8"))


class Recorder:
    """A plugin of pytest that keeps the class and the outcome of each marked test."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}

    def pytest_itemcollected(self, item: Any) -> None:
        if (mark := item.get_closest_marker("fault")) is not None:
            self.rows[item.nodeid] = {"test": item.nodeid, "class": mark.args[0], "outcome": "not run", "why": ""}

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            why = str(report.longrepr).strip().splitlines()[-1].removeprefix("E").strip()
            self.rows[report.nodeid] = {"test": report.nodeid, "class": None, "outcome": "failed", "why": why}

    def pytest_runtest_logreport(self, report: Any) -> None:
        row = self.rows[report.nodeid]
        if report.failed or row["outcome"] == "not run":
            row["outcome"] = report.outcome
        if report.failed and not row["why"]:
            crash = getattr(report.longrepr, "reprcrash", None)
            row["why"] = (crash.message if crash is not None else str(report.longrepr)).strip().splitlines()[0]

    def pytest_deselected(self, items: Any) -> None:
        for item in items:
            self.rows.pop(item.nodeid, None)


def run_here(tree: Path, words: list[str]) -> list[dict[str, Any]]:
    """Run the marked tests in this process, all of whose imports are to come from ``tree``."""
    import pytest

    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [path for path in sys.path if path != here]
    for finder in sys.meta_path:  # of an editable install, which names the packages of another checkout
        mapping = getattr(sys.modules.get(getattr(finder, "__module__", "")), "MAPPING", None)
        if mapping is not None:
            mapping.update({name: path.replace(str(ROOT), str(tree), 1) for name, path in mapping.items()})
    import agent_environments
    import loop_recipes

    for package in (agent_environments, loop_recipes):
        assert Path(str(package.__file__)).is_relative_to(tree), f"{package.__file__} is not of {tree}"
    recorder = Recorder()
    files = [str(file) for file in sorted((tree / "tests").rglob("test_*.py")) if "mark.fault(" in file.read_text()]
    words = ["-m", "fault", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--continue-on-collection-errors", *words]
    if files:  # importing the others would take minutes
        pytest.main([*words, "--tb=short", "-W", "ignore", *files], plugins=[recorder])
    return list(recorder.rows.values())


def compare(then: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row a class: {"class", "tests", "then", "now", "shown", "why"}; ``why``: what the first of its tests
    that did not pass said then, and now where one does not pass."""
    old = {row["test"]: row for row in then}
    classes = defaultdict(list)
    for row in now:
        classes[row["class"]].append(row)
    rows = []
    for name, tests in classes.items():
        before = [old.get(test["test"]) or _unknown(test["test"], old) for test in tests]
        failed = [row for row in before if row["outcome"] not in ("passed", "skipped")]
        broken = [row for row in tests if row["outcome"] != "passed"]
        imported = all(row["why"].startswith(_NO_SUCH_NAME) for row in failed)
        rows.append(
            {
                "class": name or "(a file that cannot be imported)",
                "tests": len(tests),
                "then": f"{'not importable' if imported else 'failed'}: {len(failed)}" if failed else "passed",
                "now": "passes" if not broken else f"{broken[0]['outcome']}: {len(broken)}",
                "shown": bool(failed) and not broken,
                "why": (broken or failed or [{"why": ""}])[0]["why"],
            }
        )
    return rows


def _unknown(test: str, old: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    file = old.get(test.partition("::")[0], {"why": "the test is not collected there"})
    return {"test": test, "class": None, "outcome": "failed", "why": f"{_NO_SUCH_NAME}: {file['why']}"}


def main() -> int:
    """Print the table; returns 0 where all classes are shown, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", nargs="?", help="commit before the mends")
    parser.add_argument("--only", default="", help="an expression of pytest's -k")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tree", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.tree is not None:
        args.json.write_text(json.dumps(run_here(args.tree.resolve(), ["-k", args.only])), encoding="utf-8")
        return 0
    if args.base is None:
        parser.error("name the commit before the mends")
    with work_tree(args.base) as tree:
        rows = compare(run_tests(tree, args.only), run_tests(ROOT, args.only))
    width = max([len(row["class"]) for row in rows], default=5)
    print(f"{'class':{width}}  tests  {'then':18}  {'now':10}  why it did not pass")
    for row in rows:
        print(f"{row['class']:{width}}  {row['tests']:5}  {row['then']:18}  {row['now']:10}  {row['why'][:110]}")
    shown = sum(row["shown"] for row in rows)
    print(f"{shown} of {len(rows)} classes failed then and pass now")
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0 if rows and shown == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
