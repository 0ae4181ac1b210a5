"""The grader: the only process that reads the ground truth, and it runs no agent code.

It is given the folder in which a world process saved its state, and evaluates that. One child per grade: a fresh copy
of the engine's caches, and a deadline that can be enforced by killing it.
"""

from __future__ import annotations

import os
from typing import Any

import databases
from appworld import evaluate_task, update_root
from appworld.common.path_store import path_store
from appworld.task import Task
from channel import Channel


class GraderServer:
    """What a grader server's children do."""

    def __init__(self, settings: dict[str, Any]) -> None:
        update_root(settings["root"])

    helper = None

    def warm_up(self, task_id: str) -> dict[str, Any]:
        """Evaluate the untouched state of one task, so that children inherit the code and the tables' definitions."""
        experiment = "warm-up-grader"
        folder = os.path.join(path_store.experiment_outputs, experiment, "tasks", task_id)
        os.makedirs(folder, exist_ok=True)
        os.symlink(Task.load(task_id).models_from_db_home_path, os.path.join(folder, "dbs"))
        evaluate_task(task_id, experiment, save_report=False)
        databases.forget()
        databases.preload(copies=2)  # the state at the start of the task and the one at its end
        os.unlink(os.path.join(folder, "dbs"))
        os.removedirs(folder)
        return {}

    def serve(self, owner: Channel) -> None:
        """Grade one experiment, then exit."""
        request = owner.receive()
        try:
            tracker = evaluate_task(request["task_id"], request["experiment"], save_report=False)
            answer = {"ok": True, **tracker.to_dict()}
        except Exception as error:
            # A state that cannot be evaluated is the episode's failure; what the owner makes of it is its business.
            answer = {"ok": False, "error": "ungradable", "message": f"{type(error).__name__}: {error}"[:500]}
        owner.send(answer)
