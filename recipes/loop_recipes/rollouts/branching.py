"""Continuations of stored rollouts: "go on from rollout r at turn t, n times, with policy version v".

Monte-Carlo values of turns and trees over turns are built on this. :mod:`loop_formats.branch` defines branches.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from loop_formats.branch import Branch
from loop_formats.collection_request import CollectionRequest, Limits, LostRollout, Sampling
from loop_formats.ids import branch_id
from loop_formats.rollout import Rollout
from loop_formats.run_files import meta_path, read_lines
from loop_recipes.rollouts.source import CollectionSource

BRANCHES_OF_A_REQUEST = 16
BYTES_OF_A_REQUEST = 6 << 20
"""A node takes requests of 8 MiB. A branch brings its rollout's token ids and texts: some 0.3 MB at 32,000 tokens."""


@dataclass(frozen=True)
class HowToSample:
    """The way to sample continuations: ``continuations`` of each turn, by one policy version."""

    continuations: int
    policy_version: int
    sampling: Sampling
    limits: Limits
    seed: int = 0

    def __post_init__(self) -> None:
        self.limits.check_branching("limits")


@dataclass(frozen=True)
class Continuations:
    """The outcome of a request: for each (rollout id, turn) the continuations and the number of refused ones; and the
    lost rollouts."""

    rollouts: dict[tuple[str, int], list[Rollout]]
    refused: dict[tuple[str, int], int]
    lost: list[LostRollout]


def continuation_request(branches: Sequence[Branch], how: HowToSample) -> CollectionRequest:
    """Make the request for all continuations, named after the collection of the first rollout.

    The request's id ends in a hash of everything that the result depends on. So the same request finds the same
    collection, and a node does not repeat rollouts that it has on disk.
    """
    origins = [[branch.rollout_id, [dataclasses.astuple(point) for point in branch.points]] for branch in branches]
    protocol = json.dumps([origins, {**dataclasses.asdict(how), "limits": how.limits.non_null()}], sort_keys=True)
    return CollectionRequest(
        id=branch_id(branches[0].rollout_id.partition("/")[0], protocol),
        tasks=[],
        branches=list(branches),
        rollouts_per_task=how.continuations,
        policy_version=how.policy_version,
        seed=how.seed,
        sampling=how.sampling,
        limits=how.limits,
    )


def branch_requests(branches: Iterable[Branch], how: HowToSample) -> list[CollectionRequest]:
    """Make the requests for all continuations, in order; each has at most as many branches as a node accepts."""
    shares: list[list[Branch]] = []
    size_of_share = 0
    for branch in branches:
        size = len(json.dumps(branch.to_dict()))
        if not shares or len(shares[-1]) == BRANCHES_OF_A_REQUEST or size_of_share + size > BYTES_OF_A_REQUEST:
            shares.append([])
            size_of_share = 0
        shares[-1].append(branch)
        size_of_share += size
    return [continuation_request(share, how) for share in shares]


def read_continuations(
    source: CollectionSource, request: CollectionRequest, deadline_s: float = math.inf
) -> Continuations:
    """Wait for a started collection, ``deadline_s`` at most; raises the source's errors."""
    collected = source.read(request, deadline_s)
    rollouts: defaultdict[tuple[str, int], list[Rollout]] = defaultdict(list)
    for rollout in collected.rollouts:
        assert rollout.branch_of is not None, "every item of the request is a branch"
        rollouts[rollout.branch_of.rollout_id, rollout.branch_of.turns].append(rollout)
    points = [(branch.rollout_id, point.turns) for branch in request.branches for point in branch.points]
    starts = {
        (item.task_id, index): (item.start.origin.rollout_id, item.start.origin.turns)
        for item in request.items()
        if item.start is not None
        for index in item.indices
    }
    lost = Counter(starts[each.task_id, each.index] for each in collected.end.lost)
    return Continuations(
        rollouts={point: sorted(rollouts[point], key=lambda rollout: rollout.index) for point in points},
        # The floors are all of them, so a rollout that is missing and not lost was refused.
        refused={point: request.rollouts_per_task - len(rollouts[point]) - lost[point] for point in points},
        lost=collected.end.lost,
    )


def stored_protocol(log: Path) -> tuple[Sampling, Limits]:
    """Read the sampling and limits of the rollouts in a collection's log.

    Raises:
        ValueError: the file beside the log is missing, or has no request.
    """
    meta = meta_path(log.parent, log.stem)
    for line in read_lines(meta) if meta.is_file() else ():
        if stored := line.record.get("request"):
            request = CollectionRequest.from_dict(stored)
            return request.sampling, request.limits
    raise ValueError(f"{meta} is missing or holds no request; it says how the rollouts of {log.name} were sampled")
