"""How much of eight ranks' time a step uses, by median length of its rollouts: planned over all ranks or rank by rank.

    python experiments/balance.py [--tokens 32768] [--ranks 8] [--sharers 1] [--rollouts 32 216] [--json results.json]

Simulated: the i-th micro-batches of all ranks take as long as the costliest of them, since FSDP2 gathers each layer on
all ranks together. Lengths are log-normal (sigma 0.5), cut to 1,500 to 32,000 tokens. A step of 32 rollouts is a
minibatch of the paper's setting, one of 216 the pass that recomputes old log-probs, or an algorithm of one step per
collection. ``step_efficiency`` is the mean of ``--repeats`` steps, ``step_efficiency_min`` the worst of them;
``step_efficiency_of_bound`` is the mean share of what no plan can exceed (see ``best_efficiency``);
``planning_seconds`` is the mean time to plan one. ``--sharers`` ranks share each row (``sequence_parallel``): so many
count as one, of so many times the tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable
from pathlib import Path

from loop_recipes.engine.step_plan import StepPlan, cost, plan_micro_batches, plan_step, step_efficiency


def rank_by_rank(lengths: list[int], ranks: int, tokens: int) -> StepPlan:
    """Deal rollouts costliest first to the rank with the least, and pack each rank's first fit."""
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        rank = loads.index(min(loads))
        dealt[rank].append(i)
        loads[rank] += cost(lengths[i])
    plans = [
        [[mine[i] for i in batch] for batch in plan_micro_batches([lengths[i] for i in mine], tokens, packed=True)]
        for mine in dealt
    ]
    return [[plan[call] if call < len(plan) else [] for plan in plans] for call in range(max(map(len, plans)))]


def one_each(lengths: list[int], ranks: int, tokens: int) -> StepPlan:
    """Plan without packing: a rollout a micro-batch, longest first."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    calls = [[[i] for i in order[start : start + ranks]] for start in range(0, len(order), ranks)]
    return [call + [[]] * (ranks - len(call)) for call in calls]


CASES: dict[str, Callable[[list[int], int, int], StepPlan]] = {
    "ours": lambda lengths, ranks, tokens: plan_step(lengths, ranks, tokens, packed=True),
    "rank_by_rank": rank_by_rank,
    "one_each": one_each,
}


def best_efficiency(lengths: list[int], ranks: int, tokens: int) -> float:
    """Return an upper bound of the efficiency of any plan within the budget.

    No two rollouts longer than half of it share a micro-batch. So the i-th call lasts at least as long as the
    (i * ranks)-th longest of those, from 0.
    """
    alone = sorted((length for length in lengths if 2 * length > tokens), reverse=True)
    return min(1.0, sum(map(cost, lengths)) / ranks / max(sum(map(cost, alone[::ranks])), 1e-9))


def drawn(median: int, rollouts: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [int(min(32_000, max(1_500, median * math.exp(0.5 * draw.gauss(0, 1))))) for _ in range(rollouts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--medians", type=int, nargs="+", default=[8_000, 12_000, 16_000, 22_000])
    parser.add_argument("--rollouts", type=int, nargs="+", default=[32, 216], help="of a step")
    parser.add_argument("--tokens", type=int, default=32_768, help="of a micro-batch")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--sharers", type=int, default=1, help="ranks that share a row")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    groups, tokens = args.ranks // args.sharers, args.tokens * args.sharers
    machines = f"{args.ranks} ranks" + (f", rows of {args.sharers}" if args.sharers > 1 else "")
    print(f"{machines}, {args.tokens:,} tokens of a micro-batch a rank, {args.repeats} steps each; simulated")
    print(f"{'case':<16}{'rollouts':>9}{'median':>8}{'efficiency':>12}{'worst':>8}{'of bound':>10}{'planning s':>12}")
    rows = []
    for rollouts in args.rollouts:
        for median in args.medians:
            steps = [drawn(median, rollouts, seed) for seed in range(args.repeats)]
            for case, plan in CASES.items():
                started = time.perf_counter()
                plans = [plan(lengths, groups, tokens) for lengths in steps]
                seconds = (time.perf_counter() - started) / len(steps)
                values = [step_efficiency(plan, lengths) for plan, lengths in zip(plans, steps, strict=True)]
                mean, worst = sum(values) / len(values), min(values)
                bounds = [best_efficiency(lengths, groups, tokens) for lengths in steps]
                of_bound = sum(value / bound for value, bound in zip(values, bounds, strict=True)) / len(values)
                print(
                    f"{case:<16}{rollouts:>9}{median:>8}{mean:>12.3f}{worst:>8.3f}{of_bound:>10.3f}{seconds:>12.3f}",
                    flush=True,
                )
                name = f"{case} {median} tokens x {rollouts} rollouts, budget {args.tokens}, {machines}"
                for metric, value, unit in (
                    ("step_efficiency", mean, ""),
                    ("step_efficiency_min", worst, ""),
                    ("step_efficiency_of_bound", of_bound, ""),
                    ("planning_seconds", seconds, "s"),
                ):
                    rows.append({"case": name, "metric": metric, "value": round(value, 4), "unit": unit})
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
