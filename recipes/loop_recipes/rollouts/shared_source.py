"""The source of rollouts as all ranks see it: rank 0 has it and asks, every rank gets the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    """Hold the :class:`~loop_recipes.rollouts.source.CollectionSource` on rank 0, and call it for all ranks.

    Every rank must call every method but :meth:`close`; an error of the source on rank 0 ends the call on all ranks
    (see :func:`~loop_recipes.engine.process_group.on_main_rank`).

    Args:
        open_source: makes the source, on rank 0 only.
    """

    def __init__(self, open_source: Callable[[], CollectionSource]) -> None:
        self._opened: list[CollectionSource] = []  # one on rank 0, none elsewhere
        on_main_rank(lambda: self._opened.append(open_source()))

    def call(self, work: Callable[[Any], Any]) -> Any:
        """Run ``work`` with the source on rank 0 and return the result.

        Args:
            work: its result must be JSON-able if there are other ranks.
        """
        return on_main_rank(lambda: work(self._opened[0]))

    def ask(self, work: Callable[[Any], Any]) -> Any:
        """Run ``work`` as :meth:`call` does; return None if the run was asked to stop meanwhile."""
        return self.call(lambda source: _unless_stopped(work, source))

    def description(self) -> Description:
        """Return the environment's description of itself."""
        return Description.from_dict(self.call(lambda source: asdict(source.description())))

    def publish(self, version: int, export: Callable[[], Path], canary: Mapping[str, Any] | None) -> str:
        """Check ``version`` on the node, then have it served; return the digest of the adapter.

        Args:
            export: writes the version as a PEFT adapter and returns its folder; called on rank 0 only.
            canary: the log-probs for the node to compare with, if there are any.
        """

        def exported_and_published(source: CollectionSource) -> str:
            folder = export()
            source.publish(version, folder, canary)
            return adapter_digest(folder)

        return self.call(exported_and_published)

    def retire(self, versions: Sequence[int]) -> None:
        """Stop serving ``versions``, as far as they are served."""
        self.call(lambda source: [source.retire(version) for version in versions])

    def collect(self, request: CollectionRequest) -> Collected | None:
        """Start a collection (or find it again) and wait for its rollouts; result as for :meth:`collect_by`."""
        return self.collect_by(lambda source: collect(source, request))

    def collect_by(self, work: Callable[[Any], Collected]) -> Collected | None:
        """Return the rollouts that ``work`` gets from the source, with texts on rank 0 only; None if the run was asked
        to stop meanwhile."""
        return on_main_rank(lambda: _unless_stopped(work, self._opened[0]), Collected.pack, Collected.unpack)

    def close(self) -> None:
        """Close this rank's source, without asking the others; a launched node is stopped."""
        while self._opened:
            self._opened.pop().close()


def _unless_stopped(work: Callable[[Any], Any], source: CollectionSource) -> Any:
    try:
        return work(source)
    except StopRequested:
        return None
