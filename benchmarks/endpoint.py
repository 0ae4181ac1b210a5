"""Measure what a call of the recording endpoint costs the node, over the bare request to vLLM that it ends in.

    python benchmarks/endpoint.py [--json PATH] [--episodes 8] [--turns 10]

An agent plays episodes through a node: each turn is one call with the whole history, 64 sampled tokens, and an answer
of 100 words. A fake vLLM answers in microseconds, so that what is measured is the node. The bare loop sends the same
ids to the same fake; it keeps the ids itself and needs no node.

``overhead_cpu_ms_per_call`` is the CPU time of the node's process over its calls: HTTP, JSON, the look-up of the
history, encoding what is new, the request to vLLM, the record and the log. ``ms_per_call`` is wall time, one call at a
time; on a machine with other work it means little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

# The root and recipes/ too, because folders of tests/ are called like packages and hide those that are installed.
sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "recipes", "tests"))

from loop_formats.collection_request import CollectionRequest, Limits
from loop_formats.rollout import Rollout
from loop_formats.schema import from_mapping
from rollout_server.client import RolloutClient
from rollout_server.config import NodeConfig
from rollout_server.node_process import NodeProcess
from support.fake_vllm import FakeVllm
from support.random_policy import write_adapter, write_model

TOKEN = "benchmark"
TOKENS, CONTEXT = 64, 8192
WORDS = "the counter shows a number that is not yet what was asked for " * 8
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


async def play(http: aiohttp.ClientSession, url: str, turns: int) -> float:
    """Play an episode of an agent elsewhere; returns the seconds of its calls."""
    async with http.post(
        f"{url}/v1/episodes", json={"wait_s": 60}, headers={"Authorization": f"Bearer {TOKEN}"}
    ) as answer:
        episode = await answer.json()
    base, key = episode["base_url"], {"Authorization": f"Bearer {episode['api_key']}"}
    messages = [{"role": "system", "content": WORDS}, {"role": "user", "content": episode["task_id"]}]
    seconds = 0.0
    for _ in range(turns):
        started = time.perf_counter()
        async with http.post(f"{base}/chat/completions", json={"messages": messages}, headers=key) as answer:
            message = (await answer.json())["choices"][0]["message"]
        seconds += time.perf_counter() - started
        messages += [message, {"role": "user", "content": WORDS}]
    async with http.post(f"{base}/episode/finish", json={"reward": 1.0}, headers=key):
        return seconds


async def replay(http: aiohttp.ClientSession, vllm: str, rollout: Rollout) -> float:
    """Send the same requests without a node; returns their seconds."""
    started = time.perf_counter()
    for turn in rollout.turns:
        sampling = {"max_tokens": TOKENS, "temperature": 1.0, "logprobs": 0, "detokenize": False}
        body = {"model": "bare", "token_ids": rollout.token_ids[: turn.start], "sampling_params": sampling}
        async with http.post(f"{vllm}/inference/v1/generate", json=body) as answer:
            await answer.json()
    return time.perf_counter() - started


async def measure(episodes: int, turns: int) -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory(prefix="endpoint-benchmark-") as name:
        folder = Path(name)
        write_model(folder / "model", positions=CONTEXT)
        write_adapter(folder / "adapter", seed=0)
        fake = FakeVllm()
        vllm = await fake.start()
        fake.loaded["bare"] = folder
        tasks = [f"task_{number}" for number in range(episodes)]
        config = {
            "root": str(folder / "node"),
            "port": 0,
            "model": {"path": str(folder / "model"), "dtype": "float32", "max_context": CONTEXT, "lora_rank": 8},
            "servers": {"urls": [vllm]},
            "environment": {"name": "harness", "tasks": {"train": tasks}, "accept_reward": True},
        }
        node = NodeProcess(from_mapping(NodeConfig, config), folder, TOKEN)
        await asyncio.to_thread(node.start)
        try:
            client = RolloutClient(node.url, TOKEN, alive=node.check)
            await asyncio.to_thread(client.wait_ready, 120.0)
            await asyncio.to_thread(client.publish_policy, 0, folder / "adapter")
            limits = Limits(max_turns=turns, max_tokens_per_turn=TOKENS, max_context=CONTEXT)
            request = CollectionRequest("benchmark", tasks, 1, 0, limits=limits)
            await asyncio.to_thread(client.start_collection, request)
            async with aiohttp.ClientSession() as http:
                await play(http, node.url, turns)  # its imports and caches are not counted
                pid = node.pid
                assert pid is not None, "it has been started"
                before = cpu_seconds(pid)
                seconds = sum([await play(http, node.url, turns) for _ in range(episodes - 1)])
                cpu = cpu_seconds(pid) - before
                rollouts = await asyncio.to_thread(
                    lambda: [r for r in client.rollouts("benchmark") if isinstance(r, Rollout)]
                )
                bare = sum([await replay(http, vllm, rollout) for rollout in rollouts[1:]])
        finally:
            await asyncio.to_thread(node.stop)
            await fake.stop()
    calls = (episodes - 1) * turns
    assert all(len(rollout.turns) == turns for rollout in rollouts), "every episode is one sequence"
    case = f"{turns} turns"
    return [
        {"case": f"ours {case}", "metric": "overhead_cpu_ms_per_call", "value": 1000 * cpu / calls, "unit": "ms"},
        {"case": f"ours {case}", "metric": "ms_per_call", "value": 1000 * seconds / calls, "unit": "ms"},
        {"case": f"bare_loop {case}", "metric": "ms_per_call", "value": 1000 * bare / calls, "unit": "ms"},
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--episodes", type=int, default=8, help="the first of them is not counted")
    parser.add_argument("--turns", type=int, default=10)
    options = parser.parse_args()
    rows = asyncio.run(measure(options.episodes, options.turns))
    for row in rows:
        print(f"{row['case']:<20} {row['metric']:<26} {row['value']:10.3f} {row['unit']}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
