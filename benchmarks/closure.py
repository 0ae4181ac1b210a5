"""Count the lines that each way into the project loads.

    python benchmarks/closure.py [--json closure.json]

A way in is the modules that a command begins with. From them on, each module's imports are read from its source, and so
on. Imports within functions count, those under TYPE_CHECKING do not, and neither do modules that a string names
(verbs, environments, a ``_component_`` of a YAML): a way in that needs one names it here. A module loads the packages
that it lies in. The rows are sorted as below; ``--json`` also writes each way's modules with their lines. Ends with 1
where a way in, or an import of the project's own packages, leads nowhere.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOT_LOADED = {"tests", "benchmarks", "experiments", "examples", "docs", "slurm"}
TRAINER, NODE = ["loop_appworld"], ["rollout_server.cli"]
TOOLS = ["agent_environments.tools.environment", "agent_environments.tools.forked"]
OWN_TASK = ["loop_recipes.cli", "loop_recipes.own_task.training", *TRAINER, *NODE, *TOOLS]
WAYS = {
    "python recipes/minimal_loop.py": ["minimal_loop"],
    "tune run loop_appworld": TRAINER,
    "loop node": NODE,
    "loop train FILE.py": OWN_TASK,
    "every verb for FILE.py": [
        *OWN_TASK,
        "eval_appworld",
        "sft_appworld",
        "loop_recipes.verbs.recipes",
        "loop_recipes.verbs.init",
        "loop_recipes.verbs.try_tasks",
        "loop_recipes.verbs.check",
        "loop_recipes.verbs.node",
        "loop_recipes.verbs.view",
        "loop_recipes.plots.curves",
        "loop_recipes.verbs.compare",
    ],
}
"""A way in -> the modules that it begins with."""


class Unresolved(Exception):
    """A name of the project's own that is no module."""


class Source:
    """The project's modules by their dotted names, and what each imports.

    Args:
        root: of a checkout; packages lie in it and in its folder ``recipes``, whose files are modules too.
    """

    def __init__(self, root: Path) -> None:
        self.files: dict[str, Path] = {}
        for folder in (root, root / "recipes", root / "contrib"):
            for package in sorted(folder.glob("*/__init__.py")):
                if package.parent.name not in NOT_LOADED:
                    files = (file for file in package.parent.rglob("*.py") if "tests" not in file.parts)
                    self.files |= {_dotted(file, folder): file for file in files}
        self.files |= {file.stem: file for file in (root / "recipes").glob("*.py")}
        self._tops = {name.partition(".")[0] for name in self.files}
        self._imports: dict[str, list[str]] = {}

    def lines(self, module: str) -> int:
        """All lines of the module's file, blank ones and comments too."""
        return len(self.files[module].read_text(encoding="utf-8").splitlines())

    def closure(self, ways: list[str]) -> list[str]:
        """All modules that these load, sorted.

        Raises:
            Unresolved: one of them, or what a module imports of the project, is no module.
        """
        loaded: set[str] = set()
        waiting = [(way, "a way in") for way in ways]
        while waiting:
            module, importer = waiting.pop()
            if module not in self.files:
                raise Unresolved(f"{importer} names {module}, which is no module")
            if module in loaded:
                continue
            loaded.add(module)
            outer = module.rpartition(".")[0]
            names = [*self.imports(module), *([outer] if outer in self.files else [])]
            waiting += [(name, module) for name in names]
        return sorted(loaded)

    def imports(self, module: str) -> list[str]:
        """The project's own modules that one imports, wherever in its source, but for TYPE_CHECKING."""
        if module in self._imports:
            return self._imports[module]
        tree = ast.parse(self.files[module].read_text(encoding="utf-8"))
        package = module if self.files[module].name == "__init__.py" else module.rpartition(".")[0]
        found = []
        for node in _without_type_checking(tree):
            if isinstance(node, ast.Import):
                found += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                source = ".".join([*above, *([node.module] if node.module else [])])
                inner = [f"{source}.{alias.name}" for alias in node.names]
                found += [source, *(name for name in inner if name in self.files)]
        self._imports[module] = [name for name in found if name.partition(".")[0] in self._tops]
        return self._imports[module]


def _dotted(file: Path, folder: Path) -> str:
    parts = file.relative_to(folder).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _without_type_checking(node: ast.AST) -> Iterator[ast.AST]:
    """The node and all below it, without the bodies of ``if TYPE_CHECKING``."""
    yield node
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        below: list[ast.AST] = [*node.orelse]
    else:
        below = [*ast.iter_child_nodes(node)]
    for child in below:
        yield from _without_type_checking(child)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    source = Source(args.root.resolve())
    status, rows = 0, []
    print(f"{'way in':<32}{'modules':>8}{'lines':>8}")
    for way, modules in {**WAYS, "all packages": list(source.files)}.items():
        try:
            lines = {module: source.lines(module) for module in source.closure(modules)}
        except Unresolved as error:
            print(f"{way:<32}  {error}")
            status = 1
            continue
        print(f"{way:<32}{len(lines):>8,}{sum(lines.values()):>8,}")
        rows.append({"way": way, "modules": len(lines), "lines": sum(lines.values()), "lines_of": lines})
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
