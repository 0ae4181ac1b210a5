"""LOOP in worlds with an expert: tiny policies built, taught bad habits, trained and scored on held-out tasks.

    python experiments/learn_worlds.py --worlds babyai --docs docs/results/worlds.md
    python experiments/learn_worlds.py --worlds colbench --iterations 8 --json results.json
    python experiments/learn_worlds.py --worlds mixed --iterations 8          # one policy in two worlds at once
    python experiments/learn_worlds.py --worlds babyai --seeds 0 --iterations 2       # does it run?

For each world: `tune run warm_start_appworld`, then `tune run loop_appworld` with each seed and with shuffled
advantages (the control, which must not learn), then `tune run eval_appworld` over all policies, the one before the
habits included. Success is in percent: one greedy run and --runs at temperature 1 over the held-out tasks, with a 95 %
bootstrap interval over levels (BabyAI) or tasks (the others; in ColBench every turn but the last is a question). What
is done is not repeated and a run that was cut off goes on, so the same command again finishes the rest. What follows
``--`` goes to every config of loop_appworld.

Each run starts a rollout node. All runs of one world can share one that serves its policy: `loop node`
with the world's config of loop_appworld, and then ``--worlds babyai --node URL``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from scored_runs import ALGORITHMS, Algorithm, figure, joined, number, put_into

from agent_environments.description import DEFAULT_DESCRIPTION, Description, environment_of
from loop_formats.run_folder import read_metrics
from loop_formats.schema import ConfigError
from loop_recipes.config.files import split_words
from loop_recipes.evaluation.report import read_report
from loop_recipes.evaluation.scores import Score, TaskResult, score
from loop_recipes.plots.curves import Curve, draw
from loop_recipes.steps import StepFailed, Steps, newest_policy, tune

WORLDS = {"babyai": "BabyAI", "textworldexpress": "TextWorldExpress", "colbench": "ColBench", "mixed": "mixture"}
"""Name of the world in the configs -> in the table."""
SCORED_BY_TASK = ("textworldexpress",)
"""Environments with so few groups of tasks (two games) that their intervals are over single tasks."""
CLEAN, BEFORE, LOOP, CONTROL = "clean", "before", "loop", "shuffled"
LABELS = {
    CLEAN: "before the habits",
    BEFORE: "with the habits, before training",
    LOOP: "after LOOP, all seeds",
    CONTROL: "after the control, shuffled advantages",
}
GREEDY, SAMPLED = "T=0", "T=1"
WINDOW = 3
"""Number of iterations that are averaged."""


@dataclass(frozen=True)
class World:
    """A world's runs, in a folder of its own."""

    name: str
    folder: Path
    options: argparse.Namespace

    @property
    def warm_start(self) -> Path:
        return self.folder / "warm_start"

    @property
    def policy(self) -> Path:
        return self.warm_start / "policy"

    @property
    def runs(self) -> dict[str, Path]:
        """Training runs by the names of their policies; the last is the control."""
        names = [*(f"seed{seed}" for seed in self.options.seeds), CONTROL]
        return {name: self.folder / name for name in names}

    @property
    def _node(self) -> list[str]:
        url = self.options.node
        return [] if url is None else ["rollout_node.launch=False", f"rollout_node.url={url}"]

    def evaluation(self, policies: str) -> Path:
        return self.folder / f"evaluation_{policies}"

    def learn(self) -> None:
        """Build, train and score, each unless it is done.

        Raises:
            StepFailed, ConfigError: a step failed, or its folder was begun with other options.
        """
        options = self.options
        build = tune("run", "warm_start_appworld", "--config", f"warm_start_appworld/{self.name}_cpu")
        build += [f"output_dir={self.warm_start}"]
        Steps(self.warm_start, {}).run("warm start", build, self.warm_start / "log", deadline_s=options.deadline_s)
        for (name, run), seed in zip(self.runs.items(), [*options.seeds, options.seeds[0]], strict=True):
            self._train(run, seed, ALGORITHMS["shuffled"].overrides if name == CONTROL else ())
        trained = {name: newest_policy(run) for name, run in self.runs.items()}
        self._score("after", self.policy, {BEFORE: None} | trained)
        self._score("clean", self.warm_start / "cycle-1", {CLEAN: None})

    def _train(self, run: Path, seed: int, words: Sequence[str]) -> None:
        options = self.options
        words = [*self._node, f"model.path={self.policy}", *words, *options.overrides]
        command = Algorithm("LOOP", f"world={self.name}").command(run, seed, options.iterations, words)
        steps = Steps(run, {"iterations": options.iterations, "seed": seed, "overrides": options.overrides})
        steps.run(f"{self.name} {run.name}", command, run / "log", training=run, deadline_s=options.deadline_s)

    def _score(self, what: str, model: Path, policies: dict[str, Path | None]) -> None:
        """Score policies of one base ``model``: name -> adapter."""
        folder, options = self.evaluation(what), self.options
        named = [f"{{name: {name}, adapter: {path or 'null'}}}" for name, path in policies.items()]
        command = tune("run", "eval_appworld", "--config", "eval_appworld/tiny_cpu", f"world={self.name}")
        command += [f"output_dir={folder}", f"policies=[{', '.join(named)}]", f"node.model.path={model}"]
        command += self._node if model == self.policy else []
        command += [f"samplings=[{{temperature: 0.0, runs: 1}}, {{temperature: 1.0, runs: {options.runs}}}]"]
        Steps(folder, {"runs": options.runs, "policies": list(policies)}).run(
            f"{self.name} scores {what}", command, folder / "log", deadline_s=options.deadline_s
        )

    @property
    def curves(self) -> dict[str, list[list[dict[str, Any]]]]:
        """The metrics of the runs behind a policy."""
        runs = {name: read_metrics(run) for name, run in self.runs.items()}
        return {CONTROL: [runs.pop(CONTROL)], LOOP: list(runs.values())}

    def results(self) -> dict[tuple[str, str], list[TaskResult]]:
        """Return policy and sampling -> the results; ``loop`` stands for all seeds together."""
        results: dict[tuple[str, str], list[TaskResult]] = {}
        for what in ("clean", "after"):
            if not (self.evaluation(what) / "report.json").exists():
                continue
            for named in read_report(self.evaluation(what))[1]:
                results[named.name, named.sampling] = list(named.results)
        for sampling in (GREEDY, SAMPLED):
            results[LOOP, sampling] = joined(results[f"seed{seed}", sampling] for seed in self.options.seeds)
        return results


