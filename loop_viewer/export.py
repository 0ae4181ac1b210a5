"""Writes a run as one HTML file: the page, its libraries and the data, readable without a server or network."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loop_formats.run_files import to_json, whole_file
from loop_viewer.app import STATIC
from loop_viewer.run_data import RunData
from loop_viewer.sound_lines import first_of
from loop_viewer.summaries import columns, episodes

_REFERENCE = re.compile(r'<link rel="stylesheet" href="/static/([\w./-]+)">|<script src="/static/([\w./-]+)"></script>')


class ExportTooLarge(ValueError):
    """The export would exceed its limit of bytes."""


def write_export(run: RunData, file: Path, collections: list[str] | None = None, max_megabytes: float = 200.0) -> int:
    """Write the page with the given collections (default: all) into ``file``; returns its size in bytes.

    Args:
        collections: for each its id, its name on the page ("iteration 2"), or the number of an iteration. The number
            means all collections that this iteration trained on.

    Raises:
        ValueError: a collection is unknown, or a line of a collection is damaged.
        ExportTooLarge: the file would exceed ``max_megabytes``.
    """
    overview = run.overview()
    known = overview["collections"]
    chosen = [] if collections else [item["id"] for item in known]
    for wanted in collections or []:
        matches = [
            item["id"]
            for item in known
            if wanted in (item["id"], item["name"]) or (item["kind"] == "training" and wanted == str(item["iteration"]))
        ]
        if not matches:
            names = [item["name"] for item in known]
            raise ValueError(f"no collection {wanted!r}; there are {', '.join(names) or 'none'}")
        chosen += [name for name in matches if name not in chosen]
    overview["collections"] = [item for item in known if item["id"] in chosen]
    overview |= {"node_runs": False, "starts": {}}  # a start names folders of this machine, and its command
    limit, size = int(max_megabytes * 1e6), 0
    file.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(file) as partial, partial.open("w", encoding="utf-8", newline="\n") as out:
        for piece in _pieces(run, overview, chosen):
            size += len(piece)
            if size > limit:
                raise ExportTooLarge(
                    f"the page would exceed {max_megabytes:g} MB; choose with --collection, or raise --max-mb"
                )
            out.write(piece)
    return size


def _pieces(run: RunData, overview: dict[str, Any], collections: list[str]) -> Iterator[str]:
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    scripts = [(STATIC / match[2]).read_text(encoding="utf-8") for match in _REFERENCE.finditer(page) if match[2]]
    styles = [(STATIC / match[1]).read_text(encoding="utf-8") for match in _REFERENCE.finditer(page) if match[1]]
    head, _, body = page.partition("</title>")
    yield f"{head}</title>\n"
    # Only the page's own scripts and styles are allowed, by their hashes: not even a script element that an agent's
    # text would manage to open.
    yield (
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; img-src data:; base-uri 'none'; "
        f"form-action 'none'; script-src {_hashes(scripts)}; style-src {_hashes(styles)}\">\n"
    )
    yield "".join(f"<style>{style}</style>\n" for style in styles)
    before, _, after = _REFERENCE.sub("", body).partition("</body>")
    yield before
    yield _data("run", overview)
    for collection in collections:
        summaries = run.summaries(collection)
        if damage := run.damage(collection):
            raise ValueError(first_of(damage))
        yield _data(f"collection/{collection}", columns(episodes(summaries)))
        for entry in summaries:
            yield _data(f"rollout/{collection}/{entry['cursor']}", run.rollout(collection, entry["cursor"]))
    yield "".join(f"<script>{script}</script>\n" for script in scripts)
    yield f"</body>{after}"


def _data(name: str, value: Any) -> str:
    """Return JSON in a script element that is never executed. The JSON has no "<" that could end the element."""
    text = to_json(value, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" data-name="{html.escape(name)}">{text}</script>\n'


def _hashes(contents: list[str]) -> str:
    digests = [base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents]
    return " ".join(f"'sha256-{digest}'" for digest in digests)
