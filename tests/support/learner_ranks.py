"""On each rank: a sharded decoder with a log-prob head against the same one whole, on the same rollouts.

In :func:`differences` the ranks have rollouts of their own, in :func:`differences_where_rows_are_shared` parts of them.
"""

import itertools
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

from loop_recipes.algorithm.loss_statistics import LossStatistics
from loop_recipes.algorithm.losses import ClippedPolicyLoss, LogLikelihood, Reinforce
from loop_recipes.algorithm.sampler_correction import TruncatedWeights
from loop_recipes.engine.batching import BatchLayout, step_batches
from loop_recipes.engine.decoder import attach_head
from loop_recipes.engine.logprobs import TiledLogProbs
from loop_recipes.engine.sequence_parallel import RowPart
from loop_recipes.engine.sharding import sharding_mesh
from support.learner_cases import adapter_gradient, flash_attention, make_episodes, make_samples, tiny_lora_model
from support.on_cuda import as_on_cuda

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
        expected = run(whole, step_batches(samples, BatchLayout(BUDGET, packed)), local := LossStatistics())

        decoder = attach_head(tiny_lora_model(tied), TiledLogProbs(16, 32))
        mesh = sharding_mesh(torch.device("cpu"))
        for number, layer in enumerate(decoder.layers):
            decoder.layers[number] = fully_shard(checkpoint_wrapper(layer) if checkpointed else layer, mesh=mesh)
        fully_shard(decoder, mesh=mesh)
        batches = step_batches(samples, BatchLayout(BUDGET, packed, ranks, rank))
        idle = sum(not batch.rollout_ids for batch in batches)
        total = torch.tensor([run(decoder, batches, shared := LossStatistics()), idle])
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


LOSSES = [
    *(ClippedPolicyLoss(level) for level in ("token", "turn", "trajectory", "geometric")),
    ClippedPolicyLoss("trajectory", kl_coefficient=0.1, sampler_correction=TruncatedWeights("sequence", cap=0.9)),
    Reinforce(),
    LogLikelihood(),
]


def step(decoder, batches, loss, counts=True):
    """Loss, gradient and, by rollout, all that the model gives for the sampled tokens of micro-batches."""
    total, found = 0.0, {}
    for batch in batches:
        outputs = decoder(**batch.inputs(), with_entropy=True, with_hidden=True)
        value = loss(outputs.logprobs, batch).per_rollout_loss.sum()
        value.backward()
        if counts:
            total += value.item()
            together = [outputs.logprobs.detach()[:, None], outputs.entropy[:, None], outputs.hidden]
            found |= batch.split(torch.cat(together, dim=1))
    return total, found


def differences_where_rows_are_shared(sharers: int) -> dict[str, float]:
    """The largest that were found, where so many ranks share each row, as parts of what is compared."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    part, groups = RowPart.of_this_rank(sharers), (ranks // sharers, rank // sharers)
    # No two fit together, so that two groups of ranks have nothing to do for one call.
    # Some that begin alike, which losses of a whole sequence take for episodes.
    alike = [replace(sample, episode_tokens=8, episode_turns=1) for sample in make_episodes([4])[1:]]
    samples = [*make_samples([60, 55, 50, 47]), *alike]
    samples = [replace(sample, ref_logprobs=sample.old_logprobs - 0.1) for sample in samples]
    worst = {"loss": 0.0, "gradient": 0.0, "outputs": 0.0, "idle_calls": 0}
    for number, loss in enumerate(LOSSES):
        kv_heads = (1, 2, 4)[number % 3]
        whole = attach_head(tiny_lora_model(True, kv_heads=kv_heads), TiledLogProbs(16, 32))
        expected, outputs = step(whole, step_batches(samples, BatchLayout(BUDGET, True)), loss)
        decoder = attach_head(tiny_lora_model(True, kv_heads=kv_heads), TiledLogProbs(16, 32))
        for place, layer in enumerate(decoder.layers):
            decoder.layers[place] = fully_shard(checkpoint_wrapper(layer) if number % 2 else layer)
        fully_shard(decoder)
        batches = step_batches(samples, BatchLayout(BUDGET // sharers, True, *groups, part))
        with as_on_cuda(varlen_attn=flash_attention) if number % 4 else nullcontext():
            found, own = step(decoder, batches, loss, part.is_leader)
        total = torch.tensor([found, len(own), sum(not batch.rollout_ids for batch in batches)])
        dist.all_reduce(total)
        gradient = torch.cat([p.grad.full_tensor().flatten() for p in decoder.parameters() if p.requires_grad])
        there = adapter_gradient(whole)
        worst["loss"] = max(worst["loss"], abs(total[0].item() / expected - 1))
        off = (gradient * groups[0] - there).abs().max() / there.abs().max()
        worst["gradient"] = max(worst["gradient"], off.item())
        worst["outputs"] = max([worst["outputs"], *((own[id_] - outputs[id_]).abs().max().item() for id_ in own)])
        assert total[1] == len(samples), "each is counted once"
        worst["idle_calls"] += int(total[2])
    dist.destroy_process_group()
    return worst
