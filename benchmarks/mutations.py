"""Break the code in thirty seeded places, one at a time, and see which of them the tests notice.

    python benchmarks/mutations.py [--old BASE] [--json results.json]

Places are drawn by a seed from the syntax trees of the files in ``SUBJECTS``: an operator, a condition, a constant, or
a line that is dropped. Each is tried in a work tree of HEAD (what is not committed is not seen) against the tests that
mirror the file, ``a/b.py`` -> ``tests/a/test_b.py``, and those that ``MORE_TESTS`` names, or else those that import
it, to the first failure. With ``--old`` the same is done with the code and the tests of commit BASE, where its lines
stand there word for word.

``caught``: a test fails, and passes without the mutation. ``missed``: all pass. ``time``: no end within the limit.
``equivalent``: missed, and ``EQUIVALENT`` says why no test can notice. ``fails anyway``: so does the code as it is.
``-``: the lines are not in BASE. Ends with 1 where a mutation that the old tests caught is missed now, else with 0.

All tests run in forks of one process that has imported torch and the other packages, so that a mutation costs what its
tests cost: ten to forty seconds on an idle core. The tests need what `make setup world` makes.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
LIMIT_S = 180.0
"""Seconds for the tests of one mutation."""
SUBJECTS = {
    "losses": ["recipes/loop_recipes/algorithm/losses.py", "recipes/loop_recipes/algorithm/preferences.py"],
    "masks": ["recipes/loop_recipes/engine/samples.py"],
    "advantages": ["recipes/loop_recipes/algorithm/advantages.py"],
    "batching": ["recipes/loop_recipes/engine/batching.py", "recipes/loop_recipes/algorithm/minibatches.py"],
    "collector": ["rollout_server/collecting/collector.py"],
    "log": ["rollout_server/collecting/rollout_log.py", "loop_formats/rollout.py"],
    "endpoint": ["rollout_server/endpoint/messages.py", "rollout_server/endpoint/conversations.py"],
    "sandbox": ["agent_environments/sandbox/sandbox.py", "agent_environments/sandbox/syscalls.py"],
    "grader": ["contrib/loop_contrib/colbench/grader.py", "appworld_adapter/worker/grader.py"],
    "resume": ["recipes/loop_recipes/engine/checkpoint.py"],
    "config": ["loop_formats/schema.py", "recipes/loop_recipes/config/files.py"],
}
MORE_TESTS = {
    "appworld_adapter/worker/grader.py": ["tests/appworld_adapter/pool/test_grading.py"],
    "recipes/loop_recipes/algorithm/losses.py": ["tests/loop_recipes/algorithm/test_sampler_correction.py"],
    "loop_formats/schema.py": ["tests/loop_recipes/config/test_loop_config.py"],
    "rollout_server/endpoint/conversations.py": ["tests/rollout_server/endpoint/test_harness_episode.py"],
}
"""Tests that do not import the module they are for, or where most of its own are."""
EQUIVALENT = {
    (
        "recipes/loop_recipes/algorithm/advantages.py",
        "return [row[: len(own)] for row, own in zip(advantages, returns, strict=True)]",
        "False",
    ): "advantages has a row for each of returns, from which it is padded, so that zip has nothing to be strict about",
    (
        "rollout_server/endpoint/conversations.py",
        "return 0",
        "1",
    ): "place 1 is that of the tools, before all messages, so that no message leads to it either",
}
"""(file, its lines, new code) of a mutation that changes nothing a test could see -> why."""
OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
SHARED = (
    "torch",
    "torchtune.models.qwen2",
    "torchtune.training",
    "torchtune.modules.peft",
    "transformers",
    "peft",
    "hypothesis.strategies",
    "aiohttp.web",
    "omegaconf",
    "safetensors.torch",
    "tokenizers",
    "pydantic",
    "httpx",
)
"""Packages of others that take long to import."""


@dataclass(frozen=True)
class Mutation:
    """A change of a file; ``start`` and ``end`` are offsets in its bytes."""

    subject: str
    file: str
    line: int
    kind: str
    before: str
    after: str
    start: int
    end: int
    lines: str
    """The whole lines that it touches."""


@dataclass
class Outcome:
    """The result of a mutation under some tests."""

    verdict: str
    by: str = ""
    seconds: float = 0.0


def is_call(node: ast.AST) -> bool:
    """Return whether a statement is a call, awaited or not."""
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value.value if isinstance(value, ast.Await) else value, ast.Call)


def changed(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield the kinds of mutation that a node can have, each with the node as it becomes."""
    new = copy.deepcopy(node)
    if isinstance(new, ast.BinOp | ast.BoolOp) and type(new.op) in OPERATORS:
        new.op = OPERATORS[type(new.op)]()
        yield "operator", new
    elif isinstance(new, ast.Compare) and type(new.ops[0]) in OPERATORS:
        new.ops[0] = OPERATORS[type(new.ops[0])]()
        yield "operator", new
    elif isinstance(new, ast.UnaryOp) and isinstance(new.op, ast.USub | ast.Not):
        yield "operator", new.operand
    elif isinstance(new, ast.Constant) and isinstance(new.value, bool):
        yield "constant", ast.Constant(not new.value)
    elif isinstance(new, ast.Constant) and isinstance(new.value, int | float):
        yield "constant", ast.Constant(new.value + 1)
    elif isinstance(new, ast.Assign | ast.AugAssign | ast.Raise) or is_call(new):
        yield "dropped line", ast.Pass()
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield "condition", ast.UnaryOp(ast.Not(), copy.deepcopy(node.test))


