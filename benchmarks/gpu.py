"""What one GPU can show of the learner and of a server, in one command: exactness, error, determinism, time, memory.

    python benchmarks/gpu.py --json results.json                  # the paper's shapes, on one 80 GB GPU
    python benchmarks/gpu.py --json results.json --parts heads    # one part
    python benchmarks/gpu.py --device cpu --size tiny             # whether it runs, without a GPU

Parts, each at most ten minutes long:

- ``heads``: largest error of log-probs and of the hidden states' gradient against full logits in fp32, and how many of
  the repeats differ from the first in any bit. ``cce_released`` is Cut Cross-Entropy's own function.
- ``heads_speed``: seconds and peak memory by number of tokens (one case of logprobs.py each).
- ``attention``: largest error against fp32 of a short packed row's attention, and seconds of one long rollout's, by
  FlashAttention-2 and 4.
- ``exactness``: in the config's precision, packed rollouts against one at a time, and an update that goes on from saved
  tensors against one that never stopped.
- ``update``: seconds, peak memory and model-FLOP use of an update (one case of large_model.py each).
- ``published``: prime-rl's case of its docs, Qwen3-4B, LoRA of rank 16, one micro-batch on one H100 with recomputation:
  6,230 tokens/s and 23.3 GiB at 16,384 tokens, 4,160 tokens/s at 65,536 (FlashAttention-3). Beside it
  ``keep_attention``, FlashAttention-4 and ``compile``.
- ``vllm``: seconds until a server serves and until a new policy is served, prompt tokens and sampled tokens a second,
  of a server that has the GPU for itself; its weights may be drawn (one case of serving.py each).

Every case has a process of its own. With ``--json`` its rows are written when it is done, and the same command goes on
after the last of them; a case that could not run is said, and tried again. torch, torchtune, torchao and safetensors
are enough; only FlashAttention-4 and the part ``vllm`` need vLLM's wheel.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FOLDER = Path(__file__).parent
PART_SECONDS = 600.0
LENGTHS = (300, 120, 61)
"""Of the rollouts of ``exactness``, two each; all fit into one micro-batch of 2,048 tokens."""
UNITS = {
    "seconds": "s",
    "cpu_seconds": "s",
    "forward_seconds": "s",
    "forward_backward_seconds": "s",
    "recompute_seconds": "s",
    "update_seconds": "s",
    "start_seconds": "s",
    "publish_seconds": "s",
    "tokens_per_s": "tokens/s",
    "prefill_tokens_per_s": "tokens/s",
    "sampled_tokens_per_s": "tokens/s",
    "peak_mib": "MiB",
    "peak_gib": "GiB",
    "error": "nats",
    "logprob_error": "nats",
}


@dataclass(frozen=True)
class Size:
    """How large the cases are; ``layers`` None means all of the config's."""

    config: str
    dtype: str
    width: int
    vocabulary: int
    heads: tuple[str, ...]
    head_tokens: int
    repeats: int
    speed_heads: tuple[str, ...]
    speed_tokens: tuple[int, ...]
    attention_heads: tuple[int, int, int]
    attention_tokens: tuple[int, ...]
    update_tokens: tuple[int, ...]
    layers: tuple[int | None, ...]
    published_config: str
    published_tokens: tuple[int, ...]
    published_words: tuple[tuple[str, ...], ...]
    served_config: str
    served_words: tuple[str, ...]
    served_requests: tuple[tuple[int, int, int], ...]