def table(worlds: Sequence[World]) -> tuple[str, list[dict[str, Any]]]:
    """Return the table in Markdown, and its numbers as rows {case, metric, value, unit}."""
    head = f"mean reward, first {WINDOW} / last {WINDOW} iterations"
    lines = [f"| world | policy | greedy | sampled | turns, greedy / sampled | {head} |", "|---|---|---|---|---|---|"]
    rows = []
    for world in worlds:
        for environment, scored in scores_of(world).items():
            for name, label in LABELS.items():
                if (name, GREEDY) not in scored:
                    continue
                ends = reward_ends(world.curves.get(name, []), environment)
                rewards = " / ".join(f"{value:.2f}" for value in ends)
                both = [scored[name, sampling] for sampling in (GREEDY, SAMPLED)]
                turns = " / ".join(f"{one.interactions:.2f}" for one in both)
                title = f"{WORLDS[world.name]}: {WORLDS[environment]}" if environment else WORLDS[world.name]
                cells = [title, label, *(figure(one.success) for one in both), turns, rewards]
                lines.append(f"| {' | '.join(cells)} |")
            for (name, sampling), one in scored.items():
                case = " ".join(filter(None, (f"ours_{name}", world.name, environment)))
                how = "greedy" if sampling == GREEDY else "sampled"
                rows.append(number(case, f"{how}_success", one.success.mean, "percent"))
                rows.append(number(case, f"{how}_turns", one.interactions, "turns"))
    return "\n".join(lines), rows


