"""Scores a policy during training, by the collection that an evaluation asked for."""

from __future__ import annotations

import logging

from agent_environments.description import UNSAID, Description
from loop_formats.collection_request import CollectionRequest
from loop_recipes.rollouts.source import CollectionSource, collect
from loop_recipes.run.metrics import rollout_metrics
from rollout_server.client import CollectionFailed

logger = logging.getLogger(__name__)


def dev_scores(
    source: CollectionSource, request: CollectionRequest, environment: Description = UNSAID
) -> dict[str, float] | None:
    """Wait for an evaluation; returns its figures of ``metrics.jsonl``, or None when the run was asked to stop.

    A task is solved as in `eval_appworld`, by what its environment says. An episode of several sequences
    counts once. A lost rollout is in no figure but ``dev_lost``; where all are lost there are no figures.
    """
    try:
        collected = collect(source, request)
    except CollectionFailed as error:
        logger.warning("this policy has no dev score: %s", error)
        return {}
    if collected is None:
        return None
    solved = [
        environment.solved(rollout.task_id, rollout.success, rollout.end_reason)
        for rollout in collected.rollouts
        if rollout.segment == 0
    ]
    return {
        "dev_reward": rollout_metrics(collected.rollouts)["reward"],
        "dev_success": sum(solved) / len(solved),
        "dev_lost": len(collected.end.lost),
    }
