"""The import directions in .importlinter hold."""

import subprocess
import sys
from pathlib import Path


def test_imports_go_one_way():
    """In a process of its own: import-linter switches off the loggers of the one that it runs in."""
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    result = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