PARTS = ("heads", "heads_speed", "attention", "exactness", "update", "published", "vllm")
HEADS = ("ours_tensor_cores", "ours_cce", "ours_tiled", "cce_released")
SIZES = {
    "full": Size(
        config="loop_appworld/qwen2_5_32b",
        dtype="bfloat16",
        width=5120,
        vocabulary=152_064,
        heads=HEADS,
        head_tokens=4096,
        repeats=50,
        speed_heads=(
            "ours_tensor_cores",
            "ours_cce",
            "ours_tiled",
            "torch_chunked",
            "torch_chunked_fp32",
            "full_logits",
            "torchtune_chunked",
        ),
        speed_tokens=(1024, 4096, 16_384, 32_768),
        attention_heads=(32, 8, 128),
        attention_tokens=(4096, 16_384, 65_536),
        update_tokens=(8000, 16_000, 32_000),
        layers=(16, None),
        published_config="qwen3_4b_one_gpu",
        published_tokens=(16_384, 65_536),
        published_words=(
            ("attention=fa2", "keep_attention=False"),
            ("attention=fa2", "keep_attention=True"),
            ("attention=fa4", "keep_attention=False"),
            ("attention=fa4", "keep_attention=True"),
            ("compile=True", "keep_attention=False"),
        ),
        served_config="qwen3_4b_one_gpu",
        served_words=(
            "node.servers.share=null",
            "node.servers.max_num_seqs=64",
            "node.servers.gpu_memory_utilization=0.9",
            "node.servers.kv_cache_bytes=null",
        ),
        served_requests=((64, 1000, 256), (16, 15_000, 256)),
    ),
    "tiny": Size(
        config="loop_appworld/tiny_gpu",
        dtype="bfloat16",
        width=32,
        vocabulary=512,
        heads=("ours_tiled", "cce_released"),
        head_tokens=64,
        repeats=2,
        speed_heads=("ours_tiled", "ours_tensor_cores"),
        speed_tokens=(64,),
        attention_heads=(4, 2, 16),
        attention_tokens=(64,),
        update_tokens=(96,),
        layers=(1,),
        published_config="tiny_gpu",
        published_tokens=(96,),
        published_words=(("attention=fa2",), ("attention=fa2", "keep_attention=True"), ("attention=fa4",)),
        served_config="tiny_gpu",
        served_words=(),
        served_requests=((4, 100, 16),),
    ),
}


def released_cce(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    return -linear_cross_entropy(hidden, weight, targets, reduction="none", filter_eps=None)


def heads(size: Size, device: torch.device, name: str) -> dict[str, float]:
    """Errors of one head against full logits in fp32, and how many repeats differ from the first."""
    from loop_recipes.engine.cut_cross_entropy import CutCrossEntropyLogProbs
    from loop_recipes.engine.logprobs import FullLogProbs, TensorCoreLogProbs, TiledLogProbs

    all_heads: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "ours_tensor_cores": TensorCoreLogProbs(),
        "ours_cce": CutCrossEntropyLogProbs(),
        "ours_tiled": TiledLogProbs(),
        "cce_released": released_cce,
    }
    head = all_heads[name]
    torch.manual_seed(0)
    dtype = getattr(torch, size.dtype)
    weight = (torch.randn(size.vocabulary, size.width, device=device) * size.width**-0.5).to(dtype)
    hidden = torch.randn(size.head_tokens, size.width, device=device).to(dtype)
    targets = torch.randint(0, size.vocabulary, (size.head_tokens,), device=device)
    upstream = torch.randn(size.head_tokens, device=device)

    def run(compute: Callable[[Tensor, Tensor, Tensor], Tensor], rows: slice, at: torch.dtype) -> tuple[Tensor, Tensor]:
        leaf = hidden[rows].to(at).requires_grad_()
        logprobs = compute(leaf, weight, targets[rows])
        (gradient,) = torch.autograd.grad(logprobs, leaf, upstream[rows].to(logprobs.dtype))
        return logprobs.detach().float(), gradient.float()

    blocks = [slice(start, start + 512) for start in range(0, size.head_tokens, 512)]
    exact = [
        torch.cat(parts) for parts in zip(*(run(FullLogProbs(), block, torch.float32) for block in blocks), strict=True)
    ]
    found = [run(head, slice(None), dtype) for _ in range(size.repeats)]
    logprobs, gradient = found[0]
    return {
        "logprob_error": (logprobs - exact[0]).abs().max().item(),
        "gradient_error_of_largest": ((gradient - exact[1]).abs().max() / exact[1].abs().max()).item(),
        "logprob_repeats_that_differ": sum(not torch.equal(other, logprobs) for other, _ in found),
        "gradient_repeats_that_differ": sum(not torch.equal(other, gradient) for _, other in found),
    }


def attention(size: Size, device: torch.device, choice: str, tokens: int) -> dict[str, float]:
    """Error of a packed row's attention, and the seconds of one document's forward, and of forward and backward."""
    from loop_recipes.engine.batching import Documents
    from loop_recipes.engine.cuda_layers import causal_attention
    from loop_recipes.engine.flash_attention import activate, largest_error

    if device.type != "cuda":
        raise SystemExit("the kernels are CUDA's")
    if choice == "fa4":
        activate()
    queries, keys, width = size.attention_heads
    dtype = getattr(torch, size.dtype)
    error = largest_error(size.attention_heads, device, dtype)
    q, k, v = (
        torch.randn(tokens, count, width, device=device, dtype=dtype, requires_grad=True)
        for count in (queries, keys, keys)
    )
    documents = Documents.of([tokens]).to(device)
    upstream = torch.randn_like(q)

    def forward() -> Tensor:
        return causal_attention(q, k, v, documents)

    def both() -> None:
        torch.autograd.grad(forward(), (q, k, v), upstream)

    def seconds(run: Callable[[], object], repeats: int = 10) -> float:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / repeats

    return {"error_of_largest": error, "forward_seconds": seconds(forward), "forward_backward_seconds": seconds(both)}


