"""Keeps, in the folder of a run or an evaluation, how its environment described itself: ``environment.json``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from agent_environments.description import UNSAID, Description
from loop_formats.run_files import to_json, write_whole

ENVIRONMENT_FILE = "environment.json"
FOLDERS_ABOVE = 3
"""A log lies in ``<run>/node/collections``."""


def write_description(folder: Path, environment: Description) -> Path:
    """Write the description, whole or not at all; returns the path."""
    return write_whole(folder / ENVIRONMENT_FILE, to_json(asdict(environment), indent=1) + "\n")


def read_description(path: Path) -> Description:
    """The environment of a run's folder, or of a file in it; :data:`UNSAID` where the folder does not say.

    Raises:
        ValueError: the file is damaged; names it.
    """
    path = path.resolve()
    for folder in (path, *path.parents[:FOLDERS_ABOVE]):
        file = folder / ENVIRONMENT_FILE
        if file.is_file():
            try:
                return Description.from_dict(json.loads(file.read_text(encoding="utf-8")))
            except ValueError as error:
                raise ValueError(f"{file} is damaged: {error}; remove it") from error
    return UNSAID
