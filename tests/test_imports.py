"""The import directions in .importlinter hold."""

import re
import subprocess
import sys
from pathlib import Path


def test_imports_go_one_way():
    """In a process of its own: import-linter switches off the loggers of the one that it runs in."""
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    result = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr


ROOT = Path(__file__).parents[1]
NAMES = re.compile(
    r"(loop|sft|eval|warm_start)_appworld|appworld_experiments|\.venv-appworld|appworld evaluate|``appworld``"
    r"|appworld\.md"
)
"""Asked-for names of recipes, keys and folders, and the names that a config may give an environment."""


def test_the_loop_and_the_node_do_not_speak_of_one_environment():
    """Nothing but asked-for names; the warm start plays the solutions of one world, for the demo."""
    files = [*(ROOT / "recipes/loop_recipes").rglob("*.py"), *(ROOT / "rollout_server").rglob("*.py")]
    spoken = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in files
        if "warm_start" not in file.parts
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        if "appworld" in NAMES.sub("", line).lower()
    ]
    assert spoken == []
