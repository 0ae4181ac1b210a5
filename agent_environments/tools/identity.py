"""Tells whether two files of functions grade the same tasks in the same way: digests of their code and of their tasks.

Comments, docstrings and the layout of the code are no part of them: they change no grade. The list ``TASKS`` is no part
of the code either, because the tasks that it gives have a digest of their own.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

_INSTALLED = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def identity(module: str, tasks: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return what a score in this environment rests on, as digests (16 hexadecimal digits).

    Args:
        module: path of a Python file, or a dotted module path, as a config names it.
        tasks: all tasks; their order does not matter.

    Returns:
        ``code``: of the syntax trees of the module and of all modules that it imports from its own folder;
        ``tasks``: of the tasks, every field included.

    Raises:
        ValueError: there is no such module.
    """
    return {"code": code_digest(module), "tasks": tasks_digest(tasks)}


def code_digest(module: str) -> str:
    """Return the digest of the code of a module and of its neighbours, wherever the folder lies.

    Raises:
        ValueError: there is no such module.
    """
    file, folder, package = _place_of(module)
    trees: dict[str, str] = {}
    waiting = [file]
    while waiting:
        at = waiting.pop()
        name = "" if at == file else str(at.relative_to(folder))
        if name in trees:
            continue
        source = at.read_bytes()
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):  # a neighbour for another Python, whose import somebody guards
            trees[name] = source.hex()
            continue
        waiting += _neighbours(tree, at, folder, package)
        trees[name] = ast.dump(_bare(tree, of_tasks=at == file))
    return digest(sorted(trees.items()))


def tasks_digest(tasks: Iterable[Mapping[str, Any]]) -> str:
    """Return the digest of some tasks: the same for the same tasks in any order."""
    return digest(sorted(json.dumps(plain(task, ())) for task in tasks))


def digest(data: object) -> str:
    """Return the digest of data that JSON can hold."""
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16]


def _place_of(module: str) -> tuple[Path, Path, str | None]:
    """Return a module's file, the folder that its imports are looked up in, and the package that they are bound to.

    An installed module lies among others that are not its own, so only its own package counts.
    """
    if module.endswith(".py"):
        file = Path(module).resolve()
        return file, file.parent, None
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        raise ValueError(f"module {module} cannot be found: {error}") from error
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise ValueError(f"module {module} has no file of Python code")
    file = Path(spec.origin).resolve()
    names = module.split(".")
    folder = file.parents[len(names) - (file.name != "__init__.py")]
    return file, folder, names[0] if folder in _INSTALLED else None


def _neighbours(tree: ast.AST, file: Path, folder: Path, package: str | None) -> Iterator[Path]:
    """Yield the files in ``folder`` that a module imports, those included that its functions import when called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            named = [(folder, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = file.parents[node.level - 1] if 0 < node.level <= len(file.parents) else folder
            if not base.is_relative_to(folder):
                continue
            module = f"{node.module}." if node.module else ""
            named = [(base, f"{module}{alias.name}") for alias in node.names]
        else:
            continue
        for base, name in named:
            parts = name.split(".")
            if base == folder and package not in (None, parts[0]):
                continue
            for count in range(1, len(parts) + 1):
                path = base.joinpath(*parts[:count])
                for found in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
                    if found.is_file():
                        yield found


def _bare(tree: ast.Module, of_tasks: bool) -> ast.Module:
    """Return the tree without docstrings, and without the list ``TASKS`` where it is ``of_tasks``."""
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    if of_tasks:
        tree.body = [each for each in tree.body if not _sets_tasks(each)]
    return tree


def _sets_tasks(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Assign):
        return all(isinstance(target, ast.Name) and target.id == "TASKS" for target in statement.targets)
    return isinstance(statement, ast.AnnAssign) and ast.unparse(statement.target) == "TASKS"


def plain(value: Any, within: tuple[int, ...]) -> Any:
    """Return any value as JSON has it, the same for equal values in another process.

    Args:
        within: ids of the objects that it is part of, so that one that holds itself ends.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if id(value) in within:
        return [kind, "..."]
    within = (*within, id(value))
    if isinstance(value, Mapping):
        return [
            "mapping",
            *sorted(json.dumps([plain(key, within), plain(each, within)]) for key, each in value.items()),
        ]
    if isinstance(value, list | tuple):
        return [plain(each, within) for each in value]
    if isinstance(value, set | frozenset):
        return ["set", *sorted(json.dumps(plain(each, within)) for each in value)]
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return [kind, f"{value.__module__}.{value.__qualname__}"]
    if callable(to_list := getattr(value, "tolist", None)):  # numpy's, and torch's
        return [kind, str(getattr(value, "dtype", "")), plain(to_list(), within)]
    if type(value).__repr__ is not object.__repr__ and f"0x{id(value):x}" not in (text := repr(value)):
        return [kind, text]
    return [kind, plain(getattr(value, "__dict__", None), within)]
