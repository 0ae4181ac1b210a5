"""Every benchmark, experiment and example that has options starts as a plain script, in any folder, and shows its help.

The scripts whose figures pages quote have tests of those figures beside this one.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.waiting import COMMAND_S

ROOT = Path(__file__).parents[1]
START = ROOT / "tests" / "support" / "start_scripts.py"
SCRIPTS = sorted(
    str(path.relative_to(ROOT))
    for folder in ("benchmarks", "experiments", "examples")
    for path in (ROOT / folder).rglob("*.py")
    if "parse_args(" in path.read_text()
)


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Exit status and output of each script's ``--help``."""
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, START, *(str(ROOT / script) for script in SCRIPTS)]
    done = subprocess.run(
        command, cwd=tmp_path_factory.mktemp("any"), env=alone, capture_output=True, text=True, timeout=COMMAND_S
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_shows_its_help(started, script):
    status, output = started[str(ROOT / script)]
    assert status == 0, output
    assert "usage: " in output


def test_scripts_of_all_three_folders_are_found():
    assert {script.partition("/")[0] for script in SCRIPTS} == {"benchmarks", "experiments", "examples"}
    assert len(SCRIPTS) > 30
