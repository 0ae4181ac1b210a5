"""Rollouts from one rollout node."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from agent_environments.description import Description
from loop_formats.collection_request import CollectionEnd, CollectionRequest, Progress
from loop_formats.rollout import Rollout
from loop_plumbing import running_time
from loop_recipes.bar import Bar
from loop_recipes.rollouts.source import Collected, NoRollouts
from loop_recipes.rollouts.waiting import Waiting
from loop_recipes.run.stop_request import StopRequested
from rollout_server.client import RolloutClient, RolloutNodeError
from rollout_server.node_process import NodeProcess


class NodeSource:
    """Rollouts from a rollout node, launched here as a child or running elsewhere.

    Args:
        client: the client of the node.
        node: the child process to stop at the end, if this run launched the node.
        start_deadline_s: longest time to wait for the node to be ready.
        deadline_s: longest time to wait for one collection.
        stop_requested: called while waiting; true ends the wait with :class:`StopRequested`.
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

    def health(self) -> dict[str, Any]:
        """Return the node's report about itself; only a ready node reports ``dataset`` and ``model`` too.

        Raises:
            NodeUnreachable: no node answers; this does not wait for one.
        """
        return self._client.health()

    def wait_ready(self) -> list[int]:
        with self._waiting("waiting for the rollout node to be ready"):
            return list(self._client.wait_ready(self._start_deadline_s)["policy_versions"])

    @contextlib.contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """Show the purpose of a wait, its time, and the node's state."""
        before = self._client.on_progress
        with Waiting(what) as waiting:
            self._client.on_progress = waiting.report
            try:
                yield
            finally:
                self._client.on_progress = before

    def check_model(self, vocabulary: int, contexts: range) -> None:
        """Check that the node's base model fits the trainer's model.

        Raises:
            NoRollouts: the vocabulary differs, or so do the positions in sequences as long as the node's servers hold.
        """
        report, node = self._client.health(), f"the rollout node at {self._client.url}"
        served, longest = report["vocabulary"], report["max_context"]
        if served != vocabulary:
            raise NoRollouts(
                f"{node} serves a model with a vocabulary of {served} ({report['model']}), but the model in training "
                f"has one of {vocabulary}; give both the same base model"
            )
        if longest not in contexts:
            bound = f"over {contexts[0] - 1}" if longest < contexts[0] else f"up to {contexts[-1]}"
            raise NoRollouts(
                f"{node} has the rotary positions of servers that hold {longest} tokens, but the model in training "
                f"those of servers that hold {bound} (longrope); give it model.max_context={longest}"
            )

    def tasks(self, split: str) -> tuple[str, list[str]]:
        listing = self._client.tasks(split)
        return listing.dataset, list(listing.tasks)

    def description(self) -> Description:
        return self._client.description()

    def publish(self, version: int, folder: Path, canary: Mapping[str, Any] | None = None) -> None:
        with self._waiting(f"publishing policy version {version}"):
            self._client.publish_policy(version, folder, canary)

    def retire(self, version: int) -> None:
        try:
            self._client.retire_policy(version)
        except RolloutNodeError as error:
            if error.status != 404:  # already not served
                raise

    def sleep(self) -> None:
        with self._waiting("waiting for the node's servers to sleep"):
            self._client.sleep()

    def wake(self) -> None:
        with self._waiting("waiting for the node's servers to wake"):
            self._client.wake()

    def start(self, request: CollectionRequest) -> None:
        self._client.start_collection(request)

    def events(self, request: CollectionRequest) -> Iterator[Rollout | Progress | CollectionEnd]:
        """Yield each rollout of a started collection as it finishes, with reports of progress, and then the end.

        Raises:
            CollectionFailed: the collection failed or was cancelled; raised after the last rollout.
        """
        stream = self._client.rollouts(request.id)
        yield from stream
        assert stream.end is not None, "the stream is over"
        yield stream.end

    def read(self, request: CollectionRequest, deadline_s: float = math.inf) -> Collected:
        """Wait for a started collection; also raises the client's errors.

        Raises:
            NoRollouts: a rollout came twice, or the deadline passed.
            StopRequested: see the class.
        """
        started, longest = running_time.now(), min(deadline_s, self._deadline_s)
        rollouts: dict[str, Rollout] = {}
        stream = self._client.rollouts(request.id)
        with Bar(total=request.floor_total, doing="collecting") as bar:
            for event in stream:
                if isinstance(event, Progress):
                    bar.facts = {name: getattr(event, name) for name in ("running", "waiting", "failed", "lost")}
                    bar.refresh()
                elif event.rollout_id in rollouts:
                    raise NoRollouts(f"rollout {event.rollout_id} was delivered twice")
                else:
                    rollouts[event.rollout_id] = event
                    bar.update(event.segment == 0)
                if self._stop_requested():
                    raise StopRequested
                if running_time.now() - started > longest:
                    whose = "collection.deadline_s" if longest == self._deadline_s else "what was left of its deadline"
                    raise NoRollouts(
                        f"collection {request.id} had {bar.n} of {request.floor_total} rollouts after "
                        f"{longest:.0f} s ({whose})"
                    )
        assert stream.end is not None, "the stream is over"
        return Collected(list(rollouts.values()), stream.end, running_time.now() - started)

    def collections(self) -> dict[str, dict[str, Any]]:
        """Return id -> the node's report for each collection that is open or ended recently.

        Raises:
            StopRequested: see the class.
        """
        if self._stop_requested():
            raise StopRequested
        return {each["id"]: each for each in self._client.collections()}

    def end_early(self, request: CollectionRequest) -> None:
        """End a collection with the finished rollouts; every task must have reached its floor."""
        self._client.end_early(request.id)

    def cancel(self, request: CollectionRequest) -> None:
        """Cancel a collection: the next request for the same collection attempts its lost rollouts again."""
        self._client.cancel(request.id)

    def close(self) -> None:
        if self._node is not None:
            self._node.stop()
