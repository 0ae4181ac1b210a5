"""Runs a few lines under pinned packages in a temporary folder, with nothing else installed to be seen."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

DEADLINE_S = 1800.0


def run(packages: Sequence[str], code: str) -> Any:
    """Install ``packages`` and run ``code``; returns what it put into its variable ``seen``, which JSON can hold."""
    with tempfile.TemporaryDirectory() as folder:
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target", folder, *packages]
        # pip warns of what is installed elsewhere.
        subprocess.run(install, check=True, timeout=DEADLINE_S, stderr=subprocess.DEVNULL)
        program = f"import sys; sys.path.insert(0, {folder!r})\n{code}\nimport json; print(json.dumps(seen))"
        bare = [sys.executable, "-I", "-S", "-c", program]
        done = subprocess.run(bare, check=True, timeout=DEADLINE_S, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def report(packages: Sequence[str], seen: Mapping[str, Any], expected: Mapping[str, Any]) -> int:
    """Print versions and what was seen; returns 0 if it is what was expected."""
    print(", ".join(packages))
    for name, value in seen.items():
        changed = "" if expected[name] == value else f"   CHANGED, it was {expected[name]!r}"
        print(f"  {name}: {value!r}{changed}")
    return int(dict(seen) != dict(expected))
