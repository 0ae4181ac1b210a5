"""A GPU that a trainer and a vLLM server have in turns, and the same GPU divided: memory, swaps, gaps, speed.

    python benchmarks/share.py --json results.json                  # qwen3_4b_one_gpu, on one GPU of 80 GB
    python benchmarks/share.py --config qwen3_4b_24gb --parts turns # where only turns fit
    python benchmarks/share.py --cpu-rehearsal                      # tiny, by vLLM's CPU build, whose memory stays

Needs vLLM for the device, and no weights: where the folder that the config names is not there, they are drawn
(``benchmarks/drawn.py``). Before the first turn the server says the log-probs of ``--canary`` ids under an adapter;
they are its canary from then on, and another adapter, and none, must be refused by it. In each of the ``--turns`` turns
it sleeps, the trainer's frozen weights come, two rollouts of ``--tokens`` are trained on, the weights leave, the server
wakes, which fails where the canary does, and ``--requests`` of ``--prompt`` + ``--sampled`` tokens are sampled at once
(``benchmarks/serving.py``). ``gap`` is the largest difference to the first log-probs, ``weights_that_differ`` counts
those that do not have the bytes of before, of which none may be. After the last turn the server's weights are
overwritten, and it must not wake. Then a server starts that has a part of the GPU for good, by the keys of
``--divided``, and both work beside each other: twice, the first time uncounted. ``*_gib`` are of the whole GPU, other
programs included. ``--json`` adds rows to a file after each turn, so a run that is cut short leaves what it has. Ends
with 1 where something is not as it was, or a wrong case is not refused.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
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
from drawn import FOR_UPDATES, composed, learner, made_up, process_group, refused
from rows import Rows, machine
from serving import NO_TOKENIZER, Requests

from loop_recipes.config.loop_config import LoopConfig, read_config
from loop_recipes.config.rollout_node import described_node
from loop_recipes.engine.frozen_weights import FrozenWeights
from loop_recipes.engine.model import vocabulary
from rollout_server.config import NodeConfig
from rollout_server.inference.server import VllmServer
from rollout_server.inference.server_group import ServerGroup
from rollout_server.policies.adapter_check import AdapterError
from rollout_server.policies.store import PolicyStore
from support.random_policy import write_adapter

TOLERANCE = 0.05
"""Nats that the canary may differ: the same server on the same ids."""
DIVIDED = (
    "node.servers.kv_cache_bytes=25769803776",
    "node.servers.gpu_memory_utilization=0.5",
    "keep_attention=False",
)
"""Keys of Qwen3-4B's server beside the trainer on 80 GB: 24 GiB of cache, and no room to keep attention."""
REHEARSED = {"turns": 1, "canary": 16, "tokens": 64, "requests": 2, "prompt": 8, "sampled": 4}
NOTHING = hashlib.sha256().hexdigest()
"""The digest in vLLM's CPU build of a layer whose weights it keeps in another form."""
WRONG = {"another adapter": (2, 0.05), "no adapter": (1, 0.0)}
"""Seed and scale of adapters that are not the canary's, which has 1 and 0.05."""


async def log_probs(server: VllmServer, policy: str, token_ids: list[int]) -> list[float]:
    """Return the server's log-probs of all ids but the first."""
    body = {
        "model": policy,
        "token_ids": token_ids,
        "request_id": f"canary-{uuid.uuid4().hex[:12]}",
        "sampling_params": {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False},
    }
    status, reply = await server.work("/inference/v1/generate", body, timeout_s=600.0)
    if status != 200:
        raise RuntimeError(f"HTTP {status}: {reply[:300]}")
    rows = json.loads(reply)["prompt_logprobs"]
    return [rows[i][str(token_ids[i])]["logprob"] for i in range(1, len(token_ids))]


