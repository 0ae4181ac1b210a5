"""Credits for the turns of a collection's rollouts from Monte-Carlo continuations, as VinePPO has them for steps of
reasoning (arXiv 2410.01679): the credit of a turn is the value of the state after it minus the value of the state
before.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from loop_formats.branch import Branch
from loop_formats.collection_request import CollectionRequest, losses
from loop_formats.rollout import Rollout
from loop_plumbing import running_time
from loop_recipes.config.loop_config import UpdateConfig
from loop_recipes.rollouts.branching import BRANCHES_OF_A_REQUEST, HowToSample, branch_requests, read_continuations
from loop_recipes.rollouts.source import CollectionSource
from rollout_server.client import CollectionFailed

logger = logging.getLogger(__name__)


def value_changes(values: Sequence[float | None], final: float) -> list[float]:
    """Return by how much each turn changed the value, [t].

    Args:
        values: [t] values of the states before the turns. If a value is None, its turn counts as no change.
        final: the return, used as the value after the last turn.
    """
    states: list[float] = []
    known = [value for value in values if value is not None]
    for value in values:
        states.append(value if value is not None else states[-1] if states else known[0] if known else final)
    return [after - before for before, after in zip(states, [*states[1:], final], strict=True)]


def with_unequal_returns(rollouts: Sequence[Rollout], paid: UpdateConfig) -> list[Rollout]:
    """Return the rollouts of all tasks whose rollouts have unequal returns. In other tasks all advantages are 0."""
    returns: defaultdict[str, set[float]] = defaultdict(set)
    for rollout in rollouts:
        returns[rollout.task_id].add(paid.return_of(rollout))
    return [rollout for rollout in rollouts if len(returns[rollout.task_id]) > 1]


def credits_in_parts(
    ask: Callable[[Callable[[CollectionSource], Any]], Any],
    rollouts: Sequence[Rollout],
    how: Mapping[int, HowToSample],
    paid: UpdateConfig,
    deadline_s: float,
) -> dict[str, list[float]] | None:
    """Return the result of :func:`branch_credits` on all ranks; None if the run was asked to stop meanwhile.

    Args:
        ask: :meth:`~loop_recipes.rollouts.shared_source.SharedSource.ask`. Each call is for a part of the rollouts,
            because the other ranks wait for its answer.
        deadline_s: longest time of each call, the same as for a collection.
    """
    batches = [rollouts[at : at + BRANCHES_OF_A_REQUEST] for at in range(0, len(rollouts), BRANCHES_OF_A_REQUEST)]
    credits: dict[str, list[float]] = {}
    for batch, ahead in zip(batches, [*batches[1:], []], strict=True):
        work = partial(branch_credits, rollouts=batch, how=how, paid=paid, ahead=ahead)
        more = ask(partial(work, deadline_s=deadline_s))
        if more is None:
            return None
        credits |= more
    return credits


def branch_credits(
    source: CollectionSource,
    rollouts: Sequence[Rollout],
    how: Mapping[int, HowToSample],
    paid: UpdateConfig,
    ahead: Sequence[Rollout] = (),
    deadline_s: float = math.inf,
) -> dict[str, list[float]]:
    """Return rollout id -> credits [t] of the turns that it sampled, as plain data for other ranks.

    A rollout has no credits if it cannot be branched (several sequences, or text only) or if all its continuations
    were lost.

    Args:
        source: source of a node that serves the policy versions of the rollouts.
        how: policy version -> how to sample the continuations of every turn.
        ahead: the next rollouts. Their continuations are started now, so that the node always has work.
        deadline_s: longest time to wait for all continuations of ``rollouts`` together.

    Raises:
        NoRollouts: the deadline passed.
    """
    give_up = running_time.now() + deadline_s
    fit = _fit(rollouts)
    requests = _requests(fit, how)
    for request in [*requests, *_requests(_fit(ahead), how)]:
        source.start(request)
    played: dict[tuple[str, int], list[Rollout]] = {}
    for request in requests:
        try:
            left = max(0.0, give_up - running_time.now())
            made = read_continuations(source, request, left)
        except CollectionFailed as error:
            logger.warning("%s; the turns of its rollouts share their advantage evenly", error)
            continue
        played |= made.rollouts
        if made.lost:
            logger.warning("continuations of %s: %s", request.id, losses(made.lost, request.episodes))

    def value(rollout: Rollout, turn: int) -> float | None:
        continuations = played.get((rollout.rollout_id, turn))
        return statistics.fmean(paid.return_of(each) for each in continuations) if continuations else None

    return {
        rollout.rollout_id: value_changes([value(rollout, turn) for turn in _numbers(rollout)], paid.return_of(rollout))
        for rollout in fit
        if any(played.get((rollout.rollout_id, turn)) for turn in _numbers(rollout))
    }


def _fit(rollouts: Sequence[Rollout]) -> list[Rollout]:
    return [rollout for rollout in rollouts if rollout.segments == 1 and not rollout.text_only]


def _requests(rollouts: Sequence[Rollout], how: Mapping[int, HowToSample]) -> list[CollectionRequest]:
    requests: list[CollectionRequest] = []
    for version in sorted({rollout.policy_versions[-1] for rollout in rollouts}):
        of_version = (rollout for rollout in rollouts if rollout.policy_versions[-1] == version)
        requests += branch_requests((Branch.of(rollout, _numbers(rollout)) for rollout in of_version), how[version])
    return requests


def _numbers(rollout: Rollout) -> range:
    """Return the numbers of the turns that the rollout sampled itself, counted from the start of its episode."""
    return range(rollout.turns_before, rollout.turns_before + len(rollout.turns))
