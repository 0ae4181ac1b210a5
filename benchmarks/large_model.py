"""Measure an update of a large model's shape with random weights: memory and seconds.

    python benchmarks/large_model.py                                  # loop_appworld/qwen2_5_32b, on one GPU
    python benchmarks/large_model.py --layers 32 --tokens 32000       # where 64 layers do not fit
    python benchmarks/large_model.py --cpu-rehearsal
    python benchmarks/large_model.py --config qwen3_4b_one_gpu --one-pass --tokens 16384 --set keep_attention=True

Model, LoRA, precision, optimizer, loss and update are those of the recipe's config, built and run by the recipe's own
parts (activation checkpointing and offloading, packing, the config's micro-batches). Only the weights are drawn, and
the rollouts made up: two of one task, a quarter of their tokens sampled; one step. Before it short sequences in one row
must have the log-probs that they have one at a time, and the row without its adapter must be refused; else it ends with
1. ``recompute_seconds`` is the pass for old log-probs, ``update_seconds`` forward, backward and step, each after one
update of the same size that is not counted. ``--engine transformers`` builds the model of transformers' modules, with
fused norms and rotary steps as torchtune's have them.
``--one-pass`` is what other trainers publish: one micro-batch of one sequence, all its tokens sampled, forward,
backward and step, and no pass before it. ``--set`` changes keys of the config.
``peak_gib`` is of the whole, model included; on a CPU it is resident memory.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path

import torch
from drawn import FOR_UPDATES, composed, learner, made_up, packing_gap, process_group
from peak_memory import PeakMemory
from rows import Rows, machine

from loop_recipes.algorithm.policy_update import PolicyUpdate, UpdateResult
from loop_recipes.config.loop_config import LoopConfig, read_config
from loop_recipes.engine.diagnostics import flops_metrics
from loop_recipes.engine.model import vocabulary
from loop_recipes.engine.samples import ScoredSample
from loop_recipes.engine.samples import made_up as all_sampled

HEADS = {
    "auto": "logprobs.AutoLogProbs",
    "cce": "cut_cross_entropy.CutCrossEntropyLogProbs",
    "tiled": "logprobs.TiledLogProbs",
    "full": "logprobs.FullLogProbs",
}
ENGINES = {"config": (), "transformers": ("model._component_=drawn.general_model",)}


def one_pass(update: PolicyUpdate, sample: ScoredSample) -> UpdateResult:
    """Take a step with one rollout, which has its advantage and old log-probs already."""
    started = time.perf_counter()
    step_samples, metrics = update.train([sample], 1)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    metrics |= {"seconds_recomputing": 0.0, "seconds_updating": seconds, "tokens_per_second": sample.tokens / seconds}
    return UpdateResult([sample], step_samples, metrics)


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Return the figures of one update."""
    device, tokens = torch.device(args.device), args.tokens
    words = [f"device={args.device}", *ENGINES[args.engine], f"log_probs=loop_recipes.engine.{HEADS[args.head]}"]
    words += [*FOR_UPDATES, *args.set]
    cfg = composed(args.config, words, args.layers, args.cpu_rehearsal)
    with process_group(device):
        own = learner(read_config(cfg, LoopConfig))
        known = vocabulary(own.model)
        gap = packing_gap(own)
        if args.one_pass:
            generator = torch.Generator().manual_seed(tokens)
            run = partial(one_pass, own.update, all_sampled("one", tokens, known, generator))
        else:
            run = partial(own.update.run, made_up(tokens, known), 0, 1)
        run()
        peak = PeakMemory(device)
        _, step_samples, metrics = run()
    result = {
        "layers": len(own.model.layers),
        "packing_gap": gap,
        "peak_gib": peak.peak_mib() / 1024,
        "recompute_seconds": metrics["seconds_recomputing"],
        "update_seconds": metrics["seconds_updating"],
        "tokens_per_s": metrics["tokens_per_second"],
    }
    return result | flops_metrics(own.model, step_samples, metrics["seconds_updating"], args.peak_tflops)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="loop_appworld/qwen2_5_32b")
    parser.add_argument("--layers", type=int, help="only so many of the model's layers")
    parser.add_argument("--tokens", type=int, default=16_000, help="per rollout")
    parser.add_argument("--head", choices=list(HEADS), default="auto")
    parser.add_argument("--engine", choices=list(ENGINES), default="config", help="who builds the model's modules")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cpu-rehearsal", action="store_true", help="the same with a tiny shape on a CPU")
    parser.add_argument("--peak-tflops", type=float, help="of the device; adds model_flops_utilization")
    parser.add_argument("--one-pass", action="store_true", help="one sequence, all sampled, no pass before the step")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="of the config")
    parser.add_argument("--json", type=Path, help="add the rows to those of this file")
    args = parser.parse_args()
    if args.cpu_rehearsal:
        args.device, args.layers, args.tokens = "cpu", None, 96
    result = measure(args)
    print(json.dumps(result))
    case = f"{args.head} {args.tokens} tokens, {args.config} {result['layers']} layers, modules by {args.engine}"
    Rows(args.json, machine(args.device)).add(case, {name: round(value, 4) for name, value in result.items()})


if __name__ == "__main__":
    main()
