"""Benchmarks and experiments that import from outside the installed packages start as plain scripts, in any folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Only these: to import torch for each of the others would take seconds and show little.
CHANGE_THE_PATH = sorted(
    str(path.relative_to(ROOT))
    for folder in ("benchmarks", "experiments")
    for path in (ROOT / folder).glob("*.py")
    if re.search(r"(?m)^sys\.path\..*__file__", path.read_text())
)


@pytest.mark.parametrize("script", CHANGE_THE_PATH)
def test_a_script_shows_its_help(tmp_path, script):
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(ROOT / script), "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=alone, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")
