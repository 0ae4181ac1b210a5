"""Findings of the papers after LOOP, tried on small policies: at equal episodes, one change at a time from one base.

    python experiments/after_loop.py --output runs/after_loop        # the tiny policy, three seeds of each arm
    python experiments/after_loop.py --bed quest --seeds 1 2 --iterations 8 --output runs/after_loop_quest
    python experiments/after_loop.py --table-only --iterations 6 --docs docs/results/after_loop.md \\
        --json experiments/results/after_loop.json                  # table and figure of the records that are there
    python experiments/after_loop.py --output runs/smoke --records runs/smoke/records.jsonl --only base tokens \\
        --seeds 0 --iterations 1 --episodes 16 --held-out-tasks 3       # does it run?

The base takes eight rollouts of each task, each a mean over its tokens, no KL term, the share of tests as the return.
It steps once on all rollouts of an iteration, on the quest on each 32 of them. Each arm changes one thing and samples
as many episodes: ``--episodes`` an iteration. The tiny policy learns at the rate that the search in
docs/results/algorithms.md found for one step or for several, the quest's at its machine's. ``--bed quest`` needs
SmolLM2-135M-Instruct (`make smollm2`). A run that is done is not repeated, one that was cut off goes on, and a seed of
every arm comes first, so that what is there can be compared. The tiny policy's runs share one rollout node, which
starts once.

A scored run leaves a record (records.py), of which the table and the figure are made. A finding holds here where the
interval of the difference to the base in held-out success, over tasks and seeds, lies on the paper's side of 0, and
does not hold where it lies on the other; otherwise the two cannot be told apart.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import secrets
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from games import after_training
from matplotlib import pyplot as plt
from omegaconf import OmegaConf
from records import KEPT_METRICS, Record, read_record, read_records
from scored_runs import EVALUATION, Algorithm, HeldOut, figure, held_out_score, number, put_into

from agent_environments.description import DEFAULT_DESCRIPTION, Description
from appworld_adapter.dataset import load_split
from appworld_adapter.pool.forked import AppWorldPool
from loop_formats.run_folder import read_metrics
from loop_formats.schema import ConfigError
from loop_recipes.config.files import compose, split_words
from loop_recipes.config.loop_config import LoopConfig, read_config
from loop_recipes.evaluation.comparison import Comparison, compare, pool_seeds
from loop_recipes.evaluation.report import read_report
from loop_recipes.evaluation.scores import NamedResults, TaskResult
from loop_recipes.plots.style import COLOURS
from loop_recipes.steps import StepFailed, Steps, newest_policy
from rollout_server.client import RolloutClient
from rollout_server.node_process import NodeProcess

BASE, GROUP = "base", 8
LAG_METRICS = "lag_mean", "lag_p90"
LAST = 3
"""Iterations at the end of a run that a mean is taken over."""
TOKEN_ENV = "AFTER_LOOP_TOKEN"
ONE_STEP_RATE, RATE = 2.4e-3, 6e-4
QUEST, SMOLLM2 = "examples/quest.py", "models/SmolLM2-135M-Instruct"
HOLDS, FAILS, OPEN = "holds", "does not hold", "cannot be told apart"


@dataclass(frozen=True)
class Arm:
    """A change: its name in the table, the words that make it, the rollouts of a task, the claim of the papers on it,
    and on which side of the base that puts it (0: within their noise)."""

    label: str
    words: tuple[str, ...] = ()
    group: int = GROUP
    claim: str = ""
    side: int = 0
    rate: float = ONE_STEP_RATE

    def collected(self, episodes: int) -> list[str]:
        """Return the words for so many episodes an iteration, all of them waited for."""
        words = {"rollouts_per_task": self.group, "min_rollouts_per_task": self.group, "min_rollouts_fraction": 1.0}
        words["tasks_per_iteration"] = episodes // self.group
        return [f"collection.{key}={value}" for key, value in words.items()]


SHUFFLED = "advantage=loop_recipes.algorithm.advantages.Shuffled"
EPOCHS = ("update.epochs=2", "update.minibatch_rollouts=8")
TINKER = "a bound of 3: 94.5 for 94.0"


def lag(most: int) -> tuple[str, str]:
    """Return the words for a stream in which a turn is at most so many versions old."""
    return "collection.stream=true", f"collection.max_policy_lag={most}"


ARMS = {
    BASE: Arm("base: groups of 8"),
    "group_4": Arm("groups of 4", group=4, claim="small groups lose (8 for 32: -16.4)", side=-1),
    "group_16": Arm("groups of 16", group=16, claim="large groups win", side=1),
    "group_32": Arm("groups of 32", group=32, claim="32 for 8: +16.4, at four times the episodes", side=1),
    "tokens": Arm("mean over all tokens", ("update.loss_divisor=tokens",), claim="+5.4", side=1),
    "epochs": Arm("two epochs of minibatches of 8", EPOCHS, claim="two half batches: -17.4", side=-1, rate=RATE),
    "kl": Arm("KL to the base model, 1e-4", ("loss.kl_coefficient=1e-4",), claim="+7.0; RLTL;DR has none", side=1),
    "success": Arm("success as the return", ("update.episode_return=success",), claim="+1.8, within noise"),
    "lag_0": Arm("stream, lag 0", lag(0)),
    "lag_1": Arm("stream, lag of at most 1", lag(1), claim=TINKER),
    "lag_4": Arm("stream, lag of at most 4", lag(4), claim=TINKER),
    "shuffled": Arm("control: shuffled advantages", (SHUFFLED,), claim="must learn nothing", side=-1),
}
IN_QUEST = (BASE, "group_32", "tokens", "lag_0", "lag_4", "shuffled")


def trained_tiny(arm: Arm, steps: Steps, run: Path, seed: int, args: argparse.Namespace) -> list[TaskResult]:
    """Train an arm of the tiny policy, as far as that is not done; returns its attempts at held-out tasks."""
    words = [f"optimizer.lr={arm.rate:g}", "lr_scheduler.num_warmup_steps=1", "update.exact_entropy=False"]
    words += [*arm.collected(args.episodes), *arm.words, *args.overrides]
    command = Algorithm(arm.label, "preset=on_policy").command(run, seed, args.iterations, [*words, *args.node])
    steps.run("training", command, run / "training.log", training=run, deadline_s=args.run_deadline_s)
    tasks = load_split(args.world, "test_normal")[: args.held_out_tasks]
    scored = HeldOut(tasks, runs=1, overrides=tuple(args.node))
    scored.score(steps, run / EVALUATION, newest_policy(run), seed, args.run_deadline_s)
    return list(read_report(run / EVALUATION)[1][0].results)


def trained_quest(arm: Arm, steps: Steps, run: Path, seed: int, args: argparse.Namespace) -> list[TaskResult]:
    """Train as :func:`trained_tiny` does, of SmolLM2 on the quest, by `loop train`."""
    words = [f"output_dir={run}", f"seed={seed}", f"max_iterations={args.iterations}"]
    words += [*arm.collected(args.episodes), *arm.words, *args.overrides]
    command = [str(Path(sys.executable).with_name("loop")), "train", QUEST, "--model", SMOLLM2, *words]
    steps.run("training", command, run.with_suffix(".log"), training=run, deadline_s=args.run_deadline_s)
    return list(next(results for sampling, results in after_training(run).items() if "1" in sampling))


def record(name: str, seed: int, budget: int, run: Path, results: list[TaskResult]) -> Record:
    """Return the record of a run."""
    config, lines = OmegaConf.load(run / "config.yaml"), read_metrics(run)
    metrics = (*KEPT_METRICS, "groups", "groups_without_signal", "entropy_estimate", "sampled_tokens", *LAG_METRICS)
    return Record(
        name=name,
        seed=seed,
        dataset=lines[-1]["dataset"],
        policy=hashlib.sha256((Path(config.model.path) / "model.safetensors").read_bytes()).hexdigest()[:12],
        budget=budget,
        rate=config.optimizer.lr,
        rollouts=sum(line["all_rollouts"] for line in lines),
        sampled_tokens=sum(line["all_sampled_tokens"] for line in lines),
        iterations=[{key: line[key] for key in metrics if key in line} for line in lines],
        results=results,
    )


@contextmanager
def shared_node(args: argparse.Namespace) -> Iterator[list[str]]:
    """Start a rollout node for all runs of the tiny policy; yields the words that name it."""
    config = read_config(compose("tiny_cpu", [f"output_dir={args.output / 'shared'}", *args.overrides]), LoopConfig)
    token = os.environ[TOKEN_ENV] = secrets.token_hex(16)
    with NodeProcess(config.child, args.output / "shared", token) as node:
        RolloutClient(node.url, token, alive=node.check).wait_ready(deadline_s=config.rollout_node.start_deadline_s)
        named = {"launch": False, "url": node.url, "token_env": TOKEN_ENV}
        yield [f"rollout_node.{key}={value}" for key, value in named.items()]


def run_all(args: argparse.Namespace) -> list[str]:
    """Train and score what has no record; returns what failed."""
    failures = []
    for seed in args.seeds:
        for name in args.only:
            if read_record(args.records, name, seed, args.budget) is not None:
                continue
            started, run = time.monotonic(), args.output / f"{name}-seed{seed}"
            try:
                options = {"arm": list(ARMS[name].words), "iterations": args.iterations, "episodes": args.episodes}
                steps = Steps(run, {**options, "overrides": args.overrides})
                results = args.train(ARMS[name], steps, run, seed, args)
                record(name, seed, args.budget, run, results).write(args.records)
            except (StepFailed, ConfigError) as error:
                failures.append(f"{name}, seed {seed}: {error}")
                print(failures[-1], flush=True)
            print(f"{name}, seed {seed}: {time.monotonic() - started:.0f} s", flush=True)
    return failures


def compared(records: Mapping[str, Sequence[Record]], environment: Description) -> dict[str, Comparison]:
    """Compare each arm with the base, over the seeds that both have."""
    comparisons = {}
    for name, seeds in records.items():
        both = {each.seed for each in seeds} & {each.seed for each in records.get(BASE, [])}
        if name == BASE or not both:
            continue
        sides = [
            pool_seeds(arm, [[NamedResults(arm, "T=1", each.results)] for each in records[arm] if each.seed in both])
            for arm in (BASE, name)
        ]
        comparisons[name] = compare(sides[0][0], sides[1][0], environment=environment)
    return comparisons


def verdict(arm: Arm, comparison: Comparison) -> str:
    """Judge the papers' finding by the interval of the difference."""
    interval = comparison.success.interval
    side = (interval.low > 0) - (interval.high < 0)
    return OPEN if side == 0 else HOLDS if side == arm.side else FAILS


