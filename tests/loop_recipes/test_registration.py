"""The hook that makes our recipes known to `tune`: it appends once, survives anything, and imports nothing heavy."""

import subprocess
import sys
from types import SimpleNamespace

from loop_recipes import registration
from support.waiting import COMMAND_S


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
