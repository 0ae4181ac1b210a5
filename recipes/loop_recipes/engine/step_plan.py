"""Plans which rollouts each rank takes in each of a step's micro-batches, over all ranks at once.

FSDP2 gathers a layer on all ranks together, so the i-th micro-batches of all ranks take as long as the costliest of
them. What counts is therefore not how much each rank has in all, but the sum over i of the costliest.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

EQUAL_COST_LENGTH = 98_304
"""Tokens at which causal attention costs what the linear layers do: parameters / (width * layers), Qwen2.5-32B's."""

MOVES_PER_ROLLOUT = 3_000
ENOUGH = 0.985

StepPlan = list[list[list[int]]]
"""For each micro-batch, for each rank, the indices of its rollouts; an empty list is an all-ignored micro-batch."""


def cost(length: int) -> float:
    """Of a rollout's forward and backward pass, in tokens: linear layers plus causal attention."""
    return length * (1 + length / EQUAL_COST_LENGTH)


def step_efficiency(plan: StepPlan, lengths: Sequence[int]) -> float:
    """Share of all ranks' time in which they compute for a rollout: mean cost of a rank over the sum of the costliest
    micro-batches."""
    busiest = sum(max(sum(cost(lengths[i]) for i in part) for part in call) for call in plan)
    return sum(map(cost, lengths)) / (len(plan[0]) * busiest)


def plan_micro_batches(lengths: Sequence[int], token_budget: int, packed: bool) -> list[list[int]]:
    """Return the rollouts of each micro-batch on one rank, as lists of indices into ``lengths``.

    Longest first, so that the micro-batch that needs the most memory comes first. A micro-batch holds at most
    ``token_budget`` tokens, padding included; a rollout longer than that goes alone.
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
    """Micro-batches of all ranks, the same on every rank that is given the same lengths.

    Every rank gets the same number of them, and the largest come first. For one rank, and for padded rows, rollouts are
    dealt to ranks and each rank's are packed for themselves. For packed rows of several ranks that is one start, bins
    of equal cost are another, and from the better one simulated annealing with a fixed seed moves and exchanges
    rollouts (some tenths of a second for 32 of them) as long as that lowers the sum of the costliest.

    Raises:
        ValueError: the budget is not positive.
    """
    plan = _dealt(lengths, world_size, token_budget, packed)
    if world_size == 1 or not packed or not plan:
        return plan
    plan = max((plan, *_even(lengths, world_size, token_budget)), key=lambda plan: step_efficiency(plan, lengths))
    plan = _annealed(plan, lengths, token_budget)
    return sorted(plan, key=lambda call: -max(sum(lengths[i] for i in part) for part in call))


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def _dealt(lengths: Sequence[int], world_size: int, token_budget: int, packed: bool) -> StepPlan:
    """Rollouts dealt costliest first to the rank with the least, then packed rank by rank."""
    ranks: list[list[int]] = [[] for _ in range(world_size)]
    loads = [0.0] * world_size
    for i in _longest_first(lengths):
        rank = loads.index(min(loads))
        ranks[rank].append(i)
        loads[rank] += cost(lengths[i])
    plans = [
        [[mine[i] for i in part] for part in plan_micro_batches([lengths[i] for i in mine], token_budget, packed)]
        for mine in ranks
    ]
    calls = max(map(len, plans))
    return [[plan[call] if call < len(plan) else [] for plan in plans] for call in range(calls)]


def _even(lengths: Sequence[int], world_size: int, token_budget: int) -> list[StepPlan]:
    """Bins filled costliest rollout first, each into the bin with the least; those of similar cost in one call.

    One plan for each of the three smallest numbers of calls, where that fits the budget.
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


def _annealed(plan: StepPlan, lengths: Sequence[int], token_budget: int) -> StepPlan:
    """Lower the sum of the costliest micro-batches by random moves and exchanges within the budget."""
    ranks, bins = len(plan[0]), [part for call in plan for part in call]
    costs = [cost(length) for length in lengths]
    place = [0] * len(lengths)
    for number, part in enumerate(bins):
        for i in part:
            place[i] = number
    count = [len(part) for part in bins]
    tokens = [sum(lengths[i] for i in part) for part in bins]
    load = [sum(costs[i] for i in part) for part in bins]

    def costliest(call: int) -> float:
        return max(load[call * ranks : (call + 1) * ranks])

    tops = [costliest(call) for call in range(len(plan))]
    now = best = sum(tops)
    kept, enough, hottest = list(place), sum(costs) / ranks / ENOUGH, max(costs) / 8
    draw, moves = random.Random(0).random, MOVES_PER_ROLLOUT * len(lengths)
    for move in range(moves):
        if best <= enough:
            break
        one, other = int(draw() * len(place)), -1
        source = place[one]
        if draw() < 0.4:
            target = int(draw() * len(bins))
            more, dearer, alone = lengths[one], costs[one], count[target] == 0
        else:
            other = int(draw() * len(place))
            target = place[other]
            more, dearer, alone = lengths[one] - lengths[other], costs[one] - costs[other], count[target] == 1
        fits_there = tokens[target] + more <= token_budget or alone
        fits_here = other < 0 or tokens[source] - more <= token_budget or count[source] == 1
        if source == target or not (fits_there and fits_here):
            continue
        load[source] -= dearer
        load[target] += dearer
        changed = {source // ranks, target // ranks}
        then = now + sum(costliest(call) - tops[call] for call in changed)
        if then > now and draw() >= math.exp((now - then) / (hottest * (1 - move / moves) ** 3 + 1.0)):
            load[source] += dearer
            load[target] -= dearer
            continue
        now = then
        for call in changed:
            tops[call] = costliest(call)
        tokens[source] -= more
        tokens[target] += more
        place[one] = target
        if other < 0:
            count[source] -= 1
            count[target] += 1
        else:
            place[other] = source
        if now < best - 1e-6:
            best, kept = now, list(place)
    found: list[list[int]] = [[] for _ in bins]
    for i in _longest_first(lengths):
        found[kept[i]].append(i)
    return _calls(found, ranks)