def code_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes within functions, without annotations, types and the text of messages."""

    def walk(node: ast.AST, inside: bool) -> Iterator[ast.AST]:
        if inside:
            yield node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list") or isinstance(node, ast.JoinedStr):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                    yield from walk(child, inside or (function and name == "body"))

    return walk(tree, False)


def mutations_of(subject: str, file: str) -> list[Mutation]:
    """Return all mutations of a file of this checkout."""
    source = (HERE / file).read_bytes()
    offsets = [0]
    for line in source.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    mutations = []
    for node in code_nodes(ast.parse(source)):
        for kind, new in changed(node):
            place: Any = node.test if kind == "condition" else node  # type: ignore[attr-defined]
            start = offsets[place.lineno - 1] + place.col_offset
            end = offsets[place.end_lineno - 1] + place.end_col_offset
            after = ast.unparse(ast.fix_missing_locations(new))
            if isinstance(new, ast.expr) and not isinstance(new, ast.Constant):
                after = f"({after})"
            lines = source[offsets[place.lineno - 1] : offsets[place.end_lineno]].decode()
            before = " ".join(source[start:end].decode().split())
            mutations.append(Mutation(subject, file, place.lineno, kind, before, after, start, end, lines))
    return mutations


def drawn(count: int, seed: int) -> list[Mutation]:
    """Draw ``count`` mutations, the same for the same seed and code: a kind at a time, subjects in turn."""
    draws = random.Random(seed)
    pools = {subject: [m for file in files for m in mutations_of(subject, file)] for subject, files in SUBJECTS.items()}
    chosen: list[Mutation] = []
    while len(chosen) < count:
        subject = list(SUBJECTS)[len(chosen) % len(SUBJECTS)]
        free = [m for m in pools[subject] if all((m.file, m.line) != (c.file, c.line) for c in chosen)]
        kind = draws.choice(sorted({m.kind for m in free}))
        chosen.append(draws.choice([m for m in free if m.kind == kind]))
    return sorted(chosen, key=lambda m: list(SUBJECTS).index(m.subject))


def mutated(mutation: Mutation, checkout: Path) -> str | None:
    """Return the file's text with the mutation; None where its lines are not in exactly one place."""
    here = (HERE / mutation.file).read_bytes()
    file = checkout / mutation.file
    text = file.read_bytes() if file.exists() else b""
    lines = mutation.lines.encode()
    if text == here:
        at = mutation.start
    elif text.count(lines) == 1:
        first = here.rindex(b"\n", 0, mutation.start) + 1
        at = text.index(lines) + mutation.start - first
    else:
        return None
    return (text[:at] + mutation.after.encode() + text[at + mutation.end - mutation.start :]).decode()


def imports(file: Path, module: str) -> bool:
    """Return whether a test file imports a module at its top or in a function."""
    package, _, name = module.rpartition(".")
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import) and any(alias.name == module for alias in node.names):
            return True
        if isinstance(node, ast.ImportFrom) and (
            node.module == module or (node.module == package and any(alias.name == name for alias in node.names))
        ):
            return True
    return False


def tests_of(file: str, checkout: Path) -> list[str]:
    """Return the test files for a file: its mirror and those of ``MORE_TESTS``, or else those that import it."""
    path = Path(file.removeprefix("recipes/"))
    own = [f"tests/{path.parent}/test_{path.name}", *MORE_TESTS.get(file, [])]
    if existing := [test for test in own if (checkout / test).exists()]:
        return existing
    module = ".".join(path.with_suffix("").parts)
    tests = [test for test in sorted((checkout / "tests").rglob("test_*.py")) if imports(test, module)]
    return [str(test.relative_to(checkout)) for test in tests if "integration" not in test.parts]


class FirstFailure:
    """A plugin of pytest that remembers the first test that failed."""

    name = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid


def forget_our_modules() -> None:
    """Drop what was imported of this checkout, so that a fork imports that of its own."""
    ours = {entry.stem for folder in (HERE, HERE / "recipes", HERE / "tests") for entry in folder.iterdir()}
    for name in [name for name in sys.modules if name.partition(".")[0] in ours - {"mutations"}]:
        del sys.modules[name]


