"""Checks that a merged model is the trained policy, by both models' log-probs of tokens that the run sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from loop_formats.run_files import find_logs, read_rollouts
from loop_formats.schema import require
from loop_recipes.algorithm.scoring import Scorer
from loop_recipes.config.components import build
from loop_recipes.config.loop_config import LearnerConfig
from loop_recipes.engine.adapter_versions import AdapterVersions
from loop_recipes.engine.decoder import attach_head
from loop_recipes.engine.device_check import training_device
from loop_recipes.engine.general_decoder import GeneralDecoder, read_weights
from loop_recipes.engine.model import DTYPES, adapter_parameters, load_base, meta_model
from loop_recipes.engine.peft_export import load_adapter
from loop_recipes.engine.process_group import destroy_process_group, init_process_group
from loop_recipes.engine.rank_batches import RankBatches
from loop_recipes.engine.samples import Sample
from loop_recipes.engine.sharding import place_model
from model_families.base_model import BaseModel
from model_families.decoder.weights import load_weights

LEAST_MOVED = 0.1
"""Nats by which the adapter must move some log-prob of the base; else a merge that adds nothing would look right."""
MOST_LOST = 0.25
"""The share of the adapter's mean movement by which a merged model's log-probs may differ in the mean."""
_WAIT_S = 600.0


@dataclass(frozen=True)
class LogprobDifference:
    """The mean and the largest distance between two policies' log-probs over all tokens."""

    mean: float
    most: float

    @classmethod
    def between(cls, one: Tensor, other: Tensor) -> LogprobDifference:
        """Compare log-probs [n] of the same tokens."""
        apart = (one.double() - other.double()).abs()
        return cls(apart.mean().item(), apart.max().item())

    def __str__(self) -> str:
        return f"{self.mean:.2g} in the mean, {self.most:.2g} at most"


def stored_samples(run: Path, most: int, longest: int) -> list[Sample]:
    """Read at most ``most`` rollouts of the run's logs, evenly spaced in their order, of up to ``longest`` tokens.

    Raises:
        ValueError: a log is damaged.
    """
    rollouts = [rollout for log in find_logs(run) for rollout in read_rollouts(log)]
    fit = [rollout for rollout in rollouts if not rollout.text_only and len(rollout.token_ids) <= longest]
    count = min(most, len(fit))
    return [Sample.from_rollout(fit[number * len(fit) // count]) for number in range(count)]


def sampled_logprobs(
    conf: LearnerConfig, samples: Sequence[Sample], adapter: Path, merged: Path | None = None, dtype: str | None = None
) -> tuple[Tensor, Tensor]:
    """Compute log-probs [n] of all sampled tokens under a policy and its base, by the learner's packed forward pass.

    Args:
        conf: the run's.
        adapter: the policy's.
        merged: a model in place of base and adapter; it then also counts as the base.
        dtype: the precision to compute in; None is the run's.

    Raises:
        ConfigError: the device cannot be used, or the model is not as ``conf`` says.
    """
    name = dtype or conf.dtype
    conf, kind = replace(conf, sequence_parallel=1), DTYPES[name]
    device = training_device(conf.device, kind)
    init_process_group(device, _WAIT_S)
    try:
        model, base = load_base(conf, kind)
        if merged is not None:
            del base
            model = meta_model(conf.model, kind)
            described = BaseModel.read(merged)
            if isinstance(model, GeneralDecoder):
                served = replace(described, context=model.base.context)
                weights, buffers = read_weights(str(merged), served, kind)
                base = weights | buffers
            else:
                base = load_weights(merged, described)
        tensors = load_adapter(adapter, model)
        if merged is not None:
            tensors = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        packed = conf.attention if conf.update.packed else "fa2"
        model = attach_head(model, build(conf.log_probs))
        model = place_model(model, base, tensors, device, kind, attention=packed)
        assert adapter_parameters(model), "the model has LoRA"
        versions = AdapterVersions(model)
        scorer = Scorer(model, versions, conf.update, RankBatches(conf.update, device))
        logprobs = [scorer.current_logprobs(samples), scorer.logprobs(samples, None)]
        policy, bare = (torch.cat([each[sample.rollout_id] for sample in samples]) for each in logprobs)
        return policy, bare
    finally:
        destroy_process_group()


def check_merge(conf: LearnerConfig, samples: Sequence[Sample], adapter: Path, merged: Path, dtype: str) -> str:
    """Load a merged model like any model and compare it with base and adapter; return the result in one line.

    Args:
        dtype: type of the merged weights; "fp32" is compared in fp32, because half precision would hide the difference.

    Raises:
        ConfigError: as :func:`sampled_logprobs`, or too much of the adapter is lost.
    """
    compute = "fp32" if dtype == "fp32" else None
    policy, base = sampled_logprobs(conf, samples, adapter, dtype=compute)
    again, _ = sampled_logprobs(conf, samples, adapter, merged, compute)
    apart, moved = LogprobDifference.between(again, policy), LogprobDifference.between(policy, base)
    line = (
        f"log-probs of {len(policy)} sampled tokens in {len(samples)} stored rollouts: the merged model is {apart} "
        f"from base and adapter, which are {moved} from the base"
    )
    if moved.most < LEAST_MOVED:
        return f"{line}; that says nothing, because the adapter moves no log-prob by {LEAST_MOVED:g}"
    finer = "merge=fp32 keeps it" if dtype == "bf16" else "please report it"
    require(apart.mean <= MOST_LOST * moved.mean, f"merge: {line}: too much of the adapter is lost; {finer}")
    return line
