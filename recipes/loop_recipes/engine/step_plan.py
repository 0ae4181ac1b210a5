"""Plans which rollouts each rank takes in each of a step's micro-batches, over all ranks at once.

FSDP2 gathers a layer on all ranks together, so the i-th micro-batches of all ranks take as long as the costliest of
them. So a plan is judged by the sum over i of the costliest, not by how much each rank has in all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

EQUAL_COST_LENGTH = 98_304
"""Tokens at which causal attention costs as much as the linear layers: parameters / (width * layers), Qwen2.5-32B's."""

GOOD_EFFICIENCY = 0.98  # of a plan that needs no improvement
LEAST_GAIN_TOKENS = 1.0  # of a change of a plan

StepPlan = list[list[list[int]]]
"""For each micro-batch, for each rank, the indices of its rollouts; an empty list is an all-ignored micro-batch."""


def cost(length: int) -> float:
    """Return the cost of a rollout's forward and backward pass in tokens: linear layers plus causal attention."""
    return length * (1 + length / EQUAL_COST_LENGTH)


def step_efficiency(plan: StepPlan, lengths: Sequence[int]) -> float:
    """Return the share of their time that the ranks compute for rollouts: a rank's mean cost, divided by the sum of
    each call's costliest micro-batch."""
    busiest = sum(max(sum(cost(lengths[i]) for i in share) for share in call) for call in plan)
    return sum(map(cost, lengths)) / (len(plan[0]) * busiest)


def plan_micro_batches(lengths: Sequence[int], token_budget: int, packed: bool) -> list[list[int]]:
    """Return the rollouts of each micro-batch on one rank, as lists of indices into ``lengths``.

    Longest first, so that the micro-batch that needs the most memory comes first. A micro-batch holds at most
    ``token_budget`` tokens, padding included; a longer rollout has a micro-batch for itself.
    """
    if token_budget < 1:
        raise ValueError(f"token_budget must be at least 1, not {token_budget}")
    plan: list[list[int]] = []
    used: list[int] = []
    for i in _longest_first(lengths):
        if packed:
            place = next((p for p, tokens in enumerate(used) if tokens + lengths[i] <= token_budget), None)
        else:
            fits = bool(plan) and (len(plan[-1]) + 1) * lengths[plan[-1][0]] <= token_budget
            place = len(plan) - 1 if fits else None
        if place is None:
            plan.append([i])
            used.append(lengths[i])
        else:
            plan[place].append(i)
            used[place] += lengths[i]
    return plan


def plan_step(lengths: Sequence[int], world_size: int, token_budget: int, packed: bool) -> StepPlan:
    """Plan the micro-batches of all ranks, the same on every rank that is given the same lengths.

    Every rank gets the same number of micro-batches, the largest first. For one rank, and for padded rows, rollouts are
    dealt to ranks, and each rank's rollouts are packed by themselves. For packed rows of several ranks this is one
    start, and bins of equal cost are others. From each start rollouts are moved and exchanged as long as that lowers
    the sum of the costliest micro-batches. The best plan is taken (in a tenth of a second for 32 rollouts).

    Raises:
        ValueError: the budget is not positive.
    """
    plan = _dealt(lengths, world_size, token_budget, packed)
    if world_size == 1 or not packed or not plan:
        return plan
    starts = sorted((plan, *_even(lengths, world_size, token_budget)), key=lambda each: -step_efficiency(each, lengths))
    plan = starts[0]
    for start in starts:
        better = _exchanged(start, lengths, token_budget)
        plan = max(plan, better, key=lambda each: step_efficiency(each, lengths))
        if step_efficiency(plan, lengths) >= GOOD_EFFICIENCY:
            break
    return sorted(plan, key=lambda call: -max(sum(lengths[i] for i in share) for share in call))


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def _dealt(lengths: Sequence[int], world_size: int, token_budget: int, packed: bool) -> StepPlan:
    """Deal rollouts, costliest first, to the rank with the least cost so far. Then pack them rank by rank."""
    ranks: list[list[int]] = [[] for _ in range(world_size)]
    loads = [0.0] * world_size
    for i in _longest_first(lengths):
        rank = loads.index(min(loads))
        ranks[rank].append(i)
        loads[rank] += cost(lengths[i])
    plans = [
        [[mine[i] for i in batch] for batch in plan_micro_batches([lengths[i] for i in mine], token_budget, packed)]
        for mine in ranks
    ]
    calls = max(map(len, plans))
    return [[plan[call] if call < len(plan) else [] for plan in plans] for call in range(calls)]


