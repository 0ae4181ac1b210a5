"""Policies made by commands and scored on held-out tasks; shared by algorithms.py, table_one.py and learn_worlds.py.

A policy is made in a folder of its own, step by step (:class:`~loop_recipes.steps.Steps`), and scored by
``eval_appworld`` in the folder ``evaluation`` there. Several seeds of one setting are several runs over the same tasks.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_environments.description import Description
from appworld_adapter.pool.forked import AppWorldPool
from loop_recipes.evaluation.comparison import compare, comparison_tables
from loop_recipes.evaluation.scores import Figure, NamedResults, Score, TaskResult, score
from loop_recipes.evaluation.tables import to_markdown
from loop_recipes.steps import Steps, tune

EVALUATION = "evaluation"
"""The folder of a policy's evaluation, in the folder that it was made in."""
WINDOW = 5
"""Iterations at the beginning or the end of a run that a mean is taken over."""
# 97.5 % quantiles of Student's t by degrees of freedom.
T_QUANTILE = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class Algorithm:
    """An algorithm over tiny_cpu: its name in a table, the word that chooses it, what the small scale changes in it.

    ``rate`` is its learning rate where none is searched, by the search in docs/results/algorithms.md; None: that of
    tiny_cpu, 6e-4.
    """

    label: str
    chosen: str | None = None
    overrides: tuple[str, ...] = ()
    rate: float | None = None

    def command(self, run: Path, seed: int, iterations: int, overrides: Sequence[str]) -> list[str]:
        """Return ``tune run`` of one run of so many iterations, which goes on where it was stopped."""
        own = [word.format(twentieth=max(1, round(iterations / 20))) for word in self.overrides]
        words = [f"output_dir={run.resolve()}", f"seed={seed}", f"max_iterations={iterations}"]
        words += ["stop.iterations_without_signal=null", "resume_from_checkpoint=True", *own, *overrides]
        chosen = [] if self.chosen is None else [self.chosen]
        return tune("run", "loop_appworld", "--config", "loop_appworld/tiny_cpu", *chosen, *words)


ALGORITHMS = {
    "loop_token": Algorithm("LOOP (token)"),
    "loop_turn": Algorithm("LOOP (turn)", "algorithm=loop_turn"),
    "loop_bandit": Algorithm("LOOP (bandit)", "algorithm=loop_bandit"),
    "loop_rwnorm": Algorithm("LOOP RwNorm", "algorithm=loop_rwnorm", rate=1.2e-3),
    "rloo": Algorithm("RLOO", "algorithm=rloo", rate=2.4e-3),
    "grpo": Algorithm("GRPO", "algorithm=grpo", rate=2.4e-3),
    "grpo_no_kl": Algorithm("GRPO no KL", "algorithm=grpo_no_kl", rate=2.4e-3),
    # The paper's ten iterations of critic warm-up are a twentieth of its run.
    "ppo_critic": Algorithm(
        "PPO (critic)", "algorithm=ppo_critic", ("credit.critic.warmup_iterations={twentieth}",), rate=1.2e-3
    ),
    "expert_iteration": Algorithm("EI", "algorithm=expert_iteration"),
    "dmpo": Algorithm("DMPO", "algorithm=dmpo"),
    "turn_credit": Algorithm("LOOP, credit by critic", "algorithm=turn_credit"),
    "turn_branches": Algorithm(
        "LOOP, credit by branches",
        "algorithm=turn_branches",
        ("credit.turns.continuations=1",),
    ),
    "shuffled": Algorithm("shuffled (control)", None, ("advantage=loop_recipes.algorithm.advantages.Shuffled",)),
}