def scores_of(world: World) -> dict[str, dict[tuple[str, str], Score]]:
    """Return environment -> policy and sampling -> score; "" is the one environment of a world without others."""
    results = world.results()
    scored: dict[str, dict[tuple[str, str], Score]] = {}
    for environment in sorted({environment_of(one.task_id) for one in results[LOOP, GREEDY]}):
        groups = Description() if (environment or world.name) in SCORED_BY_TASK else DEFAULT_DESCRIPTION
        scored[environment] = {}
        for key, attempts in results.items():
            own = [one for one in attempts if environment_of(one.task_id) == environment]
            scored[environment][key] = score(own, None, groups)
    return scored


def reward_ends(runs: Sequence[Sequence[dict[str, Any]]], environment: str = "") -> list[float]:
    """Mean reward over the first and over the last iterations of some runs; nothing of none.

    ``environment`` is one of a mixture; "" stands for all rollouts.
    """
    ends = (slice(None, WINDOW), slice(-WINDOW, None))
    lines = [[line["environments"][environment] if environment else line for line in run] for run in runs]
    return [statistics.fmean(line["reward"] for run in lines for line in run[end]) for end in ends if lines]


def picture(worlds: Sequence[World], path: Path) -> None:
    """Mean reward over iterations, a panel a world, the control in grey."""
    drawing, grid = plt.subplots(1, len(worlds), figsize=(4.5 * len(worlds), 3), squeeze=False, sharey=True)
    for axes, world in zip(grid[0], worlds, strict=True):
        for name, colour in ((CONTROL, "#999999"), (LOOP, "#0072B2")):
            draw(axes, Curve(LABELS[name], world.curves[name]), "reward", colour, window=1)
        axes.set_title(WORLDS[world.name], fontsize=10)
        axes.set_xlabel("iteration")
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.25, lw=0.5)
    grid[0][0].set_ylabel("mean reward (0 to 1)")
    drawing.legend(*grid[0][0].get_legend_handles_labels(), fontsize=8, loc="upper right", ncols=2, frameon=False)
    drawing.suptitle("band: lowest to highest seed", fontsize=8, x=0.01, ha="left")
    drawing.tight_layout()
    drawing.savefig(path, dpi=120)
    plt.close(drawing)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/learn_worlds"), help="folder of all runs")
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=list(WORLDS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="the control takes the first")
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--runs", type=int, default=2, help="runs over the held-out tasks at temperature 1")
    parser.add_argument("--node", metavar="URL", help="a rollout node that serves the policy of the one world")
    parser.add_argument("--deadline-s", type=float, default=5400.0, help="of each command")
    parser.add_argument("--table-only", action="store_true", help="of what is scored; train nothing")
    parser.add_argument("--docs", type=Path, help="put table and picture between the markers in this file")
    parser.add_argument("--json", type=Path, help="write the rows there")
    return parser


def main(arguments: list[str] | None = None) -> None:
    words, overrides = split_words(sys.argv[1:] if arguments is None else arguments)
    args = parser().parse_args(words)
    args.overrides = overrides
    worlds = [World(name, args.output.resolve() / name, args) for name in args.worlds]
    try:
        for world in worlds if not args.table_only else ():
            world.learn()
    except (StepFailed, ConfigError) as error:
        sys.exit(f"learn_worlds: {error}")
    text, rows = table(worlds)
    image = args.output / f"learn_{'_'.join(args.worlds)}.png"
    picture(worlds, image)
    print(f"{text}\n{image}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if args.docs:
        put_into(args.docs, image.stem, text, image, f"LOOP in {', '.join(WORLDS[name] for name in args.worlds)}")


if __name__ == "__main__":
    main()
