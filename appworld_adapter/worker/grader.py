"""The grader: the only process that reads the ground truth, and it runs no agent code.

It gets the folder in which a world process saved its state, and evaluates that. Each grade runs
in a child process of its own, which has a fresh copy of the engine's caches and is killed at the deadline.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import clock
import databases
import sandbox
from appworld import evaluate_task, update_root
from appworld.common.path_store import path_store
from appworld.evaluator import TestTracker
from appworld.task import Task
from channel import Channel


class GraderServer:
    """The operations of a grader server's children."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._memory_mb = settings["memory_mb"]
        update_root(settings["root"])

    helper = None

    def warm_up(self, task_id: str) -> dict[str, Any]:
        """Evaluate the untouched state of one task, so that children inherit the code and the tables' definitions."""
        _evaluate_untouched(task_id)
        databases.forget()
        clock.freeze()
        databases.preload(copies=2)  # the state at the start of the task and the one at its end
        return {}

    def serve(self, owner: Channel) -> None:
        """Grade one experiment, or the task's untouched state if the experiment is None; then exit."""
        request = owner.receive()
        sandbox.limit_memory(self._memory_mb)  # an agent can write hundreds of megabytes of rows
        try:
            if request["experiment"] is None:
                tracker = _evaluate_untouched(request["task_id"])
            else:
                tracker = evaluate_task(request["task_id"], request["experiment"], save_report=False)
            # Requirements are the dataset's words; the reason of a failure may hold the agent's, of any length.
            passes, failures = (
                [{"requirement": test["requirement"], "label": test["label"]} for test in tests]
                for tests in (tracker.passes, tracker.failures)
            )
            answer = {
                "ok": True,
                "success": tracker.success,
                "num_tests": tracker.num_tests,
                "passes": passes,
                "failures": failures,
            }
        except Exception as error:
            answer = {"ok": False, "message": f"{type(error).__name__}: {error}"[:500]}
        owner.send(answer)


def _evaluate_untouched(task_id: str) -> TestTracker:
    experiment = f"untouched-{os.getpid()}"
    folder = os.path.join(path_store.experiment_outputs, experiment, "tasks", task_id)
    os.makedirs(folder, exist_ok=True)
    try:
        os.symlink(Task.load(task_id).models_from_db_home_path, os.path.join(folder, "dbs"))
        return evaluate_task(task_id, experiment, save_report=False)
    finally:
        shutil.rmtree(os.path.join(path_store.experiment_outputs, experiment), ignore_errors=True)
