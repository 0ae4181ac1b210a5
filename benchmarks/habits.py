"""List the places of four habits of writing, which CONTRIBUTING.md names, in the packages and the pages.

    python benchmarks/habits.py

The packages are those of benchmarks/closure.py, without tests. The pages are the Markdown of docs/, of the root and of
the folders in it, without the changelog, and without code and headings. benchmarks/size.py prints how many places each
habit has, and tests/size.toml has the caps.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

from benchmarks.closure import Source  # noqa: E402

OPENING_WITHOUT_NOUN = re.compile(r"(?:Of|What|One|Whether)\b")
DENIED_NOUN = re.compile(r"(?<![Tt]here\s)\b(?:is|are|was|were)\s+(?:no|none)\b(?! longer\b| more\b)")
VAGUE_NAMES = {"told", "found", "said", "seen", "shown"}
CLAUSE_AS_SUBJECT = re.compile(
    r"(?:^ *(?:- |\d+\. )?|(?<=[.:;]\s)|(?<=\*\*\s)|(?<=\| ))"
    r"(?:What|Who|Whoever|One who|Those that|Those who)\s[^.:?!|]*[.:|]",
    re.MULTILINE,
)
"""A question ends with another sign, so it does not match; a caption such as "What this costs:" does."""


def places(source: Source) -> dict[str, list[str]]:
    """Return the places of each habit in a checkout, as ``file:line: words``."""
    root = source.root
    openings, denied, names, clauses = [], [], [], []
    for module, file in sorted(source.files.items()):
        name, text = str(file.relative_to(root)), file.read_text(encoding="utf-8")
        opened = [*_comments(text), *_docstrings(source.tree(module))]
        openings += [f"{name}:{line}: {words}" for line, words in opened if OPENING_WITHOUT_NOUN.match(words)]
        names += [f"{name}:{line}: {word}" for line, word in _identifiers(source.tree(module)) if word in VAGUE_NAMES]
        denied += _matches(DENIED_NOUN, name, text)
    for page in (page for place in ("docs/**/*.md", "*.md", "*/README.md") for page in sorted(root.glob(place))):
        if page.name != "CHANGELOG.md":
            name, text = str(page.relative_to(root)), _sentences(page.read_text(encoding="utf-8"))
            denied += _matches(DENIED_NOUN, name, text)
            clauses += _matches(CLAUSE_AS_SUBJECT, name, text)
    return {
        "openings_without_a_noun": openings,
        "denied_nouns": denied,
        "vague_names": names,
        "clauses_as_subjects": clauses,
    }


def _comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield the first line of each comment that has its lines to itself."""
    before = ""
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if line.startswith("# ") and not before.startswith("#"):
            yield number, line[2:]
        before = line


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the first line of each docstring, those of constants and attributes too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.partition("\n")[0]


def _identifiers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield each name where it is defined, used, imported or passed."""
    for node in ast.walk(tree):
        for field in ("id", "arg", "attr", "name", "asname"):
            if isinstance(word := getattr(node, field, None), str):
                yield getattr(node, "lineno", 0), word


def _sentences(page: str) -> str:
    """Return a page without its code and headings, as many lines as before."""
    code_or_heading = re.compile(r"^```.*?^```$|`[^`]*`|^#.*?$", re.MULTILINE | re.DOTALL)
    return code_or_heading.sub(lambda match: "code" + "\n" * match[0].count("\n"), page)


def _matches(pattern: re.Pattern[str], name: str, text: str) -> list[str]:
    return [
        f"{name}:{1 + text.count(chr(10), 0, match.start())}: {' '.join(match[0].split())}"
        for match in pattern.finditer(text)
    ]


if __name__ == "__main__":
    for habit, found in places(Source(ROOT)).items():
        print(*found, f"{habit}: {len(found)}\n", sep="\n")
