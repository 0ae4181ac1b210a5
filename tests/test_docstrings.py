"""A docstring says what its function does, or what its class is: its first word is no question word and no section."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("recipes", "loop_formats", "model_families", "rollout_server", "agent_environments", "appworld_adapter")
PART_OF_THE_DATASET = ROOT / "appworld_adapter/worker/synthetic"
"""Its text is part of the synthetic world's identity: another docstring would be another dataset."""
RIDDLES = {"What", "Who", "Whom", "Whose", "Where", "Which", "How", "That", "Args:", "Raises:"}


def riddles(source: str) -> Iterator[str]:
    """Yield the line, name and first word of each docstring that begins with a word of :data:`RIDDLES`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            words = (ast.get_docstring(node) or "").split(maxsplit=1)
            if words and words[0].rstrip(",") in RIDDLES:
                yield f"line {node.lineno}: {node.name} begins with {words[0]!r}"


@pytest.mark.parametrize("package", PACKAGES)
def test_the_first_word_of_a_docstring_is_a_verb_or_defines_the_name(package):
    found = [
        f"{path.relative_to(ROOT)}, {line}"
        for path in sorted((ROOT / package).rglob("*.py"))
        if PART_OF_THE_DATASET not in path.parents
        for line in riddles(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


def test_riddles_are_found_in_functions_methods_and_classes():
    source = '''
class Load:
    """What a server said."""

    async def poll(self):
        """
        Raises:
            OSError: it is gone.
        """

    @property
    def crowding(self):
        """The share of slots in use."""


def _end():
    """Where, it has not ended."""
'''
    assert [line.split(": ")[1].split()[0] for line in riddles(source)] == ["Load", "_end", "poll"]
