"""Does a critic find the turn that went wrong? Flawed episodes whose wrong turn is known, and several critics of turns.

    python experiments/turn_credit.py --output runs/turn_credit --seeds 3
    python experiments/turn_credit.py --output runs/turn_credit --seeds 3 --continuations 8     # Monte-Carlo values too
    python experiments/turn_credit.py --output runs/turn_credit --tasks 8 --episodes 8 --epochs 1 --seeds 1

Reference solutions of the synthetic world, some with a deliberate flaw, are executed in the real environment. On those
of train the critics of docs/algorithms.md learn from pairs, a good episode and a flawed one, which name no turn.
``found`` is the share of held-out flawed episodes, of other tasks, in which a critic gives its lowest advantage to the
turn that the flaw is in; where the flaw is that a look-up was left out, to the turn that lacks its result.

The interval is a 95 % bootstrap over tasks; a seed draws other episodes, adapters and minibatches. ``chance`` is one
turn at random, ``last turn`` always the last, ``surprise`` the turn whose tokens the base model likes least, and
``monte_carlo`` the difference of the values of two states, each the mean return of the base model's continuations.

Everything is kept under ``--output``; the same command again makes what is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "recipes"))  # the recipes are modules there

from turn_value_head import TurnValueHead

from agent_environments.extraction import extract_code
from agent_environments.protocol import create_pool
from appworld_adapter.dataset import dataset_name, load_split
from loop_contrib.ground_truth.scripted import scripted_rollout
from loop_contrib.sweet_rl.stored_critic import load_learner, load_turn_critic
from loop_contrib.sweet_rl.turn_critic import by_turn, prefix_of
from loop_contrib.turn_credit import turn_values_cli
from loop_contrib.turn_credit.branch_credit import value_changes
from loop_formats.collection_request import CollectionRequest
from loop_formats.ids import training_id
from loop_formats.rollout import Rollout
from loop_formats.run_files import COLLECTIONS, meta_path, read_rollouts, write_rollouts, write_whole
from loop_formats.turn_values import read_turn_values, values_file
from loop_recipes.algorithm.preferences import ReturnPairs
from loop_recipes.config.files import compose
from loop_recipes.config.loop_config import LoopConfig, UpdateConfig, read_config
from loop_recipes.engine.peft_export import write_empty_adapter
from loop_recipes.engine.samples import training_samples
from loop_recipes.warm_start.appworld import draw_scripts
from loop_recipes.warm_start.demonstration import Demonstration, collect, load, save
from model_families.chat import open_chat
from model_families.chat.format import ChatFormat
from rollout_server.config import write_node_config
from sft_appworld import SftAppWorldRecipe

CRITICS = {
    "sweet": (),
    "sweet, nothing hidden": ("samples=null",),
    "sweet, sum": ("loss.per_turn=sum",),
}
"""Overrides of ``sft_appworld`` with ``algorithm=turn_critic``."""
BLIND_REFERENCE = "sweet, reference blind"
HELD_OUT = training_id("held-out", 1, "flawed episodes of dev tasks")
"""The collection of the held-out episodes."""


@dataclass(frozen=True)
class Case:
    """A held-out episode with its flaw; ``wrong`` is the turn that the flaw is in, from 0."""

    rollout: Rollout
    flaw: str
    wrong: int


def wrong_turn(codes: Sequence[str], reference: Sequence[str]) -> int:
    """Return the first of an episode's turns that the reference solution has nowhere; the last one where it has all,
    which is giving up in the words of the reference's own end."""
    return next((number for number, code in enumerate(codes) if code not in reference), len(codes) - 1)


def reference_codes(world: Path, task_id: str) -> list[str]:
    turns = json.loads((world / "data" / "tasks" / task_id / "ground_truth" / "turns.json").read_text())
    return [turn["code"].strip() for turn in turns]


def play(
    conf: LoopConfig, world: Path, tasks: Sequence[str], count: int, seed: int, share: float, file: Path
) -> list[Demonstration]:
    """Execute scripts in the environment that the policy's node has; reads them again if they are there."""
    if not file.is_file():
        environment = conf.child.environment
        tokens = open_chat(conf.base_model)
        pool = create_pool(environment.name, dict(environment.options), tokens.spans)
        save(asyncio.run(collect(pool, draw_scripts(world, tasks, count, seed, share), at_once=4)), file)
    return load(file)


def as_rollout(played: Demonstration, index: int, collection: str, dataset: str, tokens: ChatFormat) -> Rollout:
    return scripted_rollout(
        tokens,
        played.opening,
        played.steps,
        collection=collection,
        task_id=played.task_id,
        dataset=dataset,
        server="demonstration",
        index=index,
        reward=played.reward,
        success=played.success,
    )


