"""Rollouts from the logs of an earlier run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import groupby, pairwise
from pathlib import Path

from agent_environments.description import Description
from loop_formats.collection_request import CollectionEnd, CollectionRequest
from loop_formats.ids import parse_collection_id
from loop_formats.rollout import MOST_IDS, Rollout, by_episode
from loop_formats.run_files import STREAM_FILE, only_logs
from loop_formats.run_folder import groups_taken, read_description
from loop_formats.schema import ConfigError, require
from loop_plumbing.breakage import raised_as
from loop_plumbing.grouping import grouped
from loop_recipes.rollouts.fixed_set import read_to_train_on
from loop_recipes.rollouts.source import Collected, NoRollouts


class ReplaySource:
    """Rollouts from the logs in a folder, without a node. In the order of names, each iteration has one log, or several
    if groups were refilled. For a stream, ``stream.jsonl`` (in the folder or above) says which groups each iteration
    took.

    For reproducing or profiling updates. The rollouts carry the versions of the run that made them, so a replay trains
    as that run did only if it starts from the same adapter.

    Raises:
        ConfigError: two logs belong to one iteration, or no log has rollouts to train on.
    """

    _vocabulary = MOST_IDS

    def __init__(self, folder: Path) -> None:
        names = {log: parse_collection_id(log.stem) for log in only_logs(folder.iterdir())}
        self._logs = [log for log, name in names.items() if not name.is_score and not name.branch]
        require(
            self._logs, f"rollout_node.replay: {folder} holds only scores of policies and branches; give a run's logs"
        )

        def whose(log: Path) -> tuple[str, int | None] | Path:
            return (names[log].name, names[log].iteration) if names[log].is_training else log

        streamed = {log.stem: log for log in self._logs if names[log].group is not None}
        whole = [list(group) for _, group in groupby((log for log in self._logs if log.stem not in streamed), whose)]
        for log, following in (pair for logs in whole for pair in pairwise(logs)):
            if names[log].refill == names[following].refill:
                raise ConfigError(
                    f"rollout_node.replay: {log.name} and {following.name} are of one iteration; leave one log of it "
                    "in the folder (of a run that went back to an earlier checkpoint, the newer one; what several "
                    "nodes collected of it, in one file)"
                )
        self._iterations = whole
        if streamed:
            with raised_as(ConfigError, "rollout_node.replay: "):
                numbered = sorted(
                    [*((names[logs[0]].iteration or 0, logs) for logs in whole), *_taken(folder, streamed)]
                )
                twice = next((iteration for (iteration, _), (again, _) in pairwise(numbered) if iteration == again), 0)
                require(
                    not twice, f"iteration {twice} has a log of its own and groups of a stream; leave one of the two"
                )
            self._iterations = [logs for _, logs in numbered]

    def wait_ready(self) -> list[int]:
        return []

    def check_model(self, vocabulary: int, contexts: range) -> None:
        self._vocabulary = vocabulary  # a log does not name its model's: each id is checked

    def tasks(self, split: str) -> tuple[str, list[str]]:
        rollouts = [rollout for log in self._logs for rollout in self._read_log(log)]
        require(rollouts, "rollout_node.replay: its logs hold no rollout")
        return rollouts[0].dataset, sorted({rollout.task_id for rollout in rollouts})

    def description(self) -> Description:
        return read_description(self._logs[0])

    def _nothing(self, *_: object, **__: object) -> None:
        """Do nothing: there is no node to be told."""

    publish = retire = sleep = wake = start = close = _nothing

    def read(self, request: CollectionRequest, deadline_s: float = math.inf) -> Collected:
        """Read the logs of the request's iteration.

        Raises:
            NoRollouts: no log is left.
            ConfigError: a line is not a rollout that can be trained on; the message names the file.
        """
        number = parse_collection_id(request.id).iteration or 0
        there = len(self._iterations)
        if number > there:
            raise NoRollouts(f"iteration {number} was asked for, but only {there} can be replayed")
        rollouts = [rollout for log in self._iterations[number - 1] for rollout in self._read_log(log)]
        return Collected(rollouts, CollectionEnd("complete", len(by_episode(rollouts)), 0, 0, {}, 0.0), 0.0)

    def _read_log(self, log: Path) -> list[Rollout]:
        with raised_as(ConfigError, "rollout_node.replay: "):
            return read_to_train_on(log, self._vocabulary)


def _taken(folder: Path, logs: Mapping[str, Path]) -> Iterable[tuple[int, list[Path]]]:
    """Return the iterations of a stream, each with the logs of the groups that it took. Raises ValueError if
    ``stream.jsonl`` is missing or damaged, or a group has no log."""
    taken = groups_taken(folder)
    require(taken, f"{folder} holds the groups of a stream; lay its run's {STREAM_FILE} beside them")
    missing = next((group for group in taken if group not in logs), None)
    require(missing is None, f"{STREAM_FILE} names {missing}, whose log is missing")
    return grouped((iteration, logs[group]) for group, iteration in taken.items()).items()
