"""The source of rollouts as all ranks see it: rank 0 has it and asks, every rank gets the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agent_environments.description import Description
from loop_formats.collection_request import CollectionRequest
from loop_formats.run_files import adapter_digest
from loop_recipes.engine.process_group import on_main_rank
from loop_recipes.rollouts.source import Collected, CollectionSource, collect
from loop_recipes.run.stop_request import StopRequested


class SharedSource:
    """A :class:`~loop_recipes.rollouts.source.CollectionSource` that every rank holds.

    Every rank must call every method but :meth:`close`; an error of the source on rank 0 ends the call on all ranks
    (see :func:`~loop_recipes.engine.process_group.on_main_rank`).

    Args:
        open_source: makes the source, on rank 0 only.
    """

    def __init__(self, open_source: Callable[[], CollectionSource]) -> None:
        self._opened: list[CollectionSource] = []  # one on rank 0, none elsewhere
        on_main_rank(lambda: self._opened.append(open_source()))

    def wait_ready(self) -> list[int]:
        """Wait until collections can be asked for; returns the policy versions that are served already."""
        return on_main_rank(lambda: self._source.wait_ready())

    def check_model(self, vocabulary: int, contexts: range) -> None:
        """Check that the node's model fits the policy, like :meth:`CollectionSource.check_model`."""
        on_main_rank(lambda: self._source.check_model(vocabulary, contexts))

    def tasks(self, split: str) -> tuple[str, list[str]]:
        """Return the name of the dataset and the tasks of a split."""
        dataset, tasks = on_main_rank(lambda: self._source.tasks(split))
        return dataset, tasks

    def description(self) -> Description:
        """Return the environment's description of itself."""
        return Description.from_dict(on_main_rank(lambda: asdict(self._source.description())))

    def publish(self, version: int, export: Callable[[], Path], canary: Mapping[str, Any] | None) -> str:
        """Check ``version`` on the node, then have it served; return the digest of the adapter.

        Args:
            export: writes the version as a PEFT adapter and returns its folder; called on rank 0 only.
            canary: the log-probs for the node to compare with, if there are any.
        """

        def exported_and_published() -> str:
            folder = export()
            self._source.publish(version, folder, canary)
            return adapter_digest(folder)

        return on_main_rank(exported_and_published)

    def retire(self, version: int) -> None:
        """Stop serving ``version``; do nothing if it is not served."""
        on_main_rank(lambda: self._source.retire(version))

    def sleep(self) -> None:
        """Free the GPUs that servers share with the trainer, for the trainer."""
        on_main_rank(lambda: self._source.sleep())

    def wake(self) -> None:
        """Have servers on shared GPUs sample again, with the versions that they served before."""
        on_main_rank(lambda: self._source.wake())

    def start(self, request: CollectionRequest) -> None:
        """Ask for a collection without waiting; asking again is harmless."""
        on_main_rank(lambda: self._source.start(request))

    def collect(self, request: CollectionRequest) -> Collected | None:
        """Start a collection (or find it again) and wait for its rollouts; result as for :meth:`collect_by`."""
        return self.collect_by(lambda source: collect(source, request))

    def collect_by(self, work: Callable[[Any], Collected]) -> Collected | None:
        """Return the rollouts that ``work`` gets from the source, with texts on rank 0 only; None if the run was asked
        to stop meanwhile."""
        return on_main_rank(lambda: self._unless_stopped(work), Collected.pack, Collected.unpack)

    def ask(self, work: Callable[[Any], Any]) -> Any:
        """Run ``work`` with the source on rank 0 and return the result; None if the run was asked to stop meanwhile.

        Args:
            work: its result must be JSON-able if there are other ranks.
        """
        return on_main_rank(lambda: self._unless_stopped(work))

    def _unless_stopped(self, work: Callable[[Any], Any]) -> Any:
        try:
            return work(self._source)
        except StopRequested:
            return None

    def close(self) -> None:
        """Close this rank's source, without asking the others; a launched node is stopped."""
        while self._opened:
            self._opened.pop().close()

    @property
    def _source(self) -> CollectionSource:
        return self._opened[0]
