"""Classes of faults: whether the tests of each fail on the packages of an earlier commit and pass on those of today.

    python benchmarks/classes.py BASE [--only WORD] [--json results.json]

A test says which class it is of by ``@pytest.mark.fault("what went wrong, in a user's words")``. All that say so run
twice: in this checkout, and in a work tree of a commit before the mend, into which this checkout's tests are copied,
and those packages that the commit does not have. That commit is BASE, or the newest of :data:`EARLIER` at which the
class did not pass, of those whose own tests do not have it. No test of a class runs there after the first that failed.
A test of today that the commit's packages have no names for cannot be imported there, which is another row than one
that ran and failed. Ends 1 unless each class has a test that did not pass then, and all of its tests pass now.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 3600.0
TEST_S = 120
"""Seconds for a test: at an earlier commit some wait for ever."""
EARLIER = ("8e8ce257", "e8c58def", "01d7c16c", "09e6a490")
"""Commits between rounds of mends, the newest first."""
_LINKS = (".venv", ".venv-appworld", ".venv-worlds", ".triton", "worlds", "models")
"""Files that git does not hold, and tests may use."""
_NO_SUCH_NAME = "has no such name"
_MARK = re.compile(r'mark\.fault\(\s*"([^"]+)"')


@contextmanager
def work_tree(base: str) -> Iterator[Path]:
    """Yield a work tree of the commit ``base`` with the tests of this checkout, removed in the end."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "base"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), base], check=True)
        try:
            for tests in _folders(tree):
                shutil.rmtree(tests)
            for tests in _folders(ROOT):
                copy = tree / tests.relative_to(ROOT)
                shutil.copytree(tests, copy, ignore=shutil.ignore_patterns("__pycache__"))
            for file in ("pyproject.toml", "conftest.py"):
                shutil.copy(ROOT / file, tree)
            for package in ROOT.glob("*/__init__.py"):
                if not (tree / package.parent.name).exists():
                    shutil.copytree(package.parent, tree / package.parent.name)
            for name in _LINKS:
                if (ROOT / name).exists() and not (tree / name).exists():
                    (tree / name).symlink_to(ROOT / name)
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def _folders(tree: Path) -> list[Path]:
    """Return the folders of a checkout that hold tests."""
    return [folder for folder in (tree / "tests", *sorted((tree / "contrib").rglob("tests"))) if folder.is_dir()]


def known_at(base: str) -> set[str]:
    """Return the classes that the tests of a commit know."""
    git = ["git", "-C", str(ROOT), "grep", "-h", "-A1", "mark.fault(", base, "--", "*.py"]
    return {*_MARK.findall(subprocess.run(git, check=False, capture_output=True, text=True).stdout)}


def run_tests(tree: Path, classes: Collection[str]) -> list[dict[str, Any]]:
    """Run the marked tests of ``tree`` against its own packages.

    Args:
        classes: of these alone, and none of a class after the first that failed.

    Returns:
        A row a test, {"test", "class", "outcome", "why"}; of a file that cannot be imported {"test": its path,
        "class": None, "outcome": "failed", "why"}.
    """
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        paths = [str(tree / name) for name in ("", "recipes", "contrib", "tests", "contrib/tests")]
        command = [
            sys.executable,
            str(Path(__file__).resolve()),
            "--tree",
            str(tree),
            "--json",
            str(rows),
            "--classes",
            json.dumps(sorted(classes)),
        ]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=tree, env=environment, timeout=DEADLINE_S, stdout=sys.stderr, check=False)
        return json.loads(rows.read_text(encoding="utf-8"))


class Recorder:
    """A plugin of pytest that keeps the class and the outcome of each marked test."""

    def __init__(self, classes: Collection[str]) -> None:
        self.classes = classes
        self.rows: dict[str, dict[str, Any]] = {}

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        others = [item for item in items if _class_of(item) not in self.classes]
        items[:] = [item for item in items if item not in others]
        config.hook.pytest_deselected(items=others)

    def pytest_runtest_setup(self, item: Any) -> None:
        failed = {row["class"] for row in self.rows.values() if row["outcome"] == "failed"}
        if _class_of(item) in failed:
            pytest.skip("its class has failed")

    def pytest_itemcollected(self, item: Any) -> None:
        if (name := _class_of(item)) is not None:
            self.rows[item.nodeid] = {"test": item.nodeid, "class": name, "outcome": "not run", "why": ""}

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


