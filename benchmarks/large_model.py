"""One update of a large model's shape with random weights: memory and seconds, by rollout length and head.

    python benchmarks/large_model.py                                  # loop_appworld/qwen2_5_32b, on one GPU
    python benchmarks/large_model.py --layers 32 --tokens 4000 16000  # where 64 layers do not fit
    python benchmarks/large_model.py --layers 1 --tokens 200 --device cpu
    python benchmarks/large_model.py --config qwen3_4b_one_gpu --one-pass --tokens 16384 --set keep_attention=True

Model, LoRA, precision, optimizer, loss and update are those of the recipe's config, built and run by the recipe's own
parts (FSDP2 on one rank, activation checkpointing, packing). Only the weights are drawn, and the rollouts made up: two
of one task, one after the other, a quarter of their tokens sampled; one step. ``recompute_seconds`` is the pass for old
log-probs, ``update_seconds`` forward, backward and step, each after one update of the same size that is not counted.
``--one-pass`` is what other trainers publish: one micro-batch of one sequence, all its tokens sampled, forward,
backward and step, and no pass before it. ``--set`` changes keys of the config.
``peak_gib`` is of the whole, model included; on a CPU it is resident memory. Every case has a process of its own; what
does not fit is said and left out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from peak_memory import PeakMemory
from torchtune.modules import TransformerDecoder

# The root and recipes/ too, because folders of tests/ are called like packages and hide those that are installed.
sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "recipes", "tests"))

from loop_recipes.algorithm.advantages import LeaveOneOut
from loop_recipes.algorithm.method import Method
from loop_recipes.algorithm.policy_update import PolicyUpdate, UpdateResult
from loop_recipes.config.components import build
from loop_recipes.config.files import compose
from loop_recipes.config.loop_config import LoopConfig, read_config
from loop_recipes.engine.adapter_versions import AdapterVersions
from loop_recipes.engine.cut_cross_entropy import CutCrossEntropyLogProbs
from loop_recipes.engine.decoder import attach_head
from loop_recipes.engine.diagnostics import flops_metrics
from loop_recipes.engine.logprobs import AutoLogProbs, FullLogProbs, Head, TiledLogProbs
from loop_recipes.engine.model import DTYPES, meta_model, new_adapter, trained_parameters, vocabulary
from loop_recipes.engine.process_group import destroy_process_group, init_process_group
from loop_recipes.engine.rank_batches import RankBatches
from loop_recipes.engine.samples import Sample, ScoredSample
from loop_recipes.engine.samples import made_up as all_sampled
from loop_recipes.engine.sharding import local_part, place_model
from support.families import with_config

HEADS: dict[str, Head] = {
    "auto": AutoLogProbs(),
    "cce": CutCrossEntropyLogProbs(),
    "tiled": TiledLogProbs(),
    "full": FullLogProbs(),
}
UNITS = {
    "peak_gib": "GiB",
    "recompute_seconds": "s",
    "update_seconds": "s",
    "tokens_per_s": "tokens/s",
    "model_flops_utilization": "",
}


def random_model(conf: LoopConfig, layers: int | None, head: Head, device: torch.device) -> TransformerDecoder:
    """The config's model, or its first ``layers`` layers, drawn on the device; the host only ever holds one tensor."""
    model = cast(TransformerDecoder, meta_model(with_config(conf.model), DTYPES[conf.dtype]))
    if layers is not None:
        model.layers = model.layers[:layers]
    base = {
        name: torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
        for name, tensor in model.state_dict().items()
        if ".lora_" not in name
    }
    adapter = new_adapter(model, conf.seed)
    model = place_model(
        attach_head(model, head),
        base,
        adapter,
        device,
        DTYPES[conf.dtype],
        activation_checkpointing=conf.enable_activation_checkpointing,
        keep_attention=conf.keep_attention,
        compile_layers=conf.compile,
        shard=True,
        attention=conf.attention,
    )
    torch.manual_seed(conf.seed)
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            values = local_part(parameter.detach())
            values.normal_(std=0.02) if values.ndim > 1 else values.fill_(1.0)
    return model


