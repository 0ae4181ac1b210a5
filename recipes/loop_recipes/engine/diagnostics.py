"""Measures taken beside an update: the sampler's gap, the canary of a new version, FLOP use, memory, a stress test."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchtune.modules import TransformerDecoder
from torchtune.utils import get_world_size_and_rank

from loop_recipes.config.loop_config import GapConfig
from loop_recipes.engine.model import AnyDecoder
from loop_recipes.engine.samples import Sample, ScoredSample, made_up
from model_families.weights.weight_names import NUMBERS_IN

CANARY_TOKENS = 512
OK_TIMES, BROKEN_TIMES = 2.0, 8.0
"""Multiples of the base's own gap up to which a gap is ok, and above which it is broken; see :func:`gap_limits`."""
BROKEN_GAP = (
    "sampler and learner disagree (gap_p99, of a mixture gap_mean, is over gap_broken): base model, adapter, dtype or "
    "vLLM differ between the two; mend that, or raise sampler_gap.broken if the precision explains it"
)


def gap_limits(thresholds: GapConfig, base_gap: float | None) -> GapConfig:
    """Return the thresholds by which a gap is judged beside that of the policy that the run began with.

    How far two programs are apart in half precision is a matter of the model, the kernels and the machine: at the 99th
    percentile 0.03 nats are reported at 32B and 0.15 were measured at 135M, so that one number is too strict for the
    small model and too lenient for the large one. Before the first step the policy is the base model (or the initial
    adapter, or its B is zero), so the first iteration's gap is the base's own, over thousands of tokens. A later gap is
    ok up to ``OK_TIMES`` times that: sharper or flatter policies move it by less. Above ``BROKEN_TIMES`` times it the
    servers compute something else than the learner. Both stay within the thresholds of the config: a gap that they call
    ok is never called worse, a broken one never better, so a wrong base model is not an excuse for itself.

    Args:
        base_gap: the first iteration's, in nats; None in float32, where two right programs agree
            to 0.001 whatever the model, and in that iteration itself.
    """
    if base_gap is None:
        return thresholds
    ok, broken = (min(max(times * base_gap, thresholds.ok), thresholds.broken) for times in (OK_TIMES, BROKEN_TIMES))
    return GapConfig(ok=ok, broken=broken)


def judged_gap(model: AnyDecoder, half: bool) -> str:
    """Return the gap metric to judge by: the 99th percentile, of a mixture of experts in half precision the mean. There
    a token near a tie goes to other experts on the other side, so that single tokens are a nat apart."""
    mixture = half and not isinstance(model, TransformerDecoder) and model.chooses_experts
    return "gap_mean" if mixture else "gap_p99"


def gap_metrics(
    samples: Sequence[ScoredSample], thresholds: GapConfig, base_gap: float | None = None, judged: str = "gap_p99"
) -> dict[str, Any]:
    """Measure how far the sampler's log-probs are from the learner's under the same version, and judge the distance
    (:func:`judged_gap`) by :func:`gap_limits`."""
    if not samples:
        return {"gap_verdict": "none"}
    gap = torch.cat([(s.sampler_logprobs - s.old_logprobs).abs() for s in samples]).double().sort().values
    sizes = {"gap_mean": gap.mean(), "gap_p99": gap[round(0.99 * (len(gap) - 1))], "gap_max": gap[-1]}
    metrics: dict[str, Any] = {name: size.item() for name, size in sizes.items()}
    limits = gap_limits(thresholds, base_gap)
    verdict = "ok" if metrics[judged] <= limits.ok else "drift" if metrics[judged] <= limits.broken else "broken"
    metrics["gap_verdict"] = verdict
    if base_gap is None:
        return metrics
    return metrics | {"gap_base": base_gap, "gap_ok": limits.ok, "gap_broken": limits.broken}


def canary(
    logprobs: Callable[[Sequence[Sample], int | None], dict[str, Tensor]],
    samples: Sequence[Sample],
    version: int,
) -> dict[str, Any]:
    """Return log-probs of the shortest rollout's first sampled tokens: of a version, the one before, the base model.

    With :func:`tolerances` they are the node's ``Canary``. Call on every rank with the same samples.

    Args:
        logprobs: gives those of samples under a version, by rollout id (``Scorer.logprobs``).
    """
    start = _beginning(min(samples, key=lambda sample: (sample.tokens, sample.rollout_id)), CANARY_TOKENS)
    expected, *others = (logprobs([start], of)[start.rollout_id].tolist() for of in (version, version - 1, None))
    return {
        "token_ids": start.token_ids.tolist(),
        "positions": start.mask.nonzero().flatten().tolist(),
        "logprobs": expected,
        "others": others,
    }


