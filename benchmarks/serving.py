"""A vLLM server as a rollout node starts it: seconds until it serves, until a new policy is served, tokens a second.

    python benchmarks/serving.py                                    # qwen3_4b_one_gpu, on one GPU
    python benchmarks/serving.py --requests 16 --prompt 15000       # long prompts
    python benchmarks/serving.py --config tiny_cpu --requests 4 --prompt 100 --sampled 16
    python benchmarks/serving.py --config cpu --prompt 60 --sampled 16 --transformers

Needs vLLM for the device (`make setup GPU=1` for a GPU), and no weights: where the folder that the config names is not
there, they are drawn, and the server takes no tokenizer. The server is the first of the config's. ``--set`` changes
keys of the config.

``start_seconds`` ends with the server's first answer. ``publish_seconds`` is what the second version of a policy takes,
an adapter of the config's rank: checked, copied, loaded and proven. Then all requests are sent at once, as token ids
that no request had before, under that policy: for one token each, twice, the second time for
``prefill_tokens_per_s``, and for ``--sampled`` tokens each for ``sampled_tokens_per_s``, of which the seconds of their
prompts are a part. ``transformers_tokens_per_s`` is the same of transformers' ``generate`` with the adapter by PEFT, in
one batch, once the server has ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import aiohttp
from drawn import composed

from loop_recipes.config.rollout_node import described_node
from rollout_server.inference.server import VllmServer
from rollout_server.inference.server_group import ServerGroup
from rollout_server.policies.store import PolicyStore
from support.random_policy import write_adapter

NO_TOKENIZER = ["--skip-tokenizer-init"]
"""Arguments for folders that are drawn."""
ROUND = aiohttp.ClientTimeout(total=600.0)
"""Time-out of all requests of a round."""


class Requests:
    """Equal requests to a server, sent at once; ``model`` is the name of a policy."""

    def __init__(self, server: VllmServer, model: str, vocabulary: int, requests: int, prompt: int) -> None:
        self._server, self._model, self._vocabulary = server, model, vocabulary
        self._requests, self._prompt = requests, prompt
        self._random = random.Random(0)

    async def seconds(self, tokens: int) -> float:
        """Return the seconds until each request, of a prompt of its own, has its ``tokens``."""
        prompts = [self._random.choices(range(self._vocabulary), k=self._prompt) for _ in range(self._requests)]
        connections = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connections, headers=self._server.headers, timeout=ROUND) as session:
            started = time.perf_counter()
            await asyncio.gather(*(self._sample(session, prompt, tokens) for prompt in prompts))
            return time.perf_counter() - started

    async def _sample(self, session: aiohttp.ClientSession, prompt: list[int], tokens: int) -> None:
        sampling = {"max_tokens": tokens, "temperature": 1.0, "logprobs": 0, "ignore_eos": True, "detokenize": False}
        body = {"model": self._model, "token_ids": prompt, "sampling_params": sampling}
        async with session.post(f"{self._server.url}/inference/v1/generate", json=body) as answer:
            reply = await answer.json()
        if answer.status != 200 or len(reply["choices"][0]["token_ids"]) != tokens:
            raise RuntimeError(f"HTTP {answer.status} instead of {tokens} tokens: {json.dumps(reply)[:300]}")


async def measure(args: argparse.Namespace) -> dict[str, float]:
    node = described_node(composed(args.config, args.set, served=True))
    if args.prompt + args.sampled > node.model.max_context:
        raise SystemExit(f"{args.prompt} + {args.sampled} tokens are over model.max_context={node.model.max_context}")
    path = node.model.path
    gpus = None if node.servers.gpus is None else [list(range(node.servers.tensor_parallel_size))]
    extra = [*node.servers.extra_args, *([] if (Path(path) / "tokenizer.json").is_file() else NO_TOKENIZER)]
    model, servers = node.model, replace(node.servers, count=1, gpus=gpus, extra_args=extra)
    with tempfile.TemporaryDirectory(prefix="serving-benchmark-") as name:
        folder = Path(name)
        group = ServerGroup(model, servers, folder / "logs")
        policies = PolicyStore(group, model, servers, folder / "policies")
        for version in (0, 1):
            write_adapter(folder / f"adapter{version}", version, model.lora_rank, scale=0.0, model=Path(path))
        started = time.perf_counter()
        await group.start()
        try:
            start_seconds = time.perf_counter() - started
            for version in (0, 1):
                policy = await policies.publish(version, folder / f"adapter{version}")
            requests = Requests(group.servers[0], policy.name, policies.vocabulary, args.requests, args.prompt)
            await requests.seconds(1)
            prefill = await requests.seconds(1)
            whole = await requests.seconds(args.sampled)
        finally:
            await group.stop()
        figures = {
            "start_seconds": start_seconds,
            "publish_seconds": policy.seconds,
            "prefill_tokens_per_s": args.requests * args.prompt / prefill,
            "sampled_tokens_per_s": args.requests * args.sampled / whole,
        }
        if args.transformers:
            seconds = generating(path, folder / "adapter1", policies.vocabulary, args)
            figures["transformers_tokens_per_s"] = args.requests * args.sampled / seconds
        return figures


def generating(path: str, adapter: Path, vocabulary: int, args: argparse.Namespace) -> float:
    """Return the seconds of transformers' second of two batches, with the KV cache that is its default."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, adapter).eval()
    for seed in (0, 1):
        torch.manual_seed(seed)
        prompts = torch.randint(vocabulary, (args.requests, args.prompt))
        length = {"min_new_tokens": args.sampled, "max_new_tokens": args.sampled}
        started = time.perf_counter()
        model.generate(input_ids=prompts, do_sample=True, top_k=0, top_p=1.0, pad_token_id=0, **length)
        seconds = time.perf_counter() - started
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="qwen3_4b_one_gpu")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys of the config")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=1000, help="tokens")
    parser.add_argument("--sampled", type=int, default=256, help="tokens")
    parser.add_argument("--transformers", action="store_true", help="for models that are there, on a CPU")
    print(json.dumps(asyncio.run(measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
