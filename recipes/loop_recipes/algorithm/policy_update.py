"""The update of an iteration in three stages: credit, score, step.

Credit (:mod:`~loop_recipes.algorithm.credit`) gives rollouts their advantages and leaves out those without signal.
Scoring (:mod:`~loop_recipes.algorithm.scoring`) recomputes the log-probs of the policy that sampled; credits of single
tokens come after it. Then optimizer steps are taken over minibatches of rollouts.

The order of rollouts, the minibatches and all statistics depend on the rollouts alone, never on the order in which they
arrived or on the number of ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from loop_recipes.algorithm.credit import credited_samples, signal_metrics, with_token_advantages
from loop_recipes.algorithm.loss_statistics import LossStatistics
from loop_recipes.algorithm.losses import LossOutput
from loop_recipes.algorithm.method import Method
from loop_recipes.algorithm.minibatches import Averaging, minibatches
from loop_recipes.algorithm.scoring import Scorer
from loop_recipes.config.loop_config import UpdateConfig
from loop_recipes.engine.adapter_versions import AdapterVersions
from loop_recipes.engine.batching import StepBatch
from loop_recipes.engine.model import adapter_parameters, drops_out, trained_parameters
from loop_recipes.engine.process_group import any_rank, sum_over_ranks
from loop_recipes.engine.rank_batches import RankBatches, of_all_ranks
from loop_recipes.engine.samples import CreditedSample, Sample, ScoredSample, episodes, scored
from loop_recipes.engine.sharding import clip_grad_norm, local_part
from loop_recipes.run.stop_request import StopRequested

if TYPE_CHECKING:
    from loop_recipes.algorithm.preferences import PairComparison, PreferenceLoss
    from loop_recipes.algorithm.token_statistics import TokenStatistics

FP16_LOSS_SCALE = 2.0**16
FP16_GROWTH_STEPS = 2000
"""Steps in a row without an overflow after which the loss scale doubles, as in torch.amp.GradScaler."""


class NonFiniteLoss(RuntimeError):
    """The loss or the gradient is nan or infinite; the step was not taken."""


class UpdateResult(NamedTuple):
    """The result of an update.

    ``samples`` are the samples with signal, with advantages and old log-probs, in the order of their ids.
    ``step_tokens`` has what :func:`~loop_recipes.engine.batching.computed` gives for these samples, once for each step
    that was taken with them. ``metrics`` are the same on every rank.
    """

    samples: list[ScoredSample]
    step_tokens: list[tuple[int, int]]
    metrics: dict[str, Any]


class StepOutcome(NamedTuple):
    """The result of an optimizer step: the minibatch's loss; its further losses by the names of their metrics; and the
    gradient's norm before clipping, without further losses that are clipped by themselves."""

    loss: float
    further_losses: dict[str, float]
    grad_norm: float


