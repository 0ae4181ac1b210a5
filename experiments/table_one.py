"""All rows of the LOOP paper's Table 1 on the tiny policy, with the same number of sampled rollouts each.

    python experiments/table_one.py --output runs/table_one        # every row, three seeds: hours
    python experiments/table_one.py --table-only --records experiments/results/tiny_policy.jsonl --seeds 0 1 2 3 4 \\
        --budget 300 --docs docs/results/algorithms.md -- collection.tasks_per_iteration=5      # the tables there
    python experiments/table_one.py --rows base rft loop_token --seeds 0 --budget 600
    python experiments/table_one.py --output runs/smoke --seeds 0 --budget 24 --epochs 1 --train-tasks 2 \\
        --held-out-tasks 3 --runs 1                               # does every row run?

``--budget`` is the number of rollouts that a row may sample to learn from (SFT-GT and base sample none). Online rows
take it in iterations, without early stop; RFT samples until tasks are solved or the budget is spent; DPO-MCTS divides
it among the tasks' trees. Scoring is not counted. Every policy is the last one of its training, scored on held-out
tasks at temperature 1, each seed as a run: TGC and SGC in percent with a 95 % bootstrap interval over scenarios.

Each row and seed has a folder, whose steps are done once: the same command again goes on where it was stopped. When it
is scored, it leaves a record in ``--records`` (records.py). A record that came from elsewhere stands for its row, which
is then not made: of another machine, or of ``algorithms.py``, which can search the online rows' learning rates. The
tables are made of the records that are there, with ``--table-only`` on any machine; a row that lacks some of the seeds
stands in them with those it has. What follows ``--`` goes to every config of loop_appworld.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from records import Record, came_from_elsewhere, read_records
from scored_runs import (
    ALGORITHMS,
    EVALUATION,
    Algorithm,
    HeldOut,
    differences,
    figure,
    held_out_score,
    listed,
    number,
    put_into,
    with_interval,
)

from appworld_adapter.dataset import load_split
from loop_contrib.rft.collect_solved import SOLVED
from loop_contrib.turn_pairs import TURN_PAIRS
from loop_formats.schema import ConfigError, require
from loop_recipes.config.files import compose, split_words
from loop_recipes.steps import StepFailed, Steps, module, newest_policy, tune

TEMPERATURES = ("0.2", "0.4", "0.6", "0.8", "1.0")
"""Temperatures of RFT. The paper has twenty; a budget for two cores would end within the lowest of them."""
RUN, ROLLOUTS = "run", "rollouts"
"""Folders in that of a row and seed: of its training, and of sampling alone."""


@dataclass(frozen=True)
class Plan:
    """The settings of all rows. ``overrides`` are for configs of loop_appworld, ``epochs`` those of training on fixed
    sets (None: as in their configs)."""

    budget: int
    overrides: list[str]
    train_tasks: list[str]
    held_out: HeldOut
    epochs: int | None
    deadline_s: float

    @property
    def config(self) -> DictConfig:
        return compose("tiny_cpu", self.overrides)

    @property
    def iterations(self) -> int:
        """Iterations of the online rows."""
        collection = self.config.collection
        return self.budget // (collection.tasks_per_iteration * collection.rollouts_per_task)

    @property
    def tree_iterations(self) -> int:
        """Rollouts of a task beside the first two of its tree."""
        return self.budget // len(self.train_tasks) - 2

    def check(self) -> None:
        """
        Raises:
            ConfigError: the budget is too small for a row.
        """
        tasks = len(self.train_tasks)
        require(self.iterations >= 1, f"--budget {self.budget} is too small for one iteration of the online rows")
        require(self.tree_iterations >= 1, f"--budget {self.budget} is too small for trees of {tasks} tasks")


@dataclass(frozen=True)
class Attempt:
    """A row with a seed, in its folder."""

    plan: Plan
    steps: Steps
    folder: Path
    seed: int

    def sample(self, command: str, *options: str) -> Path:
        """Sample by a command that takes a config of loop_appworld; returns its output folder."""
        out = self.folder / ROLLOUTS
        words = ["loop_appworld/tiny_cpu", f"output_dir={out}", f"seed={self.seed}", *self.plan.overrides]
        self._run("sampling", module(command, *words, *options))
        return out

    def learn(self, logs: Path, *chosen: str) -> Path:
        """Train on a fixed set by RFT, or by an algorithm that is chosen; returns the last policy."""
        epochs = [] if self.plan.epochs is None else [f"max_iterations={self.plan.epochs}"]
        words = [f"output_dir={self.folder / RUN}", f"seed={self.seed}", f"rollouts.logs=[{logs}]", *epochs]
        words = [*chosen, *words, "resume_from_checkpoint=True"]
        command = tune("run", "sft_appworld", "--config", "sft_appworld/tiny_cpu", *words)
        self._run("training", command, self.folder / RUN)
        return newest_policy(self.folder / RUN)

    def online(self, algorithm: Algorithm) -> Path:
        """Train by reinforcement learning, or else on rollouts of its own policy; returns the last policy."""
        whole = self.plan.config.collection.rollouts_per_task
        exact = [f"collection.min_rollouts_per_task={whole}", "collection.min_rollouts_fraction=1.0"]
        rate = [] if algorithm.rate is None else [f"optimizer.lr={algorithm.rate:g}"]
        words = [*exact, *rate, *self.plan.overrides]
        command = algorithm.command(self.folder / RUN, self.seed, self.plan.iterations, words)
        self._run("training", command, self.folder / RUN)
        return newest_policy(self.folder / RUN)

    def solutions(self) -> Path:
        """Write ground-truth solutions of the training tasks as rollouts."""
        environment, out = self.plan.config.node.environment, self.folder / "solutions"
        command = module("loop_contrib.ground_truth.ground_truth", str(environment.root), "--out", str(out))
        command += ["--model", str(self.plan.config.model.path), "--prompt", str(environment.prompt)]
        self._run("writing solutions", [*command, "--split", str(self.plan.config.collection.split)])
        return out

    def _run(self, name: str, command: list[str], training: Path | None = None) -> None:
        log = self.folder / f"{name.replace(' ', '_')}.log"
        self.steps.run(name, command, log, training=training, deadline_s=self.plan.deadline_s)


def _base(attempt: Attempt) -> None:
    """Nothing is learned."""


def _sft_gt(attempt: Attempt) -> Path:
    return attempt.learn(attempt.solutions(), "algorithm=sft_gt")


def _rft(attempt: Attempt) -> Path:
    budget = str(attempt.plan.budget)
    options = ["--rollouts", budget, "--attempts", budget, "--temperatures", *TEMPERATURES]
    return attempt.learn(attempt.sample("loop_contrib.rft.collect_solved", *options) / SOLVED)


def _dpo_mcts(attempt: Attempt) -> Path:
    options = ["--iterations", str(attempt.plan.tree_iterations)]
    searched = attempt.sample("loop_contrib.dpo_mcts.search_trees", *options)
    return attempt.learn(searched / TURN_PAIRS, "algorithm=dpo_mcts")


def _online(name: str, attempt: Attempt) -> Path:
    return attempt.online(ALGORITHMS[name])


@dataclass(frozen=True)
class Row:
    """A row of the table: its name there, and how an attempt at it makes a policy (None: the base model)."""

    label: str
    make: Callable[[Attempt], Path | None]


def _rows() -> dict[str, Row]:
    online = ("expert_iteration", "dmpo", "ppo_critic", "rloo", "grpo", "grpo_no_kl")
    loop = ("loop_bandit", "loop_turn", "loop_token", "loop_rwnorm")
    rows = {"base": Row("base", _base), "sft_gt": Row("SFT-GT", _sft_gt), "rft": Row("RFT", _rft)}
    rows |= {"dpo_mcts": Row("DPO-MCTS", _dpo_mcts)}
    return rows | {name: Row(ALGORITHMS[name].label, partial(_online, name)) for name in (*online, *loop)}


ROWS = _rows()


def make(name: str, folder: Path, seed: int, plan: Plan, records: Path) -> None:
    """Make and score the policy of one row and seed, as far as that is not done, and write its record.

    Raises:
        StepFailed, ConfigError: a step failed, or the folder was begun with other options.
    """
    options = {
        "budget": plan.budget, "seed": seed, "overrides": plan.overrides, "epochs": plan.epochs,
        "train_tasks": plan.train_tasks, "held_out": [list(plan.held_out.tasks), plan.held_out.runs],
    }  # fmt: skip
    steps = Steps(folder, options)
    policy = ROWS[name].make(Attempt(plan, steps, folder, seed))
    plan.held_out.score(steps, folder / EVALUATION, policy, seed, plan.deadline_s)
    run = None if policy is None else folder / RUN
    logs = [folder / RUN / "node", folder / ROLLOUTS / "node"]
    Record.of_run(name, seed, plan.budget, run, logs, folder / EVALUATION).write(records)


HEAD = ["method", "seeds", "rollouts", "sampled tokens", "optimizer steps", "reward", "TGC", "SGC"]


def tables(records: Mapping[str, Sequence[Record]], reference: str = "loop_token") -> tuple[str, list[dict[str, Any]]]:
    """Return the table in Markdown with the differences to ``reference`` where it is there, and its numbers.

    Args:
        records: those of each row, at least one.
    """
    lines, numbers = [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"], []
    for name, seeds in records.items():
        score = held_out_score(record.results for record in seeds)
        counts = {
            "rollouts": [float(record.rollouts) for record in seeds],
            "sampled_tokens": [float(record.sampled_tokens) for record in seeds],
            "optimizer_steps": [float(sum(line["steps"] for line in record.iterations)) for record in seeds],
        }
        cells = [ROWS[name].label, str(len(seeds)), *(with_interval(values, 0) for values in counts.values())]
        lines.append(
            f"| {' | '.join([*cells, f'{score.reward:.3f}', figure(score.success), figure(score.group_success)])} |"
        )
        case = f"ours_{name} tiny"
        numbers += [number(case, key, sum(values) / len(values), "number") for key, values in counts.items()]
        numbers += [number(case, "reward", score.reward, "fraction")]
        for key, value in (("tgc", score.success), ("sgc", score.group_success)):
            numbers += [number(case, key, value.mean, "percent")]
            numbers += [number(case, f"{key}_low", value.interval.low, "percent")]
            numbers += [number(case, f"{key}_high", value.interval.high, "percent")]
    if reference in records and len(records) > 1:
        order = [reference, *(name for name in records if name != reference)]
        results = {ROWS[name].label: [record.results for record in records[name]] for name in order}
        lines += ["", *differences(results)]
    return "\n".join(lines), numbers


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/table_one"), help="folder of all rows")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--budget", type=int, default=900, help="sampled rollouts of each row and seed (900)")
    parser.add_argument("--epochs", type=int, help="of training on fixed sets (as in their configs)")
    parser.add_argument("--runs", type=int, default=2, help="rollouts of a held-out task for each seed (2)")
    parser.add_argument("--train-tasks", type=int, help="the first of the training split only")
    parser.add_argument("--held-out-tasks", type=int, help="the first of test_normal only")
    parser.add_argument("--records", type=Path, help="file of what is kept of each row and seed (OUTPUT/records.jsonl)")
    parser.add_argument("--table-only", action="store_true", help="of the records that are there; run nothing")
    parser.add_argument("--step-deadline-s", type=float, default=7200.0, help="longest time of one command (7200)")
    parser.add_argument("--docs", type=Path, help="put the tables between the markers in this file")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    return parser


def read_plan(args: argparse.Namespace, overrides: Sequence[str]) -> Plan:
    """
    Raises:
        ConfigError: the config, or a budget that is too small.
    """
    config = compose("tiny_cpu", overrides)
    world = config.node.environment.root
    chosen = config.collection.get("tasks") or config.collection.split
    train = load_split(world, chosen if isinstance(chosen, str) else list(chosen))[: args.train_tasks]
    own = [f"collection.tasks={listed(train)}"] if args.train_tasks else []
    own += [f"collection.tasks_per_iteration={min(len(train), config.collection.tasks_per_iteration)}"]
    held_out = HeldOut(load_split(world, "test_normal")[: args.held_out_tasks], args.runs)
    plan = Plan(args.budget, [*overrides, *own], train, held_out, args.epochs, args.step_deadline_s)
    plan.check()
    return plan


def make_all(args: argparse.Namespace, overrides: Sequence[str]) -> list[str]:
    """Make the rows and seeds, but for those whose record came from elsewhere; returns what failed.

    Raises:
        ConfigError: the plan, or a record of another budget.
    """
    plan, failures = read_plan(args, overrides), []
    # A seed of every row first, so that a table cut short can be compared too.
    for seed in args.seeds:
        for name in args.rows:
            folder = args.output / f"{name}-seed{seed}"
            if came_from_elsewhere(args.records, name, seed, args.budget, folder):
                continue
            print(f"{name}, seed {seed}", flush=True)
            started = time.monotonic()
            try:
                make(name, folder, seed, plan, args.records)
            except (StepFailed, ConfigError) as error:
                failures.append(f"{name}, seed {seed}: {error}")
                print(failures[-1], flush=True)
            print(f"{name}, seed {seed}: {time.monotonic() - started:.0f} s", flush=True)
    return failures


def main(arguments: list[str] | None = None) -> None:
    words, overrides = split_words(sys.argv[1:] if arguments is None else arguments)
    args = parser().parse_args(words)
    args.output = args.output.resolve()
    args.records = args.records or args.output / "records.jsonl"
    try:
        failures = [] if args.table_only else make_all(args, overrides)
        records = read_records(args.records, args.rows, args.seeds, args.budget)
    except (ConfigError, OSError) as error:
        sys.exit(f"table_one: {error}")
    if not records:
        sys.exit(f"table_one: {args.records} holds no record of these rows and seeds")
    text, numbers = tables(records)
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "table_one.md").write_text(text + "\n")
    print(text)
    if args.json:
        args.json.write_text(json.dumps(numbers, indent=1) + "\n")
    if args.docs:
        put_into(args.docs, "table_one", text)
    if failures:
        sys.exit(f"table_one: {len(failures)} attempt(s) failed; the same command tries them again")


if __name__ == "__main__":
    main()
