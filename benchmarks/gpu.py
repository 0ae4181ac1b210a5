"""Check the learner and a server on one GPU, in one command: exactness, error, determinism, time, memory.

    python benchmarks/gpu.py --json results.json                  # the paper's shapes, on one 80 GB GPU
    python benchmarks/gpu.py --json results.json --parts heads    # one part
    python benchmarks/gpu.py --device cpu --size tiny             # whether it runs, without a GPU
    python benchmarks/gpu.py --cpu-rehearsal                      # the steps of gpu_day.sh, tiny, without a GPU

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

Every case has a process of its own. With ``--json`` its rows are written when it is done, and the same command goes on
after the last of them; a case that could not run is reported, and tried again. ``--case run``, which is in no part, is
two iterations of the recipe with a server of its own: the gap between the two must be small, and with an adapter that
nobody sampled with must be refused. Only that and FlashAttention-4 need vLLM's wheel.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rows import Rows, machine, unit
from torch import Tensor

FOLDER = Path(__file__).parent
PART_SECONDS = 600.0


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


@dataclass(frozen=True)
class Step:
    """A step of a day with a GPU: its limit, and its words after the interpreter, ROWS for the file of the rows."""

    seconds: int
    name: str
    words: str


_UPDATE = "large_model.py --json ROWS --one-pass --tokens 16384 --config"
DAY = (
    Step(
        100,
        "sleep and wake, Qwen3-0.6B",
        "share.py --json ROWS --parts turns --turns 2 --tokens 4000 --requests 16 --prompt 1000 --set "
        "model.path=models/Qwen3-0.6B node.servers.extra_args=[--enforce-eager] node.servers.kv_cache_bytes=8589934592",
    ),
    Step(225, "in turns, Qwen3-4B", "share.py --json ROWS --parts turns --turns 2 --prompt 3000"),
    Step(150, "divided, Qwen3-4B", "share.py --json ROWS --parts divided --prompt 3000"),
    Step(45, "update by torchtune's modules, Qwen3-4B", f"{_UPDATE} qwen3_4b_one_gpu --set attention=fa2"),
    Step(
        45,
        "update by transformers' modules, Qwen3-4B",
        f"{_UPDATE} qwen3_4b_one_gpu --engine transformers --set attention=fa2",
    ),
    Step(50, "update, Qwen3.5-4B", f"{_UPDATE} qwen3_5_4b_one_gpu"),
    Step(55, "update, 8 layers of gpt-oss-20b", f"{_UPDATE} gpt_oss_20b --layers 8"),
    Step(110, "a small run", "gpu.py --json ROWS --case run"),
)
"""Most valuable first; gpu_day.sh runs them, and a rehearsal."""
MOST_S, LEAST_S, REHEARSAL_S = 780, 10, 1800.0
"""Seconds of a day, those that a step needs to begin, and those of a rehearsed step."""
RUN = (
    "node.environment.name=tools",
    "node.servers.extra_args=[--enforce-eager]",
    "collection.split=train",
    "collection.tasks_per_iteration=4",
    "collection.rollouts_per_task=4",
    "collection.limits.max_turns=1",
    "collection.limits.max_tokens_per_turn=24",
    "max_iterations=2",
)
"""Words of the small run, of the tiny policy on functions."""
PARTS = ("heads", "heads_speed", "attention", "exactness", "update", "published")
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
    ),
}


def released_cce(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    return -linear_cross_entropy(hidden, weight, targets, reduction="none", filter_eps=None)


def heads(size: Size, device: torch.device, name: str) -> dict[str, float]:
    """Measure errors of a head against full logits in fp32, and count repeats that differ from the first."""
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
    repeats = [run(head, slice(None), dtype) for _ in range(size.repeats)]
    logprobs, gradient = repeats[0]
    return {
        "logprob_error": (logprobs - exact[0]).abs().max().item(),
        "gradient_error_of_largest": ((gradient - exact[1]).abs().max() / exact[1].abs().max()).item(),
        "logprob_repeats_that_differ": sum(not torch.equal(other, logprobs) for other, _ in repeats),
        "gradient_repeats_that_differ": sum(not torch.equal(other, gradient) for _, other in repeats),
    }


def attention(size: Size, device: torch.device, choice: str, tokens: int) -> dict[str, float]:
    """Measure the error of a packed row's attention, and a document's seconds forward, and with backward."""
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
    """Measure how packed rollouts differ from single ones, and a resumed update from an uninterrupted one."""
    from drawn import FOR_UPDATES, LENGTHS, composed, learner, made_up, process_group

    from loop_recipes.config.components import build
    from loop_recipes.config.loop_config import LoopConfig, read_config
    from loop_recipes.engine.model import vocabulary
    from loop_recipes.engine.optimizer import optimizer_tensors, restore_optimizer

    conf = read_config(composed("tiny_gpu", [*FOR_UPDATES, f"device={device}"]), LoopConfig)
    with process_group(device):
        own = learner(conf)
        samples = [
            replace(sample, rollout_id=f"{length}-{sample.rollout_id}", task_id=str(length))
            for length in LENGTHS
            for sample in made_up(length, vocabulary(own.model))
        ]
        update, versions, parameters = own.update, own.versions, own.parameters
        optimizer = partial(build, conf.optimizer, [{"params": list(parameters.values())}])  # without a warm-up
        update.optimizer = optimizer()
        update.run(samples, 0, 1)  # so that the adapter is not zero
        versions.keep(1)
        packed = update.scorer.logprobs(samples, 1)
        alone = [update.scorer.logprobs([sample], 1)[sample.rollout_id] for sample in samples]

        state = {name: tensor.clone() for name, tensor in optimizer_tensors(update.optimizer, parameters).items()}
        update.run(samples, 0, 2)
        versions.keep(2)
        update.optimizer = optimizer()
        restore_optimizer(update.optimizer, parameters, state)
        with versions.active(1):
            update.run(samples, 0, 2)
            versions.keep(3)
        went_on, resumed = versions.full(2), versions.full(3)
    apart = [(one - packed[s.rollout_id]).abs().max().item() for one, s in zip(alone, samples, strict=True)]
    return {
        "packed_logprob_difference": max(apart),
        "resumed_adapter_difference": max((went_on[n] - resumed[n]).abs().max().item() for n in went_on),
    }


def small_run(device: torch.device) -> dict[str, float]:
    """Measure a run of the recipe with a server of its own: seconds, and the gap between sampler and learner in nats,
    which must be small, and with an adapter that nobody sampled with must be refused."""
    from drawn import FOR_UPDATES, composed, judge_of, learner, process_group, refused

    from loop_formats.run_files import read_rollouts
    from loop_formats.run_folder import read_metrics
    from loop_recipes.config.loop_config import LoopConfig, read_config
    from loop_recipes.engine.diagnostics import tolerances
    from loop_recipes.engine.samples import Sample
    from support.small_runs import random_adapter

    config = "tiny_gpu" if device.type == "cuda" else "tiny_cpu"
    words = [*RUN, f"node.environment.module={FOLDER / 'task_files/even.py'}"]
    with tempfile.TemporaryDirectory() as name:
        started = time.perf_counter()
        command = [str(Path(sys.executable).with_name("loop")), "train", config, *words, f"output_dir={name}"]
        done = subprocess.run(command, stdout=sys.stderr)
        seconds = time.perf_counter() - started
        lines = read_metrics(Path(name))
        if done.returncode or [line["policy_version"] for line in lines] != [1, 2]:
            raise SystemExit(f"the run ended with {done.returncode} after versions {[*lines]}")
        first = min(Path(name, "node/collections").glob("*-i0001-*.jsonl"))
        samples = [Sample.from_rollout(rollout.validate()) for rollout in read_rollouts(first)]
    with process_group(device):
        own = learner(read_config(composed(config, [*words, *FOR_UPDATES]), LoopConfig))
        own.versions.put(1, random_adapter(own.versions.full(0), seed=1, scale=0.2))
        right, wrong = (own.update.scorer.logprobs(samples, version) for version in (0, 1))
    sampled = torch.cat([sample.sampler_logprobs for sample in samples])
    limits = tolerances(own.conf.sampler_gap)
    judge = judge_of(sampled.tolist(), limits["tolerance"], limits["mean_tolerance"])
    own_logprobs, other = (torch.cat([of[s.rollout_id] for s in samples]) for of in (right, wrong))
    if objection := judge.objection(own_logprobs.tolist()):
        raise SystemExit(f"the learner {objection}")
    refused("the learner with an adapter that nobody sampled with", judge.objection(other.tolist()))
    return {
        "run_seconds": seconds,
        "sampler_gap": (own_logprobs - sampled).abs().mean().item(),
        "grad_norm": lines[-1]["grad_norm"],
    }


CASES: dict[str, Callable[[Size, torch.device, argparse.Namespace], dict[str, float]]] = {
    "heads": lambda size, device, args: heads(size, device, args.head),
    "attention": lambda size, device, args: attention(size, device, args.attention, args.tokens),
    "exactness": lambda size, device, args: exactness(device),
    "run": lambda size, device, args: small_run(device),
}


def cases(size: Size, args: argparse.Namespace) -> dict[str, dict[str, list[str]]]:
    """Return for each part its cases and the command that prints a case's metrics as JSON."""
    python, device = sys.executable, ["--device", args.device]
    own = [python, __file__, *device, "--size", args.size, "--case"]
    logprobs = [python, str(FOLDER / "logprobs.py"), *device, "--dtype", size.dtype, "--width", str(size.width)]
    logprobs += ["--vocab", str(size.vocabulary), "--repeats", "3"]
    peak = [] if args.peak_tflops is None else ["--peak-tflops", str(args.peak_tflops)]
    update = [python, str(FOLDER / "large_model.py"), *device, *peak]
    large = [*update, "--config", size.config]
    one_pass = [*update, "--config", size.published_config, "--one-pass"]
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
    }  # fmt: skip


