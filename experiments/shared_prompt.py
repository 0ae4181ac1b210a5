"""Tokens of an iteration that computing the shared prompt of a task's rollouts only once could save: an upper bound.

    python experiments/shared_prompt.py runs/demo/node/collections/*.jsonl [--minibatch 32] [--epochs 1] [--json PATH]
    python experiments/shared_prompt.py --tasks 40 --prompt 4000 --length 12000 --epochs 2

Counts tokens, runs no model. A prompt can be shared only by rollouts that go through the model together: all of a task
while old log-probs are recomputed, those of a task that fall into one minibatch while training. The minibatches are
those that the recipe would draw. Costs per token: 1 for a forward pass, 2 for forward and backward (with frozen weights
the backward pass costs as much as the forward pass), attention not counted. It is assumed that a minibatch fits into
one micro-batch on one rank; every cut lowers the saving. ``saving_grouped`` is what it would be if minibatches were
made of whole tasks, which is another algorithm: its steps would see fewer tasks.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from loop_formats.run_files import only_logs, read_rollouts
from loop_recipes.algorithm.minibatches import minibatches
from loop_recipes.engine.samples import CreditedSample, Sample, credited


@dataclass(frozen=True)
class Episode:
    """A rollout as far as this count goes; lengths in tokens."""

    task: str
    prompt: int
    length: int


def from_log(path: Path) -> list[Episode]:
    """Read the episodes of one collection; a task's prompt is what all its rollouts begin with."""
    tasks: dict[str, list[list[int]]] = {}
    for rollout in read_rollouts(path):
        tasks.setdefault(rollout.task_id, []).append(rollout.token_ids)
    episodes = []
    for task, sequences in tasks.items():
        shortest = min(map(len, sequences))
        shared = next((i for i in range(shortest) if len({ids[i] for ids in sequences}) > 1), shortest)
        episodes += [Episode(task, shared, len(ids)) for ids in sequences]
    return episodes


def made_up(tasks: int, group: int, prompt: int, length: int) -> list[Episode]:
    """Make episodes of a mean ``length``, whose part after the prompt is spread from a half to one and a half."""
    draw, rest = random.Random(0), length - prompt
    return [
        Episode(f"task{task}", prompt, prompt + int(rest * draw.uniform(0.5, 1.5)))
        for task in range(tasks)
        for _ in range(group)
    ]


def tokens(episodes: Sequence[Episode], shared: bool) -> int:
    """Return the tokens to compute these together; with ``shared`` each task's prompt once."""
    total = sum(episode.length for episode in episodes)
    if shared:
        prompts = {episode.task: episode.prompt for episode in episodes}
        total -= sum(episode.prompt for episode in episodes) - sum(prompts.values())
    return total


def by_tasks(episodes: Sequence[Episode], size: int) -> list[list[Episode]]:
    """Return minibatches of about ``size`` rollouts, of whole tasks."""
    ordered = sorted(episodes, key=lambda episode: episode.task)
    starts = [i for i, (a, b) in enumerate(pairwise(ordered), start=1) if a.task != b.task]
    cuts, last = [0], 0
    for start in [*starts, len(ordered)]:
        if start - last >= size or start == len(ordered):
            cuts.append(start)
            last = start
    return [ordered[low:high] for low, high in pairwise(cuts)]


def as_drawn(episodes: Sequence[Episode], size: int | None, seed: int) -> list[list[Episode]]:
    """Return the minibatches that the recipe would draw."""
    nothing = torch.zeros(1)
    stand_ins: list[CreditedSample] = []
    for number, episode in enumerate(episodes):
        ids, mask = torch.zeros(2), torch.tensor([False, True])
        sample = Sample(str(number), episode.task, ids, mask, mask.long() - 1, nothing, nothing, 0.0)
        stand_ins += credited([sample], 0.0)
    return [[episodes[int(one.rollout_id)] for one in batch] for batch in minibatches(stand_ins, size, seed)]


def saving(episodes: Sequence[Episode], epochs: Sequence[Sequence[Sequence[Episode]]]) -> float:
    """Return the share of an iteration's cost that sharing saves, given the minibatches of its epochs."""
    costs = []
    for shared in (False, True):
        cost = tokens(episodes, shared)
        cost += 2 * sum(tokens(batch, shared) for batches in epochs for batch in batches)
        costs.append(cost)
    return 1 - costs[1] / costs[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="*", type=Path, help="collections of a run; without any, made-up ones")
    parser.add_argument("--tasks", type=int, default=40)
    parser.add_argument("--group", type=int, default=6, help="rollouts of a task")
    parser.add_argument("--prompt", type=int, default=4000)
    parser.add_argument("--length", type=int, default=12000)
    parser.add_argument("--minibatch", type=int, default=32, help="rollouts, 0: all")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    collections = [from_log(path) for path in only_logs(args.logs)]
    size = f"minibatch{args.minibatch}_epochs{args.epochs}"
    if not collections:
        collections = [made_up(args.tasks, args.group, args.prompt, args.length)]
        size += f"_prompt{args.prompt}_length{args.length}"
    rows = []
    episodes = [episode for collection in collections for episode in collection]
    share = sum(episode.prompt for episode in episodes) / sum(episode.length for episode in episodes)
    numbers = {"prompt_share": share, "saving": 0.0, "saving_grouped": 0.0}
    for seed, collection in enumerate(collections):
        drawn = [as_drawn(collection, args.minibatch or None, seed * 100 + epoch) for epoch in range(args.epochs)]
        grouped = by_tasks(collection, args.minibatch or len(collection))
        numbers["saving"] += saving(collection, drawn) / len(collections)
        numbers["saving_grouped"] += saving(collection, [grouped] * args.epochs) / len(collections)
    print(f"{len(collections)} collection(s), {len(episodes)} rollouts, {size}")
    for metric, value in numbers.items():
        print(f"{metric:<16}{value:>8.3f}")
        rows.append({"case": f"ours {size}", "metric": metric, "value": round(value, 4), "unit": "fraction"})
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
