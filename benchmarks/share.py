"""One GPU that a trainer and a vLLM server have in turns, and the same GPU divided: memory, swaps, gaps, speed.

    python benchmarks/share.py --json results.json                  # qwen3_4b_one_gpu, on one GPU of 80 GB
    python benchmarks/share.py --config qwen3_4b_24gb --divided     # where only turns fit
    python benchmarks/share.py --config tiny_cpu --url http://127.0.0.1:8000   # a server that runs and can sleep

Needs vLLM for the device, and no weights: where the folder that the config names is not there, they are drawn. Before
the first turn the server says the log-probs of ``--canary`` ids under an adapter; they are its canary from then on. In
each of the ``--turns`` turns it sleeps, the trainer's frozen weights come, two rollouts of ``--tokens`` are trained on
(``benchmarks/large_model.py``), the weights leave, the server wakes, which fails where the canary does, and
``--requests`` of ``--prompt`` + ``--sampled`` tokens are sampled at once (``benchmarks/serving.py``). ``gap`` is the
largest difference to the first log-probs. Then a server starts that has a part of the GPU for good, by the keys of
``--divided``, and both work beside each other: twice, the first time uncounted. ``*_gib`` are of the whole GPU, other
programs included. All of it takes about nine minutes on an H100 (arithmetic). ``--json`` adds rows to a file after each
turn, so a run that is cut short leaves what it has.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from large_model import HEADS, made_up, policy_update, random_model
from serving import DRAWN, Requests

from loop_recipes.config.files import compose
from loop_recipes.config.loop_config import LoopConfig, read_config
from loop_recipes.config.rollout_node import described_node
from loop_recipes.engine.frozen_weights import FrozenWeights
from loop_recipes.engine.model import vocabulary
from loop_recipes.engine.process_group import destroy_process_group, init_process_group
from rollout_server.config import NodeConfig
from rollout_server.inference.server import VllmServer
from rollout_server.inference.server_group import ServerGroup
from rollout_server.policies.store import PolicyStore
from support.families import with_config
from support.random_policy import write_adapter

TOLERANCE = 0.05
"""In nats, of the canary: the same server on the same ids."""
DIVIDED = (
    "node.servers.kv_cache_bytes=25769803776",
    "node.servers.gpu_memory_utilization=0.5",
    "keep_attention=False",
)
"""What 80 GB leave Qwen3-4B's server beside the trainer: 24 GiB of cache, and no room to keep attention."""
UNITS = {"seconds": "s", "gib": "GiB", "per_s": "tokens/s", "gap": "nats"}


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


class Trainer:
    """A model of the config with drawn weights, and its update."""

    def __init__(self, conf: LoopConfig, device: torch.device, tokens: int) -> None:
        model = random_model(conf, None, HEADS["auto"], device)
        self.frozen = FrozenWeights(model)
        self._update, self._known, self._tokens = policy_update(conf, model, device), vocabulary(model), tokens

    def update(self) -> dict[str, float]:
        started = time.perf_counter()
        _, _, metrics = self._update.run(made_up(self._tokens, self._known), 0, 1)
        seconds = time.perf_counter() - started
        return {"update_seconds": seconds, "trained_tokens_per_s": metrics["tokens_per_second"]}


