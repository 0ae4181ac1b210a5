"""What every rank of a run asks for and learns from, written down by the rank itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from loop_formats.collection_request import CollectionRequest
from loop_recipes.algorithm.credit import CreditFailed
from loop_recipes.algorithm.policy_update import PolicyUpdate, UpdateResult
from loop_recipes.engine.process_group import RemoteError, launched_rank
from loop_recipes.rollouts.shared_source import SharedSource
from loop_recipes.rollouts.source import Collected
from support.small_runs import train_into


@contextmanager
def recorded(output_dir: Path) -> Iterator[dict[str, Any]]:
    """What the run in the block does goes into ``<output_dir>/rank<number>.json``: ``asked``, the id and the tasks of
    each collection; ``learned``, of each update the advantage of every rollout, or those of its tokens, by id."""
    record: dict[str, Any] = {"asked": [], "learned": []}
    collect, run = SharedSource.collect, PolicyUpdate.run

    def collecting(source: SharedSource, request: CollectionRequest) -> Collected | None:
        record["asked"].append([request.id, request.tasks])
        return collect(source, request)

    def learning(update: PolicyUpdate, *arguments: Any, **options: Any) -> UpdateResult:
        result = run(update, *arguments, **options)
        record["learned"].append(
            {
                sample.rollout_id: sample.advantage
                if sample.token_advantages is None
                else sample.token_advantages.tolist()
                for sample in result.samples
            }
        )
        return result

    with (
        mock.patch.object(SharedSource, "collect", collecting),
        mock.patch.object(PolicyUpdate, "run", learning),
    ):
        try:
            yield record
        finally:
            (output_dir / f"rank{launched_rank()}.json").write_text(json.dumps(record))


def records(output_dir: Path) -> list[dict[str, Any]]:
    """Of each rank, in their order."""
    return [json.loads(file.read_text()) for file in sorted(output_dir.glob("rank*.json"))]


def train_recorded(config: Path, output_dir: Path) -> None:
    """:func:`support.small_runs.train_into` on each rank; where a credit ends it, the record has ``ended``."""
    with recorded(output_dir) as record:
        try:
            train_into(config, output_dir)
        except (CreditFailed, RemoteError) as error:
            record["ended"] = [type(error).__name__, str(error)]
