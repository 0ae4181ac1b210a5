"""Generates the synthetic world: a dataset in AppWorld's own on-disk layout, made of nothing but this code and a seed.

    .venv-appworld/bin/python -E appworld_adapter/worker/synthetic/generate.py --root worlds/synthetic

Runs under the AppWorld interpreter. Writes ROOT/data and, last, ROOT/dataset.json; when that file is there already and
says the same parameters, nothing is done. Everything is first written beside ROOT and then renamed into place.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from people import Person, draw_population

GENERATOR_VERSION = "v3"
TASKS_PER_SCENARIO = 3
SPLITS = ("train", "dev", "test_normal", "test_challenge")
DEFAULT = {"seed": 0, "per_template": 2, "people": 48}
"""The world of `make world`. It is the same bytes on every machine, so a test checks what doing nothing is paid in
it; worlds of other parameters are checked when they are made."""


@dataclass(frozen=True)
class DrawnScenario:
    """One template with three people and one wording."""

    scenario_id: str
    split: str
    template: str
    people: tuple[Person, ...]
    phrasing: int


def draw_scenarios(
    templates: dict, pools: dict[str, tuple[Person, ...]], per_template: int, seed: int
) -> list[DrawnScenario]:
    """Train: every train template ``per_template`` times. Dev: a fifth as many. test_normal: every train template half
    as often with people not in train, and the held-out compositions. test_challenge: the challenge templates."""
    rng = random.Random(f"scenarios {seed}")
    by_kind = {
        kind: [name for name, info in templates.items() if info.kind == kind]
        for kind in ("train", "held_out", "challenge")
    }
    half = (per_template + 1) // 2
    shuffled = rng.sample(by_kind["train"], len(by_kind["train"]))
    dev_count = max(1, len(shuffled) * per_template // 5)
    names = {
        "train": by_kind["train"] * per_template,
        "dev": [shuffled[index % len(shuffled)] for index in range(dev_count)],
        "test_normal": (by_kind["train"] + by_kind["held_out"]) * half,
        "test_challenge": by_kind["challenge"] * per_template,
    }
    scenarios = []
    for split in SPLITS:
        for index, name in enumerate(names[split]):
            digest = hashlib.sha256(f"{GENERATOR_VERSION} {seed} {split} {name} {index}".encode()).hexdigest()
            people = tuple(rng.sample(pools[split], TASKS_PER_SCENARIO))
            scenarios.append(DrawnScenario(digest[:7], split, name, people, rng.randrange(2)))
    if len({scenario.scenario_id for scenario in scenarios}) != len(scenarios):
        raise ValueError(f"two scenarios of seed {seed} have one id: choose another --seed")
    return scenarios


def generate(root: Path, seed: int, per_template: int, people: int, progress: bool = True) -> dict[str, Any]:
    """Writes the dataset under ``root`` and returns what dataset.json says."""
    population = draw_population(people, seed)
    os.environ["APPWORLD_ROOT"] = str(root)
    # The engine is imported here, after --help and bad arguments have been dealt with: it takes seconds.
    import templates_cross  # noqa: F401
    import templates_media  # noqa: F401
    import templates_phone  # noqa: F401
    import templates_todoist  # noqa: F401
    import templates_venmo  # noqa: F401
    from base_world import Engine, build_base
    from plan import TEMPLATES
    from task_writer import write_api_docs, write_json, write_task

    scenarios = draw_scenarios(TEMPLATES, population.pools, per_template, seed)
    data = root / "data"
    bar = ProgressLine(2 * len(population.people) + TASKS_PER_SCENARIO * len(scenarios), progress)
    engine = Engine(population)
    write_api_docs(data / "api_docs")
    bar.label = "people"
    build_base(engine, seed, str(data / "base_dbs"), bar.step)
    bar.label = "tasks"
    tasks: dict[str, list[str]] = {split: [] for split in SPLITS}
    for scenario in scenarios:
        for number, person in enumerate(scenario.people, start=1):
            task_id = f"{scenario.scenario_id}_{number}"
            rng = random.Random(f"task {seed} {task_id}")
            write_task(
                engine,
                data / "base_dbs",
                data / "tasks" / task_id,
                TEMPLATES[scenario.template],
                person,
                rng,
                scenario.phrasing,
                scenario.split,
            )
            tasks[scenario.split].append(task_id)
            bar.step()
    bar.close()
    (data / "datasets").mkdir()
    for split, ids in tasks.items():
        (data / "datasets" / f"{split}.txt").write_text("\n".join(ids) + "\n", encoding="utf-8")
    dataset = describe(seed, per_template, people) | {
        "scenarios": {split: len(ids) // TASKS_PER_SCENARIO for split, ids in tasks.items()},
        "tasks": {split: len(ids) for split, ids in tasks.items()},
    }
    write_json(root / "dataset.json", dataset)
    return dataset


def describe(seed: int, per_template: int, people: int) -> dict[str, Any]:
    """Name and parameters; the fingerprint of the generator's own code tells a world of older code apart."""
    code = hashlib.sha256()
    for path in sorted(Path(__file__).resolve().parent.glob("*.py")):
        code.update(path.read_bytes())
    return {
        "name": f"synthetic-{GENERATOR_VERSION}-seed{seed}-{per_template}x{people}",
        "seed": seed,
        "scenarios_per_template": per_template,
        "people": people,
        "generator": code.hexdigest()[:12],
    }


