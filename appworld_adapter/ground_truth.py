"""AppWorld's ground-truth solutions as turns of an agent, for supervised training (LOOP, appendix C.1).

Each top-level statement or loop of ``solution`` is a turn: the comments that stand above and in it are the thought, the
code without them is the block.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agent_environments.protocol import UnknownTask
from loop_plumbing.breakage import raised_as

STRINGS = (tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", None))
"""Kinds of tokens that hold the text of strings; those of f-strings are tokens of their own from Python 3.12 on."""
EXECUTION_SUCCESSFUL = "Execution successful."
"""The observation of every turn of a ground truth."""


@dataclass(frozen=True)
class SolutionTurn:
    """A thought, perhaps empty, and the code that follows from it."""

    thought: str
    code: str

    @property
    def action(self) -> str:
        """The text of the turn as an agent writes it."""
        block = f"```python\n{self.code}\n```"
        return f"{self.thought}\n{block}" if self.thought else block


def load_solution(root: str | Path, task_id: str) -> list[SolutionTurn]:
    """Return the turns of a task's ``ground_truth/solution.py`` in a dataset of AppWorld's layout.

    Raises:
        UnknownTask: the dataset has no solution of that task, as for all tasks of the test splits.
        ValueError: the file holds no function ``solution``; the message names the file.
    """
    file = Path(root) / "data" / "tasks" / task_id / "ground_truth" / "solution.py"
    if not file.is_file():
        raise UnknownTask(f"{file} does not exist: only train and dev come with ground-truth solutions")
    with raised_as(ValueError, f"{file}: ", SyntaxError, ValueError):
        return solution_turns(file.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class ReferenceSolutions:
    """Give the hidden information of AppWorld's tasks: the code of a task's reference solution, without comments.

    Args:
        root: folder that holds ``data/``.
    """

    root: str

    def hidden_information(self, task_id: str) -> str:
        """Return the code of the task's solution.

        Raises:
            UnknownTask, ValueError: as in :func:`load_solution`.
        """
        return "\n".join(turn.code for turn in load_solution(self.root, task_id))


def solution_turns(source: str) -> list[SolutionTurn]:
    """Return the turns of the function ``solution`` in a program; imports above the function become the first turns.

    Raises:
        ValueError: the program has no such function.
        SyntaxError: the program is not Python.
    """
    module = ast.parse(source)
    function = next((n for n in module.body if isinstance(n, ast.FunctionDef) and n.name == "solution"), None)
    if function is None:
        raise ValueError("there is no function solution")
    imports = [node for node in module.body if isinstance(node, ast.Import | ast.ImportFrom)]
    lines = source.split("\n")  # as the tokenizer counts them; splitlines also splits within strings
    comments, strings = _comments(source), _lines_in_strings(source)
    turns, last_line = [], 0
    body = function.body if ast.get_docstring(function) is None else function.body[1:]
    for node in [*imports, *body]:
        end = node.end_lineno or node.lineno
        thought = [text for line, (_, text) in sorted(comments.items()) if last_line < line <= end]
        turns.append(SolutionTurn("\n".join(thought), _code(lines[node.lineno - 1 : end], node, comments, strings)))
        last_line = end
    return turns


def _comments(source: str) -> dict[int, tuple[int, str]]:
    """Return line number (from 1) -> the column where the line's comment starts, and the text behind the #."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {
        token.start[0]: (token.start[1], token.string.lstrip("#").strip())
        for token in tokens
        if token.type == tokenize.COMMENT
    }


def _lines_in_strings(source: str) -> tuple[set[int], set[int]]:
    """Return the numbers (from 1) of the lines that begin within a string, and of those that end within one."""
    begin: set[int] = set()
    end: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in STRINGS:
            begin.update(range(token.start[0] + 1, token.end[0] + 1))
            end.update(range(token.start[0], token.end[0]))
    return begin, end


def _code(
    lines: list[str], node: ast.stmt, comments: Mapping[int, tuple[int, str]], strings: tuple[set[int], set[int]]
) -> str:
    """Return a statement's lines without comments and without the function's indentation; strings stay as they are."""
    begin_in_string, end_in_string = strings
    code_lines = []
    for number, line in enumerate(lines, node.lineno):
        column, _ = comments.get(number, (len(line), ""))
        code = line[:column]
        if number not in end_in_string:
            code = code.rstrip()
        if code or number not in comments:
            indented = number not in begin_in_string and not code[: node.col_offset].strip()
            code_lines.append(code[node.col_offset :] if indented else code)
    return "\n".join(code_lines)
