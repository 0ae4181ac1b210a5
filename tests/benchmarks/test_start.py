"""Benchmarks and experiments that import from outside the installed packages start as plain scripts, in any folder."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.waiting import COMMAND_S

ROOT = Path(__file__).parents[2]
START = ROOT / "tests" / "support" / "start_scripts.py"

# Only these: to import torch for each of the others would take seconds and show little.
CHANGE_THE_PATH = sorted(
    str(path.relative_to(ROOT))
    for folder in ("benchmarks", "experiments")
    for path in (ROOT / folder).glob("*.py")
    if re.search(r"(?m)^sys\.path\..*__file__", path.read_text())
)


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Exit status and output of each script's ``--help``."""
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, START, *(str(ROOT / script) for script in CHANGE_THE_PATH)]
    done = subprocess.run(
        command, cwd=tmp_path_factory.mktemp("any"), env=alone, capture_output=True, text=True, timeout=COMMAND_S
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("script", CHANGE_THE_PATH)
def test_a_script_shows_its_help(started, script):
    status, output = started[str(ROOT / script)]
    assert status == 0, output
    assert output.startswith("usage: ")
