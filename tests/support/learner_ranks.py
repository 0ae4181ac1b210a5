"""On each rank: a sharded decoder with a log-prob head against the same one whole, on the same rollouts."""

import itertools
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

from loop_recipes.algorithm.losses import ClippedPolicyLoss, RatioStatistics
from loop_recipes.algorithm.sampler_correction import TruncatedWeights
from loop_recipes.engine.batching import step_batches
from loop_recipes.engine.logprobs import TiledLogProbs, attach_head
from support.learner_cases import adapter_gradient, make_samples, tiny_lora_model

BUDGET = 80


def run(decoder, batches, statistics):
    """Sum of the losses of these micro-batches; gradients are left in the decoder."""
    loss, total = ClippedPolicyLoss("turn", sampler_correction=TruncatedWeights("sequence", cap=0.9)), 0.0
    for batch in batches:
        output = loss(decoder(**batch.inputs()).logprobs, batch)
        statistics.add(output)
        output.per_rollout_loss.sum().backward()
        total += output.per_rollout_loss.sum().item()
    return total


def differences() -> dict[str, float]:
    """The largest that were found."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # No two fit together, so some rank has nothing to do in the last call.
    samples = [
        replace(sample, sampler_logprobs=sample.old_logprobs + 0.1 * torch.arange(len(sample.old_logprobs)).sin())
        for sample in make_samples([60, 55, 50, 48, 45])
    ]
    worst = {"loss": 0.0, "gradient": 0.0, "statistics": 0.0, "idle_calls": 0}
    for tied, packed, checkpointed in itertools.product((True, False), (True, False), (True, False)):
        whole = attach_head(tiny_lora_model(tied), TiledLogProbs(16, 32))
        expected = run(whole, step_batches(samples, BUDGET, 0, packed), local := RatioStatistics())

        decoder = attach_head(tiny_lora_model(tied), TiledLogProbs(16, 32))
        for number, layer in enumerate(decoder.layers):
            decoder.layers[number] = fully_shard(checkpoint_wrapper(layer) if checkpointed else layer)
        fully_shard(decoder)
        batches = step_batches(samples, BUDGET, 0, packed, ranks, rank)
        idle = sum(not batch.rollout_ids for batch in batches)
        total = torch.tensor([run(decoder, batches, shared := RatioStatistics()), idle])
        dist.all_reduce(total)
        gradient = torch.cat([p.grad.full_tensor().flatten() for p in decoder.parameters() if p.requires_grad]) * ranks

        worst["loss"] = max(worst["loss"], abs(total[0].item() - expected))
        worst["gradient"] = max(worst["gradient"], (gradient - adapter_gradient(whole)).abs().max().item())
        worst["idle_calls"] += int(total[1])
        # `local` holds every rollout on each rank, so gathering it counts all twice: the means and the maximum stay.
        ours, theirs = shared.summary(), local.summary()
        for key in ("clip_fraction", "approx_kl", "ratio_max", "correction_weight", "correction_cut"):
            worst["statistics"] = max(worst["statistics"], abs(ours[key] / theirs[key] - 1))
    dist.destroy_process_group()
    return worst
