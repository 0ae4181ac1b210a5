"""Where a recipe's rollouts come from: a rollout node, or the logs of an earlier run. Lives on rank 0 only."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from loop_recipes.config.loop_config import CollectionConfig, RolloutSourceConfig
from rollout_server.client import CollectionFailed, NodeUnreachable, RolloutClient, RolloutNodeError
from rollout_server.collection_request import (
    RARE_FAILURES,
    CollectionEnd,
    CollectionRequest,
    Progress,
    failures_warning,
)
from rollout_server.ids import parse_collection_id
from rollout_server.node_process import NodeDied, NodeProcess
from rollout_server.rollout import Rollout
from rollout_server.run_files import only_logs, read_rollouts
from rollout_server.schema import ConfigError

logger = logging.getLogger(__name__)


class NoRollouts(RuntimeError):
    """Rollouts that do not come, or come wrong; the message says why."""


SOURCE_ERRORS = (NoRollouts, CollectionFailed, NodeDied, NodeUnreachable, RolloutNodeError)
"""What a source raises when it cannot deliver; each message is for the user."""


class StopRequested(Exception):
    """The run was asked to stop while it waited for rollouts."""


@dataclass(frozen=True)
class Collected:
    """A finished collection; ``seconds_waiting`` is how long this process waited for it."""

    rollouts: list[Rollout]
    end: CollectionEnd
    seconds_waiting: float


class CollectionSource(Protocol):
    """What the recipe asks of the place its rollouts come from."""

    def wait_ready(self) -> list[int]:
        """Wait until collections can be asked for; returns the policy versions that are served already."""
        ...

    def tasks(self, split: str) -> tuple[str, list[str]]:
        """Name of the dataset and the tasks of a split."""
        ...

    def publish(self, version: int, folder: Path, canary: Mapping[str, Any] | None = None) -> None:
        """Serve the PEFT adapter in ``folder`` as ``version``; ``canary`` is what the node compares log-probs with."""
        ...

    def retire(self, version: int) -> None:
        """``version`` is needed no more."""
        ...

    def start(self, request: CollectionRequest) -> None:
        """Ask for a collection without waiting; asking again is harmless."""
        ...

    def read(self, request: CollectionRequest) -> Collected:
        """Wait for a collection that was started."""
        ...

    def close(self) -> None:
        """Let go of everything; a node that was launched is stopped."""
        ...


class NodeSource:
    """Rollouts from a rollout node, launched here as a child or running elsewhere.

    Args:
        client: of the node.
        node: the child to stop at the end, if the node is ours.
        start_deadline_s: longest time to wait for the node to be ready.
        deadline_s: longest time to wait for one collection.
        stop_requested: asked while waiting; true ends the wait with :class:`StopRequested`.
    """

    def __init__(
        self,
        client: RolloutClient,
        node: NodeProcess | None,
        start_deadline_s: float,
        deadline_s: float,
        stop_requested: Callable[[], bool],
    ) -> None:
        self._client = client
        self._node = node
        self._start_deadline_s = start_deadline_s
        self._deadline_s = deadline_s
        self._stop_requested = stop_requested

    def wait_ready(self) -> list[int]:
        return list(self._client.wait_ready(self._start_deadline_s)["policy_versions"])

    def tasks(self, split: str) -> tuple[str, list[str]]:
        listing = self._client.tasks(split)
        return listing.dataset, list(listing.tasks)

    def publish(self, version: int, folder: Path, canary: Mapping[str, Any] | None = None) -> None:
        self._client.publish_policy(version, folder, canary)

    def retire(self, version: int) -> None:
        try:
            self._client.retire_policy(version)
        except RolloutNodeError as error:
            if error.status != 404:  # not served (any more) is what we want
                raise

    def start(self, request: CollectionRequest) -> None:
        self._client.start_collection(request)

    def read(self, request: CollectionRequest) -> Collected:
        """
        Raises:
            NoRollouts: a rollout came twice, or the deadline passed. Also the client's errors.
            StopRequested: see the class.
        """
        started = time.monotonic()
        rollouts: dict[str, Rollout] = {}
        stream = self._client.rollouts(request.id)
        with tqdm(total=request.floor_total, desc="collecting", leave=False, disable=None, mininterval=1.0) as bar:
            for event in stream:
                if isinstance(event, Progress):
                    bar.set_postfix(running=event.running, waiting=event.waiting, failed=event.failed)
                elif event.rollout_id in rollouts:
                    raise NoRollouts(f"rollout {event.rollout_id} was delivered twice")
                else:
                    rollouts[event.rollout_id] = event
                    bar.update()
                if self._stop_requested():
                    raise StopRequested
                if time.monotonic() - started > self._deadline_s:
                    raise NoRollouts(
                        f"collection {request.id} had {len(rollouts)} of {request.floor_total} rollouts after "
                        f"{self._deadline_s:.0f} s (collection.deadline_s)"
                    )
        return Collected(list(rollouts.values()), stream.end, time.monotonic() - started)

    def close(self) -> None:
        if self._node is not None:
            self._node.stop()


class ReplaySource:
    """Rollouts from the logs in a folder, one log per iteration in the order of their names; asks no node.

    For reproducing or profiling updates. The rollouts carry the versions of the run that made them, so a replay trains
    as that run did only if it starts from the same adapter.
    """

    def __init__(self, folder: Path) -> None:
        logs = only_logs(folder.iterdir())
        self._logs = [log for log in logs if not parse_collection_id(log.stem).dev]

    def wait_ready(self) -> list[int]:
        return []

    def tasks(self, split: str) -> tuple[str, list[str]]:
        rollouts = [rollout for log in self._logs for rollout in self._read_log(log)]
        return rollouts[0].dataset, sorted({rollout.task_id for rollout in rollouts})

    def publish(self, version: int, folder: Path, canary: Mapping[str, Any] | None = None) -> None:
        pass

    def retire(self, version: int) -> None:
        pass

    def start(self, request: CollectionRequest) -> None:
        pass

    def read(self, request: CollectionRequest) -> Collected:
        """
        Raises:
            NoRollouts: there is no log left. ConfigError: a line of it is no rollout; names file and line.
        """
        number = parse_collection_id(request.id).iteration or 0
        if number > len(self._logs):
            raise NoRollouts(f"iteration {number} was asked for, but only {len(self._logs)} logs can be replayed")
        rollouts = self._read_log(self._logs[number - 1])
        return Collected(rollouts, CollectionEnd("complete", len(rollouts), 0, 0, {}, 0.0), 0.0)

    @staticmethod
    def _read_log(log: Path) -> list[Rollout]:
        try:
            return read_rollouts(log)
        except ValueError as error:
            raise ConfigError(f"rollout_node.replay: {error}") from error

    def close(self) -> None:
        pass


def open_source(
    node: RolloutSourceConfig, collection: CollectionConfig, output_dir: Path, stop_requested: Callable[[], bool]
) -> CollectionSource:
    """The source that a config names. A node that is launched goes on starting while the caller works.

    Raises:
        NodeDied, NodeUnreachable: there is no node, or it is not ready before ``start_deadline_s``.
    """
    if node.replay is not None:
        return ReplaySource(Path(node.replay))
    # A node of our own needs no secret that somebody has to know.
    token = os.environ.get(node.token_env) or secrets.token_hex(16)

    def open_node(url: str, stop: Callable[[], bool]) -> NodeSource:
        return _node_source(url, None, token, node, collection, stop)

    if not node.launch:
        urls = str(node.url).split(",")
        if len(urls) == 1:
            source: CollectionSource = open_node(urls[0], stop_requested)
        else:
            from loop_recipes.collecting.several_nodes import SeveralNodes  # which imports this module

            source = SeveralNodes(open_node, urls, stop_requested)
        source.wait_ready()
        return source
    with contextlib.ExitStack() as undo:
        child = NodeProcess(node.child, output_dir, token)
        undo.callback(child.stop)
        child.start()
        source = _node_source(child.url, child, token, node, collection, stop_requested)
        undo.pop_all()
    return source


def _node_source(
    url: str,
    child: NodeProcess | None,
    token: str,
    node: RolloutSourceConfig,
    collection: CollectionConfig,
    stop_requested: Callable[[], bool],
) -> NodeSource:
    def alive() -> None:
        if stop_requested():
            raise StopRequested
        if child is not None:
            child.check()

    client = RolloutClient(url, token, alive=alive)
    return NodeSource(client, child, node.start_deadline_s, collection.deadline_s, stop_requested)


def collect(source: CollectionSource, request: CollectionRequest) -> dict[str, Any] | None:
    """Start a collection (or find it again) and wait for it; None when the run was asked to stop meanwhile.

    Returns JSON-able data: ``rollouts`` (see :func:`slim_record`) and, by their keys, what goes into the metrics.
    """
    source.start(request)
    try:
        collected = source.read(request)
    except StopRequested:
        return None
    end = collected.end
    if warning := failures_warning(end.finished, end.failures, end.failures_by_task):
        logger.warning("collection %s: %s", request.id, warning)
    ungradable = sum(rollout.ungradable is not None for rollout in collected.rollouts)
    if ungradable > RARE_FAILURES * len(collected.rollouts):
        logger.warning(
            "collection %s: %d of %d rollouts ended in a state that could not be graded, and count as reward 0",
            request.id,
            ungradable,
            len(collected.rollouts),
        )
    return {
        "rollouts": [slim_record(rollout) for rollout in collected.rollouts],
        "dropped_rollouts": end.dropped,
        "failed_attempts": sum(end.failures.values()),
        "failed_attempts_worst_task": max(end.failures_by_task.values(), default=0),
        "ungradable_rollouts": ungradable,
        "seconds_collecting": collected.end.seconds,
        "seconds_waiting": collected.seconds_waiting,
    }


def check_versions(rollouts: Sequence[Rollout], oldest: int, newest: int) -> None:
    """
    Raises:
        NoRollouts: a token was sampled by a policy version outside ``oldest`` to ``newest``.
    """
    for rollout in rollouts:
        if not all(oldest <= version <= newest for version in rollout.policy_versions):
            raise NoRollouts(
                f"rollout {rollout.rollout_id} was sampled by policy versions {rollout.policy_versions}; the update "
                f"takes {oldest} to {newest} (collection.max_policy_lag)"
            )


def slim_record(rollout: Rollout) -> dict[str, Any]:
    """A rollout as JSON-able data for the other ranks, without the texts that no update reads."""
    turns = [vars(turn) for turn in rollout.turns]
    return {**vars(rollout), "turns": turns, "messages": [], "requirements": []}