def measure(command: list[str], seconds: float) -> dict[str, Any]:
    """Return what a case printed; ``left_out`` is the reason where it could not run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(seconds, 1.0), cwd=FOLDER)
    except subprocess.TimeoutExpired:
        return {"left_out": f"the part's {PART_SECONDS:.0f} s are over"}
    errors = done.stderr.strip().splitlines()
    if done.returncode:
        return {"left_out": (errors or [f"ended by signal {-done.returncode}"])[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def run_day(args: argparse.Namespace) -> int:
    """Run the steps of :data:`DAY` that have not ended well before, each within its limit; returns 0 where all have.

    In a rehearsal they are tiny, on this CPU, and have no limit of their own.
    """
    device = "cpu" if args.cpu_rehearsal else "cuda"
    if args.dry:
        for step in DAY:
            print(f"{step.seconds:>4} s  {step.name}: {step.words}")
        print(f"{sum(step.seconds for step in DAY)} s of {MOST_S}")
        return 0
    scratch = tempfile.TemporaryDirectory()
    file = args.json or Path(scratch.name, "day.json")
    rows, began, status = Rows(file.resolve(), machine(device)), time.monotonic(), dict[str, Any]()
    for step in DAY:
        status[step.name] = rows.of(step.name).get("exit status")
        left = MOST_S - (time.monotonic() - began)
        if status[step.name] == 0 or (left < LEAST_S and not args.cpu_rehearsal):
            continue
        limit = REHEARSAL_S if args.cpu_rehearsal else min(step.seconds, left)
        print(f"==> {step.name} ({limit:.0f} s at most)", flush=True)
        words = step.words.replace("ROWS", str(file.resolve())).split()
        words += ["--cpu-rehearsal"] if args.cpu_rehearsal else []
        command = ["timeout", "-k", "10", str(round(limit)), sys.executable, str(FOLDER / words[0]), *words[1:]]
        started = time.monotonic()
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, cwd=FOLDER.parent).returncode
        status[step.name] = ended
        rows.add(step.name, {"exit status": ended, "step_seconds": round(time.monotonic() - started, 1)})
    for row in rows.read():
        case = row["case"].removesuffix(f", {machine(device)}")
        if case not in (row["case"], *status):
            print(f"{case:<80} {row['metric']:<22} {row['value']:>10.6g} {row['unit']}")
    ways = {0: "ended well", 124: "cut by its limit", None: "not begun"}
    for name, code in status.items():
        print(f"{name}: {ways.get(code, f'failed with {code}')}")
    print(f"{machine(device)}; rows: {args.json or 'kept nowhere, --json names a file'}")
    return int(any(status.values()) or None in status.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=list(SIZES), default="full")
    parser.add_argument("--parts", choices=PARTS, nargs="+")
    parser.add_argument("--only", type=re.compile, help="a regular expression: cases whose name it finds")
    parser.add_argument("--peak-tflops", type=float, help="of the device; adds model_flops_utilization")
    parser.add_argument("--day", action="store_true", help="the steps of gpu_day.sh, most valuable first")
    parser.add_argument("--cpu-rehearsal", action="store_true", help="the same steps with tiny shapes on a CPU")
    parser.add_argument("--dry", action="store_true", help="show those steps and their limits")
    parser.add_argument("--json", type=Path, help="write the rows here, and go on from those that are there")
    parser.add_argument("--case", choices=list(CASES), help="measure in this process and print JSON")
    parser.add_argument("--head", choices=HEADS, default=HEADS[0])
    parser.add_argument("--attention", choices=["fa2", "fa4"], default="fa2")
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    if args.cpu_rehearsal:
        args.size, args.device = "tiny", "cpu"
    if (args.day or args.cpu_rehearsal) and not args.case:
        sys.exit(run_day(args))
    size, device = SIZES[args.size], torch.device(args.device)
    rows = Rows(args.json, machine(device.type))
    if args.case:
        figures = CASES[args.case](size, device, args)
        print(json.dumps(figures))
        rows.add(args.case, figures)
        return

    print(machine(device.type))
    for part, commands in cases(size, args).items():
        if args.parts and part not in args.parts:
            continue
        ends = time.monotonic() + PART_SECONDS
        for case, command in commands.items():
            if args.only and not args.only.search(case):
                continue
            if rows.of(case):
                print(f"{part}: {case}: done before")
                continue
            metrics = measure(command, ends - time.monotonic())
            if "left_out" in metrics:
                print(f"{part}: {case}: left out: {metrics['left_out']}", flush=True)
                continue
            for metric, value in metrics.items():
                print(f"{part}: {case}: {metric} {value:.6g} {unit(metric)}".rstrip(), flush=True)
            rows.add(case, metrics)


if __name__ == "__main__":
    main()