def _even(lengths: Sequence[int], world_size: int, token_budget: int) -> list[StepPlan]:
    """Put rollouts, costliest first, into the bin with the least cost so far; bins of similar cost make up a call.

    There is a plan for each of the three smallest numbers of calls, if the budget allows it.
    """
    least = max(1, math.ceil(sum(lengths) / (token_budget * world_size)))
    plans = []
    for calls in range(least, least + 3):
        bins: list[list[int]] = [[] for _ in range(calls * world_size)]
        tokens, loads = [0] * len(bins), [0.0] * len(bins)
        for i in _longest_first(lengths):
            open_to = [b for b in range(len(bins)) if not bins[b] or tokens[b] + lengths[i] <= token_budget]
            if not open_to:
                break
            chosen = min(open_to, key=loads.__getitem__)
            bins[chosen].append(i)
            tokens[chosen] += lengths[i]
            loads[chosen] += cost(lengths[i])
        else:
            order = sorted(range(len(bins)), key=lambda b: -loads[b])
            plans.append(_calls([bins[b] for b in order], world_size))
    return plans


def _calls(bins: list[list[int]], world_size: int) -> StepPlan:
    calls = [bins[start : start + world_size] for start in range(0, len(bins), world_size)]
    return [call for call in calls if any(call)]


def _exchanged(plan: StepPlan, lengths: Sequence[int], token_budget: int) -> StepPlan:
    """Lower the sum of the costliest micro-batches. Each change moves one of their rollouts to another micro-batch, or
    exchanges two, and gains most; stop when none gains or the ranks compute nearly all of the time."""
    ranks, bins = len(plan[0]), [list(share) for call in plan for share in call]
    costs = [cost(length) for length in lengths]
    tokens, loads = ([sum(of[i] for i in content) for content in bins] for of in (lengths, costs))
    enough = sum(costs) / ranks / GOOD_EFFICIENCY

    def costliest(call: int, changed: Mapping[int, float]) -> float:
        return max(changed.get(b, loads[b]) for b in range(call * ranks, (call + 1) * ranks))

    def gains() -> Iterator[tuple[float, int, int, int, int | None]]:
        for call in range(len(plan)):
            source = max(range(call * ranks, (call + 1) * ranks), key=loads.__getitem__)
            for target in (b for b in range(len(bins)) if b != source):
                calls = {call, target // ranks}
                before = sum(costliest(each, {}) for each in calls)
                for i, j in itertools.product(bins[source], (None, *bins[target])):
                    more = lengths[i] - (0 if j is None else lengths[j])
                    dearer = costs[i] - (0.0 if j is None else costs[j])
                    fits_there = tokens[target] + more <= token_budget or len(bins[target]) == (j is not None)
                    fits_here = tokens[source] - more <= token_budget or (j is not None and len(bins[source]) == 1)
                    if dearer > 0 and fits_there and fits_here:
                        changed = {source: loads[source] - dearer, target: loads[target] + dearer}
                        yield before - sum(costliest(each, changed) for each in calls), source, i, target, j

    while sum(costliest(call, {}) for call in range(len(plan))) > enough:
        gain, source, i, target, j = max(gains(), key=lambda each: each[0], default=(0.0, 0, 0, 0, None))
        if gain < LEAST_GAIN_TOKENS:
            break
        for one, other, place in ((i, source, target), *([] if j is None else [(j, target, source)])):
            bins[other].remove(one)
            bins[place].append(one)
        for b in (source, target):
            tokens[b], loads[b] = (sum(of[i] for i in bins[b]) for of in (lengths, costs))
    order = {i: number for number, i in enumerate(_longest_first(lengths))}
    return _calls([sorted(content, key=order.__getitem__) for content in bins], ranks)
