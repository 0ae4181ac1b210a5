"""Measure what the rollout node costs per turn: the node beside a bare loop, over one real vLLM server.

    python benchmarks/rollout_node.py [--json PATH] [--concurrent 1,8] [--repeats 5]

Both play the same episodes of the counter environment with the same seeds, a random policy of 0.1 million parameters
and an adapter, on one vLLM server that is started for it. The bare loop is what one would write in an afternoon:
encode, POST, append, step; no routing, no deadlines, no checks, no record, no log. Both are run in turn,
``--repeats`` times after a round that fills the prefix cache, so every prompt is cached for both.

``seconds_per_turn`` is wall time times concurrency over turns. ``outside_ms_per_turn`` is what is left of it without
the time that vLLM itself says the requests took (``vllm:e2e_request_latency_seconds``), which is nearly all of it and
wanders by more than what is looked for. ``overhead_ms_per_turn`` is the difference of that, node minus bare loop, and
so holds everything between the environment's answer and the request to vLLM, and back: tokens, routing, HTTP, checks,
records, fsync. ``node_cpu_ms_per_turn`` is the CPU time of the node's process. All are medians over the rounds. With
one episode at a time both must sample the same tokens, which is checked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

# The root and recipes/ too, because folders of tests/ are called like packages and hide those that are installed.
sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "recipes", "tests"))

from agent_environments.counter import CounterPool
from loop_formats.collection_request import CollectionRequest, Limits
from loop_formats.rollout import Rollout
from loop_formats.schema import from_mapping
from model_families.chat import open_chat
from model_families.chat.format import ChatFormat
from rollout_server.client import RolloutClient
from rollout_server.collecting.attempt import derive_seed
from rollout_server.config import ModelConfig, NodeConfig, ServersConfig
from rollout_server.inference.server import VllmServer
from rollout_server.inference.server_group import ServerGroup
from rollout_server.inference.server_metrics import parse_metrics
from rollout_server.node_process import NodeProcess
from support.random_policy import write_adapter, write_model

TOKEN = "benchmark"
ROLLOUTS, TURNS, TOKENS, CONTEXT = 2, 6, 16, 2000
LIMITS = Limits(max_turns=TURNS, max_tokens_per_turn=TOKENS, max_context=CONTEXT, episode_deadline_s=600.0)
TICKS = os.sysconf("SC_CLK_TCK")


class BareLoop:
    """Episodes with nothing around them."""

    def __init__(self, server: VllmServer, model_name: str, tokens: ChatFormat) -> None:
        self._server, self._model_name, self._tokens = server, model_name, tokens
        self._pool = CounterPool(tokens.spans, max_worlds=10**6)

    async def run(self, seeds: list[tuple[str, int]], concurrent: int) -> tuple[float, list[list[int]], int]:
        """Return wall seconds, token ids per episode, and turns; ``seeds`` holds task and seed of each."""
        results: list[list[int]] = [[] for _ in seeds]
        turns = 0
        waiting = iter(enumerate(seeds))

        async def worker(session: aiohttp.ClientSession) -> None:
            nonlocal turns
            for number, (task, seed) in waiting:
                results[number], count = await self._episode(session, task, seed)
                turns += count

        async with aiohttp.ClientSession(headers=self._server.headers) as session:
            started = time.perf_counter()
            await asyncio.gather(*(worker(session) for _ in range(concurrent)))
            return time.perf_counter() - started, results, turns

    async def _episode(self, session: aiohttp.ClientSession, task: str, seed: int) -> tuple[list[int], int]:
        environment = await self._pool.acquire("bare")
        token_ids = self._tokens.prompt(await environment.start(task))
        for turn in range(TURNS):
            sampling: dict[str, Any] = {
                "max_tokens": TOKENS,
                "temperature": 1.0,
                "seed": derive_seed(seed, turn),
                "logprobs": 0,
            }
            sampling |= {"stop_token_ids": list(self._tokens.stop_ids), "detokenize": False}
            body = {"model": self._model_name, "token_ids": token_ids, "sampling_params": sampling}
            async with session.post(f"{self._server.url}/inference/v1/generate", json=body) as answer:
                choice = (await answer.json())["choices"][0]
            prompt, sampled = token_ids, choice["token_ids"]
            token_ids = prompt + sampled
            spoken = sampled[:-1] if sampled[-1] in self._tokens.stop_ids else sampled
            result = await environment.step(self._tokens.decode(spoken))
            if result.done or turn + 1 == TURNS:
                break
            heard = self._tokens.heard(result.observation, ())
            token_ids = token_ids + (self._tokens.extension(prompt, sampled, heard) or [])
        await environment.grade()
        await environment.close()
        return token_ids, turn + 1


def through_node(client: RolloutClient, request: CollectionRequest) -> tuple[float, list[Rollout]]:
    """Return the node's seconds of the collection, and its rollouts in the order of tasks and indices."""
    client.start_collection(request)
    stream = client.rollouts(request.id)
    rollouts = [event for event in stream if isinstance(event, Rollout)]
    rollouts.sort(key=lambda rollout: (request.tasks.index(rollout.task_id), rollout.index))
    assert stream.end is not None, "the stream is over"
    return stream.end.seconds, rollouts


