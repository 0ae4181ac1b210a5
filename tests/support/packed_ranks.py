"""On each rank: a base in four bits, sharded, against the same weights written out, on the same rollouts."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from loop_recipes.engine.batching import BatchLayout, step_batches
from loop_recipes.engine.decoder import attach_head
from loop_recipes.engine.logprobs import TiledLogProbs
from loop_recipes.engine.model import meta_model, new_adapter
from loop_recipes.engine.process_group import destroy_process_group, init_process_group
from loop_recipes.engine.sharding import full_tensors, local_part, place_model
from model_families.base_model import BaseModel
from model_families.decoder.weights import load_weights
from support.families import section
from support.learner_cases import make_samples
from support.small_runs import random_adapter


def packed_and_whole(folders: list[Path]) -> dict[str, bool | float]:
    """Whether log-probs and the adapter's gradients of the two models are equal, and the share of weights kept."""
    init_process_group(torch.device("cpu"), 60)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    results: list[list[Tensor]] = []
    held = []
    for folder in folders:
        model = attach_head(meta_model(section(folder), torch.bfloat16), TiledLogProbs())
        base = load_weights(folder, BaseModel.read(folder))
        adapter = random_adapter(new_adapter(model, 0), seed=1, scale=0.2)
        placing = (torch.device("cpu"), torch.bfloat16)
        model = place_model(model, base, adapter, *placing, activation_checkpointing=True)
        held.append(sum(local_part(each).nbytes for each in model.parameters() if not each.requires_grad))
        logprobs = []
        for batch in step_batches(make_samples([31, 9, 50, 17]), BatchLayout(64, True, ranks, rank)):
            logprobs.append(model(**batch.inputs()).logprobs)
            (logprobs[-1] * batch.old_logprobs).sum().backward()
        gradients = full_tensors({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        results.append([torch.cat(logprobs).detach(), *gradients.values()])
    equal = all(torch.equal(*pair) for pair in zip(*results, strict=True))
    largest = max(float(gradient.abs().max()) for gradient in results[0][1:])
    every = torch.tensor([equal], dtype=torch.int32)
    dist.all_reduce(every, dist.ReduceOp.MIN)
    dist.barrier()
    destroy_process_group()
    return {"equal": bool(every), "gradient": largest, "held": held[0] / held[1]}