HEAD = ["arm", "seeds", "steps", "groups with signal", f"success, last {LAST}"]
HEAD += ["held out, %", "difference", "papers", "here"]


def table(records: Mapping[str, Sequence[Record]], environment: Description) -> tuple[str, list[dict[str, Any]]]:
    """Return the table in Markdown and its numbers."""
    lines, rows, against = [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"], [], compared(records, environment)
    for name, seeds in records.items():
        arm, score = ARMS[name], held_out_score((each.results for each in seeds), environment).success
        every = [line for each in seeds for line in each.iterations]
        last = statistics.fmean(line["success"] for each in seeds for line in each.iterations[-LAST:])
        signal = 1 - sum(line["groups_without_signal"] for line in every) / sum(line["groups"] for line in every)
        steps = sum(line["steps"] for line in every) / len(seeds)
        cells = [arm.label, str(len(seeds)), f"{steps:.0f}", f"{100 * signal:.0f}%", f"{last:.3f}", figure(score)]
        values = {"seeds": len(seeds), "steps": steps, "groups_with_signal": signal, "success_last": last}
        values |= {"held_out": score.mean, "held_out_low": score.interval.low, "held_out_high": score.interval.high}
        if name in against:
            effect = against[name].success.interval
            cells += [f"{effect.estimate:+.1f} [{effect.low:+.1f}, {effect.high:+.1f}]"]
            cells += [arm.claim, verdict(arm, against[name])]
            values |= {"difference": effect.estimate, "difference_low": effect.low, "difference_high": effect.high}
        lines.append(f"| {' | '.join(cells + [''] * (len(HEAD) - len(cells)))} |")
        rows += [number(arm.label, key, value, "") for key, value in values.items()]
    return "\n".join(lines), rows


def picture(records: Mapping[str, Sequence[Record]], path: Path, environment: Description) -> None:
    """Draw the held-out success of each arm with its interval, and its seeds as dots; the head names the dataset."""
    drawing, axes = plt.subplots(figsize=(7.5, 0.45 * len(records) + 1))
    for row, seeds in enumerate(records.values()):
        score = held_out_score((each.results for each in seeds), environment).success
        reach = [[score.mean - score.interval.low], [score.interval.high - score.mean]]
        mean = axes.errorbar(score.mean, row, xerr=reach, fmt="s", color=COLOURS[0], capsize=3)
        dots = [100 * statistics.fmean(result.success for result in each.results) for each in seeds]
        (dot,) = axes.plot(dots, [row] * len(dots), "o", color=COLOURS[1], ms=4, alpha=0.7)
    axes.set_yticks(range(len(records)), [ARMS[name].label for name in records])
    axes.invert_yaxis()
    axes.set_xlabel("held-out success, %")
    names = ["mean of the seeds, 95% interval over scenarios", "a seed"]
    drawing.legend(handles=[mean, dot], labels=names, loc="upper right", ncols=2, frameon=False, fontsize=8)
    datasets = sorted({each.dataset for seeds in records.values() for each in seeds})
    drawing.suptitle(", ".join(datasets), fontsize=10, x=0.01, ha="left")
    axes.grid(alpha=0.25, lw=0.5)
    drawing.tight_layout()
    drawing.savefig(path, dpi=120)
    plt.close(drawing)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bed", choices=["tiny", "quest"], default="tiny", help="policy and tasks")
    parser.add_argument("--output", type=Path, default=Path("runs/after_loop"), help="folder of all runs")
    parser.add_argument("--only", nargs="+", choices=list(ARMS), help="these arms (all of the bed's)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--episodes", type=int, default=64, help="of an iteration (64)")
    parser.add_argument("--held-out-tasks", type=int, help="the first of test_normal only")
    parser.add_argument("--records", type=Path, help="of what is kept (experiments/results/after_loop_BED.jsonl)")
    parser.add_argument("--table-only", action="store_true", help="of the records that are there; train nothing")
    parser.add_argument("--run-deadline-s", type=float, default=7200.0)
    parser.add_argument("--docs", type=Path, help="put table and figure between the markers in this file")
    parser.add_argument("--json", type=Path, help="write the rows there")
    return parser


def main(arguments: list[str] | None = None) -> None:
    words, overrides = split_words(sys.argv[1:] if arguments is None else arguments)
    args = parser().parse_args(words)
    args.output, args.overrides, args.budget = args.output.resolve(), overrides, args.iterations * args.episodes
    args.records = args.records or Path(__file__).parent / f"results/after_loop_{args.bed}.jsonl"
    args.only = args.only or (list(ARMS) if args.bed == "tiny" else list(IN_QUEST))
    args.train, failures = {"tiny": trained_tiny, "quest": trained_quest}[args.bed], []
    try:
        if args.bed == "tiny" and not args.table_only:
            args.world = compose("tiny_cpu", overrides).node.environment.root
            with shared_node(args) as args.node:
                failures = run_all(args)
        elif not args.table_only:
            failures = run_all(args)
        records = read_records(args.records, args.only, args.seeds, args.budget)
    except (ConfigError, OSError) as error:
        sys.exit(f"after_loop: {error}")
    if not records:
        sys.exit(f"after_loop: {args.records} holds no record of these arms and seeds")
    environment = AppWorldPool.description if args.bed == "tiny" else DEFAULT_DESCRIPTION
    text, rows = table(records, environment)
    args.output.mkdir(parents=True, exist_ok=True)
    image = args.output / f"after_loop_{args.bed}.png"
    picture(records, image, environment)
    print(f"{text}\n{image}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if args.docs:
        put_into(args.docs, f"after_loop_{args.bed}", text, image, "held-out success of each arm")
    if failures:
        sys.exit(f"after_loop: {len(failures)} run(s) failed; the same command tries them again")


if __name__ == "__main__":
    main()
