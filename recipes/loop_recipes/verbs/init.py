"""Writes a task of your own to change: NAME.py, a small game as a file of functions, and test_NAME.py beside it.

loop init my_game
"""

from __future__ import annotations

import importlib.util
import keyword
import sys
from collections.abc import Sequence
from pathlib import Path

import agent_environments
from loop_formats.schema import ConfigError, require
from loop_recipes.config.arguments import verb_parser
from loop_recipes.exit_status import exit_status

EXAMPLE = Path(agent_environments.__file__).parent / "tools" / "guess_number.py"
TEST = '''"""Tests of {name}.py, without a model: how the game goes, and its reward. Run them with pytest."""

import re

import pytest
from {name} import TASKS, Game, found


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task["id"])
def test_halving_finds_every_number(task):
    game = Game()
    game.reset(task)
    low, high = map(int, re.findall("[0-9]+", task["question"]))
    reply = ""
    while reply is not None:
        middle = (low + high) // 2
        reply = game.guess(f"I say {{middle}}!")
        low, high = (middle + 1, high) if reply == "Higher." else (low, middle - 1)
    assert found(game)


def test_a_turn_without_a_number_is_refused_and_lost():
    game = Game()
    game.reset(TASKS[0])
    assert [game.guess("Hm.") for _ in range(5)] == ["Say a number."] * 4 + [None]
    assert not found(game)


def test_doing_nothing_is_worth_nothing():
    game = Game()
    game.reset(TASKS[0])
    assert not found(game)
'''


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the two files; returns the exit status."""
    parser = verb_parser("init", __doc__)
    parser.add_argument("name", metavar="NAME", help="name of the file, without .py")
    name = parser.parse_args(arguments).name.removesuffix(".py")
    return exit_status(parser.prog, lambda: _begin(name), (ConfigError, OSError))


def _begin(name: str) -> str:
    require(name.isidentifier(), f"{name!r} is not a name of a Python module: letters, digits and _ alone")
    require(not keyword.iskeyword(name), f"{name!r} is a word of the language; choose another name")
    here = Path.cwd() / f"{name}.py"
    spec = importlib.util.find_spec(name)
    taken = name in sys.stdlib_module_names or (spec is not None and spec.origin not in (None, str(here)))
    require(not taken, f"Python has a module {name!r} already, which {name}.py would hide; choose another name")
    head = '"""A game in plain text: find a number by "Higher." and "Lower.". Change it into a task of your own."""\n'
    example = head + EXAMPLE.read_text(encoding="utf-8").partition("\n")[2]
    files = {Path(f"{name}.py"): example, Path(f"test_{name}.py"): TEST.format(name=name)}
    for file in files:
        require(not file.exists(), f"{file} is there already; choose another name")
    for file, text in files.items():
        file.write_text(text, encoding="utf-8")
    return (
        f"written: {', '.join(map(str, files))}\nnext:    loop try {name}.py, then loop train {name}.py --model FOLDER"
    )
