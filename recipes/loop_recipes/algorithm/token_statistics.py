"""The effect of an update on every sampled token, kept for `loop view`: the learner's log-prob, the ratio, the clip.

    <output_dir>/token_statistics/<collection>.jsonl     one line per rollout that was trained on
    {"rollout_id", "advantage", "old_logprobs": [n], "ratios": [n], "clipped": [n]}, some with "advantages", "entropies"

n runs over the sampled tokens of the rollout. ``old_logprobs`` are of the policy that sampled, as the learner
recomputes them; ``ratios`` and ``clipped`` are of the last step that the rollout was part of. At turn or trajectory
level each token shows those of its turn or rollout. ``advantage`` is the rollout's, whichever the
algorithm; where tokens have advantages of their own, as with a critic, it is their mean, and ``advantages`` [n] are
theirs. ``entropies`` [n], in nats, are there with ``update.exact_entropy``, which computes them anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from loop_formats.run_files import to_json, write_whole, writing

if TYPE_CHECKING:  # the viewer reads these files without torch
    from torch import Tensor

    from loop_recipes.algorithm.losses import LossOutput
    from loop_recipes.engine.batching import MicroBatch
    from loop_recipes.engine.samples import ScoredSample


class TokenStatistics:
    """Collects one rank's statistics of an iteration and writes them. Rank 1 writes ``<collection>.rank1.jsonl``."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._suffix = "" if rank == 0 else f".rank{rank}"
        self._step: dict[str, tuple[Tensor, Tensor]] = {}
        self._taken: dict[str, tuple[Tensor, Tensor]] = {}

    def add(self, batch: MicroBatch, output: LossOutput) -> None:
        """Remember the ratios of a micro-batch until its step is taken (:meth:`keep`) or not (:meth:`drop`)."""
        if not len(batch.targets):
            return
        ratios = batch.split(output.log_ratio.float().clamp(max=20.0).exp()[output.ratio_index].cpu())
        clipped = batch.split(output.clipped[output.ratio_index].cpu())
        for rollout_id in ratios:
            self._step[rollout_id] = (ratios[rollout_id], clipped[rollout_id])

    def keep(self) -> None:
        """Keep the statistics of a step that was taken; they replace those of an earlier step for the same rollout."""
        self._taken |= self._step
        self._step = {}

    def drop(self) -> None:
        """Forget the statistics of a step that was not taken."""
        self._step = {}

    def write(self, samples: Sequence[ScoredSample]) -> None:
        """Write the lines of the rollouts added since the last call, replacing their collections' files."""
        lines: dict[str, list[str]] = {}
        for sample in samples:
            if sample.rollout_id in self._taken:
                ratios, clipped = self._taken[sample.rollout_id]
                record = {
                    "rollout_id": sample.rollout_id,
                    "advantage": round(_advantage(sample), 5),
                    "old_logprobs": _rounded(sample.old_logprobs),
                    "ratios": _rounded(ratios),
                    "clipped": [int(value) for value in clipped.tolist()],
                }
                further = {"advantages": sample.token_advantages, "entropies": sample.entropies}
                record |= {name: _rounded(values) for name, values in further.items() if values is not None}
                lines.setdefault(sample.collection_id, []).append(f"{to_json(record)}\n")
        self._taken.clear()
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            for collection, text in lines.items():
                write_whole(self._folder / f"{collection}{self._suffix}.jsonl", "".join(text))


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 5) for value in values.tolist()]


def _advantage(sample: ScoredSample) -> float:
    return sample.advantage if sample.token_advantages is None else sample.token_advantages.mean().item()