def run_tests(checkout: Path, tests: Iterable[str], limit_s: float) -> tuple[int | None, str]:
    """Run tests in a fork, to the first failure: pytest's exit code, None past the limit, and the test that failed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.close(reading)
        os.chdir(checkout)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nothing, stream)
        paths = [str(checkout), str(checkout / "recipes"), str(checkout / "tests")]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # for children of the tests
        sys.path[:0] = paths
        import pytest

        failure, code = FirstFailure(), 70
        words = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slurm and not drill"]
        try:
            code = int(pytest.main([*words, *tests], plugins=[failure]))
        finally:
            os.write(writing, json.dumps([code, failure.name]).encode())
            os._exit(0)
    os.close(writing)
    deadline = time.monotonic() + limit_s
    try:
        while time.monotonic() < deadline:
            if os.waitpid(child, os.WNOHANG)[0]:
                with os.fdopen(reading) as pipe:
                    code, name = json.loads(pipe.read() or '[70, ""]')
                return code, name
            time.sleep(0.05)
        os.close(reading)
        return None, ""
    finally:
        end_group(child)


def end_group(leader: int) -> None:
    """End what a run of tests left behind."""
    try:
        os.killpg(leader, signal.SIGKILL)
        os.waitpid(leader, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def judged(mutation: Mutation, checkout: Path, limit_s: float, sound: dict[tuple[Path, str], bool]) -> Outcome:
    """Judge a mutation by the tests of a checkout. ``sound`` remembers which tests pass without one."""
    text = mutated(mutation, checkout)
    if text is None:
        return Outcome("-")
    file = checkout / mutation.file
    plain = file.read_text()
    began = time.monotonic()
    try:
        file.write_text(text)
        code, name = run_tests(checkout, tests_of(mutation.file, checkout), limit_s)
    finally:
        file.write_text(plain)
    took = time.monotonic() - began
    if code == 0:
        reason = EQUIVALENT.get((mutation.file, mutation.lines.strip(), mutation.after))
        return Outcome("equivalent" if reason else "missed", reason or "", took)
    if code is None:
        return Outcome("time", "", took)
    if name and (checkout, name) not in sound:
        sound[checkout, name] = run_tests(checkout, [name], limit_s)[0] == 0
    return Outcome("caught" if sound.get((checkout, name)) else "fails anyway", name, took)


@contextmanager
def work_tree(commit: str, folder: Path) -> Iterator[Path]:
    """Yield a work tree of a commit, with this checkout's environments and worlds."""
    git = ["git", "-C", str(HERE), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(folder), commit], check=True)
    try:
        for name in (".venv-appworld", ".triton", "worlds"):
            if (HERE / name).exists() and not (folder / name).exists():
                (folder / name).symlink_to((HERE / name).resolve())
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", metavar="BASE", help="a commit whose code and tests are tried as well")
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for the tests of one mutation")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chosen = drawn(options.count, options.seed)
    for name in SHARED:
        importlib.import_module(name)
    forget_our_modules()
    rows: list[dict[str, Any]] = []
    sound: dict[tuple[Path, str], bool] = {}
    with (
        tempfile.TemporaryDirectory(prefix="mutations-") as folder,
        work_tree("HEAD", Path(folder) / "new") as new,
        work_tree(options.old or "HEAD", Path(folder) / "old") as old,
    ):
        Path(folder).chmod(0o755)  # some tests of the sandbox run as nobody
        print(f"{'place':58} {'then':12} {'now':12} seconds  mutation; by which test now")
        for mutation in chosen:
            then = judged(mutation, old, options.limit, sound) if options.old else Outcome("-")
            now = judged(mutation, new, options.limit, sound)
            place = f"{mutation.file}:{mutation.line}"
            what = f"{mutation.before[:60]} -> {mutation.after[:60]}"
            print(f"{place:58} {then.verdict:12} {now.verdict:12} {now.seconds:7.0f}  {what}; {now.by}", flush=True)
            rows.append(
                {
                    "subject": mutation.subject,
                    "file": mutation.file,
                    "line": mutation.line,
                    "kind": mutation.kind,
                    "before": mutation.before,
                    "after": mutation.after,
                    "then": then.verdict,
                    "then_by": then.by,
                    "then_seconds": round(then.seconds, 1),
                    "now": now.verdict,
                    "now_by": now.by,
                    "now_seconds": round(now.seconds, 1),
                }
            )
            if options.json:
                options.json.write_text(json.dumps(rows, indent=1) + "\n")
    lost = [row for row in rows if row["then"] == "caught" and row["now"] == "missed"]
    print(
        f"caught then {sum(row['then'] == 'caught' for row in rows)}, now "
        f"{sum(row['now'] == 'caught' for row in rows)} of {len(rows)}; caught then and missed now: {len(lost)}"
    )
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
