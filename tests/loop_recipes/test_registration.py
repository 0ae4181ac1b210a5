"""The hook that makes our recipes known to `tune`: it appends once, survives anything, and imports nothing heavy."""

import os
import signal
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from torch.distributed.elastic.multiprocessing import SignalException

from loop_recipes import registration
from support.texts import texts_beside
from support.waiting import COMMAND_S

TABLES = texts_beside(__file__)

ROOT = Path(__file__).parents[2]


def _registry():
    return SimpleNamespace(
        _ALL_RECIPES=[SimpleNamespace(name="full_finetune_single_device")],
        Config=lambda **fields: SimpleNamespace(**fields),
        Recipe=lambda **fields: SimpleNamespace(**fields),
    )


def test_recipes_are_appended_once_with_absolute_paths():
    registry = _registry()
    registration.register(registry)
    registration.register(registry)
    names = [recipe.name for recipe in registry._ALL_RECIPES]
    assert names.count("loop_appworld") == 1
    assert names[0] == "full_finetune_single_device"
    loop = next(recipe for recipe in registry._ALL_RECIPES if recipe.name == "loop_appworld")
    assert loop.file_path.startswith("/")
    assert loop.file_path.endswith("loop_appworld.py")
    assert "loop_appworld/tiny_cpu" in {config.name for config in loop.configs}
    assert all(config.file_path.startswith("/") for config in loop.configs)


def test_a_broken_registry_is_reported_and_does_not_raise(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, registration._REGISTRY, SimpleNamespace())
    registration.install_hook()
    assert "recipes not registered" in capsys.readouterr().err


def test_the_hook_imports_nothing_heavy():
    program = (
        "import sys; from loop_recipes import registration; registration.install_hook();"
        "heavy = {'torch', 'torchtune', 'transformers', 'vllm'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=COMMAND_S)


def test_only_a_tune_run_whose_threads_would_spin_is_started_again():
    tune = ["/venv/bin/python", "/venv/bin/tune", "run", "loop_appworld"]
    assert registration.starts_again(tune, b"HOME=/root\0OMP_NUM_THREADS=2\0")
    for variable in (b"OMP_WAIT_POLICY=passive", b"OMP_WAIT_POLICY=active", b"GOMP_SPINCOUNT=0", b"OMP_NUM_THREADS=1"):
        assert not registration.starts_again(tune, b"HOME=/root\0" + variable + b"\0")
    for other in (
        ["python"],
        ["python", "-c", "import torch"],
        ["python", "/venv/bin/tune", "ls"],
        ["python", "train.py"],
        ["python", "/venv/bin/tune", "run", "lora_finetune_single_device", "--config", "llama3/8B_lora_single_device"],
    ):
        assert not registration.starts_again(other, b"")


def test_importing_our_packages_changes_nothing_of_the_importing_process():
    program = (
        "import logging, os, signal, sys; before = dict(os.environ), sys.excepthook, signal.getsignal(signal.SIGINT);"
        "import torch, loop_recipes, agent_environments, rollout_server, loop_plumbing, loop_formats, loop_viewer;"
        "assert before == (dict(os.environ), sys.excepthook, signal.getsignal(signal.SIGINT));"
        "assert not logging.getLogger('torchao').filters"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=COMMAND_S)


@pytest.mark.fault("tune cp and tune validate of our configs")
def test_whoever_reads_the_registry_can_resolve_our_paths(monkeypatch):
    OmegaConf.clear_resolver("loop_home")
    sys.modules.pop("loop_recipes.config.resolvers", None)
    registration.register(_registry())
    assert OmegaConf.create({"a": "${loop_home:}/runs"}).a.endswith("/runs")


@pytest.mark.fault("tune run of a misspelt recipe: a traceback of torchtune's")
@pytest.mark.parametrize(("words", "meant"), TABLES["misspelt_recipes"])
def test_a_misspelt_recipe_ends_with_the_name_that_was_meant(monkeypatch, tmp_path, words, meant):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop_appworlds.py").touch()
    command = ["python", "/venv/bin/tune", "run", *words.split()]
    error = registration.misspelt_recipe(command)
    assert (error and error.partition("; ")[2]) == (meant and f"did you mean {meant!r}?")
    monkeypatch.setattr(sys, "orig_argv", command)
    if error:
        with pytest.raises(SystemExit, match="tune run: no recipe"):
            registration.install_hook()


@pytest.mark.fault("Ctrl-C in the first seconds")
def test_ctrl_c_while_libraries_are_imported_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "orig_argv", ["python", "/venv/bin/tune", "run", "loop_appworld"])
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(registration, "starts_again", lambda *_: False)
    monkeypatch.setattr(registration, "register", lambda registry: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as `loop train` leaves it
    registration.install_hook()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, set())
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert capsys.readouterr().err == "tune run: stopped\n"
    passed_on = SignalException("Process 1 got signal: 2", signal.SIGINT)
    sys.excepthook(SignalException, passed_on, None)
    assert capsys.readouterr().err == "tune run: stopped\n"
    sys.excepthook(ValueError, ValueError("boom"), None)
    assert "ValueError: boom" in capsys.readouterr().err


HOOK = TABLES["hook"]


@pytest.fixture(scope="module")
def editable(tmp_path_factory):
    """A checkout, and the site-packages of an environment in which it is installed as editable."""
    checkout, installed = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("installed")
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    parts = {"recipes", *(package.partition(".")[0] for package in packages)} - {"loop_recipes"}
    files = ["README.md", "LICENSE", "pyproject.toml", "setup.py", "torchtune_loop_hook.py"]
    subprocess.run(["cp", "-r", *files, *parts, checkout], cwd=ROOT, check=True)
    program = f"from setuptools.build_meta import build_editable; build_editable({str(installed)!r})"
    subprocess.run([sys.executable, "-c", program], cwd=checkout, check=True, capture_output=True, timeout=COMMAND_S)
    zipfile.ZipFile(next(installed.glob("*.whl"))).extractall(installed)
    for file in installed.glob("*.data/purelib/*"):
        file.rename(installed / file.name)
    return checkout, installed


@pytest.mark.slow
@pytest.mark.fault("a checkout that was moved: no program of the environment imports torch")
@pytest.mark.parametrize(
    ("lost", "program", "hooks", "said"), TABLES["torch_is_imported_whatever_becomes_of_the_checkout"]
)
def test_torch_is_imported_whatever_becomes_of_the_checkout(editable, lost, program, hooks, said):
    checkout, installed = editable
    away = checkout.with_name("away")
    if lost:
        (checkout / lost).rename(away)
    try:
        command = [sys._base_executable, "-I", "-c", HOOK, installed, program]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S)
    finally:
        if lost:
            away.rename(checkout / lost)
    assert (done.returncode, done.stdout.strip()) == (0, hooks), done.stderr
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == bool(said)
