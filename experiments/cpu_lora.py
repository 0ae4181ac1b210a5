"""LoRA of one layer in vLLM's CPU build: its own operators beside ours, which take the tokens of an adapter together.

    python experiments/cpu_lora.py [--json experiments/results/cpu_lora.json]

The layer is the tiny policy's first projection of the MLP: two slices of 384 outputs from 128 inputs, rank 16, float32.
All tokens of a batch are for one adapter, as nearly always in training. Milliseconds of processor time a call, on one
thread, the median of rounds in which both take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from scored_runs import number
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from rollout_server.inference.cpu_lora import GroupedLora

TOKENS = (1, 16, 64, 600)
"""Tokens of a batch: one to all of the 64 episodes that sample at once, and a prompt."""
SLICES, WIDTH, RANK = (384, 384), 128, 16
ADAPTER, SLOTS = 1, 2
CASES = {"vllm": PunicaWrapperCPU, "ours_grouped": GroupedLora}
ROUNDS, CALLS = 9, 20
Slices = tuple[torch.Tensor, ...]


def cpu_ms(wrapper: PunicaWrapperCPU, x: torch.Tensor, lora_a: Slices, lora_b: Slices) -> float:
    """Return the milliseconds of a call, the mean over :data:`CALLS`."""
    y = torch.zeros(len(x), sum(SLICES))
    began = time.process_time()
    for _ in range(CALLS):
        wrapper.add_lora_linear(y, x, lora_a, lora_b, 1.0, SLICES)
    return (time.process_time() - began) / CALLS * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lora_a = tuple(torch.randn(SLOTS, 1, RANK, WIDTH) for _ in SLICES)
    lora_b = tuple(torch.randn(SLOTS, 1, width, RANK) for width in SLICES)
    print("| tokens | vLLM's operators, ms | ours, ms | ratio |\n|---|---|---|---|")
    rows = []
    for tokens in TOKENS:
        x = torch.randn(tokens, WIDTH)
        wrappers = {case: kind(tokens, tokens, "cpu") for case, kind in CASES.items()}
        for wrapper in wrappers.values():
            # vLLM calls every step of its CPU build a prefill.
            mapping = LoRAMapping((ADAPTER,) * tokens, (ADAPTER,), is_prefill=True)
            wrapper.update_metadata(mapping, [ADAPTER, None], SLOTS, 1)
        rounds = [{case: cpu_ms(lora, x, lora_a, lora_b) for case, lora in wrappers.items()} for _ in range(ROUNDS)]
        cost = {case: statistics.median(one[case] for one in rounds) for case in CASES}
        theirs, ours = cost.values()
        print(f"| {tokens} | {theirs:.3f} | {ours:.3f} | {theirs / ours:.1f} |")
        rows += [number(f"{case} {tokens} tokens", "cpu_ms", ms, "ms") for case, ms in cost.items()]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
