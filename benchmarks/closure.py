"""Count the lines that each way into the project loads.

    python benchmarks/closure.py [--json closure.json]

A way in is the modules that a command begins with. From them on, each module's imports are read from its source, and
so on: those within functions too, but for the modules of ``ASKED_FOR``, and none under TYPE_CHECKING. A string counts
as an import where it is the dotted name of a module, or of something in one. Two kinds do not: strings of the modules
in ``CHOICES``, which name what is loaded when somebody asks for it, and a program after "-m", which is a process of its
own. A way in that needs one of all these names it here. It names its YAMLs too, whose ``_component_`` names modules. A
module that imports torch loads what the project's entry points give to torch, and each module loads the packages that
it lies in.

The rows are sorted as below; ``--json`` also writes each way's modules with their lines. Ends with 1 where a way in, or
an import of the project's own packages, leads nowhere. This is quick, and an estimate: a real run's lines are counted
by tests/integration/test_own_task.py.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOT_LOADED = {"tests", "benchmarks", "experiments", "examples", "docs", "slurm"}
COMMAND = "loop_recipes.cli"
CHOICES = {
    COMMAND,
    "agent_environments.description",
    "agent_environments.protocol",
    "loop_contrib.verbs",
    "loop_recipes",
    "rollout_server.endpoint.dialects",
    "loop_recipes.own_task.play",
}
"""Modules whose strings are tables: of verbs, counters of behaviour, environments, lazy attributes, dialects and
loggers."""
ENDPOINT = ["rollout_server.endpoint.endpoint", "rollout_server.endpoint.routes"]
ASKED_FOR = {
    *ENDPOINT,
    "agent_environments.tools.group",
    "loop_recipes.config.sft_config",
    "loop_recipes.engine.flash_attention",
    "loop_recipes.engine.frozen_weights",
    "loop_recipes.engine.general_decoder",
    "loop_recipes.engine.general_probe",
    "loop_recipes.engine.packed_weights",
    "loop_recipes.evaluation.dev_scores",
    "loop_recipes.plan.host_memory",
    "loop_recipes.plots.slots",
    "loop_recipes.rollouts.mixed_tasks",
    "loop_recipes.rollouts.replay_source",
    "loop_recipes.rollouts.several_nodes",
    "loop_recipes.rollouts.stream",
    "loop_recipes.run.tracker",
    "loop_recipes.run.trackers",
    "loop_recipes.verbs.tune_run",
    "model_families.weights.four_bits",
    "model_families.weights.hub_fetch",
    "model_families.weights.published",
    "rollout_server.asking",
    "rollout_server.collecting.compaction",
    "rollout_server.display",
}
"""Modules that a function imports where a config, a machine, the kind of a model, or an error asks for them. That a
task of one's own loads none of them is asserted by tests/integration/test_own_task.py."""
CONFIGS = "recipes/configs"
TRAINER = ["loop_appworld", f"{CONFIGS}/machines/tiny_cpu.yaml"]
SCORES = ["eval_appworld", f"{CONFIGS}/eval/base.yaml"]
NODE = ["rollout_server.cli"]
TOOLS = [f"agent_environments.tools.{name}" for name in ("environment", "forked", "behavior")]
OWN_TASK = "loop train FILE.py"
SCORED = f"{OWN_TASK}, and scoring"


class Unresolved(Exception):
    """A name of the project's own that is not a module."""


def ways_in(source: Source) -> dict[str, list[str]]:
    """Return the modules and YAMLs that each way in begins with; the verbs are read from the command's own table."""
    verbs = source.verbs()
    own_task = [COMMAND, verbs["train"], verbs["plot"], *TRAINER, f"{CONFIGS}/machines/cpu.yaml", *NODE, *TOOLS]
    return {
        "python recipes/minimal_loop.py": ["minimal_loop"],
        "tune run loop_appworld": TRAINER,
        "loop node": [*NODE, *ENDPOINT],
        OWN_TASK: own_task,
        SCORED: [*own_task, *SCORES],
        "every verb for FILE.py": [*own_task, *SCORES, "sft_appworld", *verbs.values(), *ENDPOINT],
    }


