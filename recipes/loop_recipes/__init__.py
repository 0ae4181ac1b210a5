"""The library behind the recipes that train and evaluate agents with LOOP.

The recipes themselves are the files beside this package; `docs/architecture.md` gives the packages and the reading
order of one iteration.

Three lines train a model on a file of functions (:func:`loop_recipes.own_task.training.train`):

    from loop_recipes import train

    train("my_tools.py", "models/SmolLM2-135M-Instruct", "max_iterations=25")
"""

import importlib
from typing import Any

import agent_environments  # noqa: F401 - before torch, for the variable that it sets


def __getattr__(name: str) -> Any:
    if name != "train":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("loop_recipes.own_task.training").train