def exactness(device: torch.device) -> dict[str, float]:
    """Largest differences of packed rollouts from one at a time, and of a resumed update from an uninterrupted one."""
    from large_model import made_up, random_model

    from loop_recipes.algorithm.advantages import LeaveOneOut
    from loop_recipes.algorithm.method import Method
    from loop_recipes.algorithm.policy_update import PolicyUpdate
    from loop_recipes.config.components import build
    from loop_recipes.config.files import compose
    from loop_recipes.config.loop_config import LoopConfig, read_config
    from loop_recipes.engine.adapter_versions import AdapterVersions
    from loop_recipes.engine.logprobs import AutoLogProbs
    from loop_recipes.engine.model import trained_parameters
    from loop_recipes.engine.optimizer import optimizer_tensors, restore_optimizer
    from loop_recipes.engine.process_group import destroy_process_group, init_process_group
    from loop_recipes.engine.rank_batches import RankBatches

    conf = read_config(compose("tiny_gpu"), LoopConfig)
    init_process_group(device, 600.0, always=True)
    model = random_model(conf, None, AutoLogProbs(), device)
    versions, parameters = AdapterVersions(model), trained_parameters(model)

    def update(optimizer: torch.optim.Optimizer, tokens: int) -> PolicyUpdate:
        config = replace(conf.update, epochs=1, minibatch_rollouts=None, micro_batch_tokens=tokens)
        return PolicyUpdate(
            model=model,
            optimizer=optimizer,
            method=Method(build(conf.loss), LeaveOneOut()),
            versions=versions,
            config=config,
            batches=RankBatches(config, device),
            seed=conf.seed,
        )

    samples = [
        replace(sample, rollout_id=f"{length}-{sample.rollout_id}", task_id=str(length))
        for length in LENGTHS
        for sample in made_up(length, model.tok_embeddings.weight.shape[0])
    ]
    optimizer = build(conf.optimizer, [{"params": list(parameters.values())}])
    update(optimizer, 2048).run(samples, 0, 1)  # so that the adapter is not zero
    versions.keep(1)
    alone, packed = (update(optimizer, tokens).scorer.logprobs(samples, 1) for tokens in (1, 2048))
    difference = max((alone[name] - packed[name]).abs().max().item() for name in alone)

    state = {name: tensor.clone() for name, tensor in optimizer_tensors(optimizer, parameters).items()}
    update(optimizer, 2048).run(samples, 0, 2)
    versions.keep(2)
    went_on = versions.full(2)
    again = build(conf.optimizer, [{"params": list(parameters.values())}])
    restore_optimizer(again, parameters, state)
    with versions.active(1):
        update(again, 2048).run(samples, 0, 2)
        versions.keep(3)
    resumed = versions.full(3)
    destroy_process_group()
    return {
        "packed_logprob_difference": difference,
        "resumed_adapter_difference": max((went_on[n] - resumed[n]).abs().max().item() for n in went_on),
    }


CASES: dict[str, Callable[[Size, torch.device, argparse.Namespace], dict[str, float]]] = {
    "heads": lambda size, device, args: heads(size, device, args.head),
    "attention": lambda size, device, args: attention(size, device, args.attention, args.tokens),
    "exactness": lambda size, device, args: exactness(device),
}