@dataclass(frozen=True)
class HeldOut:
    """How policies are scored: ``runs`` rollouts at temperature 1 of each of ``tasks``, for each seed; ``overrides``
    are further words of ``eval_appworld``."""

    tasks: Sequence[str]
    runs: int = 2
    overrides: tuple[str, ...] = ()

    def score(self, steps: Steps, folder: Path, policy: Path | None, seed: int, deadline_s: float | None) -> None:
        """Score ``policy`` (None: the base model) in ``folder``, unless that is done."""
        adapter = "null" if policy is None else str(policy)
        command = tune("run", "eval_appworld", "--config", "eval_appworld/tiny_cpu", f"output_dir={folder}")
        command += [f"policies=[{{name: policy, adapter: {adapter}}}]", f"seed={seed}"]
        command += [f"samplings=[{{temperature: 1.0, runs: {self.runs}}}]"]
        command += ["split=null", f"tasks={listed(self.tasks)}", *self.overrides]
        steps.run("scoring", command, folder.with_suffix(".log"), deadline_s=deadline_s)


def listed(tasks: Sequence[str]) -> str:
    """Return the tasks as a key's value on the command line; unquoted, YAML takes 1099290_1 for a number."""
    return json.dumps(list(tasks))


def joined(seeds: Iterable[Sequence[TaskResult]]) -> list[TaskResult]:
    """Join results over the same tasks, numbered as runs of one."""
    together: list[TaskResult] = []
    for results in seeds:
        before = 1 + max((result.run for result in together), default=-1)
        together += [dataclasses.replace(result, run=before + result.run) for result in results]
    return together


def held_out_score(seeds: Iterable[Sequence[TaskResult]], environment: Description = AppWorldPool.description) -> Score:
    """Return TGC, SGC and reward over all seeds; intervals are bootstraps over scenarios."""
    return score(joined(seeds), environment=environment)


def figure(value: Figure) -> str:
    """Return a percentage for a table: mean and interval."""
    return f"{value.mean:.1f} [{value.interval.low:.1f}, {value.interval.high:.1f}]"


def differences(results: Mapping[str, Iterable[Sequence[TaskResult]]]) -> list[str]:
    """Return a Markdown table: each label but the first against the first, over all seeds and paired by task."""
    first, *others = (NamedResults(label, "T=1", joined(seeds)) for label, seeds in results.items())
    appworld = AppWorldPool.description
    compared = [compare(first, other, environment=appworld) for other in others]
    return to_markdown(comparison_tables(compared, appworld)[:1]).splitlines()


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean over seeds and half the width of its 95 % interval by Student's t (nan for one seed)."""
    if len(values) < 2:
        return statistics.fmean(values), math.nan
    return statistics.fmean(values), t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def t_quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t; beyond the table the normal's by Cornish and Fisher."""
    return T_QUANTILE[degrees] if degrees < len(T_QUANTILE) else 1.96 + 2.372 / degrees + 2.82 / degrees**2


def with_interval(values: Sequence[float], digits: int) -> str:
    """Mean over seeds and its interval for a table."""
    return " ± ".join(f"{value:.{digits}f}" for value in interval(values) if not math.isnan(value))


def number(case: str, metric: str, value: float, unit: str) -> dict[str, Any]:
    """Return a figure as ``experiments/results/*.json`` have it."""
    return {"case": case, "metric": metric, "value": round(value, 4), "unit": unit}


def put_into(document: Path, mark: str, text: str, image: Path | None = None, caption: str = "") -> None:
    """Replace what stands between the markers of ``document``; a picture goes into ``images`` beside it."""
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    content = document.read_text()
    if begin not in content or end not in content:
        sys.exit(f"{document} lacks the lines {begin} and {end}; put them where the table shall stand")
    if image is not None:
        images = document.with_name("images")
        images.mkdir(exist_ok=True)
        shutil.copyfile(image, images / image.name)
        text = f"{text}\n\n![{caption}](images/{image.name})"
    section = f"{begin}\n{text}\n{end}"
    document.write_text(re.sub(f"{re.escape(begin)}.*{re.escape(end)}", lambda _: section, content, flags=re.DOTALL))
