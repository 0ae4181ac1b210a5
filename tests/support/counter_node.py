"""A whole node in the test's own process: real HTTP on both sides, the counter environment, a scripted vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loop_formats.collection_request import CollectionEnd, CollectionRequest, Limits
from loop_formats.rollout import Rollout
from loop_formats.schema import from_mapping
from loop_plumbing.http_server import Site
from model_families.chat import open_chat
from rollout_server.app import build_runner
from rollout_server.client import CollectionFailed, RolloutClient
from rollout_server.config import NodeConfig
from rollout_server.node import Node
from support.scripted_vllm import ScriptedVllm
from support.waiting import DEADLINE_S

TOKEN = "secret"


@dataclass
class LocalNode:
    """A running node and what is needed to talk to it."""

    node: Node
    url: str
    vllm: ScriptedVllm
    client: RolloutClient

    async def call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Run a blocking call of the client beside the node's event loop."""
        return await asyncio.to_thread(function, *arguments, **options)

    async def collect(self, request: CollectionRequest, after: int = 0) -> tuple[list[Rollout], CollectionEnd]:
        await self.call(self.client.start_collection, request)
        return await self.call(read_all, self.client, request.id, after)


def read_all(client: RolloutClient, collection_id: str, after: int = 0) -> tuple[list[Rollout], CollectionEnd]:
    stream = client.rollouts(collection_id, after)
    with contextlib.suppress(CollectionFailed):
        return [event for event in stream if isinstance(event, Rollout)], stream.end
    return [], stream.end


@contextlib.asynccontextmanager
async def two_nodes(policy: Path, folder: Path, **changes: Any) -> AsyncIterator[tuple[LocalNode, LocalNode]]:
    """Two nodes below ``folder``."""
    async with (
        local_node(policy, folder / "west", **changes) as west,
        local_node(policy, folder / "east", **changes) as east,
    ):
        yield west, east


def counter_request(collection_id: str = "c1", **changes: Any) -> CollectionRequest:
    """A collection on the counter environment."""
    values = {
        "tasks": ["reach3_1", "reach5_1", "reach8_1"],
        "rollouts_per_task": 4,
        "policy_version": 0,
        "limits": Limits(max_turns=4, max_tokens_per_turn=64, max_context=1000, episode_deadline_s=DEADLINE_S),
        **changes,
    }
    return CollectionRequest(id=collection_id, **values)


@contextlib.asynccontextmanager
async def local_node(policy: Path, root: Path, publish: bool = True, **changes: Any) -> AsyncIterator[LocalNode]:
    """A node on ``root``; ``changes`` replace keys of its configuration."""
    vllm = ScriptedVllm(open_chat(policy / "model"))
    vllm_url = await vllm.start()
    config = {
        "root": str(root),
        "port": 0,
        "model": {"path": str(policy / "model"), "dtype": "float32", "max_context": 1024, "lora_rank": 8},
        "servers": {"urls": [vllm_url], "max_num_seqs": 16, **changes.pop("servers", {})},
        "environment": {"name": "counter"},
        "max_concurrent_episodes": 6,
        **changes,
    }
    node = Node(from_mapping(NodeConfig, json.loads(json.dumps(config))))
    runner = build_runner(node, TOKEN, shutdown_timeout_s=0.5)
    await runner.setup()
    await Site(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    node.listens_at(url)
    try:
        await node.start()
        local = LocalNode(node, url, vllm, RolloutClient(url, TOKEN, reconnect_s=DEADLINE_S))
        if publish:
            await local.call(local.client.publish_policy, 0, policy / "adapter0")
        yield local
    finally:
        await node.stop()
        await runner.cleanup()
        await vllm.stop()