class Experiment:
    """A seed: its episodes, its critics, and their advantages."""

    def __init__(self, args: argparse.Namespace, seed: int) -> None:
        self._args, self._seed = args, seed
        self._folder = args.output / f"seed{seed}"
        self._conf = read_config(compose("tiny_cpu"), LoopConfig)
        self._world = Path(self._conf.child.environment.options["root"])
        self._tokens = open_chat(self._conf.base_model)
        self._dataset = dataset_name(self._world)

    def training_log(self) -> Path:
        """Write good and flawed episodes of each train task, in equal number; returns their log."""
        count, pairs = self._args.tasks, self._args.pairs_per_task
        tasks = random.Random(self._seed).sample(load_split(self._world, "train"), count)
        folder = self._folder / "demonstrations"
        good = play(self._conf, self._world, tasks, count, self._seed, 0.0, folder / "good.jsonl")
        flawed = play(self._conf, self._world, tasks, count * pairs, self._seed, 1.0, folder / "flawed.jsonl")
        # A good episode of a task is always the same one, and each is in one pair only: so there are copies of it.
        episodes = [*(one for one in good for _ in range(pairs)), *flawed]
        numbers: dict[str, int] = defaultdict(int)
        rollouts = []
        for one in episodes:
            rollouts.append(as_rollout(one, numbers[one.task_id], "demonstrations", self._dataset, self._tokens))
            numbers[one.task_id] += 1
        return write_rollouts(self._folder / "train" / COLLECTIONS, "demonstrations", rollouts)

    def cases(self) -> list[Case]:
        """Return flawed episodes of dev tasks that failed, no two alike."""
        tasks = load_split(self._world, "dev")
        file = self._folder / "demonstrations" / "held_out.jsonl"
        played = play(self._conf, self._world, tasks, self._args.episodes, 1000 + self._seed, 1.0, file)
        distinct = list({(one.task_id, one.steps): one for one in played if not one.success}.values())
        collection = HELD_OUT
        cases = []
        for index, one in enumerate(distinct):
            rollout = as_rollout(one, index, collection, self._dataset, self._tokens)
            codes = [extract_code(action).strip() for action, _ in one.steps]
            wrong = wrong_turn(codes, reference_codes(self._world, one.task_id))
            cases.append(Case(rollout, str(one.flaw), wrong))
        return cases

    def train(self, name: str, log: Path) -> Path:
        """Return the run of a critic, made unless it is there."""
        run = self._folder / "critics" / name.replace(", ", "_").replace(" ", "_")
        words = [f"output_dir={run}", f"rollouts.logs=[{log}]", f"max_iterations={self._args.epochs}"]
        words += [f"export_every={self._args.epochs}", f"seed={self._seed}", "resume_from_checkpoint=True"]
        words += [*CRITICS[name], *self._args.overrides]
        recipe = SftAppWorldRecipe(compose("tiny_cpu", ["algorithm=turn_critic", *words], "sft_appworld"))
        try:
            recipe.setup()
            recipe.train()
        finally:
            recipe.cleanup()
        return run

    def wrong_turns(self, cases: Sequence[Case]) -> dict[str, list[float]]:
        """Return for each critic 1 for every case whose wrong turn it found, else 0; chance is a share."""
        log = self.training_log()
        rollouts = [case.rollout for case in cases]
        by_critic: dict[str, Mapping[str, Sequence[float]]] = {}
        for name in CRITICS:
            run = self.train(name, log)
            by_critic[name] = advantages(run, rollouts)
            if name == "sweet":
                by_critic[BLIND_REFERENCE] = advantages(run, rollouts, reference_sees_hidden=False)
        by_critic["value head"] = value_head(self._folder / "critics" / "sweet", read_rollouts(log), rollouts)
        by_critic["surprise"] = surprise(self._folder / "critics" / "sweet", rollouts)
        if self._args.continuations:
            by_critic["monte_carlo"] = self.monte_carlo(rollouts)
        hits = {
            name: [float(lowest(turns[case.rollout.rollout_id]) == case.wrong) for case in cases]
            for name, turns in by_critic.items()
        }
        hits["last turn"] = [float(case.wrong == len(case.rollout.turns) - 1) for case in cases]
        hits["chance"] = [1.0 / len(case.rollout.turns) for case in cases]
        return hits

    def monte_carlo(self, rollouts: Sequence[Rollout]) -> dict[str, list[float]]:
        """Return V(next state) - V(state) of every turn, by ``loop method turn-values`` on a folder like a run's."""
        run, collection = self._folder / "values", HELD_OUT
        log = write_rollouts(run / "node" / COLLECTIONS, collection, rollouts)
        asked = self._conf.collection
        tasks = sorted({rollout.task_id for rollout in rollouts})
        request = CollectionRequest(collection, tasks, 1, 0, seed=self._seed, limits=asked.limits)
        write_whole(meta_path(log.parent, collection), json.dumps({"request": request.to_dict()}) + "\n")
        if not (run / "policies").is_dir():
            write_empty_adapter(run / "policies" / "policy-v0000", self._conf.base_model)
            conf = read_config(compose("tiny_cpu", [f"output_dir={run}"]), LoopConfig)
            write_node_config(conf.child, run / "rollout_node.yaml")
        node = ["--node", str(run / "rollout_node.yaml")]
        continuations = ["--continuations", str(self._args.continuations)]
        if turn_values_cli.main([str(run), "--collection", collection, *node, *continuations]):
            raise RuntimeError("loop method turn-values failed; see above")
        values = {(v.rollout_id, v.turn): v.value for v in read_turn_values(values_file(run, collection))}
        return {
            each.rollout_id: value_changes(
                [values.get((each.rollout_id, turn)) for turn in range(len(each.turns))], each.reward
            )
            for each in rollouts
        }


