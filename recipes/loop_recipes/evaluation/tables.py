"""Documents of an evaluation: paragraphs and tables, written as Markdown or printed on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rich import table
from rich.console import Console
from rich.markdown import Markdown
from rich.markup import escape
from rich.measure import Measurement

UNBOUNDED = 100_000
"""Width in columns, more than any table has."""


@dataclass(frozen=True)
class Table:
    """Columns and rows of text; the first ``named`` columns name a row."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    named: int = 1


Document = Sequence[str | Table]
"""Paragraphs of Markdown, lists and headings among them, and tables."""


def to_markdown(document: Document) -> str:
    """Return a document as Markdown, its blocks divided by empty lines."""
    return "\n\n".join(block if isinstance(block, str) else _rows(block) for block in document) + "\n"


def print_document(console: Console, document: Document) -> None:
    """Print a document; its tables are whole at any width."""
    for kind, blocks in groupby(document, type):
        if kind is Table:
            for block in blocks:
                assert isinstance(block, Table), "they are grouped by type"
                print_table(console, "", block)
        else:
            console.print(Markdown("\n\n".join(map(str, blocks))))


def print_table(console: Console, title: str, data: Table) -> None:
    """Print a table; if it is wider than the console, print a block of lines for each row."""
    grid = table.Table(*map(escape, data.columns), title=escape(title) if title else None, title_justify="left")
    for row in data.rows:
        grid.add_row(*map(escape, row))
    unbounded = console.options.update(width=UNBOUNDED)
    if max(Measurement.get(console, unbounded, grid).maximum, len(title)) <= console.width:
        console.print(grid)
        return
    if title:
        console.print(title, markup=False, highlight=False, style="italic")
    columns = data.columns[data.named :]
    widest = max(map(len, columns), default=0)
    for row in data.rows:
        console.print(", ".join(row[: data.named]), markup=False, highlight=False, style="bold")
        for name, cell in zip(columns, row[data.named :], strict=True):
            console.print(f"  {name:<{widest}}  {cell}", markup=False, highlight=False)


def _rows(data: Table) -> str:
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (data.columns, *data.rows)]
    lines.insert(1, "|" + "---|" * len(data.columns))
    return "\n".join(lines)
