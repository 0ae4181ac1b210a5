"""Scores a policy during training, by the collection that an evaluation asked for."""

from __future__ import annotations

import logging
from statistics import fmean

from agent_environments.description import UNSAID, Description
from loop_formats.collection_request import CollectionRequest
from loop_recipes.evaluation.scores import task_means
from loop_recipes.rollouts.source import CollectionSource, collect
from rollout_server.client import CollectionFailed

logger = logging.getLogger(__name__)


def dev_scores(
    source: CollectionSource, request: CollectionRequest, environment: Description = UNSAID
) -> dict[str, float] | None:
    """Wait for an evaluation; returns its figures of ``metrics.jsonl``, or None when the run was asked to stop.

    Both scores are as in `eval_appworld`: a task is solved where its environment says so, and counts with its mean over
    the rollouts that it has. An episode of several sequences
    counts once. A lost rollout is in no figure but ``dev_lost``; where all are lost there are no figures.
    """
    try:
        collected = collect(source, request)
    except CollectionFailed as error:
        logger.warning("this policy has no dev score: %s", error)
        return {}
    if collected is None:
        return None
    first = [rollout for rollout in collected.rollouts if rollout.segment == 0]
    rewards = task_means((each.task_id, each.reward) for each in first)
    solved = task_means(
        (each.task_id, environment.solved(each.task_id, each.success, each.end_reason)) for each in first
    )
    return {
        "dev_reward": fmean(rewards.values()),
        "dev_success": fmean(solved.values()),
        "dev_lost": len(collected.end.lost),
    }