def advantages(run: Path, rollouts: Sequence[Rollout], reference_sees_hidden: bool = True) -> dict[str, list[float]]:
    critic = load_turn_critic(run, reference_sees_hidden=reference_sees_hidden)
    by_rollout = critic.advantages(training_samples(rollouts, UpdateConfig()))
    return {rollout_id: turns.tolist() for rollout_id, turns in by_rollout.items()}


def lowest(turns: Sequence[float]) -> int:
    return min(range(len(turns)), key=turns.__getitem__)


def by(values: Sequence[tuple[Case, float]], key: Callable[[Case], str]) -> dict[str, list[float]]:
    """Return the values of the cases of each key."""
    grouped: dict[str, list[float]] = defaultdict(list)
    for case, value in values:
        grouped[key(case)].append(value)
    return grouped


def interval(by_task: Mapping[str, Sequence[float]], draws: int = 10_000) -> tuple[float, float, float]:
    """Mean over all cases, and its 95 % bootstrap interval over tasks; ``by_task`` has the cases of each task."""
    sums = torch.tensor([[sum(values), len(values)] for values in by_task.values()], dtype=torch.float64)
    drawn = sums[torch.randint(len(sums), (draws, len(sums)), generator=torch.Generator().manual_seed(0))].sum(1)
    low, high = (drawn[:, 0] / drawn[:, 1]).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return statistics.fmean(value for values in by_task.values() for value in values), low, high


def value_head(run: Path, learned_from: Sequence[Rollout], rollouts: Sequence[Rollout]) -> dict[str, list[float]]:
    """Fit a head on the base model of a critic's run, which sees what the critic sees."""
    conf, learner = load_learner(run)
    prefix = prefix_of(conf)
    head = TurnValueHead(learner.update, prefix)
    head.fit(training_samples(learned_from, UpdateConfig()), ReturnPairs())
    by_rollout = head.advantages(training_samples(rollouts, UpdateConfig()))
    return {rollout_id: turns.tolist() for rollout_id, turns in by_rollout.items()}


def surprise(run: Path, rollouts: Sequence[Rollout]) -> dict[str, list[float]]:
    """Mean log-prob of each turn under the base model of a critic's run, which the actor could see too."""
    samples = training_samples(rollouts, UpdateConfig())
    logprobs = load_learner(run)[1].update.scorer.logprobs(samples, None)
    return {
        sample.rollout_id: by_turn(logprobs[sample.rollout_id].double(), sample.turn_ids[sample.mask]).tolist()
        for sample in samples
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/turn_credit"))
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    parser.add_argument("--tasks", type=int, default=40, help="train tasks that critics learn from (40)")
    parser.add_argument("--pairs-per-task", type=int, default=2, metavar="N", help="(2)")
    parser.add_argument("--episodes", type=int, default=60, help="held-out episodes that are played (60)")
    parser.add_argument("--epochs", type=int, default=4, help="passes over the pairs (4)")
    parser.add_argument("--continuations", type=int, default=0, metavar="N", help="for Monte-Carlo values; 0: none (0)")
    parser.add_argument("--json", type=Path, help="where the rows are written too")
    parser.add_argument("overrides", nargs="*", help="behind --: keys of sft_appworld for every critic")
    args = parser.parse_args()
    args.output = args.output.resolve()
    by_critic: dict[str, list[tuple[Case, float]]] = defaultdict(list)
    for seed in range(args.seeds):
        experiment = Experiment(args, seed)
        cases = experiment.cases()
        turns = statistics.fmean(len(case.rollout.turns) for case in cases)
        print(f"seed {seed}: {len(cases)} held-out episodes of {turns:.1f} turns on average", flush=True)
        for name, values in experiment.wrong_turns(cases).items():
            by_critic[name] += zip(cases, values, strict=True)
    rows = []
    print(f"{'critic':<26}{'found':>8}{'from':>8}{'to':>8}   by flaw")
    for name, each in by_critic.items():
        share, low, high = interval(by(each, lambda case: case.rollout.task_id))
        of_flaw = {f"found_{flaw}": statistics.fmean(own) for flaw, own in by(each, lambda case: case.flaw).items()}
        flaws = ", ".join(f"{metric.removeprefix('found_')} {value:.2f}" for metric, value in sorted(of_flaw.items()))
        print(f"{name:<26}{share:>8.3f}{low:>8.3f}{high:>8.3f}   {flaws}")
        for metric, value in {"found": share, "found_low": low, "found_high": high, **of_flaw}.items():
            rows.append({"case": f"ours {name}", "metric": metric, "value": round(value, 4), "unit": "fraction"})
    if args.json is not None:
        write_whole(args.json, json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
