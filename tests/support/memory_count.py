"""Bytes that a rank of the trainer would allocate on its GPU, counted on shapes: no weights, no GPU, no other rank.

The recipe's own parts run on fake tensors (``FakeTensorMode``): its decoder, head and layers for CUDA, FSDP2 over a
process group whose collectives do nothing, activation checkpointing and the backward pass; two moments of each weight
stand for AdamW. A
dispatch mode counts the storages that are alive. Run as a program, it prints the counts as JSON; a case is
``BUILDER:RANKS:LAYERS:TOKENS``, or that and ``:SHARERS``, the ranks that share a row of so many tokens each:

    python tests/support/memory_count.py lora_qwen2_5_32b_instruct:8:2:8192 lora_qwen2_5_32b_instruct:8:4:8192

On a CPU build of torch no stream or autograd thread exists for ``cuda``, so the fake tensors say ``cpu``, and the
layers' passes for CUDA are called by name. What CUDA's allocator rounds up, and its context, are not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from loop_recipes.engine import logprobs, sharding
from loop_recipes.engine.batching import collate_step
from loop_recipes.engine.decoder import attach_head
from loop_recipes.engine.diagnostics import made_up
from loop_recipes.engine.model import adapter_parameters, meta_model
from loop_recipes.engine.sequence_parallel import RowPart
from loop_recipes.engine.sharding import local_part, place_model
from loop_recipes.plan.layer_memory import LiveBytes
from support.on_cuda import as_on_cuda, norms_of_one_kernel

GIB = 2**30
LONGEST = 16_384
CPU = torch.device("cpu")


def count(builder: str, ranks: int, layers: int, tokens: int, sharers: int) -> float:
    """Peak GiB of the second step of one of ``ranks``, on its ``tokens`` of a packed row, nearly all sampled.

    Args:
        builder: one of torchtune's LoRA builders for Qwen2.5; its first ``layers`` layers are taken.
    """
    model = meta_model(
        {
            "_component_": f"torchtune.models.qwen2_5.{builder}",
            "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
            "apply_lora_to_mlp": True,
            "lora_rank": 16,
            "lora_alpha": 32,
        },
        torch.bfloat16,
    )
    model.layers = model.layers[:layers]
    generator = torch.Generator().manual_seed(0)
    lengths = [min(LONGEST, tokens * sharers - start) for start in range(0, tokens * sharers, LONGEST)]
    rollouts = [made_up(f"rollout-{i}", n, 1000, generator) for i, n in enumerate(lengths)]
    batch = collate_step(rollouts, 0, packed=True, part=RowPart(0, sharers, dist.group.WORLD))
    with FakeTensorMode(allow_non_fake_inputs=True):
        weights = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in model.state_dict().items()}
        decoder = attach_head(model, logprobs.TensorCoreLogProbs())
        decoder = place_model(decoder, weights, {}, CPU, torch.bfloat16, activation_checkpointing=True)
    parameters = list(adapter_parameters(decoder).values())
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, LiveBytes() as bytes_:
        for tensor in (*decoder.parameters(), *decoder.buffers()):
            bytes_.add(local_part(tensor))
        moments = [torch.zeros_like(local_part(parameter)) for parameter in parameters * 2]
        inputs = {
            name: fake.from_tensor(value) if isinstance(value, Tensor) else value
            for name, value in batch.inputs().items()
        }
        decoder(**inputs).logprobs.sum().backward()
        del moments
    return bytes_.peak / GIB


def any_device(*_: Any) -> None:
    """Refuses none. A mock would keep the tensors that it is called with."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", metavar="BUILDER:RANKS:LAYERS:TOKENS")
    for case in parser.parse_args().cases:
        builder, ranks, layers, tokens, *sharers = case.split(":")
        dist.init_process_group("fake", rank=0, world_size=int(ranks), store=FakeStore())
        mesh = dist.device_mesh.init_device_mesh("cpu", (int(ranks),))
        with contextlib.ExitStack() as stack:
            for context in (as_on_cuda(), norms_of_one_kernel()):
                stack.enter_context(context)
            stack.enter_context(mock.patch.object(logprobs, "require_half_on_cuda", any_device))
            # Made outside, since a fake tensor holds no ranks.
            stack.enter_context(mock.patch.object(sharding, "init_device_mesh", return_value=mesh))
            gib = count(builder, int(ranks), int(layers), int(tokens), int((sharers or ["1"])[0]))
            print(json.dumps({"case": case, "gib": gib}), flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