def cases(size: Size, args: argparse.Namespace) -> dict[str, dict[str, list[str]]]:
    """For each part, its cases and the command that prints a case's metrics as JSON."""
    python, device = sys.executable, ["--device", args.device]
    own = [python, __file__, *device, "--size", args.size, "--case"]
    logprobs = [python, str(FOLDER / "logprobs.py"), *device, "--dtype", size.dtype, "--width", str(size.width)]
    logprobs += ["--vocab", str(size.vocabulary), "--repeats", "3"]
    peak = [] if args.peak_tflops is None else ["--peak-tflops", str(args.peak_tflops)]
    update = [python, str(FOLDER / "large_model.py"), *device, *peak, "--case", "--heads", "auto"]
    large = [*update, "--config", size.config]
    one_pass = [*update, "--config", size.published_config, "--one-pass"]
    serving = [python, str(FOLDER / "serving.py"), "--config", size.served_config]
    serving += ["--set", *size.served_words] if size.served_words else []
    shape = f"{size.head_tokens} tokens, width {size.width}, vocabulary {size.vocabulary}"
    model = size.config.rpartition("/")[2]
    return {
        "heads": {f"{head} {shape}, {size.repeats} repeats": [*own, "heads", "--head", head] for head in size.heads},
        "heads_speed": {
            f"{head} {tokens} tokens, width {size.width}, vocabulary {size.vocabulary}": [
                *logprobs, "--case", head, "--tokens", str(tokens)
            ]
            for tokens in size.speed_tokens
            for head in size.speed_heads
        },
        "attention": {
            f"{choice} {size.attention_heads} heads, {tokens} tokens": [
                *own, "attention", "--attention", choice, "--tokens", str(tokens)
            ]
            for tokens in size.attention_tokens
            for choice in ("fa2", "fa4")
        },
        "exactness": {"ours tiny_gpu in bf16": [*own, "exactness"]},
        "update": {
            f"ours {model}, {layers or 'all'} layers, {tokens} tokens": [
                *large, "--tokens", str(tokens), *([] if layers is None else ["--layers", str(layers)])
            ]
            for layers in size.layers
            for tokens in size.update_tokens
        },
        "published": {
            f"ours {size.published_config}, one sequence of {tokens} tokens, {' '.join(words)}": [
                *one_pass, "--tokens", str(tokens), "--set", "enable_activation_checkpointing=True", *words
            ]
            for tokens in size.published_tokens
            for words in size.published_words
        },
        "vllm": {
            f"vllm {size.served_config}, {requests} requests of {prompt} + {sampled} tokens": [
                *serving, "--requests", str(requests), "--prompt", str(prompt), "--sampled", str(sampled)
            ]
            for requests, prompt, sampled in size.served_requests
        },
    }  # fmt: skip


def measure(command: list[str], seconds: float) -> dict[str, Any]:
    """What a case printed; ``left_out`` is the reason where it could not run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(seconds, 1.0), cwd=FOLDER)
    except subprocess.TimeoutExpired:
        return {"left_out": f"the part's {PART_SECONDS:.0f} s are over"}
    if done.returncode:
        return {"left_out": (done.stderr.strip().splitlines() or [f"ended by signal {-done.returncode}"])[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=list(SIZES), default="full")
    parser.add_argument("--parts", choices=PARTS, nargs="+")
    parser.add_argument("--only", type=re.compile, help="a regular expression: cases whose name it finds")
    parser.add_argument("--peak-tflops", type=float, help="of the device; adds model_flops_utilization")
    parser.add_argument("--json", type=Path, help="write the rows here, and go on from those that are there")
    parser.add_argument("--case", choices=list(CASES), help="measure in this process and print JSON")
    parser.add_argument("--head", choices=HEADS, default=HEADS[0])
    parser.add_argument("--attention", choices=["fa2", "fa4"], default="fa2")
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    size, device = SIZES[args.size], torch.device(args.device)
    if args.case:
        print(json.dumps(CASES[args.case](size, device, args)))
        return

    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    machine = f"{name}, torch {torch.__version__}"
    rows = json.loads(args.json.read_text()) if args.json and args.json.exists() else []
    done = {row["case"] for row in rows}
    print(machine)
    for part, commands in cases(size, args).items():
        if args.parts and part not in args.parts:
            continue
        ends = time.monotonic() + PART_SECONDS
        for case, command in commands.items():
            full = f"{case}, {machine}"
            if args.only and not args.only.search(case):
                continue
            if full in done:
                print(f"{part}: {case}: done before")
                continue
            metrics = measure(command, ends - time.monotonic())
            if "left_out" in metrics:
                print(f"{part}: {case}: left out: {metrics['left_out']}", flush=True)
                continue
            for metric, value in metrics.items():
                print(f"{part}: {case}: {metric} {value:.6g} {UNITS.get(metric, '')}".rstrip(), flush=True)
                rows.append({"case": full, "metric": metric, "value": value, "unit": UNITS.get(metric, "")})
            if args.json:
                partial = args.json.with_suffix(".partial")
                partial.write_text(json.dumps(rows, indent=1) + "\n")
                partial.replace(args.json)


if __name__ == "__main__":
    main()
