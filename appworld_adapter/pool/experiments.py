"""An evaluation in AppWorld's own layout, one experiment per policy, way of sampling and run.

    appworld evaluate <experiment> <split> --root <output_dir>/final_states

then grades the very same final states, and its TGC and SGC are those of the report. `appworld pack` takes the same
folders for the leaderboard.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from agent_environments.protocol import EnvironmentFault, FinishedRuns
from appworld_adapter.pool.run_folder import kept_state
from loop_formats.run_files import copy_folder, write_whole


def _name(policy: str, sampling: str, run: int, split: str) -> str:
    """Return an experiment's name for `appworld pack`: lower case, digits, - and _, with the split at the end."""
    name = re.sub(r"[^a-z0-9]+", "-", policy.lower()).strip("-")
    if name != policy:  # policies that differ in other characters alone keep two names
        name = f"{name}-{hashlib.sha256(policy.encode()).hexdigest()[:6]}".strip("-")
    return f"{name}-{re.sub(r'[^a-z0-9]+', '-', sampling.lower().replace('=', ''))}-run{run}_{split}"


def write_experiments(runs: FinishedRuns, worlds: Path, dataset_root: Path, root: Path) -> list[str]:
    """Write one experiment per run under ``root``; return the experiments' names.

    A state that does not count is a failure, but the engine cannot see this in the state. So the task's start state is
    written in its place.

    Args:
        runs: their split is a split of the dataset, or any name for the tasks of the states. The engine finds it as a
            split of ``root``, whose other data are links to the dataset's data.
        worlds: the folder in which the node's pool kept the states (its ``experiments_root``).
        dataset_root: folder that holds ``data/``.

    Raises:
        EnvironmentFault: a state is missing; the node was started without ``final_states``.
    """
    split = split_name(runs.split)
    tasks = list(dict.fromkeys(task for task, _ in runs.states))
    _write_data(root / "data", dataset_root / "data", split, tasks)
    names: dict[int, str] = {}
    for (task, run), rollout in runs.states.items():
        name = names.setdefault(run, _name(runs.policy, runs.sampling, run, split))
        target = root / "experiments" / "outputs" / name / "tasks" / task
        shutil.rmtree(target, ignore_errors=True)
        if rollout is None:
            copy_folder(dataset_root / "data" / "tasks" / task / "dbs", target / "dbs")
        else:
            state_folder = kept_state(worlds, rollout, task)
            if state_folder is None:
                raise EnvironmentFault(
                    f"the final state of {rollout} is not in {worlds}; it was not kept, so give another output_dir"
                )
            copy_folder(state_folder, target)
    return [names[run] for run in sorted(names)]


def split_name(split: str) -> str:
    """Return a split's name in a form that the engine accepts: ``train_1_2`` for ``train:1,2``."""
    return re.sub(r"[^a-z0-9]+", "_", split.lower()).strip("_")


def _write_data(data: Path, dataset: Path, split: str, tasks: Sequence[str]) -> None:
    """Make ``data`` a folder of links to the files of ``dataset``; add a split of ``tasks`` if the split is missing."""
    if data.is_symlink():
        data.unlink()
    (data / "datasets").mkdir(parents=True, exist_ok=True)
    lists = [path.relative_to(dataset) for path in (dataset / "datasets").iterdir()]
    for name in [path.relative_to(dataset) for path in dataset.iterdir() if path.name != "datasets"] + lists:
        (data / name).unlink(missing_ok=True)
        (data / name).symlink_to((dataset / name).resolve())
    if not (dataset / "datasets" / f"{split}.txt").exists():
        write_whole(data / "datasets" / f"{split}.txt", "".join(f"{task}\n" for task in tasks))