def made_up(tokens: int, known: int) -> list[Sample]:
    """Two rollouts of ``tokens``, every fourth token sampled, one of them solved."""
    generator = torch.Generator().manual_seed(tokens)
    mask = torch.arange(tokens) % 4 == 3
    sampled = int(mask.sum())
    return [
        Sample(
            rollout_id=f"rollout-{number}",
            task_id="task",
            token_ids=torch.randint(known, (tokens,), generator=generator),
            mask=mask,
            turn_ids=torch.where(mask, torch.arange(tokens) // 400, -1),
            sampler_logprobs=torch.zeros(sampled),
            policy_versions=torch.zeros(sampled, dtype=torch.long),
            reward=float(number),
        )
        for number in range(2)
    ]


def policy_update(conf: LoopConfig, model: TransformerDecoder, device: torch.device) -> PolicyUpdate:
    """The recipe's update of ``model``, of both rollouts in one step."""
    # Both rollouts at once, which a number says: by null their one step would need no old log-probs.
    config = replace(conf.update, epochs=1, minibatch_rollouts=2, micro_batch_tokens=1)
    return PolicyUpdate(
        model=model,
        optimizer=build(conf.optimizer, [{"params": list(trained_parameters(model).values())}]),
        method=Method(build(conf.loss), LeaveOneOut()),
        versions=AdapterVersions(model),
        config=config,
        batches=RankBatches(config, device),
        seed=conf.seed,
    )


def one_pass(update: PolicyUpdate, sample: ScoredSample) -> UpdateResult:
    """One step with one rollout, which has its advantage and old log-probs already."""
    started = time.perf_counter()
    step_samples, metrics = update.train([sample], 1)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    metrics |= {"seconds_recomputing": 0.0, "seconds_updating": seconds, "tokens_per_second": sample.tokens / seconds}
    return UpdateResult([sample], step_samples, metrics)


def measure(args: argparse.Namespace) -> dict[str, float | str]:
    """One length with one head in this process; the reason as ``left_out`` where that cannot be done."""
    conf = read_config(compose(args.config, args.set), LoopConfig)
    device, (tokens,), (head,) = torch.device(args.device), args.tokens, args.heads
    init_process_group(device, 600.0, always=True)
    try:
        model = random_model(conf, args.layers, HEADS[head], device)
        update = policy_update(conf, model, device)
        known = vocabulary(model)
        if args.one_pass:
            run = partial(one_pass, update, all_sampled("one", tokens, known, torch.Generator().manual_seed(tokens)))
        else:
            run = partial(update.run, made_up(tokens, known), 0, 1)
        run()
        peak = PeakMemory(device)
        _, step_samples, metrics = run()
    except (torch.OutOfMemoryError, ValueError, ImportError) as error:
        return {"left_out": str(error).splitlines()[0]}
    finally:
        destroy_process_group()
    result = {
        "layers": len(model.layers),
        "peak_gib": peak.peak_mib() / 1024,
        "recompute_seconds": metrics["seconds_recomputing"],
        "update_seconds": metrics["seconds_updating"],
        "tokens_per_s": metrics["tokens_per_second"],
    }
    return result | flops_metrics(model, step_samples, metrics["seconds_updating"], args.peak_tflops)


def run_case(args: argparse.Namespace, tokens: int, head: str) -> dict[str, Any]:
    """Measure in a child process."""
    command = [sys.executable, __file__, "--case", "--tokens", str(tokens), "--heads", head]
    for name in ("config", "layers", "device", "peak_tflops"):
        if getattr(args, name) is not None:
            command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    command += ["--one-pass"] if args.one_pass else []
    command += ["--set", *args.set] if args.set else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    if done.returncode:
        return {"left_out": (done.stderr.strip().splitlines() or [f"ended by signal {-done.returncode}"])[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="loop_appworld/qwen2_5_32b")
    parser.add_argument("--layers", type=int, help="only so many of the model's layers")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4000, 16000, 32000], help="per rollout")
    parser.add_argument("--heads", choices=list(HEADS), nargs="+", default=list(HEADS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--peak-tflops", type=float, help="of the device; adds model_flops_utilization")
    parser.add_argument("--one-pass", action="store_true", help="one sequence, all sampled, no pass before the step")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="of the config")
    parser.add_argument("--case", action="store_true", help="measure one length and head in this process")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measure(args)))
        return

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{args.config}, {args.layers or 'all'} layers; {name}, torch {torch.__version__}")
    print(f"{'tokens':>8} {'head':<6}{'peak GiB':>10}{'recompute s':>13}{'update s':>10}{'tokens/s':>10}")
    rows = []
    for tokens in args.tokens:
        for head in args.heads:
            result = run_case(args, tokens, head)
            if "left_out" in result:
                print(f"{tokens:>8} {head:<6}  left out: {result['left_out']}", flush=True)
                continue
            case = f"{head} {tokens} tokens, {result.pop('layers')} layers, {name}"
            numbers = (
                f"{result['peak_gib']:>10.2f}{result['recompute_seconds']:>13.2f}{result['update_seconds']:>10.2f}"
            )
            print(f"{tokens:>8} {head:<6}{numbers}{result['tokens_per_s']:>10.0f}", flush=True)
            for metric, value in result.items():
                unit = UNITS[metric]
                rows.append({"case": case, "metric": metric, "value": round(value, 4), "unit": unit})
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