def _class_of(item: Any) -> str | None:
    mark = item.get_closest_marker("fault")
    return None if mark is None else mark.args[0]


def run_here(tree: Path, classes: Collection[str]) -> list[dict[str, Any]]:
    """Run the marked tests in this process, all of whose imports are to come from ``tree``."""
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
    recorder = Recorder(classes)
    groups = defaultdict[Path, list[str]](list)
    """Files by the folder whose conftest.py they share: where that cannot be imported, others still run."""
    for file in dict.fromkeys(file for folder in _folders(tree) for file in sorted(folder.rglob("test_*.py"))):
        if {*_MARK.findall(file.read_text(encoding="utf-8"))} & {*classes}:  # importing the others would take minutes
            groups[next(folder for folder in file.parents if (folder / "conftest.py").is_file())].append(str(file))
    words = ["-m", "fault", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    words += ["--rootdir", str(tree), f"--timeout={TEST_S}", "--tb=short", "-W", "ignore"]
    for folder, files in groups.items():
        if pytest.main([*words, *files], plugins=[recorder]) == pytest.ExitCode.USAGE_ERROR:
            names = [str(Path(file).relative_to(tree)) for file in files]
            why = f"{folder.name}/conftest.py cannot be imported"
            recorder.rows |= {name: {"test": name, "class": None, "outcome": "failed", "why": why} for name in names}
    return list(recorder.rows.values())


def compare(then: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row a class: {"class", "tests", "then", "now", "shown", "why"}; ``why``: the message of the first of
    its tests that did not pass then, or of one that does not pass now."""
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


def compared(newest: str, only: str) -> list[dict[str, Any]]:
    """Return the rows of :func:`compare`, each with the commit ``base`` that its class was compared with."""
    files = defaultdict(set)
    for file in (file for folder in _folders(ROOT) for file in folder.rglob("test_*.py")):
        for name in filter(lambda name: only in name, _MARK.findall(file.read_text(encoding="utf-8"))):
            files[name].add(str(file.relative_to(ROOT)))
    waiting, then = {*files}, dict[str, tuple[str, list[dict[str, Any]]]]()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_tests, ROOT, {*files})
        for base in (newest, *(each for each in EARLIER if _is_before(each, newest))):
            if not (names := waiting - known_at(base)):
                continue
            with work_tree(base) as tree:
                rows = run_tests(tree, names)
            then |= {name: (base, rows) for name in names}
            failed = [row for row in rows if row["outcome"] == "failed"]
            lost = {row["test"] for row in failed if row["class"] is None}
            waiting -= {row["class"] for row in failed} | {name for name in names if files[name] & lost}
        now = defaultdict(list)
        for row in running.result():
            now[row["class"]].append(row)
    table = []
    for name, tests in now.items():
        base, rows = then.get(name, ("none", []))
        table += [{"base": base, **row} for row in compare(rows, tests)]
    return table


def _is_before(base: str, newest: str) -> bool:
    git = ["git", "-C", str(ROOT), "merge-base", "--is-ancestor", base, f"{newest}^"]
    return subprocess.run(git, check=False, capture_output=True).returncode == 0


def _unknown(test: str, old: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    file = old.get(test.partition("::")[0], {"why": "the test is not collected there"})
    return {"test": test, "class": None, "outcome": "failed", "why": f"{_NO_SUCH_NAME}: {file['why']}"}


def main() -> int:
    """Print the table; returns 0 where all classes are proven, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", nargs="?", help="commit before the mends")
    parser.add_argument("--only", default="", help="classes whose text holds this")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tree", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--classes", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.tree is not None:
        rows = run_here(args.tree.resolve(), args.classes)
        args.json.write_text(json.dumps(rows), encoding="utf-8")
        return 0
    if args.base is None:
        parser.error("name the commit before the mends")
    rows = compared(args.base, args.only)
    width = max([len(row["class"]) for row in rows], default=5)
    print(f"{'class':{width}}  tests  {'base':8}  {'then':18}  {'now':10}  why it did not pass")
    for row in rows:
        results = f"{row['tests']:5}  {row['base']:8}  {row['then']:18}  {row['now']:10}"
        print(f"{row['class']:{width}}  {results}  {row['why'][:110]}")
    proven = sum(row["shown"] for row in rows)
    print(f"{proven} of {len(rows)} classes failed then and pass now")
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0 if rows and proven == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
