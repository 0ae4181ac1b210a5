"""Training runs small enough for drills: the tiny policy, two tasks of three rollouts, three iterations."""

import json
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
SMALL = (
    "run_name=drill",  # part of every rollout's seed: two runs of this name sample the same
    "max_iterations=3",
    "collection.tasks_per_iteration=2",
    "collection.rollouts_per_task=3",
    "collection.min_rollouts_per_task=3",
    "collection.min_rollouts_fraction=1.0",
    "collection.limits.max_turns=4",
    "node.max_concurrent_episodes=4",
    "update.min_abs_advantage=0.0",  # a step in every iteration, also where all rollouts earn the same
)


def metrics(run: Path) -> list[dict]:
    """The iterations that a run has logged so far."""
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
