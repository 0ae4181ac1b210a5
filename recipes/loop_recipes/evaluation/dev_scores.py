"""Scores a policy during training, from the collection of an evaluation."""

from __future__ import annotations

import logging
from statistics import fmean

from agent_environments.description import DEFAULT_DESCRIPTION, Description
from loop_formats.collection_request import CollectionRequest
from loop_recipes.evaluation.pass_at_k import PassAtK, passes
from loop_recipes.evaluation.scores import success_rates, task_means
from loop_recipes.rollouts.source import CollectionSource, collect
from rollout_server.client import CollectionFailed

logger = logging.getLogger(__name__)


def dev_scores(
    source: CollectionSource, request: CollectionRequest, environment: Description = DEFAULT_DESCRIPTION
) -> dict[str, float]:
    """Wait for an evaluation with ``collect``; return the figures for ``metrics.jsonl``.

    Both scores are as in `eval_appworld`: the environment decides whether a task is solved, and a task counts with the
    mean over its rollouts. With several rollouts per task there are pass@k and pass^k too. An episode of several
    sequences counts once. A lost rollout is in no figure but ``dev_lost``, and ``dev_tasks`` counts the tasks with a
    rollout; if all rollouts are lost there are no figures.
    """
    try:
        collected = collect(source, request)
    except CollectionFailed as error:
        logger.warning("this policy has no dev score: %s", error)
        return {}
    first = [rollout for rollout in collected.rollouts if rollout.segment == 0]
    rewards = task_means((each.task_id, each.reward) for each in first)
    runs: dict[int, dict[str, bool]] = {}
    for each in first:
        success = environment.solved(each.task_id, each.success, each.end_reason)
        runs.setdefault(each.index, {})[each.task_id] = success
    return {
        **_several(passes(list(runs.values()), environment.group_of), request.rollouts_per_task),
        "dev_reward": fmean(rewards.values()),
        "dev_success": fmean(success_rates(list(runs.values())).values()),
        "dev_tasks": len(rewards),
        "dev_lost": len(collected.end.lost),
    }


def _several(scores: list[PassAtK], runs: int) -> dict[str, float]:
    """Return pass@k and pass^k with their intervals, as shares, for k = ``runs``; {} if there is one run, or no task
    has ``runs`` rollouts."""
    of_all = {score.k: score for score in scores}.get(runs)
    if of_all is None:
        return {}
    both = {"dev_pass_at_k": of_all.any.scaled(0.01), "dev_pass_all_k": of_all.all.scaled(0.01)}
    ends = {f"{name}_{end}": getattr(score, end) for name, score in both.items() for end in ("low", "high")}
    return {**{name: score.estimate for name, score in both.items()}, **ends}