def measure_idleness(root: Path) -> None:
    """Prints what doing nothing is paid, per split, on the first task of every scenario; exits when that is success.

    In a process of its own, because the engine's databases and clock belong to one world at a time.
    """
    command = [sys.executable, "-E", str(Path(__file__).with_name("check.py")), "--root", str(root)]
    options = ["--agent", "nothing", "--every", str(TASKS_PER_SCENARIO)]
    if subprocess.run(command + options, stdout=sys.stderr, timeout=1800).returncode:
        sys.exit("generate.py: the generated dataset failed its check, so it was thrown away")


class ProgressLine:
    """A line on stderr that is rewritten on a terminal, and printed at every tenth elsewhere."""

    def __init__(self, total: int, shown: bool) -> None:
        self.total, self.done, self.shown, self.label = total, 0, shown, ""

    def step(self) -> None:
        self.done += 1
        tenth = self.done * 10 // self.total > (self.done - 1) * 10 // self.total
        if self.shown and (tenth or sys.stderr.isatty()):
            filled = 30 * self.done // self.total
            line = f"synthetic world [{'#' * filled:<30}] {self.done}/{self.total} {self.label}"
            print(line, end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.shown and sys.stderr.isatty():
            print(file=sys.stderr)


def up_to_date(root: Path, wanted: dict[str, Any]) -> bool:
    try:
        found = json.loads((root / "dataset.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and all(found.get(key) == value for key, value in wanted.items())


def may_be_replaced(root: Path) -> bool:
    """Return whether nothing but an earlier synthetic world is lost with ``root``."""
    if not root.exists():
        return True
    try:
        if not any(root.iterdir()):
            return True
        return str(json.loads((root / "dataset.json").read_text(encoding="utf-8"))["name"]).startswith("synthetic-")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def replace_folder(new: Path, old: Path) -> None:
    """Puts ``new`` in the place of ``old``, which may be there; a reader sees the one or the other."""
    retired = new.with_name(new.name + "-old")
    if old.exists():
        old.rename(retired)
    new.rename(old)
    shutil.rmtree(retired, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate the synthetic AppWorld dataset.")
    parser.add_argument("--root", type=Path, required=True, help="folder to hold data/ and dataset.json")
    parser.add_argument("--seed", type=int, default=DEFAULT["seed"])
    templates, people = DEFAULT["per_template"], DEFAULT["people"]
    parser.add_argument(
        "--scenarios-per-template", type=int, default=templates, help="train scenarios of each template"
    )
    parser.add_argument("--people", type=int, default=people, help="an even number, at least 48")
    arguments = parser.parse_args()
    if arguments.scenarios_per_template < 1:
        parser.error("--scenarios-per-template must be at least 1")
    root = arguments.root.resolve()
    parameters = (arguments.seed, arguments.scenarios_per_template, arguments.people)
    if up_to_date(root, describe(*parameters)):
        print(f"{root}: {describe(*parameters)['name']} is there already", file=sys.stderr)
        return
    if not may_be_replaced(root):
        sys.exit(f"generate.py: --root {root} holds something other than a synthetic world; give another folder")
    warnings.filterwarnings("ignore")
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{root.name}-", dir=root.parent))
    except OSError as error:
        sys.exit(f"generate.py: --root {root} cannot be created: {error.strerror}; give another folder")
    try:
        dataset = generate(temporary, *parameters)
        if parameters != tuple(DEFAULT.values()):
            measure_idleness(temporary)
        temporary.chmod(0o755)
        replace_folder(temporary, root)
    except ValueError as error:
        sys.exit(f"generate.py: {error}")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"{root}: {dataset['name']}, tasks {dataset['tasks']}", file=sys.stderr)


if __name__ == "__main__":
    main()
