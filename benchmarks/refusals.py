"""Refusals that the tests of an earlier commit expected: whether the tests of today expect each of them too.

    python benchmarks/refusals.py BASE [--all]

Read by ``ast`` from the test files of BASE and of this checkout; nothing is run. A refusal is a type and a text:

- ``pytest.raises(TYPE, match=TEXT)``, each TYPE of a tuple; where TEXT is a name, all texts of that column of the
  function's ``parametrize`` tables, or of the assignment to that name in the function or the file;
- a text of several words in an ``assert`` that asks an error's ``value``, ``err``, ``stderr``, a log's ``text`` or
  ``messages``, or all that was printed, in a function that has ``pytest.raises`` or one of the fixtures capsys, capfd
  and caplog. Its types are those of the function's ``pytest.raises``, or ``printed`` where there is none.

A refusal of BASE is still expected where one file of today names its type, and in that file one string, at any place,
holds all literal parts of the text in their order: what stands between ``.*``, groups and braces, and has four letters
or more. Moved tests and tests that became tables are found thus, and the texts of YAML files beside a test, of its
own name or such as it names, count as its strings.

It cannot see: whether that string is still compared with the error; a text of BASE that a helper makes, that
stands in a data file, or that is compared in pieces alone; a refusal without a text (any file of today that names the
type will do); a condition that became narrower under the same words. Only a run of the tests shows that today's
expectations hold.

``refusals_gone.txt`` beside this file lists refusals that are gone on purpose, ``TYPE<TAB>PATTERN<TAB>REASON`` a line,
where ``*`` in TYPE and PATTERN stands for anything. Prints a row a package, then the refusals that are gone; ends
with 1 where there are any.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
GONE = Path(__file__).with_name("refusals_gone.txt")
PRINTED = "printed"
HEARS = {"capsys", "capfd", "caplog"}
ERROR_ATTRIBUTES = {"value", "err", "stderr", "text", "messages", "readouterr"}
PATTERN_GAPS = r"\\[dwsSWDb]|\{[^{}]*\}|\(\?:|\[[^\]]*\][+*]?|\.[*+]\??|(?<!\\)[()|^$]"
"""Pieces that are not a literal part of a regular expression, or are computed in an f-string."""


@dataclass(frozen=True)
class Refusal:
    """The expectation of a test: the error's type, its text as the test writes it, and the place of the test."""

    kind: str
    text: str
    place: str
    is_pattern: bool = True

    @property
    def parts(self) -> list[str]:
        """The literal parts of the text, in their order."""
        gaps = PATTERN_GAPS if self.is_pattern else r"\{\}"
        plain = re.sub(gaps, "\0", self.text.strip())
        pieces = (re.sub(r"\\(.)", r"\1", plain) if self.is_pattern else plain).splitlines()[:1]
        return [part.strip() for part in "".join(pieces).split("\0") if sum(map(str.isalpha, part)) >= 4]


def strings(node: ast.AST) -> Iterator[str]:
    """Yield all texts below a node; computed values of an f-string are brace pairs."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(str(piece.value) if isinstance(piece, ast.Constant) else "{}" for piece in node.values)
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    for child in ast.iter_child_nodes(node):
        yield from strings(child)


def texts_in(data: object) -> Iterator[str]:
    """Yield all texts of what a YAML file holds."""
    if isinstance(data, str):
        yield data
    elif isinstance(data, dict | list):
        for each in [*data, *data.values()] if isinstance(data, dict) else data:
            yield from texts_in(each)


def last_name(node: ast.AST) -> str:
    """Return ``b`` of ``a.b`` and of ``b``."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def kinds_of(call: ast.Call) -> list[str]:
    """Return the types of ``pytest.raises``."""
    asked = call.args[0] if call.args else ast.Tuple(elts=[])
    return [name for each in ast.walk(asked) if (name := last_name(each)) and name[0].isupper()]


def column(function: ast.AST, name: str, module: ast.Module) -> list[str]:
    """Return the texts that a name may stand for: of the function's tables, else of assignments to it."""
    texts: list[str] = []
    for decorator in getattr(function, "decorator_list", []):
        if isinstance(decorator, ast.Call) and last_name(decorator.func) == "parametrize":
            names = re.split(r"\W+", " ".join(strings(decorator.args[0])).strip())
            if name not in names:
                continue
            for row in getattr(decorator.args[1], "elts", [decorator.args[1]]):
                cells = getattr(row, "elts", [row]) if len(names) > 1 else [row]
                texts += strings(cells[names.index(name)]) if len(cells) == len(names) else strings(row)
    for node in (*ast.walk(function), *module.body):
        match node:
            case ast.Assign(targets=targets, value=value):
                pass
            case ast.For(target=target, iter=value):
                targets = [target]
            case _:
                continue
        if any(isinstance(each, ast.Name) and each.id == name for target in targets for each in ast.walk(target)):
            texts += strings(value)
    return texts