class Device:
    """What the server and the trainer of one config do on the device; each step returns what it took."""

    def __init__(self, conf: LoopConfig, node: NodeConfig, args: argparse.Namespace, shares: bool) -> None:
        self._conf, self._args, self._device = conf, args, torch.device(conf.device)
        urls = None if args.url is None else [args.url]
        extra = [*node.servers.extra_args, *([] if conf.model["path"] == node.model.path else DRAWN)]
        self._model = replace(node.model, path=conf.model["path"])
        servers = replace(node.servers, count=1, urls=urls, extra_args=extra)
        self._servers = replace(servers, share="trainer") if shares else replace(servers, share=None)
        self._trainer: Trainer | None = None

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[dict[str, Any]]:
        """With a server that has proven a policy; gives the seconds of its start and of the policy's."""
        with tempfile.TemporaryDirectory(prefix="share-benchmark-") as name:
            folder, model = Path(name), Path(self._model.path)
            self._group = ServerGroup(self._model, self._servers, folder / "logs")
            policies = PolicyStore(self._group, self._model, self._servers, folder / "policies", folder)
            write_adapter(folder / "adapter", 1, self._model.lora_rank, scale=0.05, model=model)
            started = time.perf_counter()
            await self._group.start()
            seconds = time.perf_counter() - started
            try:
                published = await policies.publish(1, folder / "adapter")
                self._policy = published.name
                self._vocabulary = policies.vocabulary
                self._canary = random.Random(0).choices(range(policies.vocabulary), k=self._args.canary)
                self._first = await log_probs(self._group.servers[0], self._policy, self._canary)
                places = list(range(1, len(self._canary)))
                canary: dict[str, Any] = {"token_ids": self._canary, "positions": places, "logprobs": self._first}
                canary["tolerance"] = TOLERANCE
                await policies.publish(1, folder / "adapter", canary)
                yield {"start_seconds": seconds, "publish_seconds": published.seconds}
                await policies.retire(1)
            finally:
                await self._group.stop()

    def _used(self, name: str, started: float) -> dict[str, Any]:
        return {f"{name}_seconds": time.perf_counter() - started, f"{name}_gib": used_gib(self._device)}

    async def train(self) -> dict[str, Any]:
        """Load the trainer, or have its weights come; then update."""
        started = time.perf_counter()
        if self._trainer is None:
            build = lambda: Trainer(self._conf, self._device, self._args.tokens)  # noqa: E731
            self._trainer = await asyncio.to_thread(build)
        await asyncio.to_thread(self._trainer.frozen.to_device)
        row = self._used("come", started)
        row |= await asyncio.to_thread(self._trainer.update)
        return row | {"trainer_gib": used_gib(self._device)}

    async def sample(self) -> dict[str, Any]:
        args, server = self._args, self._group.servers[0]
        requests = Requests(server, self._policy, self._vocabulary, args.requests, args.prompt)
        seconds = await requests.seconds(args.sampled)
        rate = args.requests * args.sampled / seconds
        return {"sample_seconds": seconds, "sampled_tokens_per_s": rate, "server_gib": used_gib(self._device)}

    async def turn(self) -> dict[str, Any]:
        """From one sleep to the end of the sampling after it."""
        began = started = time.perf_counter()
        self._group.rest()
        await self._group.sleep()
        row = self._used("sleep", started) | await self.train()
        assert self._trainer is not None, "it has trained"
        started = time.perf_counter()
        await asyncio.to_thread(self._trainer.frozen.to_host)
        row |= self._used("leave", started)
        started = time.perf_counter()
        await self._group.wake()
        if not self._group.ready:
            raise RuntimeError(f"it did not wake: {self._group.servers[0].condemned}")
        row |= self._used("wake", started) | await self.sample()
        row["turn_seconds"] = time.perf_counter() - began
        found = await log_probs(self._group.servers[0], self._policy, self._canary)
        return row | {"gap": max(abs(a - b) for a, b in zip(found, self._first, strict=True))}

    async def beside(self) -> dict[str, Any]:
        """An update and sampling, one after the other, while both hold their memory."""
        started = time.perf_counter()
        row = await self.train() | await self.sample()
        del row["come_seconds"], row["come_gib"]
        return row | {"turn_seconds": time.perf_counter() - started}


def read(config: str, words: list[str]) -> tuple[LoopConfig, NodeConfig]:
    cfg = compose(config, ["collection.max_policy_lag=0", *words])
    node = described_node(cfg)
    cfg.model = with_config(cfg.model)
    return read_config(cfg, LoopConfig), node


async def measure(args: argparse.Namespace, tell: Callable[[str, dict[str, Any]], None]) -> None:
    """Tell a row of each turn, of which the first loads the trainer, and one of the divided device."""
    device = Device(*read(args.config, args.set), args, shares=True)
    async with device.serving() as row:
        tell("in turns, start", row)
        for turn in range(args.turns):
            tell(f"in turns, turn {turn}", await device.turn())
    if not args.divided:
        return
    del device
    gc.collect()  # the trainer of the turns, and with it its memory
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    words = ["node.servers.share=null", *args.divided]
    device = Device(*read(args.config, [*args.set, *words]), args, shares=False)
    async with device.serving() as row:
        tell("divided, start", row)
        await device.beside()
        tell("divided", await device.beside())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="qwen3_4b_one_gpu")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys of the config")
    parser.add_argument("--divided", nargs="*", default=list(DIVIDED), metavar="KEY=VALUE", help="none: not measured")
    parser.add_argument("--url", help="of a vLLM server that runs already and can sleep")
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--canary", type=int, default=256, help="tokens")
    parser.add_argument("--tokens", type=int, default=16_000, help="of each of two rollouts")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=6000, help="tokens")
    parser.add_argument("--sampled", type=int, default=256, help="tokens")
    parser.add_argument("--json", type=Path, help="add the rows to those of this file")
    args = parser.parse_args()
    device = torch.device(read(args.config, args.set)[0].device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    rows = json.loads(args.json.read_text()) if args.json and args.json.exists() else []

    def tell(case: str, row: dict[str, Any]) -> None:
        print(json.dumps({"case": case, **row}), flush=True)
        full = f"{args.config} {case}, {name}"
        rows[:] = [old for old in rows if old["case"] != full]
        for metric, value in row.items():
            if value is not None:
                unit = next(unit for end, unit in UNITS.items() if metric.endswith(end))
                rows.append({"case": full, "metric": metric, "value": value, "unit": unit})
        if args.json is not None:
            partial = args.json.with_suffix(".partial")
            partial.write_text(json.dumps(rows, indent=1) + "\n")
            partial.replace(args.json)

    init_process_group(device, 600.0, always=True)
    try:
        asyncio.run(measure(args, tell))
    finally:
        destroy_process_group()


if __name__ == "__main__":
    main()
