"""The second stage of an update: the learner's log-probs and entropies of tokens before it learns from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torchtune.modules.peft import disable_adapter

from loop_recipes.config.loop_config import UpdateConfig
from loop_recipes.engine.adapter_versions import AdapterVersions
from loop_recipes.engine.batching import MicroBatch
from loop_recipes.engine.process_group import any_rank
from loop_recipes.engine.rank_batches import RankBatches, of_all_ranks
from loop_recipes.engine.samples import CreditedSample, Sample, ScoredSample, scored
from loop_recipes.run.stop_request import StopRequested


class Scorer:
    """Runs the model over rollouts without a gradient; every rank calls each method with the same rollouts.

    Args:
        model: a decoder with a log-prob head.
        versions: the adapters that log-probs are computed with.
        batches: makes this rank's micro-batches.
        stop_requested: called by :meth:`scored` before each micro-batch; if true on any rank, the pass ends there.
    """

    def __init__(
        self,
        model: nn.Module,
        versions: AdapterVersions,
        config: UpdateConfig,
        batches: RankBatches,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self.model = model
        self.versions, self._config, self._batches = versions, config, batches
        self._stop_requested = stop_requested

    def scored(
        self, samples: Sequence[CreditedSample], version: int, reference: bool
    ) -> tuple[list[ScoredSample], dict[str, float]]:
        """Return the samples with each token's log-prob under the version that sampled it, and metrics.

        Dropout is off. Each version's adapter runs over a rollout only up to the last token that the version sampled.
        If the config asks for entropy, the same pass gives each token's entropy, and the mean as a metric.

        Args:
            version: the policy version whose adapter is in the model.
            reference: true if log-probs under the base model are needed too.

        Raises:
            StopRequested: on every rank.
        """
        needed = sorted({int(v) for sample in samples for v in sample.policy_versions.unique()})
        compute = self._unless_stopped(self._logprobs_and_entropy if self._config.exact_entropy else self._logprobs)
        sampled = {sample.rollout_id: len(sample.policy_versions) for sample in samples}
        old: dict[str, Tensor] = {}
        for other in needed:
            of_version = [_until(sample, other) for sample in samples if bool((sample.policy_versions == other).any())]
            if other == version:
                computed = self.per_token(of_version, compute)
            else:
                with self.versions.active(other):
                    computed = self.per_token(of_version, compute)
            for sample in of_version:
                mine, values = sample.policy_versions == other, computed[sample.rollout_id]
                all_of = values.new_zeros(sampled[sample.rollout_id], *values.shape[1:])
                old.setdefault(sample.rollout_id, all_of)[: len(mine)][mine] = values[mine]
        metrics, entropies = {}, dict[str, Tensor]()
        if self._config.exact_entropy and samples:
            entropies = {rollout_id: values[:, 1] for rollout_id, values in old.items()}
            metrics["entropy"] = torch.cat([entropies[s.rollout_id] for s in samples]).double().mean().item()
            old = {rollout_id: values[:, 0] for rollout_id, values in old.items()}
        under_base: dict[str, Tensor] = {}
        if reference:
            with disable_adapter(self.model):
                under_base = self.per_token(samples, self._unless_stopped(self._logprobs))
        names = [(sample, sample.rollout_id) for sample in samples]
        return [scored(sample, old[name], under_base.get(name), entropies.get(name)) for sample, name in names], metrics

    def logprobs(
        self, samples: Sequence[Sample], version: int | None, versions: AdapterVersions | None = None
    ) -> dict[str, Tensor]:
        """Return log-probs [n] of each rollout's sampled tokens, by rollout id.

        Args:
            version: one of ``versions``; None is the base model.
            versions: adapters of the same model to use in place of the policy's own.
        """
        with disable_adapter(self.model) if version is None else (versions or self.versions).active(version):
            return self.per_token(samples, self._logprobs)

    def current_logprobs(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """Return log-probs [n] of each rollout's sampled tokens under the policy as it stands, by rollout id."""
        return self.per_token(samples, self._logprobs)

    def _unless_stopped(self, compute: Callable[[MicroBatch], Tensor]) -> Callable[[MicroBatch], Tensor]:
        """Wrap ``compute`` so that a stop request ends the pass, which over all rollouts takes as long as a step."""

        def of(batch: MicroBatch) -> Tensor:
            if any_rank(self._stop_requested()):
                raise StopRequested("while recomputing log-probs")
            return compute(batch)

        return of

    def _logprobs(self, batch: MicroBatch) -> Tensor:
        return self.model(**batch.inputs()).logprobs

    def _logprobs_and_entropy(self, batch: MicroBatch) -> Tensor:
        outputs = self.model(**batch.inputs(), with_entropy=True)
        return torch.stack([outputs.logprobs, outputs.entropy], dim=1)

    @torch.no_grad()
    def per_token(self, samples: Sequence[Sample], compute: Callable[[MicroBatch], Tensor]) -> dict[str, Tensor]:
        """Return the results of ``compute`` for each rollout's sampled tokens, [n] or [n, k], by rollout id.

        Args:
            compute: takes a micro-batch; its result is of the micro-batch's sampled tokens.
        """
        if not samples:
            return {}
        self.model.eval()
        parts: dict[str, Tensor] = {}
        for batch in self._batches.without_loss(samples):
            computed = compute(batch).cpu()
            parts |= batch.split(computed) if self._batches.is_leader else {}
        return of_all_ranks(parts, samples, computed)


def _until(sample: Sample, version: int) -> Sample:
    """Cut the sample after the last token that ``version`` sampled, if another version went on from there."""
    of_version = sample.policy_versions == version
    if of_version[-1]:
        return sample
    return sample.beginning(int(sample.mask.nonzero()[of_version][-1]) + 1)
