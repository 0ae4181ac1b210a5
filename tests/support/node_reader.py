"""Collections of a node that is a process of its own: asked for, read while harm is done, held against a reference."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loop_formats.collection_request import CollectionEnd, CollectionRequest, Limits
from loop_formats.rollout import Rollout
from loop_formats.schema import from_mapping
from rollout_server.client import RolloutClient
from rollout_server.config import NodeConfig
from rollout_server.node_process import NodeProcess
from support.random_policy import reference_logprobs
from support.waiting import COMMAND_S, block_until

TOKEN = "secret"
LIMITS = Limits(max_turns=4, max_tokens_per_turn=24, max_context=1500, episode_deadline_s=COMMAND_S)


@contextlib.contextmanager
def ready_node(config: dict[str, Any], folder: Path) -> Iterator[tuple[NodeProcess, RolloutClient]]:
    """A node that is ready, and its client."""
    with NodeProcess(from_mapping(NodeConfig, config), folder, TOKEN) as process:
        client = RolloutClient(process.url, TOKEN, reconnect_s=COMMAND_S)
        RolloutClient(process.url, TOKEN, alive=process.check).wait_ready(COMMAND_S)
        yield process, client


def request(collection_id: str, tasks: list[str], **changes: Any) -> CollectionRequest:
    """A collection of short episodes on the counter environment or any other."""
    values: dict[str, Any] = {"rollouts_per_task": 4, "policy_version": 0, "limits": LIMITS, **changes}
    return CollectionRequest(id=collection_id, tasks=tasks, **values)


def largest_gap(model: Path, rollouts: list[Rollout], adapters: list[Path]) -> float:
    """The largest distance between what the sampler said and a reference forward of the version that sampled.

    ``adapters[version]`` is the folder of a version's adapter.
    """
    worst = 0.0
    for rollout in rollouts:
        rollout.validate()
        reference = {
            version: reference_logprobs(model, adapters[version], rollout.token_ids)
            for version in rollout.policy_versions
        }
        for turn in rollout.turns:
            for position in range(turn.start, turn.end):
                expected = reference[turn.policy_version][position]
                worst = max(worst, abs(expected - rollout.sampler_logprobs[position]))
    return worst


class Reader(threading.Thread):
    """Reads a collection to its end while the test does harm; ``rollouts`` grows as they come."""

    def __init__(self, client: RolloutClient, collection_id: str):
        super().__init__(daemon=True)
        self.stream = client.rollouts(collection_id)
        self.rollouts: list[Rollout] = []
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            for event in self.stream:
                if isinstance(event, Rollout):
                    self.rollouts.append(event)
        except Exception as error:
            self.error = error

    def wait_for(self, count: int) -> None:
        """Return when ``count`` rollouts have come."""
        block_until(lambda: len(self.rollouts) >= count or self.error is not None, COMMAND_S)
        assert self.error is None, self.error

    def finish(self) -> tuple[list[Rollout], CollectionEnd]:
        """All rollouts and the end; raises what the reading raised."""
        self.join(COMMAND_S)
        assert not self.is_alive(), f"{len(self.rollouts)} rollouts after {COMMAND_S:g} s"
        if self.error is not None:
            raise self.error
        assert self.stream.end is not None
        return self.rollouts, self.stream.end