class Source:
    """The project's modules by their dotted names, and what each imports and names.

    Args:
        root: of a checkout; packages lie in it and in its folder ``recipes``, whose files are modules too.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: dict[str, Path] = {}
        for folder in (root, root / "recipes", root / "contrib"):
            for package in sorted(folder.glob("*/__init__.py")):
                if package.parent.name not in NOT_LOADED:
                    files = package.parent.rglob("*.py")
                    own = (file for file in files if "tests" not in file.relative_to(folder).parts)
                    self.files |= {_dotted(file, folder): file for file in own}
        self.files |= {file.stem: file for file in (root / "recipes").glob("*.py")}
        self._trees: dict[str, ast.Module] = {}
        self._imports: dict[tuple[str, bool], list[str]] = {}
        self._names: dict[str, list[str]] = {}
        project = root / "pyproject.toml"
        points = tomllib.loads(project.read_text(encoding="utf-8"))["project"] if project.is_file() else {}
        hooks: Mapping[str, str] = points.get("entry-points", {}).get("torch.backends", {})
        for name in (target.partition(":")[0] for target in hooks.values()):
            if (file := root / f"{name}.py").is_file():  # which lies beside the packages
                self.files[name] = file
        self._tops = {name.partition(".")[0] for name in self.files}
        self._torch = [name for target in hooks.values() if (name := self._module_of(target))]

    def lines(self, module: str) -> int:
        """Return all lines of the module's file, blank ones and comments too."""
        return len(self.files[module].read_text(encoding="utf-8").splitlines())

    def tree(self, module: str) -> ast.Module:
        """Parse the module's source."""
        if module not in self._trees:
            self._trees[module] = ast.parse(self.files[module].read_text(encoding="utf-8"))
        return self._trees[module]

    def closure(self, ways: Iterable[str]) -> list[str]:
        """Return all modules that ``ways`` load, sorted.

        Args:
            ways: modules, and YAMLs by their paths in the checkout.

        Raises:
            Unresolved: one of them, or what a module imports of the project, is not a module.
        """
        loaded: set[str] = set()
        waiting = [(name, way) for way in ways if way.endswith(".yaml") for name in self._components(way)]
        waiting += [(way, "a way in") for way in ways if not way.endswith(".yaml")]
        while waiting:
            module, importer = waiting.pop()
            if module not in self.files:
                raise Unresolved(f"{importer} names {module}, which is not a module")
            if module in loaded:
                continue
            loaded.add(module)
            outer = module.rpartition(".")[0]
            names = [*self.imports(module), *self._named(module), *([outer] if outer in self.files else [])]
            waiting += [(name, module) for name in names]
        return sorted(loaded)

    def imports(self, module: str, types: bool = False) -> list[str]:
        """Return the project's own modules that a module imports.

        Args:
            types: wherever in its source, under TYPE_CHECKING and those of ``ASKED_FOR`` too.
        """
        names = self._all_imports(module, types)
        return [name for name in names if name.partition(".")[0] in self._tops]

    def verbs(self) -> dict[str, str]:
        """Return each verb of the project's command, and the module that it calls.

        Raises:
            Unresolved: there is no table of verbs.
        """
        for node in self.tree(COMMAND).body if COMMAND in self.files else ():
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "VERBS":
                return {verb: target.partition(":")[0] for verb, (*_, target) in ast.literal_eval(node.value).items()}
        raise Unresolved(f"{COMMAND} has no table VERBS")

    def _all_imports(self, module: str, types: bool) -> list[str]:
        if (module, types) in self._imports:
            return self._imports[module, types]
        tree = self.tree(module)
        package = module if self.files[module].name == "__init__.py" else module.rpartition(".")[0]
        imported = []
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        late = set() if types else {id(node) for function in functions for node in ast.walk(function)}
        for node in ast.walk(tree) if types else _without_type_checking(tree):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                source = ".".join([*above, *([node.module] if node.module else [])])
                inner = [f"{source}.{alias.name}" for alias in node.names]
                names = [source, *(name for name in inner if name in self.files)]
            imported += [name for name in names if id(node) not in late or name not in ASKED_FOR]
        self._imports[module, types] = imported
        return imported

    def _named(self, module: str) -> list[str]:
        """Return the project's modules that a module loads without an import: by a string, or with torch."""
        if module in self._names:
            return self._names[module]
        loads_torch = any(name.partition(".")[0] == "torch" for name in self._all_imports(module, types=False))
        texts = () if module in CHOICES else _strings(self.tree(module))
        named = [name for text in texts if (name := self._module_of(text))]
        self._names[module] = [*named, *(self._torch if loads_torch else [])]
        return self._names[module]

    def _components(self, config: str) -> list[str]:
        file = self.root / config
        if not file.is_file():
            raise Unresolved(f"a way in names {config}, which is not a file")
        names = re.findall(r"_component_: *([\w.]+)", file.read_text(encoding="utf-8"))
        return [name for text in names if (name := self._module_of(text))]

    def _module_of(self, text: str) -> str:
        """Return the module that ``module``, ``module:attribute`` or ``module.attribute`` names; "" for other text."""
        if not re.fullmatch(r"\w+([.:]\w+)+", text):
            return ""
        name = text.replace(":", ".")
        while name and name not in self.files:
            name = name.rpartition(".")[0]
        return name


def _strings(tree: ast.AST) -> Iterator[str]:
    """Yield all strings but the programs, which stand after "-m"."""
    programs = {
        id(program)
        for words in ast.walk(tree)
        if isinstance(words, ast.List | ast.Tuple)
        for option, program in pairwise(words.elts)
        if isinstance(option, ast.Constant) and option.value == "-m"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in programs:
            yield node.value


def _dotted(file: Path, folder: Path) -> str:
    parts = file.relative_to(folder).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _without_type_checking(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the node and all below it, without the bodies of ``if TYPE_CHECKING``."""
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
    for way, modules in {**ways_in(source), "all packages": list(source.files)}.items():
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
