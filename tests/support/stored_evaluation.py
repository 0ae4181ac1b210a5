"""A stored evaluation of AppWorld, reported again."""

import io
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

from rich.console import Console

from loop_recipes.evaluation.collect import Cell
from loop_recipes.evaluation.config import PolicyUnderTest, SamplingConfig
from loop_recipes.evaluation.report import (
    Protocol,
    compare_cells,
    read_report,
    score_cells,
    terminal_table,
    write_report,
)

STORED = Path(__file__).parents[1] / "loop_recipes/evaluation/stored_evaluation"
SAMPLINGS = {"T=0": SamplingConfig(runs=1), "T=1": SamplingConfig(temperature=1.0, runs=3)}


@dataclass(frozen=True)
class Config:
    """Stands for the config, which a report repeats."""

    output_dir: str = "runs/paper/evaluation"
    tasks: list[str] = field(default_factory=list)


def report_again(folder, environment, renamed=None, width=180):
    """Write the report of the stored results anew; returns what a terminal shows of it."""
    folder.mkdir(exist_ok=True)
    _, named = read_report(STORED)
    for side in named:
        side.results[:] = [replace(one, task_id=(renamed or {}).get(one.task_id, one.task_id)) for one in side.results]
    tasks = list(dict.fromkeys(result.task_id for result in named[0].results))
    cells = [
        (
            Cell(
                PolicyUnderTest(side.name, None, "base"),
                SAMPLINGS[side.sampling],
                SimpleNamespace(id=f"eval-{side.name}-{side.sampling}", rollouts_per_task=3, tasks=tasks),
            ),
            side.results,
        )
        for side in named
    ]
    protocol = Protocol(
        environment=environment,
        dataset="appworld",
        split="dev",
        tasks=tasks,
        difficulties={task: 1 + int(task.startswith("2")) for task in tasks},
        model="models/Qwen2.5-32B-Instruct",
        limits={"max_turns": 50, "max_tokens_per_turn": 1500, "max_context": 32000, "episode_deadline_s": 1800.0},
        seed=0,
        level=0.95,
        resamples=300,
        packages={"torchtune-loop": "0.1", "appworld": "0.1.3"},
        groups={"all tasks": tasks, "easy": tasks[:3]},
    )
    scored = score_cells(cells, protocol)
    write_report(folder, Config(), protocol, scored, compare_cells(scored, protocol))
    shown = Console(file=io.StringIO(), width=width)
    terminal_table(protocol, scored, shown)
    return shown.file.getvalue()
