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
    """Return the thresholds for a later gap, given the gap of the policy that the run began with.

    How far two programs are apart in half precision depends on the model, the kernels and the machine: at the 99th
    percentile 0.03 nats are reported at 32B and 0.15 were measured at 135M, so one number is too strict for the small
    model and too lenient for the large one. The first iteration's gap is that of the base model (with the initial
    adapter, or with B zero), over thousands of tokens. A later gap is ok up to ``OK_TIMES`` times the first, because
    sharper or flatter policies change the gap by less. Above ``BROKEN_TIMES`` times the first, the servers compute
    something else than the learner. The config's thresholds bound both: a gap that they call ok is never called worse,
    and a gap that they call broken never better, so a wrong base model cannot excuse itself.

    Args:
        base_gap: the first iteration's gap in nats; None in that iteration itself, and in float32, where two right
            programs agree to 0.001 for every model.
    """
    if base_gap is None:
        return thresholds
    ok, broken = (min(max(times * base_gap, thresholds.ok), thresholds.broken) for times in (OK_TIMES, BROKEN_TIMES))
    return GapConfig(ok=ok, broken=broken)


def judged_gap(model: AnyDecoder, half: bool) -> str:
    """Return the gap metric to judge by: the 99th percentile, or the mean for a mixture of experts in half precision.
    There the two sides send a token near a tie to different experts, so that single tokens are a nat apart."""
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
    """Return log-probs of the shortest rollout's first sampled tokens under a version, the version before and the base.

    With :func:`tolerances` they are the node's ``Canary``. Call on every rank with the same samples.

    Args:
        logprobs: gives the log-probs of samples under a version, by rollout id (``Scorer.logprobs``).
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
    """Return how far a server may be from a canary: in the mean up to the largest gap that is ok, at the 90th
    percentile up to the largest gap that is not broken."""
    return {"tolerance": gap.broken, "mean_tolerance": gap.ok}


def _beginning(sample: Sample, count: int) -> Sample:
    """Return the beginning of the sample, up to the ``count``-th sampled token."""
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
    """Return the model FLOPs of a forward and backward pass over a rollout of ``length`` tokens, without recomputation.
    The first ``shared`` tokens belong to another rollout.

    A token costs two FLOPs forward and two backward for each weight that it meets (frozen weights get no gradient; the
    head is left out). For each token that it attends to, attention costs 4 * width forward and twice that backward.
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
    """Return the number of pairs of a token and a token to which it attends."""
    return length**2 / 2 if window is None or length <= window else window * (length - window / 2)


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory of this rank's device so far; 0 where it is not counted."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0


def out_of_memory(error: torch.OutOfMemoryError, micro_batch_tokens: int, device: torch.device, then: str) -> str:
    """Return the error line for a rank whose device has no memory left. It names the keys that lower the need,
    ``update.micro_batch_tokens`` and ``then``. If other programs fill the device, no key helps."""
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

    It is made up: one rollout of ``length`` tokens, or several of at most ``length`` that fill ``micro_batch_tokens``.

    Args:
        rehearse: runs the model over the rollouts (``PolicyUpdate.rehearse``).

    Returns:
        A line with the pass's seconds and the device's peak memory.
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
