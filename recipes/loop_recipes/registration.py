"""Makes our recipes known to the `tune` command line.

torchtune has no plug-in point: `tune ls`, `tune run` and `tune cp` read the module-level list
`torchtune._recipe_registry._ALL_RECIPES`. The `tune` executable imports torch before it reads that list, and torch
calls every entry point of the group `torch.backends` at the end of its import; :func:`install_hook` is ours. It must
stay cheap and must never raise, because every program that imports torch in this environment runs it. In a program that
is not a `tune run` of a recipe of ours it does nothing else, but a `tune run` that misspells one ends with one line.

A run of ours loads torch before any module of ours can say how threads of OpenMP wait
(`loop_plumbing/start.py`), so it is started once more, with that variable, before it has done anything.
"""

import importlib
import importlib.abc
import importlib.machinery
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from loop_plumbing.names import did_you_mean, similar_names
from loop_plumbing.start import prepare_process
from loop_recipes.paths import RECIPES, config_files, recipes_folder

_REGISTRY = "torchtune._recipe_registry"


def register(registry) -> None:
    """Append our recipes to the torchtune registry module, with absolute paths, once.

    The configs of recipe ``R`` are the files that it runs by themselves; ``--config R/name`` names one.
    """
    # `tune cp` and `tune validate` read configs too, whose paths are resolved by these.
    importlib.import_module("loop_recipes.config.resolvers")
    folder = recipes_folder()
    known = {recipe.name for recipe in registry._ALL_RECIPES}
    for name in RECIPES:
        file = folder / f"{name}.py"
        if name in known or not file.exists():
            continue
        configs = [
            registry.Config(name=f"{name}/{config}", file_path=str(path))
            for config, path in config_files(name)["machine"].items()
        ]
        registry._ALL_RECIPES.append(
            registry.Recipe(
                name=name,
                file_path=str(file),
                configs=configs,
                supports_distributed=name in ("loop_appworld", "sft_appworld"),
            )
        )


class _RegistryFinder(importlib.abc.MetaPathFinder):
    """Lets torchtune's registry load as usual, then registers our recipes in it."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_then_register(module):
            load(module)
            try:
                register(module)
            except Exception as error:
                print(f"torchtune-loop: recipes not registered: {error!r}", file=sys.stderr)

        spec.loader.exec_module = load_then_register  # type: ignore[method-assign]
        return spec


def starts_again(command: list[str], at_start: bytes) -> bool:
    """Return whether this process is a run of ours whose OpenMP threads spin while they wait.

    Args:
        command: the process's command line: interpreter, program, arguments.
        at_start: its environment at the start, as in `/proc/self/environ`.
    """
    names = {variable.partition(b"=")[0] for variable in at_start.split(b"\0")}
    chosen = names & {b"OMP_WAIT_POLICY", b"GOMP_SPINCOUNT"} or b"OMP_NUM_THREADS=1" in at_start.split(b"\0")
    return is_our_run(command) and not chosen


def is_our_run(command: list[str]) -> bool:
    """Return whether a process that was started by ``command`` is a `tune run` of a recipe of ours."""
    return not RECIPES.keys().isdisjoint(words_of_run(command))


def words_of_run(command: list[str]) -> list[str]:
    """Return the words after `tune run`; [] if ``command`` is another one."""
    return command[3:] if [Path(word).name for word in command[1:3]] == ["tune", "run"] else []


def misspelt_recipe(command: list[str]) -> str | None:
    """Return the error for a `tune run` that misspells a recipe of ours; None for any other command, and if a module or
    a file has that name."""
    words = words_of_run(command)
    words = words[: words.index("--config") if "--config" in words else None]
    name = next((word for word in reversed(words) if word.replace("-", "_").isidentifier() and word[0] != "-"), "")
    near = similar_names(name, [*RECIPES], cutoff=0.8)
    taken = name in RECIPES or Path(name).exists() or Path(f"{name}.py").exists()
    return f"tune run: no recipe {name!r}; {did_you_mean(near)}" if near and not taken and not find_spec(name) else None


def say_stopped(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Serve as ``sys.excepthook``: print one line in place of a traceback if Ctrl-C comes while libraries are imported,
    or if torchrun raises ``SignalException`` because it passes a Ctrl-C on to its ranks."""
    if issubclass(kind, KeyboardInterrupt) or kind.__name__ == "SignalException":
        print("tune run: stopped", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def install_hook() -> None:
    """Entry point of the group `torch.backends`: arrange for :func:`register`, now or when the registry is imported."""
    if is_our_run(sys.orig_argv):
        _begin_our_run()
    elif error := misspelt_recipe(sys.orig_argv):
        sys.exit(error)
    try:
        if _REGISTRY in sys.modules:
            register(sys.modules[_REGISTRY])
        elif not any(isinstance(finder, _RegistryFinder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _RegistryFinder())
    except Exception as error:
        print(f"torchtune-loop: recipes not registered: {error!r}", file=sys.stderr)


def _begin_our_run() -> None:
    """Prepare the process of a `tune run` of ours, which has done nothing but import torch."""
    sys.excepthook = say_stopped
    prepare_process()
    try:
        if starts_again(sys.orig_argv, Path("/proc/self/environ").read_bytes()):
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    except OSError:  # it waits as it did
        pass
    # From here on Ctrl-C works again, which `loop train` or the restart above has blocked.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
