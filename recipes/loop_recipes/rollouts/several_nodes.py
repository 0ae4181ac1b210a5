"""Rollouts from several rollout nodes: each takes a share of an iteration's tasks. Lives on rank 0 only."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from agent_environments.description import Description
from loop_formats.branch import Branch
from loop_formats.collection_request import CollectionEnd, CollectionRequest, Progress, too_many_lost
from loop_formats.ids import share_id
from loop_formats.rollout import Rollout
from loop_recipes.rollouts.node_source import NodeSource
from loop_recipes.rollouts.source import Collected, NoRollouts, merge_ends
from loop_recipes.run.stop_request import StopRequested
from rollout_server.client import CollectionFailed

Answer = TypeVar("Answer")


class SeveralNodes:
    """A source like :class:`NodeSource`, over several rollout nodes that run elsewhere.

    All nodes hold the same base model and dataset and are given every policy version. Each node ends its share of a
    collection by itself, so the floors of early stop hold for each share and therefore for the whole. The collection
    ends if a node fails, or if too many rollouts of the whole are lost.

    Args:
        open_node: makes the source of one node, given its URL and its ``stop_requested``.
        urls: the nodes' URLs. Their order decides which node gets which tasks; keep it when resuming, so that a node
            finds the rollouts it has on disk.
        stop_requested: called while waiting.
    """

    def __init__(
        self,
        open_node: Callable[[str, Callable[[], bool]], NodeSource],
        urls: Sequence[str],
        stop_requested: Callable[[], bool],
    ) -> None:
        self._stop_requested = stop_requested
        self._given_up = threading.Event()
        self._urls = list(urls)
        self._nodes = [open_node(url, lambda: self._given_up.is_set() or stop_requested()) for url in self._urls]

    def health(self) -> dict[str, Any]:
        """Return the first node's report about itself; check that all ready nodes have the same model and dataset.

        Raises:
            NodeUnreachable: a node does not answer; this does not wait for it.
            NoRollouts: two nodes differ.
        """
        reports = self._each(lambda node: node.health())
        for key in ("model_digest", "dataset"):
            if all(key in report for report in reports):  # else one is not ready yet
                self._check_alike(f"have different {key}s", [report[key] for report in reports])
        return reports[0]

    def wait_ready(self) -> list[int]:
        """Return the versions that any of the nodes serves. Raises a single source's errors."""
        served = self._each(lambda node: node.wait_ready())
        return sorted({version for versions in served for version in versions})

    def check_model(self, vocabulary: int, contexts: range) -> None:
        self._each(lambda node: node.check_model(vocabulary, contexts))

    def tasks(self, split: str) -> tuple[str, list[str]]:
        """Return the tasks that every node serves.

        Raises:
            NoRollouts: two nodes serve different tasks.
        """
        listings = self._each(lambda node: node.tasks(split))
        self._check_alike("have different datasets", [dataset for dataset, _ in listings])
        self._check_alike(f"serve different tasks of {split}", [tasks for _, tasks in listings], show=False)
        return listings[0]

    def description(self) -> Description:
        """Return the environment that every node serves.

        Raises:
            NoRollouts: two nodes describe their environments differently.
        """
        described = self._each(lambda node: node.description())
        self._check_alike("describe their environments differently", described, show=False)
        return described[0]

    def publish(self, version: int, folder: Path, canary: Mapping[str, Any] | None = None) -> None:
        self._each(lambda node: node.publish(version, folder, canary))

    def retire(self, version: int) -> None:
        self._each(lambda node: node.retire(version))

    def sleep(self) -> None:
        self._each(lambda node: node.sleep())

    def wake(self) -> None:
        self._each(lambda node: node.wake())

    def start(self, request: CollectionRequest) -> None:
        shares = split_request(request, len(self._nodes))
        self._each(lambda node, share: node.start(share), shares)

    def events(self, request: CollectionRequest) -> Iterator[Rollout | Progress | CollectionEnd]:
        """Yield the events of one share after the other, each with the share's end. All nodes keep working while one
        share is read.

        Raises:
            CollectionFailed: a share failed; raised after the rollouts of every share.
        """
        failure: CollectionFailed | None = None
        self._given_up.clear()
        for node, share in zip(self._nodes, split_request(request, len(self._nodes)), strict=False):
            try:
                yield from node.events(share)
            except CollectionFailed as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def read(self, request: CollectionRequest, deadline_s: float = math.inf) -> Collected:
        """Read all shares of a collection that was started. Raises a single source's errors."""
        shares = split_request(request, len(self._nodes))
        collections = self._each(lambda node, share: node.read(share, deadline_s), shares)
        end = merge_ends([each.end for each in collections])
        if too_many := too_many_lost(end.lost, request):
            # No share had too many: each has ended well, and a new request would find it so.
            self._each(lambda node, share: node.cancel(share), shares)
            raise CollectionFailed(f"collection {request.id} failed: {too_many}", end)
        return Collected(
            rollouts=[rollout for each in collections for rollout in each.rollouts],
            end=end,
            seconds_waiting=max(each.seconds_waiting for each in collections),
        )

    def close(self) -> None:
        for node in self._nodes:
            node.close()

    def _check_alike(self, difference: str, answers: Sequence[object], show: bool = True) -> None:
        for url, answer in zip(self._urls, answers, strict=True):
            if answer != answers[0]:
                both = f" ({answers[0]} and {answer})" if show else ""
                cure = "give them the same model and environment"
                raise NoRollouts(f"rollout nodes {self._urls[0]} and {url} {difference}{both}; {cure}")

    def _each(self, call: Callable[..., Answer], *arguments: Sequence[object]) -> list[Answer]:
        """Do ``call`` on every node at once (or on as many as there are ``arguments``). Raise the first error; it also
        ends the waiting on the other nodes."""
        self._given_up.clear()

        def guarded(*values: object) -> Answer:
            try:
                return call(*values)
            except BaseException:
                self._given_up.set()
                raise

        with ThreadPoolExecutor(len(self._nodes)) as threads:
            jobs = [threads.submit(guarded, *values) for values in zip(self._nodes, *arguments, strict=False)]
        errors = [error for job in jobs if (error := job.exception()) is not None]
        # The others stopped waiting because of it: their StopRequested is not the reason.
        for error in sorted(errors, key=lambda error: isinstance(error, StopRequested)):
            raise error
        return [job.result() for job in jobs]


def split_request(request: CollectionRequest, nodes: int) -> list[CollectionRequest]:
    """Split a request into one per node, but at most one per task or branch. The ids name the share and the number of
    shares, so another number of nodes makes another collection."""
    wanted = [*request.tasks, *request.branches]
    nodes = min(nodes, len(wanted))
    shares = []
    for index in range(nodes):
        tasks = [item for item in wanted[index::nodes] if isinstance(item, str)]
        shares.append(
            dataclasses.replace(
                request,
                id=share_id(request.id, index + 1, nodes),
                tasks=tasks,
                max_lost=request.most_lost,  # for the whole: a node may lose all of its share
                branches=[item for item in wanted[index::nodes] if isinstance(item, Branch)],
                only={task_id: request.only[task_id] for task_id in tasks if task_id in request.only},
            )
        )
    return shares