def refusals(file: Path, place: str) -> Iterator[Refusal]:
    """Yield the refusals that the tests of a file expect."""
    module = ast.parse(file.read_text(encoding="utf-8"))
    for function in ast.walk(module):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) or not function.name.startswith("test"):
            continue
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call) and last_name(node.func) == "raises"]
        for call in calls:
            match = next((word.value for word in call.keywords if word.arg == "match"), None)
            names = [] if match is None else [node.id for node in ast.walk(match) if isinstance(node, ast.Name)]
            texts = [] if match is None else [*strings(match)]
            texts += [text for name in names for text in column(function, name, module)]
            yield from (Refusal(kind, text, place) for kind in kinds_of(call) for text in texts or [""])
        if calls or HEARS & {argument.arg for argument in function.args.args}:
            kinds = sorted({kind for call in calls for kind in kinds_of(call)}) or [PRINTED]
            asserted = [node for node in ast.walk(function) if isinstance(node, ast.Assert)]
            of_errors = [node for node in asserted if ERROR_ATTRIBUTES & set(map(last_name, ast.walk(node.test)))]
            sentences = {text for node in of_errors for text in strings(node.test) if " " in text.strip()}
            yield from (Refusal(kind, text, place, is_pattern=False) for kind in kinds for text in sorted(sentences))


def test_files(tree: Path) -> dict[str, Path]:
    """Return the Python files of tests, by their paths in the tree."""
    files = [*tree.glob("tests/**/*.py"), *tree.glob("contrib/**/tests/**/*.py")]
    return {str(file.relative_to(tree)): file for file in sorted(files)}


class Today:
    """The names and texts in the test files of this checkout."""

    def __init__(self, tree: Path):
        self.files: list[tuple[set[str], list[str]]] = []
        for file in test_files(tree).values():
            source = file.read_text(encoding="utf-8")
            module = ast.parse(source)
            names = {last_name(node) for node in ast.walk(module)} | {PRINTED}
            data = [each for each in file.parent.glob("*.yaml") if each.name in source or each.stem == file.stem]
            texts = [*strings(module), *(text for each in data for text in texts_in(yaml.safe_load(each.read_text())))]
            self.files.append((names, [re.sub(r"\\(.)", r"\1", text) for text in texts]))

    def expects(self, refusal: Refusal) -> bool:
        """Return whether one file names the type, and one of its texts holds all parts."""
        parts = re.compile(".*".join(map(re.escape, refusal.parts)), re.DOTALL)
        return any(refusal.kind in names and any(map(parts.search, texts)) for names, texts in self.files)


def base_tests(base: str, folder: Path) -> Path:
    """Unpack the test files of the commit ``base`` into ``folder``; raises SystemExit where there is no such commit."""
    done = subprocess.run(["git", "-C", str(ROOT), "archive", base, "tests", "contrib"], capture_output=True)
    if done.returncode:
        raise SystemExit(f"refusals: {done.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


@cache
def allowed() -> list[list[str]]:
    """Read (type, pattern, reason) of refusals that are gone on purpose."""
    lines = GONE.read_text(encoding="utf-8").splitlines()
    return [line.split("\t") for line in lines if line and not line.startswith("#")]


def reason_of(refusal: Refusal) -> str | None:
    """Return why a refusal is gone on purpose; None where the list does not name it."""
    own = (refusal.kind, refusal.text)
    rows = (row for row in allowed() if all(map(fnmatchcase, own, row[:2])))
    return next((reason for *_, reason in rows), None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="a commit")
    parser.add_argument("--all", action="store_true", help="also print those that are gone on purpose")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = test_files(base_tests(args.base, Path(folder)))
        expected = {refusal for place, file in files.items() for refusal in refusals(file, place)}
    today = Today(ROOT)
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    lines = []
    for refusal in sorted(expected, key=lambda each: (each.place, each.kind, each.text)):
        package = "/".join(refusal.place.split("/")[:-1][:2]) or "tests"
        reason = reason_of(refusal)
        state = 1 if today.expects(refusal) else 2 if reason else 3
        counts[package][0] += 1
        counts[package][state] += 1
        if state == 3 or (state == 2 and args.all):
            lines.append(f"{refusal.place}: {refusal.kind}: {refusal.text!r}{f' ({reason})' * (state == 2)}")
    print(f"{'tests of':32}{'expected':>10}{'still':>8}{'on purpose':>12}{'gone':>6}")
    everywhere = [sum(each) for each in zip(*counts.values(), strict=True)]
    for package, row in [*sorted(counts.items()), ("all", everywhere)]:
        print(f"{package:32}{row[0]:10}{row[1]:8}{row[2]:12}{row[3]:6}")
    print("\n".join(lines))
    return int(bool(everywhere[3]))


if __name__ == "__main__":
    sys.exit(main())