async def vllm_seconds(server: VllmServer) -> float:
    """Return seconds that all requests of the server took so far, from their arrival to their last token."""
    async with aiohttp.ClientSession(headers=server.headers) as session, session.get(f"{server.url}/metrics") as answer:
        return parse_metrics(await answer.text())["e2e_request_latency_seconds_sum"]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


@dataclass(frozen=True)
class Round:
    """Seconds per turn in one round: wall time, the part of it outside vLLM, and CPU time of the node."""

    node: float
    bare: float
    node_outside: float
    bare_outside: float
    node_cpu: float


async def compare(folder: Path, server: VllmServer, concurrent: int, repeats: int) -> list[Round]:
    """Measure ``repeats`` rounds with ``concurrent`` episodes at a time."""
    config = {
        "port": 0,
        "root": str(folder / f"node{concurrent}"),
        "model": {"path": str(folder / "model"), "dtype": "float32", "max_context": CONTEXT, "lora_rank": 8},
        "servers": {"urls": [server.url], "max_num_seqs": 32},
        "environment": {"name": "counter"},
        "max_concurrent_episodes": concurrent,
    }
    rounds: list[Round] = []
    with NodeProcess(from_mapping(NodeConfig, config), folder / f"run{concurrent}", TOKEN) as process:
        client, pid = RolloutClient(process.url, TOKEN, alive=process.check), process.pid
        assert pid is not None, "it has been started"
        await asyncio.to_thread(client.wait_ready, 120.0)
        published = await asyncio.to_thread(client.publish_policy, 0, folder / "adapter")
        bare = BareLoop(server, published.name, open_chat(folder / "model"))
        tasks = (await asyncio.to_thread(client.tasks, "train")).tasks
        for number in range(repeats + 1):
            request = CollectionRequest(f"round{number}", tasks, ROLLOUTS, policy_version=0, seed=1, limits=LIMITS)
            cpu, served = cpu_seconds(pid), await vllm_seconds(server)
            seconds, rollouts = await asyncio.to_thread(through_node, client, request)
            cpu, between = cpu_seconds(pid) - cpu, await vllm_seconds(server)
            turns = sum(len(rollout.turns) for rollout in rollouts)
            wall, token_ids, bare_turns = await bare.run([(r.task_id, r.seed) for r in rollouts], concurrent)
            after = await vllm_seconds(server)
            if concurrent == 1 and token_ids != [rollout.token_ids for rollout in rollouts]:
                raise RuntimeError("node and bare loop sampled different tokens: they cannot be compared")
            if number:  # the first round fills the prefix cache
                node_seconds, bare_seconds = concurrent * seconds / turns, concurrent * wall / bare_turns
                node_outside = node_seconds - (between - served) / turns
                bare_outside = bare_seconds - (after - between) / bare_turns
                rounds.append(Round(node_seconds, bare_seconds, node_outside, bare_outside, cpu / turns))
        await asyncio.to_thread(client.retire_policy, 0)
    return rounds


async def measure(concurrencies: list[int], repeats: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []

    def add(case: str, metric: str, value: float, unit: str) -> None:
        rows.append({"case": case, "metric": metric, "value": value, "unit": unit})
        print(f"{case:<14} {metric:<22} {value:10.4f} {unit}", flush=True)

    with tempfile.TemporaryDirectory(prefix="rollout-node-benchmark-") as name:
        folder = Path(name)
        write_model(folder / "model")
        write_adapter(folder / "adapter", seed=0)
        model = ModelConfig(str(folder / "model"), "float32", max_context=CONTEXT, lora_rank=8)
        group = ServerGroup(model, ServersConfig(kv_cache_bytes=256 << 20), folder / "logs")
        await group.start()
        try:
            server = group.servers[0]
            os.environ["VLLM_API_KEY"] = server.headers["Authorization"].removeprefix("Bearer ")
            for concurrent in concurrencies:
                rounds = await compare(folder, server, concurrent, repeats)
                for case, metric, numbers, unit in (
                    ("ours", "seconds_per_turn", [r.node for r in rounds], "s"),
                    ("bare_loop", "seconds_per_turn", [r.bare for r in rounds], "s"),
                    ("ours", "outside_ms_per_turn", [1000 * r.node_outside for r in rounds], "ms"),
                    ("bare_loop", "outside_ms_per_turn", [1000 * r.bare_outside for r in rounds], "ms"),
                    ("ours", "overhead_ms_per_turn", [1000 * (r.node_outside - r.bare_outside) for r in rounds], "ms"),
                    ("ours", "node_cpu_ms_per_turn", [1000 * r.node_cpu for r in rounds], "ms"),
                ):
                    add(f"{case} {concurrent}", metric, statistics.median(numbers), unit)
        finally:
            await group.stop()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--concurrent", default="1,8", help="numbers of concurrent episodes")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    rows = asyncio.run(measure([int(number) for number in options.concurrent.split(",")], options.repeats))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
