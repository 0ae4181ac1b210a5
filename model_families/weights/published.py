"""Published models: the parts of their config.json that make the decoder, in its own spelling (``published.json``).

A job is planned by them before its weights are fetched, and without a network.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

HUB = {"qwen": "Qwen", "smollm": "HuggingFaceTB", "llama": "meta-llama", "gpt-oss": "openai"}
"""Whose models of a name's beginning are on the hub."""


@cache
def published() -> dict[str, dict[str, Any]]:
    """The parts of the config.json of each published model by its name, without an ``-Instruct`` behind it."""
    return json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))


def published_config(path: str | Path) -> dict[str, Any] | None:
    """The config.json of the published model that a folder, or a name on the hub, is called after; None where none is
    known here."""
    name = Path(str(path).partition("@")[0]).name
    return published().get(name) or published().get(name.removesuffix("-Instruct"))


def how_to_fetch(path: str | Path) -> str | None:
    """The command that fetches the published model that a folder is called after; None where none is known here."""
    name = Path(path).name
    owners = [owner for begin, owner in HUB.items() if name.lower().startswith(begin)]
    if published_config(path) is None or not owners:
        return None
    return f"tune download {owners[0]}/{name} --output-dir {path}"
