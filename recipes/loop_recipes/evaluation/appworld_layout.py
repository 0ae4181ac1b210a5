"""An evaluation in AppWorld's own layout, one experiment per policy, way of sampling and run.

    appworld evaluate <experiment> <split> --root <output_dir>/appworld

then grades the very same final states, and its TGC and SGC are those of the report. `appworld pack` takes the same
folders for the leaderboard.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from appworld_adapter.pool.run_folder import kept_state
from loop_recipes.evaluation.scores import TaskResult


class MissingState(RuntimeError):
    """The final state of an episode is not where the node was told to keep it."""


def experiment_name(policy: str, sampling: str, run: int, split: str) -> str:
    """Lower case, letters, digits, - and _, and the split at its end: what `appworld pack` asks of a name."""
    stem = re.sub(r"[^a-z0-9-]+", "-", f"{policy}-{sampling}-run{run}".lower().replace("=", "")).strip("-")
    return f"{stem}_{split}"


def write_experiments(
    results: Sequence[TaskResult], policy: str, sampling: str, split: str, worlds: Path, dataset_root: Path, root: Path
) -> list[str]:
    """Write one experiment per run under ``root``; returns their names.

    An attempt over budget, or without a rollout, counts as a failure, which the engine cannot see from a state alone:
    the start state of its task is written in place of the state it reached.

    Args:
        worlds: the folder that the node's pool kept the states in (its ``experiments_root``).
        dataset_root: folder that holds ``data/``; ``root`` gets a link to it.

    Raises:
        MissingState: a state is not there; the node was started without ``appworld_experiments``.
    """
    root.mkdir(parents=True, exist_ok=True)
    link = root / "data"
    link.unlink(missing_ok=True)
    link.symlink_to((dataset_root / "data").resolve())
    names: dict[int, str] = {}
    for result in results:
        name = names.setdefault(result.run, experiment_name(policy, sampling, result.run, split))
        target = root / "experiments" / "outputs" / name / "tasks" / result.task_id
        shutil.rmtree(target, ignore_errors=True)
        if result.rollout_id is None or result.over_budget:
            shutil.copytree(dataset_root / "data" / "tasks" / result.task_id / "dbs", target / "dbs")
        else:
            state = kept_state(worlds, result.rollout_id, result.task_id)
            if state is None:
                raise MissingState(
                    f"the final state of {result.rollout_id} is not in {worlds}; it was not kept, so give another "
                    "output_dir"
                )
            shutil.copytree(state, target)
    return [names[run] for run in sorted(names)]
