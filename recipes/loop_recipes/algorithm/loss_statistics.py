"""The metrics of an iteration's steps: the distribution of importance ratios, and means of the losses' own metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from safetensors.torch import load, save
from torch import Tensor

from loop_recipes.algorithm.losses import LossOutput
from loop_recipes.engine.process_group import gather_bytes

_QUANTILES = {"p01": 0.01, "p10": 0.10, "p50": 0.50, "p90": 0.90, "p99": 0.99}


class LossStatistics:
    """Collects the results of many micro-batches and sums them up in a few metrics."""

    def __init__(self) -> None:
        self._log_ratios: defaultdict[str, list[Tensor]] = defaultdict(list)
        self._metrics: defaultdict[str, list[Tensor]] = defaultdict(list)

    def add(self, output: LossOutput) -> None:
        """Keep the values for the summary, on the CPU."""
        self._log_ratios["own"].append(output.log_ratio.cpu())
        self._log_ratios["tokens"].append(output.token_log_ratio.cpu())
        self.add_metrics({"clip_fraction": output.clipped, **output.metrics})

    def add_metrics(self, metrics: Mapping[str, Tensor]) -> None:
        """Keep values, on the CPU, whose means the summary has under the same names."""
        for name, values in metrics.items():
            values = torch.as_tensor(values).detach().cpu().flatten()
            self._metrics[name].append(values if values.is_floating_point() else values.float())

    def join(self, other: LossStatistics) -> None:
        """Add the values of ``other`` to these."""
        for ours, theirs in ((self._log_ratios, other._log_ratios), (self._metrics, other._metrics)):
            for name, values in theirs.items():
                ours[name] += values

    def summary(self) -> dict[str, float]:
        """Return ``ratio_p01`` .. ``ratio_p99``, ``ratio_max``, ``clip_fraction``, ``approx_kl`` and the means of all
        metrics that losses added.

        Percentiles and clip fraction count the loss's own ratios (tokens, turns or rollouts). ``approx_kl`` is the mean
        over sampled tokens of ``r - 1 - log r`` against the sampling policy. In a process group of several ranks every
        rank must call, and the numbers cover all ranks. Empty if nothing was added.
        """
        ratios, metrics = _of_all_ranks(self._log_ratios), _of_all_ranks(self._metrics)
        if not len(ratios.get("own", ())):
            return {}
        ordered, tokens = ratios["own"].double().exp().sort().values, ratios["tokens"].double()
        numbers = {f"ratio_{name}": ordered[round(q * (len(ordered) - 1))].item() for name, q in _QUANTILES.items()}
        numbers["ratio_max"] = ordered[-1].item()
        numbers["approx_kl"] = (tokens.exp() - 1 - tokens).mean().item()
        return numbers | {name: values.mean().item() for name, values in metrics.items()}


def _of_all_ranks(parts: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
    """Return the values of all ranks by name, in rank order."""
    ranks = [load(data) for data in gather_bytes(save({name: torch.cat(values) for name, values in parts.items()}))]
    names = sorted({name for each in ranks for name in each})
    return {name: torch.cat([each[name] for each in ranks if name in each]) for name in names}
