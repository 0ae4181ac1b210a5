"""SWEET-RL's data for the actor (arXiv 2503.15478, section 4.3): candidates for the turns of stored rollouts, ranked.

For a turn of a stored rollout the policy samples candidates after exactly the token ids that were served before it
(a branch, :mod:`loop_formats.branch`). The critic of turns ranks them. The chosen turn of a pair is drawn from the
better half and the rejected one from the worse half, without replacement; both follow the same ids, so they are a pair
as :mod:`~loop_contrib.turn_pairs` keeps it, with the critic's advantages as values.
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from loop_contrib.turn_pairs import TurnPair, turns_of
from loop_formats.branch import Branch
from loop_formats.collection_request import CollectionRequest
from loop_formats.rollout import Rollout
from loop_plumbing.grouping import grouped
from loop_recipes.rollouts.branching import HowToSample, branch_requests, read_continuations
from loop_recipes.rollouts.source import CollectionSource
from rollout_server.client import CollectionFailed

logger = logging.getLogger(__name__)

Turn = tuple[str, int]
"""A turn of a stored rollout: its id, and the turn's number in the episode, from 0."""


def candidate_requests(rollouts: Sequence[Rollout], every: int, how: HowToSample) -> list[CollectionRequest]:
    """Return requests for ``how.continuations`` episodes from every ``every``-th turn. Each episode ends after that
    turn.

    A request has a single limit of turns, so each request is for turns with one number. The node also plays the
    candidate in the world. This step is not needed.
    """
    spans = [(each, range(each.turns_before, each.turns_before + len(each.turns), every)) for each in rollouts]
    of_number = grouped((turn, rollout) for rollout, turns in spans for turn in turns)
    requests: list[CollectionRequest] = []
    for turn, members in sorted(of_number.items()):
        one_turn = dataclasses.replace(how, limits=dataclasses.replace(how.limits, max_turns=turn + 1))
        requests += branch_requests((Branch.of(rollout, [turn]) for rollout in members), one_turn)
    return requests


def sample_candidates(
    source: CollectionSource,
    requests: Sequence[CollectionRequest],
    on_request: Callable[[CollectionRequest], None] = lambda request: None,
) -> dict[Turn, list[Rollout]]:
    """Sample the candidates of every turn; each is a rollout of one turn. A turn has none if its world answered
    differently when played again or all were lost. Candidates on the node's disk are not sampled again. The
    errors of ``source`` are raised too.

    Raises:
        CollectionFailed: all candidates were lost.
    """
    for request in requests[:2]:
        source.start(request)
    candidates: dict[Turn, list[Rollout]] = {}
    failure: CollectionFailed | None = None
    for number, request in enumerate(requests):
        try:
            candidates |= read_continuations(source, request).rollouts
        except CollectionFailed as error:
            if not error.end.lost:
                raise
            logger.warning("%s", error)
            failure = error
        on_request(request)
        if number + 2 < len(requests):
            source.start(requests[number + 2])
    if failure is not None and not any(candidates.values()):
        raise failure
    return candidates


def pairs_of(
    turn: Turn, candidates: Sequence[Rollout], values: Mapping[str, Tensor], count: int, seed: int
) -> Iterator[TurnPair]:
    """Yield up to ``count`` pairs of a turn's candidates from the better and the worse half, without a middle one.

    Args:
        values: the critic's advantage of each candidate, [1], by rollout id.
    """
    ranked = sorted(candidates, key=lambda rollout: (values[rollout.rollout_id].item(), rollout.rollout_id))
    half = len(ranked) // 2
    draw = random.Random(f"{seed} {turn}")
    drawn = min(count, half)
    better, worse = draw.sample(ranked[len(ranked) - half :], drawn), draw.sample(ranked[:half], drawn)
    for chosen, rejected in zip(better, worse, strict=True):
        high, low = values[chosen.rollout_id].item(), values[rejected.rollout_id].item()
        # The critic's values of the same words differ by rounding.
        if high > low and turns_of(chosen)[0].sampled != turns_of(rejected)[0].sampled:
            yield TurnPair(
                task_id=chosen.task_id,
                turn=turn[1],
                chosen=chosen.rollout_id,
                rejected=rejected.rollout_id,
                chosen_value=high,
                rejected_value=low,
                chosen_visits=1,
                rejected_visits=1,
            )
