"""Print how large the project is, before and after, and whether a number rose above its cap.

    python benchmarks/size.py [BASE]

BASE is a commit, or its name. Lines are all lines of a file, blank ones and comments too. Packages are those of
benchmarks/closure.py, so contrib and the recipes are in them; tests are the Python files in folders called ``tests``,
drills included. A class name has two meanings where two modules have a class of that name; nested and private ones
count. A circle is a largest set of modules that import each other, in functions and under TYPE_CHECKING too. The
habits of writing are those of benchmarks/habits.py, which lists their places. Data are printed without a cap. Ends
with 1 where a number is above its cap in tests/size.toml, as tests/test_size.py does; what a real run loads is counted
by tests/integration/test_own_task.py alone.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import networkx

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

from benchmarks.closure import OWN_TASK, SCORED, Source, Unresolved, ways_in  # noqa: E402
from benchmarks.habits import places  # noqa: E402

CAPS = ROOT / "tests/size.toml"
DATA = {".yaml", ".json", ".jinja", ".js", ".css", ".html"}
RULE = (
    "A change that raises a number takes as much away elsewhere, or raises tests/size.toml in a commit of its own "
    "whose message says what for."
)


def caps() -> dict[str, float]:
    """Return the caps of tests/size.toml by their names."""
    return tomllib.loads(CAPS.read_text(encoding="utf-8"))["caps"]


def sizes(root: Path) -> dict[str, float | None]:
    """Return the rows of the table by their names, those with a cap by the cap's; None for what BASE does not have.

    Args:
        root: of a checkout.
    """
    source = Source(root)
    core = [module for module, file in source.files.items() if not file.is_relative_to(root / "contrib")]
    folders = [root / name for name in {"tests", *(file.relative_to(root).parts[0] for file in source.files.values())}]
    files = [file for folder in folders for file in (folder.rglob("*") if folder.is_dir() else ()) if file.is_file()]
    tests = {file for file in files if "tests" in file.relative_to(root).parts[:-1]}
    data = {file for file in files if file.suffix in DATA}
    packages = sum(map(source.lines, source.files))
    of_tests = _lines(file for file in tests if file.suffix == ".py")
    return {
        "own_task_estimated": _loaded(source, OWN_TASK),
        "own_task_and_scoring_estimated": _loaded(source, SCORED),
        "package_lines": packages,
        "package_lines_without_contrib": sum(map(source.lines, core)),
        "test_lines": of_tests,
        "tests_per_package_line": round(of_tests / packages, 3),
        "class_names_with_two_meanings": len(twins(source)),
        "circles_of_imports": len(circles(source)),
        **{name: len(found) for name, found in places(source).items()},
        "lines_of_data_in_packages": _lines(data - tests),
        "lines_of_data_in_tests": _lines(data & tests),
    }


def twins(source: Source) -> dict[str, list[str]]:
    """Return the class names that two modules or more have, and these modules."""
    modules: defaultdict[str, set[str]] = defaultdict(set)
    for module in source.files:
        for node in ast.walk(source.tree(module)):
            if isinstance(node, ast.ClassDef):
                modules[node.name].add(module)
    return {name: sorted(owners) for name, owners in sorted(modules.items()) if len(owners) > 1}


def circles(source: Source) -> list[list[str]]:
    """Return the largest sets of modules that import each other."""
    edges = [(module, name) for module in source.files for name in source.imports(module, types=True)]
    components = networkx.strongly_connected_components(networkx.DiGraph(edges))
    return sorted(sorted(circle) for circle in components if len(circle) > 1)


def risen(numbers: Mapping[str, float | None]) -> list[str]:
    """Return a line for each number that is above its cap."""
    return [
        f"{name} rose from {cap:,} to {now:,}. {RULE}"
        for name, cap in caps().items()
        if (now := numbers.get(name)) is not None and now > cap
    ]


def slack(numbers: Mapping[str, float | None]) -> list[str]:
    """Return a line for each number that is below its cap."""
    return [
        f"{name} is {now:,} and its cap {cap:,}: lower it in tests/size.toml"
        for name, cap in caps().items()
        if (now := numbers.get(name)) is not None and now < cap
    ]


def sizes_at(base: str) -> dict[str, float | None]:
    """Return the rows at a commit."""
    packed = subprocess.run(["git", "-C", str(ROOT), "archive", base], stdout=subprocess.PIPE, check=True).stdout
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
        return sizes(Path(folder))


def _loaded(source: Source, way: str) -> int | None:
    try:
        return sum(map(source.lines, source.closure(ways_in(source)[way])))
    except Unresolved as error:
        print(f"{way}: {error}", file=sys.stderr)
        return None


def _lines(files: Iterable[Path]) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", nargs="?", metavar="BASE", help="a commit to compare with")
    args = parser.parse_args()
    before = sizes_at(args.base) if args.base else {}
    now, limits = sizes(ROOT), caps()
    print(f"{'':<32}{args.base or '':>12}{'now':>12}{'cap':>12}")
    for name, value in now.items():
        cells = (f"{'-' if cell is None else f'{cell:,}':>12}" for cell in (before.get(name), value, limits.get(name)))
        print(f"{name.replace('_', ' '):<32}{''.join(cells)}")
    print(*risen(now), *slack(now), sep="\n")
    return 1 if risen(now) else 0


if __name__ == "__main__":
    sys.exit(main())
