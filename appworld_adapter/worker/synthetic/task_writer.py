"""Writes one task, and what all tasks share, in the engine's own on-disk layout."""

from __future__ import annotations

import datetime
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import evaluation_program
from appworld.apps.model_lib import ModelHashHandler
from appworld.collections.api_docs import ApiDocCollection
from appworld.common.constants import CANARY_STRING, DB_VERSION
from base_world import Engine
from people import Person
from plan import Plan, Stage, TemplateInfo

NO_OP_PASSES = ("only",)


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def write_api_docs(folder: Path) -> None:
    """Writes the documentation that agents read, taken from the installed engine."""
    for app, documents in ApiDocCollection.build().items():
        if app != "admin":
            marked = {name: {**document, "canary_string": CANARY_STRING} for name, document in documents.items()}
            path = folder / "standard" / f"{app}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(marked, indent=1) + "\n", encoding="utf-8")


def write_task(
    engine: Engine,
    base_folder: Path,
    folder: Path,
    template: TemplateInfo,
    person: Person,
    rng: random.Random,
    phrasing: int,
    split: str,
) -> Plan:
    """Opens a copy of the base world, lets the template set its stage there, and writes the task into ``folder``."""
    now = datetime.datetime(2023, 5, rng.randrange(8, 27), rng.randrange(12, 20), rng.randrange(60), 0)
    engine.open_copy(str(base_folder), f"task_input-{folder.name}")
    plan = template.build(Stage(engine, person, rng, now, phrasing))
    engine.set_time(now)
    _add_supervisor(engine, person, plan.instruction)
    engine.models.save(str(folder / "dbs"), format="changes", delete_if_exists=True)
    # Written by ourselves because the order of the engine's own file depends on what ran before.
    hashes = ModelHashHandler.data[engine.models.to_db_home_path]
    write_json(folder / "dbs" / "model_hashes.json", {app: dict(counts) for app, counts in hashes.items()})
    engine.close_copy()
    specs = {
        "instruction": plan.instruction,
        "supervisor": person.identity,
        "datetime": now.isoformat(),
        "db_version": DB_VERSION,
        "canary_string": CANARY_STRING,
    }
    write_json(folder / "specs.json", specs)
    _write_ground_truth(folder / "ground_truth", plan, template, split)
    return plan


def _add_supervisor(engine: Engine, person: Person, instruction: str) -> None:
    supervisor = engine.models.supervisor
    record = supervisor.Supervisor.create_save(**person.identity, birthday=person.birthday, sex=person.sex)
    for app, password in person.passwords.items():
        supervisor.AccountPassword.create_save(supervisor_id=record.id, account_name=app, password=password)
    supervisor.Task.create_save(supervisor_id=record.id, instruction=instruction)


def _write_ground_truth(folder: Path, plan: Plan, template: TemplateInfo, split: str) -> None:
    script = plan.script
    solution = solution_code([turn["code"] for turn in script.turns])
    used_apis = set(re.findall(r"apis\.(\w+\.\w+)", solution))
    write_json(folder / "answer.json", plan.answer)
    write_json(folder / "public_data.json", {})
    write_json(folder / "private_data.json", {"requirements": plan.requirements})
    test_data = [
        {
            "requirement": requirement["text"],
            "label": "no_op_pass" if requirement["kind"] in NO_OP_PASSES else "no_op_fail",
        }
        for requirement in plan.requirements
    ]
    write_json(folder / "test_data.json", test_data)
    write_json(folder / "required_apps.json", sorted(template.apps))
    metadata = {
        "mode": "full",
        "difficulty": template.difficulty,
        "num_apps": len(template.apps),
        "num_apis": len(used_apis),
        "num_api_calls": len(re.findall(r"apis\.\w+\.\w+\(", solution)),
        "num_solution_code_lines": sum(len(turn["code"].splitlines()) for turn in script.turns),
    }
    write_json(folder / "metadata.json", metadata)
    write_json(folder / "turns.json", script.turns)
    demonstration = {
        "template": template.name,
        "split": split,
        "difficulty": template.difficulty,
        "apps": list(template.apps),
        "roles": script.roles,
        "slips": script.slips,
        "answer": plan.answer,
    }
    write_json(folder / "demonstration.json", demonstration)
    for name in ("solution.py", "compiled_solution.py"):
        (folder / name).write_text(solution, encoding="utf-8")
    shutil.copyfile(evaluation_program.__file__, folder / "evaluation.py")


def solution_code(blocks: list[str]) -> str:
    """The turns' code as one function, which is what ``appworld verify tasks`` runs."""
    body = "\n".join(f"    {line}" for block in blocks for line in block.splitlines())
    return f"def solution(apis, requester):\n{body}\n"
