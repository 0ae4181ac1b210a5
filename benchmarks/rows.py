"""Rows of figures in a JSON file, shared by the benchmarks: each is of a case, which ends with the device's name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

UNITS = {"seconds": "s", "per_s": "tokens/s", "gib": "GiB", "mib": "MiB", "gap": "nats", "error": "nats"}
"""Units by the end of a figure's name."""


def unit(metric: str) -> str:
    """Return the unit of a figure of this name; "" where it has none."""
    return next((unit for end, unit in UNITS.items() if metric.endswith(end)), "")


def machine(device: str) -> str:
    """Return the name of a device of the kind "cuda" or "cpu", and torch's release."""
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return f"{name}, torch {torch.__version__}"


class Rows:
    """The rows of a file, of one machine; every program that adds some reads it anew, so that several can.

    Args:
        file: None keeps nothing.
    """

    def __init__(self, file: Path | None, machine: str) -> None:
        self._file, self._machine = file, machine

    def of(self, case: str) -> dict[str, Any]:
        """Return the figures of a case; {} where there are none."""
        return {row["metric"]: row["value"] for row in self.read() if row["case"] == f"{case}, {self._machine}"}

    def read(self) -> list[dict[str, Any]]:
        """Return all rows of the file."""
        return json.loads(self._file.read_text()) if self._file is not None and self._file.exists() else []

    def add(self, case: str, figures: Mapping[str, Any]) -> None:
        """Put the figures of a case in the place of those that it had."""
        if self._file is None:
            return
        full = f"{case}, {self._machine}"
        rows = [row for row in self.read() if row["case"] != full]
        rows += [{"case": full, "metric": name, "value": figures[name], "unit": unit(name)} for name in figures]
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps(rows, indent=1) + "\n")
        partial.replace(self._file)
