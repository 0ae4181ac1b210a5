"""One GPU that a trainer and a vLLM server have in turns: memory of both phases, seconds of swaps, gaps after wakes.

    python benchmarks/share.py --json results.json                  # qwen3_4b_24gb, on one GPU
    python benchmarks/share.py --config qwen2_5_7b_one_gpu
    python benchmarks/share.py --config tiny_cpu --url http://127.0.0.1:8000   # a server that runs and can sleep

Needs vLLM for the device, and no weights: where the folder that the config names is not there, they are drawn. Before
the first turn the server says the log-probs of ``--tokens`` ids under an adapter; they are its canary from then on. In
each turn it sleeps, the trainer's frozen weights come and leave, and it wakes, which fails where the canary does.
``gap`` is the largest difference to the first log-probs. ``*_gib`` are of the whole GPU, other programs included.
The seconds and the tokens of an update are those of ``benchmarks/gpu.py``: the same code computes it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from large_model import HEADS, random_model
from serving import DRAWN

from loop_recipes.config.files import compose
from loop_recipes.config.loop_config import LoopConfig, read_loop_config
from loop_recipes.config.rollout_node import described_node
from loop_recipes.engine.frozen_weights import FrozenWeights
from loop_recipes.engine.process_group import destroy_process_group, init_process_group
from rollout_server.config import NodeConfig
from rollout_server.inference.server import VllmServer
from rollout_server.inference.server_group import ServerGroup
from rollout_server.policies.store import PolicyStore
from support.families import with_config
from support.random_policy import write_adapter

TOLERANCE = 0.05
"""In nats, of the canary: the same server on the same ids."""


async def log_probs(server: VllmServer, policy: str, token_ids: list[int]) -> list[float]:
    """Of all ids but the first, by the server."""
    body = {
        "model": policy,
        "token_ids": token_ids,
        "request_id": f"canary-{uuid.uuid4().hex[:12]}",
        "sampling_params": {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False},
    }
    status, said = await server.work("/inference/v1/generate", body, timeout_s=600.0)
    if status != 200:
        raise RuntimeError(f"HTTP {status}: {said[:300]}")
    rows = json.loads(said)["prompt_logprobs"]
    return [rows[i][str(token_ids[i])]["logprob"] for i in range(1, len(token_ids))]


def used_gib(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / 2**30


class Turns:
    """Both sides of the device; each step returns what it took."""

    def __init__(self, conf: LoopConfig, group: ServerGroup, device: torch.device) -> None:
        self._conf, self._group, self._device = conf, group, device
        self._frozen: FrozenWeights | None = None

    async def sleep(self) -> dict[str, Any]:
        started = time.perf_counter()
        self._group.rest()
        await self._group.sleep()
        return {"sleep_seconds": time.perf_counter() - started, "asleep_gib": used_gib(self._device)}

    def come(self) -> dict[str, Any]:
        started = time.perf_counter()
        if self._frozen is None:
            self._frozen = FrozenWeights(random_model(self._conf, None, HEADS["auto"], self._device))
        self._frozen.come()
        return {"come_seconds": time.perf_counter() - started, "trainer_gib": used_gib(self._device)}

    def leave(self) -> dict[str, Any]:
        assert self._frozen is not None, "they have come before"
        started = time.perf_counter()
        self._frozen.leave()
        return {"leave_seconds": time.perf_counter() - started, "trainer_left_gib": used_gib(self._device)}

    async def wake(self) -> dict[str, Any]:
        started = time.perf_counter()
        await self._group.wake()
        if not self._group.ready:
            raise RuntimeError(f"it did not wake: {self._group.servers[0].condemned}")
        return {"wake_seconds": time.perf_counter() - started, "awake_gib": used_gib(self._device)}


async def measure(conf: LoopConfig, node: NodeConfig, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each turn; the first loads the trainer's weights."""
    device, rank = torch.device(conf.device), node.model.lora_rank
    drawn = [] if conf.model["path"] == node.model.path else DRAWN
    model = replace(node.model, path=conf.model["path"])
    urls = None if args.url is None else [args.url]
    extra = [*node.servers.extra_args, *drawn]
    servers = replace(node.servers, count=1, urls=urls, extra_args=extra, share="trainer")
    with tempfile.TemporaryDirectory(prefix="share-benchmark-") as name:
        folder = Path(name)
        group = ServerGroup(model, servers, folder / "logs")
        policies = PolicyStore(group, model, servers, folder / "policies", folder)
        write_adapter(folder / "adapter", 1, rank, scale=0.05, model=Path(model.path))
        await group.start()
        try:
            policy = (await policies.publish(1, folder / "adapter")).name
            token_ids = random.Random(0).choices(range(policies.vocabulary), k=args.tokens)
            first = await log_probs(group.servers[0], policy, token_ids)
            canary = {"token_ids": token_ids, "positions": list(range(1, len(token_ids))), "logprobs": first}
            await policies.publish(1, folder / "adapter", canary | {"tolerance": TOLERANCE})
            turns, rows = Turns(conf, group, device), []
            for turn in range(args.turns):
                row = {"turn": turn, **await turns.sleep(), **turns.come(), **turns.leave(), **await turns.wake()}
                found = await log_probs(group.servers[0], policy, token_ids)
                rows.append(row | {"gap": max(abs(a - b) for a, b in zip(found, first, strict=True))})
                print(json.dumps(rows[-1]), flush=True)
        finally:
            await group.stop()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="qwen3_4b_24gb")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys of the config")
    parser.add_argument("--url", help="of a vLLM server that runs already and can sleep")
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--tokens", type=int, default=256, help="of the canary")
    parser.add_argument("--json", type=Path, help="write the rows there, with the device's name")
    args = parser.parse_args()
    cfg = compose(args.config, ["collection.max_policy_lag=0", *args.set])
    node = described_node(cfg)
    cfg.model = with_config(cfg.model)
    conf = read_loop_config(cfg)
    device = torch.device(conf.device)
    init_process_group(device, 600.0, always=True)
    try:
        rows = asyncio.run(measure(conf, node, args))
    finally:
        destroy_process_group()
    if args.json is not None:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        args.json.write_text(json.dumps({"config": args.config, "device": name, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