class PolicyUpdate:
    """Trains a policy on one collection after the other; call every method on every rank with the same rollouts.

    Args:
        model: a decoder with a log-prob head.
        optimizer: over :func:`~loop_recipes.engine.model.trained_parameters`.
        method: made by :func:`~loop_recipes.algorithm.method.build_method`.
        versions: the adapters that old log-probs are computed with.
        batches: makes this rank's micro-batches.
        token_statistics: keeps the statistics of each token, for `loop view`; None keeps nothing.
        stop_requested: called before each step, and before each micro-batch that is recomputed; if true on any rank,
            the update stops there.

    Attributes:
        scorer: runs the model over rollouts without a gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        method: Method,
        versions: AdapterVersions,
        config: UpdateConfig,
        batches: RankBatches,
        seed: int,
        token_statistics: TokenStatistics | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self.model, self.optimizer, self.method, self.config, self.seed = model, optimizer, method, config, seed
        self.token_statistics = token_statistics
        self._stop_requested = stop_requested
        self._batches = batches
        self.scorer = Scorer(model, versions, config, batches, stop_requested)
        self._further = method.trained
        self._clipped = self._clipped_together()
        # The loss is multiplied by it before the backward pass, and gradients are divided by it after, so that they
        # stay within fp16's range; it is halved whenever they overflow, and grows back.
        self._scales = model.get_parameter("tok_embeddings.weight").dtype == torch.float16
        self._loss_scale = FP16_LOSS_SCALE if self._scales else 1.0
        self._steps_at_scale = 0

    def _clipped_together(self) -> list[tuple[list[nn.Parameter], float | None]]:
        """Return the groups of parameters that are clipped together, each with its limit; the policy's comes first."""
        together, apart = list(adapter_parameters(self.model).values()), []
        for further in self._further.values():
            if further.clip_grad_norm is None:
                together += further.parameters()
            else:
                apart.append((list(further.parameters()), further.clip_grad_norm))
        return [(together, self.config.clip_grad_norm), *apart]

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON-able state, beside the model and the optimizer, that the next update needs."""
        return {"loss_scale": self._loss_scale, "steps_at_loss_scale": self._steps_at_scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of :meth:`state_dict`."""
        self._loss_scale = float(state["loss_scale"])
        self._steps_at_scale = int(state["steps_at_loss_scale"])

    def run(self, samples: Sequence[Sample], version: int, iteration: int) -> UpdateResult:
        """Train on one collection.

        Args:
            samples: the samples of all ranks, in any order.
            version: the policy version whose adapter is in the model.

        Raises:
            CreditFailed: a credit could not give tokens their advantages.
            NonFiniteLoss: before the step that it would have spoilt.
            StopRequested: while log-probs are recomputed, or see :meth:`train`.
        """
        every = credited_samples(samples, self.method.advantage)
        started = time.perf_counter()
        chosen = every if self.method.plan.keeps_samples_without_signal else self._with_signal(every)
        by_step = self._scored_by_their_step(chosen, version, iteration)
        ready, metrics_of_stages = self._scored_and_credited(chosen, by_step, version)
        recomputed = time.perf_counter()
        step_logprobs: dict[str, Tensor] = {}
        step_tokens, numbers = (
            self.train(ready, iteration, step_logprobs if by_step else None) if ready else ([], {"steps": 0})
        )
        learned = [s if isinstance(s, ScoredSample) else scored(s, step_logprobs[s.rollout_id]) for s in ready]
        metrics = signal_metrics(every, learned) | metrics_of_stages
        metrics["policy_lag"] = version - min((int(s.policy_versions.min()) for s in learned), default=version)
        metrics |= numbers
        seconds = time.perf_counter() - recomputed
        if self.token_statistics is not None:
            self.token_statistics.write(learned)
        metrics |= {
            "seconds_recomputing": recomputed - started,
            "seconds_updating": seconds,
            "tokens_per_second": sum(tokens - shared for tokens, shared in step_tokens) / seconds,
        }
        return UpdateResult(learned, step_tokens, metrics)

    def tasks_with_signal(self, samples: Sequence[Sample]) -> set[str]:
        """Return the tasks of a collection that an update learns from. Each has a rollout whose advantage passes the
        filter and is not 0."""
        with_signal = self._with_signal(credited_samples(samples, self.method.advantage))
        return {sample.task_id for sample in with_signal if sample.advantage}

    def _with_signal(self, samples: Sequence[CreditedSample]) -> list[CreditedSample]:
        """Return the samples that the update can learn from."""
        if self.method.plan.compares_pairs:  # unpaired, the advantage is 0, which the filter may let pass
            return [sample for sample in samples if sample.pair]
        return [sample for sample in samples if abs(sample.advantage) >= self.config.min_abs_advantage]

    def _scored_by_their_step(self, samples: Sequence[CreditedSample], version: int, iteration: int) -> set[str]:
        """Return the ids of the first step's rollouts if that step can compute their old log-probs, else an empty set.

        It can if its policy is, to the last bit, the one that sampled all their tokens, and if no credit and no later
        step needs the log-probs. That saves a pass over these rollouts.
        """
        plan, config = self.method.plan, self.config
        before = self.method.token_credits or plan.needs_reference or plan.compares_pairs or config.exact_entropy
        if before or config.epochs > 1 or not samples:
            return set()
        first = self._planned(samples, iteration)[0]
        own = all(bool((sample.policy_versions == version).all()) for sample in first) and not drops_out(self.model)
        return {sample.rollout_id for sample in first} if own else set()

    def _scored_and_credited(
        self, samples: Sequence[CreditedSample], by_step: Collection[str], version: int
    ) -> tuple[list[CreditedSample], dict[str, Any]]:
        """Return the samples with old log-probs and token advantages, and metrics. Samples of the rollouts ``by_step``
        stay unchanged, because the first step computes their log-probs."""
        rest = [sample for sample in samples if sample.rollout_id not in by_step]
        done, metrics = self.scorer.scored(rest, version, self.method.plan.needs_reference)
        for credit in self.method.token_credits:
            done = credit.credit(done)
            metrics |= credit.metrics()
        known = {sample.rollout_id: sample for sample in done}
        return [known.get(sample.rollout_id, sample) for sample in samples], metrics

    def prepare(self, samples: Sequence[Sample]) -> list[CreditedSample]:
        """Return the samples of a fixed set that carry signal, for :meth:`train`. Any policy may have sampled them.

        They have advantages. For a loss that compares pairs they also have log-probs of the reference, version 0.
        """
        with_signal = self._with_signal(credited_samples(samples, self.method.advantage))
        if not self.method.plan.compares_pairs:
            return with_signal
        reference = self.scorer.logprobs(with_signal, 0)
        return [scored(sample, reference[sample.rollout_id]) for sample in with_signal]

    def rehearse(self, samples: Sequence[ScoredSample]) -> None:
        """Run rollouts forward and backward on every rank, to see that memory suffices. Take no step, keep no gradient.

        Meanwhile it reserves the rest of an update's memory: two moments of each weight and one more version.
        """
        parameters = trained_parameters(self.model, self._further).values()
        reserved = [torch.empty_like(local_part(parameter)) for parameter in parameters for _ in range(3)]
        if self.method.token_credits or self.method.plan.compares_pairs:
            samples = with_token_advantages(samples, [torch.ones_like(s.sampler_logprobs) for s in samples])
        self.model.train()
        for batch in self._batches.rehearsed(samples):
            output, further, _ = self._losses(batch, policy_rests=False)
            (output.per_rollout_loss.sum() + sum(each.sum() for each in further)).backward()
        del reserved
        self.optimizer.zero_grad(set_to_none=True)

    def train(
        self, samples: Sequence[CreditedSample], iteration: int, step_logprobs: dict[str, Tensor] | None = None
    ) -> tuple[list[tuple[int, int]], dict[str, Any]]:
        """Take the steps of an iteration. Return ``step_tokens`` as in :class:`UpdateResult`, and metrics.

        Args:
            step_logprobs: given if the first step's policy is the one that sampled; receives that step's log-probs
                [n] by rollout id, which then serve as the old log-probs.

        Raises:
            ValueError: a sample has hidden information, which an actor must not see.
            NonFiniteLoss: before the step that it would have spoilt.
            StopRequested: before the next step, on every rank; the changes of earlier steps must not be saved.
        """
        informed = next((sample.rollout_id for sample in samples if sample.hidden_tokens), None)
        if informed is not None and not self.method.plan.sees_hidden_information:
            raise ValueError(f"rollout {informed} begins with hidden information, which only a critic may learn from")
        self.model.train()
        planned = self._planned(samples, iteration)
        statistics, outcomes = LossStatistics(), list[StepOutcome]()
        with self._batches.bar(len(planned), "updating") as bar:
            for number, minibatch in enumerate(planned):
                if any_rank(self._stop_requested()):
                    raise StopRequested(f"before step {number + 1} of {len(planned)} of iteration {iteration}")
                outcome = self._step(minibatch, statistics, iteration, None if number else step_logprobs)
                if outcome is None:
                    break
                outcomes.append(outcome)
                bar.update()
        metrics: dict[str, Any] = {"steps": len(outcomes), "steps_left_out": len(planned) - len(outcomes)}
        if outcomes:
            norms = [outcome.grad_norm for outcome in outcomes]
            metrics |= {
                "loss": sum(outcome.loss for outcome in outcomes) / len(outcomes),
                "grad_norm": sum(norms) / len(norms),
                "grad_norm_max": max(norms),
                "learning_rate": self.optimizer.param_groups[0]["lr"],
            }
            for name in outcomes[0].further_losses:
                metrics[name] = sum(outcome.further_losses[name] for outcome in outcomes) / len(outcomes)
        step_tokens = [each for minibatch in planned[: len(outcomes)] for each in self._batches.computed(minibatch)]
        return step_tokens, metrics | statistics.summary()

    def _planned(self, samples: Sequence[CreditedSample], iteration: int) -> list[list[CreditedSample]]:
        """Return the minibatches of an iteration, one for each step."""
        seeds = [(self.seed * 1_000_003 + iteration) * 1_009 + epoch for epoch in range(self.config.epochs)]
        rollouts, full = self.config.minibatch_rollouts, self.config.minibatch_sizes == "full"
        return [each for seed in seeds for each in minibatches(samples, rollouts, seed, full)]

    def _step(
        self,
        minibatch: list[CreditedSample],
        statistics: LossStatistics,
        iteration: int,
        step_logprobs: dict[str, Tensor] | None,
    ) -> StepOutcome | None:
        """Take one optimizer step and return its outcome; None if ``max_trajectory_log_ratio`` forbids the step."""
        own_statistics, comparison = LossStatistics(), None
        weighted: Sequence[CreditedSample] = minibatch
        if self.method.plan.compares_pairs:
            comparison, weighted = self._compared(minibatch)
            if self._batches.is_main:  # every rank has compared all of them
                own_statistics.add_metrics(comparison.metrics)
        average = Averaging.of(minibatch, self.config)
        loss, log_ratio, *further_losses = self._backward(weighted, average, own_statistics, iteration, step_logprobs)
        limit = self.config.max_trajectory_log_ratio
        if limit is not None and abs(log_ratio) > limit:
            self.optimizer.zero_grad(set_to_none=True)
            if self.token_statistics is not None:
                self.token_statistics.drop()
            return None
        if comparison is not None:  # the weighted log-likelihood has its gradient, but not its value
            loss = comparison.losses.sum().item() / average.divisor
        norms = [clip_grad_norm(together, limit, self._loss_scale) for together, limit in self._clipped]
        finite_gradient = all(map(math.isfinite, norms))
        if math.isfinite(loss) and not finite_gradient and self._loss_scale > 1.0:
            # Scaled gradients ran over fp16's range, on every rank alike: the same minibatch again with half the scale.
            self._loss_scale, self._steps_at_scale = self._loss_scale / 2.0, 0
            self.optimizer.zero_grad(set_to_none=True)
            return self._step(minibatch, statistics, iteration, step_logprobs)
        if not (math.isfinite(loss) and finite_gradient):
            raise NonFiniteLoss(f"loss {loss}, gradient norm {norms}; the step was not taken")
        statistics.join(own_statistics)
        if self.token_statistics is not None:
            self.token_statistics.keep()
        self.optimizer.step()
        self._grow_loss_scale()
        self.optimizer.zero_grad(set_to_none=True)
        names = [each.metric for each in self._further.values()]
        return StepOutcome(loss, dict(zip(names, further_losses, strict=True)), norms[0])

    def _backward(
        self,
        minibatch: Sequence[CreditedSample],
        average: Averaging,
        statistics: LossStatistics,
        iteration: int,
        step_logprobs: dict[str, Tensor] | None,
    ) -> list[float]:
        """Add up the gradient of a minibatch over its micro-batches. Return, over all ranks, its loss, the mean over
        episodes of the log-ratio of all their tokens, and the mean of each further loss."""
        count = len(episodes(minibatch))
        # While a further loss trains alone the adapter gets no gradient at all, so that the optimizer leaves it alone.
        policy_rests = iteration <= self.method.plan.policy_rests_iterations
        coefficients = [each.coefficient(iteration - 1) for each in self._further.values()]
        totals = torch.zeros(2 + len(coefficients), dtype=torch.float64, device=self._batches.device)
        parts: dict[str, Tensor] = {}
        for batch in self._batches.of_step(minibatch):
            output, further, logprobs = self._losses(batch, policy_rests, on_policy=step_logprobs is not None)
            mean_loss = average.term(output.per_rollout_loss, batch, self.method.loss.plan.sums_tokens)
            total = mean_loss
            for coefficient, losses in zip(coefficients, further, strict=True):
                total = total + coefficient * average.term(losses, batch)
            # FSDP averages gradients over the ranks, but the loss is a sum over them.
            (total * (self._batches.groups * self._loss_scale)).backward()
            if not self._batches.is_leader:
                continue
            # Summed over its tokens, mean over episodes, as are further losses, independent of the loss's divisor.
            log_ratio = output.token_log_ratio.sum() / count
            means = [losses.sum() / count for losses in further]
            totals += torch.stack([mean_loss, log_ratio, *means]).detach().double()
            # Copied to the CPU only now: before the backward pass it would wait for the forward pass's last kernel.
            statistics.add(output)
            if self.token_statistics is not None:
                self.token_statistics.add(batch, output)
            if step_logprobs is not None:
                parts |= batch.split(logprobs.detach().cpu())
        if step_logprobs is not None:
            step_logprobs |= of_all_ranks(parts, minibatch, torch.empty(0))
        return sum_over_ranks(totals.cpu()).tolist()

    def _grow_loss_scale(self) -> None:
        self._steps_at_scale += self._scales
        if self._steps_at_scale == FP16_GROWTH_STEPS:
            self._loss_scale, self._steps_at_scale = self._loss_scale * 2.0, 0

    def _compared(self, minibatch: Sequence[CreditedSample]) -> tuple[PairComparison, Sequence[CreditedSample]]:
        """Return how the loss compares the minibatch's rollouts now, and the samples with their tokens' weights."""
        known = [sample for sample in minibatch if isinstance(sample, ScoredSample)]  # all: they have a reference
        loss = cast("PreferenceLoss", self.method.loss)  # its plan says that it compares pairs
        comparison = loss.compare(known, self.scorer.current_logprobs(known))
        self.model.train()
        return comparison, comparison.weighted(known)

    def _losses(
        self, batch: StepBatch, policy_rests: bool, on_policy: bool = False
    ) -> tuple[LossOutput, list[Tensor], Tensor]:
        """Return the policy's loss, the further losses [b] and the log-probs [n]. While the policy rests, its loss has
        no gradient. In a step that is ``on_policy`` the log-probs also serve as the old ones."""
        with torch.set_grad_enabled(not policy_rests):
            outputs = self.model(**batch.inputs(), with_hidden=bool(self._further))
            if on_policy:
                batch = replace(batch, old_logprobs=outputs.logprobs.detach())
            output = self.method.loss(outputs.logprobs, batch)
        further = [each.further_loss(outputs.hidden, batch) for each in self._further.values()]
        return output, further, outputs.logprobs