def used_gib(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / 2**30


class Trainer:
    """The learner of the config, and its update."""

    def __init__(self, conf: LoopConfig, tokens: int) -> None:
        own = learner(conf)
        self.frozen, self._update = FrozenWeights(own.model), own.update
        self._samples = made_up(tokens, vocabulary(own.model))

    def update(self) -> dict[str, float]:
        started = time.perf_counter()
        _, _, metrics = self._update.run(self._samples, 0, 1)
        seconds = time.perf_counter() - started
        return {"update_seconds": seconds, "trained_tokens_per_s": metrics["tokens_per_second"]}


class Device:
    """The server and the trainer of one config on the device; each step returns what it took."""

    def __init__(self, conf: LoopConfig, node: NodeConfig, args: argparse.Namespace, shares: bool) -> None:
        self._conf, self._args, self._device, self._model = conf, args, torch.device(conf.device), node.model
        extra = [*node.servers.extra_args, *([] if args.has_tokenizer else NO_TOKENIZER)]
        env = {**node.servers.env, "VLLM_SERVER_DEV_MODE": "1"}  # vLLM's CPU build sleeps by this, with its weights
        servers = replace(node.servers, count=1, extra_args=extra, env=env)
        sleeps = shares and conf.device != "cpu"
        self._servers = replace(servers, share="trainer") if sleeps else replace(servers, share=None)
        self._trainer: Trainer | None = None

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the seconds of the start of a server that has proven a policy, and refused wrong ones, and of the
        policy's."""
        with tempfile.TemporaryDirectory(prefix="share-benchmark-") as name:
            folder, model = Path(name), Path(self._model.path)
            self._group = ServerGroup(self._model, self._servers, folder / "logs")
            policies = PolicyStore(self._group, self._model, self._servers, folder / "policies")
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
                self._weights = json.loads(await self._checked("checksum"))["checksums"]
                places = list(range(1, len(self._canary)))
                canary: dict[str, Any] = {"token_ids": self._canary, "positions": places, "logprobs": self._first}
                canary["tolerance"] = TOLERANCE
                write_adapter(folder / "adapter", 1, self._model.lora_rank, scale=0.05, model=model)
                await policies.publish(1, folder / "adapter", canary)
                for what, (seed, scale) in WRONG.items():
                    write_adapter(folder / what, seed, self._model.lora_rank, scale=scale, model=model)
                    refused(what, await _objection(policies, folder / what, canary))
                yield {"start_seconds": seconds, "publish_seconds": published.seconds}
            finally:
                await self._group.stop()

    async def _checked(self, action: str, **more: Any) -> str:
        """Return vLLM's answer about the bytes of its weights."""
        request = {"action": action, **more}
        status, body = await self._group.servers[0].work("/weight_checker", request, timeout_s=600.0)
        if status != 200:
            raise RuntimeError(f"/weight_checker: HTTP {status}: {body[:300]}")
        return body

    async def stale(self) -> None:
        """Check that the server does not wake with other weights than it slept with."""
        await self._checked("reset")
        self._group.rest()
        await self._group.sleep()
        await self._group.wake()
        refused("a server whose weights were overwritten", self._group.servers[0].condemned or None)

    def _used(self, name: str, started: float) -> dict[str, Any]:
        return {f"{name}_seconds": time.perf_counter() - started, f"{name}_gib": used_gib(self._device)}

    async def train(self) -> dict[str, Any]:
        """Load the trainer, or have its weights come; then update."""
        started = time.perf_counter()
        if self._trainer is None:
            self._trainer = await asyncio.to_thread(Trainer, self._conf, self._args.tokens)
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
        """Go from one sleep to the end of the sampling after it."""
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
        logprobs = await log_probs(self._group.servers[0], self._policy, self._canary)
        row["gap"] = max(abs(a - b) for a, b in zip(logprobs, self._first, strict=True))
        differ = json.loads(await self._checked("compare", baseline=self._weights))["mismatches"]
        if differ:
            raise RuntimeError(f"{len(differ)} weights woke with other bytes, {differ[0]} among them")
        compared = sum(digest != NOTHING for digest in self._weights.values())
        return row | {"weights": compared, "weights_that_differ": len(differ)}

    async def beside(self) -> dict[str, Any]:
        """Update and sample, one after the other, while both hold their memory."""
        started = time.perf_counter()
        row = await self.train() | await self.sample()
        del row["come_seconds"], row["come_gib"]
        return row | {"turn_seconds": time.perf_counter() - started}


async def _objection(policies: PolicyStore, folder: Path, canary: dict[str, Any]) -> str | None:
    """Return why the servers refuse an adapter with this canary; None where they serve it."""
    try:
        await policies.publish(2, folder, canary)
    except AdapterError as error:
        return str(error) if str(error).startswith("canary: ") else None
    return None


def read(args: argparse.Namespace, words: list[str]) -> tuple[LoopConfig, NodeConfig]:
    """Read the learner's config and the node's, of the same model, which is drawn where it is not there."""
    words = ["collection.max_policy_lag=0", *args.set, *words]
    cfg, of_learner = (
        composed(args.config, [*words, *more], tiny=args.cpu_rehearsal, served=True) for more in ((), FOR_UPDATES)
    )
    return read_config(of_learner, LoopConfig), described_node(cfg)


async def measure(args: argparse.Namespace, tell: Callable[[str, dict[str, Any]], None]) -> None:
    """Report a row of each turn, of which the first loads the trainer, and one of the divided device."""
    if "turns" in args.parts:
        device = Device(*read(args, []), args, shares=True)
        async with device.serving() as row:
            tell("in turns, start", row)
            for turn in range(args.turns):
                tell(f"in turns, turn {turn}", await device.turn())
            await device.stale()
        del device
        gc.collect()  # the trainer of the turns, and with it its memory
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if "divided" in args.parts:
        words = [] if args.cpu_rehearsal else ["node.servers.share=null", *args.divided]
        device = Device(*read(args, words), args, shares=False)
        async with device.serving() as row:
            tell("divided, start", row)
            await device.beside()
            tell("divided", await device.beside())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="qwen3_4b_one_gpu")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys of the config")
    parser.add_argument("--parts", nargs="+", choices=["turns", "divided"], default=["turns", "divided"])
    parser.add_argument("--divided", nargs="*", default=list(DIVIDED), metavar="KEY=VALUE", help="keys where divided")
    parser.add_argument("--cpu-rehearsal", action="store_true", help="the same with a tiny shape on a CPU")
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--canary", type=int, default=256, help="tokens")
    parser.add_argument("--tokens", type=int, default=16_000, help="of each of two rollouts")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=6000, help="tokens")
    parser.add_argument("--sampled", type=int, default=256, help="tokens")
    parser.add_argument("--json", type=Path, help="add the rows to those of this file")
    args = parser.parse_args()
    if args.cpu_rehearsal:
        vars(args).update(REHEARSED)
    conf, _ = read(args, [])
    args.has_tokenizer = (Path(conf.model["path"]) / "tokenizer.json").is_file()
    rows = Rows(args.json, machine(conf.device))

    def tell(case: str, row: dict[str, Any]) -> None:
        print(json.dumps({"case": case, **row}), flush=True)
        model = Path(conf.model["path"]).name
        rows.add(f"{args.config} {model} {case}", {name: value for name, value in row.items() if value is not None})

    with process_group(torch.device(conf.device)):
        asyncio.run(measure(args, tell))


if __name__ == "__main__":
    main()
