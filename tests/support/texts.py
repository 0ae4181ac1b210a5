"""Data of a test, in a YAML file of the same name beside it: modules, scripts, tables, and what is printed."""

from pathlib import Path
from typing import Any

import yaml


def texts_beside(file: str) -> dict[str, Any]:
    """Read the YAML file beside a Python file.

    Args:
        file: ``__file__`` of the module that asks.
    """
    return yaml.safe_load(Path(file).with_suffix(".yaml").read_text())