def tolerances(gap: GapConfig) -> dict[str, float]:
    """Return how far a server may be from a canary: in the mean by the gap that counts as ok, at the 90th percentile by
    the largest that does not count as broken."""
    return {"tolerance": gap.broken, "mean_tolerance": gap.ok}


def _beginning(sample: Sample, count: int) -> Sample:
    """Return the sample up to its ``count``-th sampled token."""
    return sample.beginning(int(sample.mask.nonzero().flatten()[:count][-1]) + 1)


def flops_metrics(
    model: AnyDecoder, step_tokens: Sequence[tuple[int, int]], seconds: float, peak_tflops: float | None
) -> dict[str, float]:
    """Return the share of the ranks' ``peak_tflops`` that training passes used in ``seconds``; {} without a peak.

    Args:
        step_tokens: (tokens, tokens shared with an earlier sequence) of each sequence, once for each time that it went
            forward and backward.
    """
    if peak_tflops is None:
        return {}
    ranks, _ = get_world_size_and_rank()
    flops = sum(training_flops(model, tokens, shared) for tokens, shared in step_tokens)
    return {"model_flops_utilization": flops / seconds / (peak_tflops * 1e12 * ranks)}


def training_flops(model: AnyDecoder, length: int, shared: int) -> float:
    """Return the model FLOPs of one forward and backward pass over a rollout of ``length`` tokens, the first ``shared``
    of which are another's; recomputation not counted.

    Per token two FLOPs a weight that it meets forward and two backward (frozen weights get no gradient of their own;
    the head is left out), and for attention 4 * width forward for each token that it attends to, twice that backward.
    """
    weights: float
    windows: Sequence[int | None]
    if isinstance(model, TransformerDecoder):
        own = ((name.rpartition(".")[2], p.numel()) for name, p in model.layers.named_parameters())
        weights, windows = sum(NUMBERS_IN.get(kind, 1) * n for kind, n in own), [None] * len(model.layers)
    else:
        weights, windows = model.parameters_of_a_token(), model.windows()
    looks = sum(_looks(length, window) - _looks(shared, window) for window in windows)
    return 4.0 * weights * (length - shared) + 12.0 * model.num_heads * model.head_dim * looks


def _looks(length: int, window: int | None) -> float:
    """Return the number of pairs of a token and one that it attends to."""
    return length**2 / 2 if window is None or length <= window else window * (length - window / 2)


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory of this rank's device so far; 0 where it is not counted."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0


def out_of_memory(error: torch.OutOfMemoryError, micro_batch_tokens: int, device: torch.device, then: str) -> str:
    """Return the line for a rank whose device has no memory left, with the keys that lower its need:
    ``update.micro_batch_tokens``, and ``then``. Where other programs fill the device, no key helps."""
    wanted = re.search(r"Tried to allocate [^.]*\.\d+ \w+", str(error))
    of_others = ""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        others = total - free - torch.cuda.memory_reserved(device)
        of_others = f" of {total / 2**30:.1f}, of which CUDA and other programs hold {others / 2**30:.1f}"
    return (
        f"out of memory on {device} of rank {get_world_size_and_rank()[1]}, in micro-batches of up to "
        f"{micro_batch_tokens} tokens, peak {peak_memory_gib(device):.1f} GiB{of_others}"
        f"{f' ({wanted[0]})' if wanted else ''}: lower update.micro_batch_tokens, then {then}; "
        "`loop check` shows what takes how much"
    )


def stress(
    rehearse: Callable[[Sequence[ScoredSample]], None],
    vocab_size: int,
    length: int,
    micro_batch_tokens: int,
    seed: int,
    device: torch.device,
) -> str:
    """Run the largest possible micro-batch forward and backward on every rank, nearly all its tokens sampled.

    It is one made-up rollout of ``length`` tokens, or as many of at most that length as fill ``micro_batch_tokens``.

    Args:
        rehearse: takes the rollouts through the model (``PolicyUpdate.rehearse``).

    Returns:
        A line with its seconds and the device's peak memory.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = max(length, micro_batch_tokens)
    count = -(-tokens // length)
    samples = [made_up(f"stress-{i}", tokens // count, vocab_size, generator) for i in range(count)]
    started = time.perf_counter()
    rehearse(samples)
    return (
        f"stress test: {tokens} tokens forward and backward in {time.perf_counter() - started:.1f} s, peak memory "
        f"{peak_memory_gib(device):.1f} GiB"
    )
