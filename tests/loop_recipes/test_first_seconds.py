"""Help and mistakes of our own commands need nothing heavy, and say nothing that is not about them."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
COMMANDS = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["scripts"]
HEAVY = ("torch", "torchtune", "torchao", "transformers", "vllm")


def run(entry: str, *words: str) -> tuple[int, list[str], str]:
    """Exit code, the heavy modules that were imported, and what was printed."""
    module, function = entry.split(":")
    code = f"""
import sys
sys.argv = ["command", *{list(words)!r}]
try:
    from {module} import {function} as main
    code = main()
except SystemExit as error:
    code = error.code
if isinstance(code, str):
    print(code)
print("imported:", *[name for name in {HEAVY!r} if name in sys.modules])
sys.exit(0 if not code else 1)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=CHECKOUT)
    *said, imported = done.stdout.splitlines()
    return done.returncode, imported.split()[1:], "\n".join(said) + done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_help_imports_nothing_heavy(command):
    code, heavy, said = run(COMMANDS[command], "--help")
    assert (code, heavy) == (0, [])
    assert said.startswith(f"usage: {command}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("check", "--config", "loop_appworld/tiny"), "loop-launch: no config 'loop_appworld/tiny'; there are: "),
        (
            ("check", "--config", "loop_appworld/tiny_cpu", "rollout_node.config.potr=1"),
            "loop-launch: unknown key 'rollout_node.config.potr'; did you mean 'port'?",
        ),
    ],
)
def test_a_mistake_in_a_config_is_said_before_anything_heavy_is_imported(words, message):
    code, heavy, said = run(COMMANDS["loop-launch"], *words)
    assert (code, heavy) == (1, [])
    assert said.startswith(message)
