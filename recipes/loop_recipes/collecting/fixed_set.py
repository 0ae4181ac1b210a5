"""A fixed set of stored rollouts to train on, from the logs of runs, collections and demonstrations."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from loop_recipes.config.sft_config import FixedSetConfig
from rollout_server.rollout import Rollout
from rollout_server.run_files import find_logs, read_rollouts
from rollout_server.schema import ConfigError, require


@dataclass(frozen=True)
class FixedSet:
    """The rollouts, in the order of logs and lines; ``digest`` is the same where their ids and tokens are the same."""

    rollouts: list[Rollout]

    @property
    def digest(self) -> str:
        content = hashlib.sha256()
        for rollout in self.rollouts:
            content.update(f"{rollout.rollout_id} {rollout.reward} {rollout.token_ids}\n".encode())
        return content.hexdigest()


def read_fixed_set(config: FixedSetConfig) -> FixedSet:
    """Read the logs.

    Raises:
        ConfigError: a log or folder that holds no rollouts, a damaged line, a rollout twice or without token ids, or
            none left.
    """
    rollouts: list[Rollout] = []
    for name in config.logs:
        logs = find_logs(Path(name)) if Path(name).exists() else []
        require(logs, f"rollouts.logs: {name} is no log of rollouts, and no folder with collections/*.jsonl below it")
        for log in logs:
            if not any(fnmatch(log.stem, pattern) for pattern in config.exclude_collections):
                rollouts += _read(log)
    if config.most_per_task is not None:
        rollouts = _at_most(rollouts, config.most_per_task)
    require(rollouts, "rollouts: no rollout is left of logs; see exclude_collections")
    twice = [name for name, count in Counter(rollout.rollout_id for rollout in rollouts).items() if count > 1]
    require(not twice, f"rollouts.logs: rollout {twice[:1]} is there twice; name each log once")
    datasets = sorted({rollout.dataset for rollout in rollouts})
    require(len(datasets) == 1, f"rollouts.logs: rollouts of several datasets: {', '.join(datasets)}")
    return FixedSet(rollouts)


def _read(log: Path) -> list[Rollout]:
    try:
        rollouts = read_rollouts(log)
    except ValueError as error:
        raise ConfigError(f"rollouts.logs: {error}") from error
    texts = next((rollout.rollout_id for rollout in rollouts if rollout.text_only), None)
    require(texts is None, f"rollouts.logs: {log}: rollout {texts} has no token ids (it is an endpoint's)")
    return rollouts


def _at_most(rollouts: Sequence[Rollout], most: int) -> list[Rollout]:
    """The first ``most`` solved episodes of each task, and all that are not solved."""
    solved: dict[str, list[str]] = {}
    for rollout in rollouts:
        if rollout.reward >= 1.0 and rollout.segment == 0:
            solved.setdefault(rollout.task_id, []).append(rollout.episode_id)
    kept = {episode for episodes in solved.values() for episode in episodes[:most]}
    return [rollout for rollout in rollouts if rollout.reward < 1.0 or rollout.episode_id in kept]
