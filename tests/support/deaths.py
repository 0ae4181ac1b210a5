"""Runs that die, and what is the same of two runs however often they died."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from loop_recipes.run.metrics import MACHINE_KEYS


class Killed(BaseException):
    """Stands in for the process's sudden death."""


def train_until(recipe: Any, die_at_step: int | None = None) -> None:
    """Set a recipe up and train; ``die_at_step`` ends it in place of that optimizer step, without any cleanup."""
    recipe.setup()
    step, steps = recipe._learner.optimizer.step, []

    def counted(*args, **kwargs):
        steps.append(1)
        if len(steps) == die_at_step:
            raise Killed
        return step(*args, **kwargs)

    recipe._learner.optimizer.step = counted
    try:
        recipe.train()
    except Killed:
        recipe._lock.close()  # as the kernel does
        raise
    recipe.cleanup()


def deterministic(metrics: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics without what the machine's speed makes of them."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if not key.startswith("seconds") and key not in MACHINE_KEYS}
        for line in lines
    ]
