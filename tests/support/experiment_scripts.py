"""Imports scripts, which are no packages, and makes up what scored runs leave behind."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from loop_recipes.evaluation.scores import TaskResult
from loop_recipes.paths import loop_package

FOLDER = Path(__file__).parents[2] / "experiments"


def load_experiment(name: str) -> ModuleType:
    """The script ``experiments/<name>.py`` as a module of its own."""
    return load_script(f"experiments/{name}.py")


def load_script(path: str) -> ModuleType:
    """A script of the checkout, which is not a package, as a module of its own; it finds those beside it."""
    file = FOLDER.parent / path
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location(f"{file.stem}_{file.parent.name}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def made_up_evaluation(folder: Path, solved: Mapping[str, bool]) -> None:
    """What ``eval_appworld`` leaves of a policy with one attempt at each task (task id -> whether it is solved)."""
    folder.mkdir(parents=True)
    head = {"policy": "policy", "sampling": "T=1", "run": 0, "reward": 0.5, "end_reason": "completed"}
    results = [head | {"task_id": task, "success": success} for task, success in solved.items()]
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in results))
    report = {"schema": 2, "dataset": "made-up", "model": str(loop_package("tiny_policy"))}
    (folder / "report.json").write_text(json.dumps(report))


def made_up_record(
    name: str, seed: int, iterations: list[dict[str, Any]], rate: float = 1e-3, budget: int = 600, policy: str = "tiny"
) -> Any:
    """A record (experiments/records.py) of a policy that solves one of two held-out tasks."""
    solved = {"held0_1": True, "held1_1": False}
    results = [TaskResult(task, 0, success=won, end_reason="completed") for task, won in solved.items()]
    records = load_experiment("records")
    return records.Record(name, seed, "made-up", policy, budget, rate, budget, 50 * budget, iterations, results)


def check_tables(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables of a document are those that the script makes of the stored records, by the document's command."""
    monkeypatch.chdir(FOLDER.parent)
    document, copy = FOLDER.parent / "docs/results/algorithms.md", folder / "algorithms.md"
    written = document.read_text().replace("\\\n", "")
    (command,) = re.findall(rf"^python experiments/{script}.py (--table-only .*)$", written, re.MULTILINE)
    words = shlex.split(command, comments=True)
    assert words[words.index("--docs") + 1] == "docs/results/algorithms.md"
    numbers = FOLDER / f"results/{script}.json"
    assert words[words.index("--json") + 1] == str(numbers.relative_to(FOLDER.parent))
    copy.write_text(document.read_text())
    into = ["--docs", str(copy), "--json", str(folder / "numbers.json"), "--output", str(folder / "out")]
    end = words.index("--") if "--" in words else len(words)  # what follows is for the configs
    load_experiment(script).main([*words[:end], *into, *words[end:]])
    assert copy.read_text() == document.read_text()
    assert (folder / "numbers.json").read_text() == numbers.read_text()
