"""One iteration's update: advantages, the filter, old log-probs, and clipped steps over minibatches of rollouts.

The order of rollouts, the minibatches and all statistics depend on the rollouts alone, never on the order in which they
arrived or on the number of ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchtune.modules.peft import disable_adapter
from torchtune.utils import get_world_size_and_rank
from tqdm import tqdm

from loop_recipes.algorithm.advantages import Advantage, PairingAdvantage, TokenAdvantage
from loop_recipes.algorithm.critic import Critic, token_advantages, value_loss
from loop_recipes.algorithm.losses import LossOutput, PolicyLoss, RatioStatistics
from loop_recipes.algorithm.minibatches import minibatch_units, minibatches
from loop_recipes.algorithm.preferences import Preferences, pair_names, preference_metrics
from loop_recipes.algorithm.token_statistics import TokenStatistics
from loop_recipes.config.loop_config import UpdateConfig
from loop_recipes.engine.adapter_versions import AdapterVersions
from loop_recipes.engine.batching import MicroBatch, StepBatch, computed, micro_batches, step_batches
from loop_recipes.engine.model import adapter_parameters, drops_out, trained_parameters
from loop_recipes.engine.process_group import sum_over_ranks
from loop_recipes.engine.samples import AnySample, CreditedSample, Sample, ScoredSample, credited, episodes, scored
from loop_recipes.engine.sequence_parallel import WHOLE, Part
from loop_recipes.engine.sharding import clip_grad_norm, local_part

FP16_LOSS_SCALE = 2.0**16
FP16_GROWTH_STEPS = 2000
"""As torch.amp.GradScaler: the loss scale doubles after so many steps in a row without an overflow."""
PAD_ID = 0  # never seen by anything: padding is on the right of causal attention and selects no row for the head


AnyBatch = TypeVar("AnyBatch", bound=MicroBatch)


class NonFiniteLoss(RuntimeError):
    """The loss or the gradient is nan or infinite; the step was not taken."""


class UpdateResult(NamedTuple):
    """The result of an update.

    ``samples`` are those with signal, with advantages and old log-probs, in the order of their ids; ``step_tokens``
    are the tokens of the same, once for each step that was taken with them, as
    :func:`~loop_recipes.engine.batching.computed` gives them; ``metrics`` are the same on every rank.
    """

    samples: list[ScoredSample]
    step_tokens: list[tuple[int, int]]
    metrics: dict[str, Any]


class StepOutcome(NamedTuple):
    """Of one optimizer step: the minibatch's loss, the critic's, the norm of the gradient before clipping (without the
    critic's where that is clipped by itself), and the minibatch's preference pairs as they stood before the step (None
    without)."""

    loss: float
    value_loss: float
    grad_norm: float
    preferences: Preferences | None


class PolicyUpdate:
    """Trains a policy on one collection after the other; call every method on every rank with the same rollouts.

    Args:
        model: a decoder with a log-prob head.
        optimizer: of :func:`~loop_recipes.engine.model.trained_parameters`.
        advantage: for a loss that compares pairs a ``PairingAdvantage``, which finds them.
        versions: the adapters that old log-probs are computed with.
        critic: gives each token its own advantage in place of the rollout's. The filter is off with a critic or a
            ``TokenAdvantage``.
        token_statistics: keeps what happened to each token, for `loop view`; None keeps nothing.
        part: what this rank takes of each packed row.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: PolicyLoss,
        advantage: Advantage,
        versions: AdapterVersions,
        config: UpdateConfig,
        device: torch.device,
        seed: int,
        critic: Critic | None = None,
        token_statistics: TokenStatistics | None = None,
        part: Part = WHOLE,
    ) -> None:
        self.model, self.optimizer, self.critic = model, optimizer, critic
        self.loss, self.advantage, self.versions, self.config = loss, advantage, versions, config
        self.device, self.seed, self.token_statistics = device, seed, token_statistics
        self._clipped = self._clipped_together()
        self._part, (ranks, self._rank) = part, get_world_size_and_rank()
        # Ranks that share rows are one where rollouts are dealt and losses added up.
        self._sharers = ranks // part.of, self._rank // part.of
        # The loss is multiplied by it before the backward pass, and gradients are divided by it after, so that they
        # stay within fp16's range; it is halved whenever they overflow, and grows back.
        self._scales = model.get_parameter("tok_embeddings.weight").dtype == torch.float16
        self._loss_scale = FP16_LOSS_SCALE if self._scales else 1.0
        self._steps_at_scale = 0

    def _clipped_together(self) -> list[tuple[list[nn.Parameter], float | None]]:
        """Parameters whose gradients have one norm, and its limit: all, or the policy's and then the critic's."""
        limit, limit_of_critic = self.config.clip_grad_norm, self.config.clip_critic_grad_norm
        if self.critic is None or limit_of_critic is None:
            return [(list(trained_parameters(self.model, self.critic).values()), limit)]
        return [
            (list(adapter_parameters(self.model).values()), limit),
            (list(self.critic.parameters()), limit_of_critic),
        ]

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; what one update hands to the next beside the model and the optimizer."""
        return {"loss_scale": self._loss_scale, "steps_at_loss_scale": self._steps_at_scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._loss_scale = float(state["loss_scale"])
        self._steps_at_scale = int(state.get("steps_at_loss_scale", 0))  # earlier versions only halved it

    def run(
        self,
        samples: Sequence[Sample],
        version: int,
        iteration: int,
        spread: Callable[[Sequence[CreditedSample]], list[Tensor]] | None = None,
        distil: Callable[[Sequence[ScoredSample]], tuple[list[Tensor], dict[str, float]]] | None = None,
    ) -> UpdateResult:
        """Train on one collection.

        Args:
            samples: of all ranks, in any order.
            version: of the adapter now in the model.
            spread: gives the tokens of samples with signal advantages of their own; see
                :mod:`~loop_contrib.turn_credit.spread`.
            distil: gives every token an advantage with a teacher's part in it, and metrics; no sample is without signal
                then. See :mod:`~loop_contrib.distillation.distillation`.

        Raises:
            NonFiniteLoss: before the step that it would have spoilt.
        """
        every = self._credited(samples)
        per_token = self.critic is not None or isinstance(self.advantage, TokenAdvantage)
        started = time.perf_counter()
        credited = every if per_token or distil is not None else self._with_signal(every)
        needs_scores = per_token or spread is not None or distil is not None
        first = set() if needs_scores else self._scored_by_their_step(credited, version, iteration)
        kept, entropy = self._scored([sample for sample in credited if sample.rollout_id not in first], version)
        if per_token:
            kept = _with_token_advantages(kept, self._token_advantages(kept))
        if spread is not None:
            kept = _with_token_advantages(kept, spread(kept))
        of_teacher: dict[str, float] = {}
        if distil is not None:
            advantages, of_teacher = distil(kept)
            kept = _with_token_advantages(kept, advantages)
        recomputed = time.perf_counter()
        step_logprobs: dict[str, Tensor] | None = {} if first else None
        known = {sample.rollout_id: sample for sample in kept}
        together = [known.get(sample.rollout_id, sample) for sample in credited]
        step_tokens, numbers = self.train(together, iteration, step_logprobs) if together else ([], {"steps": 0})
        if step_logprobs is not None:
            known |= {s.rollout_id: scored(s, step_logprobs[s.rollout_id]) for s in credited if s.rollout_id in first}
            kept = [known[sample.rollout_id] for sample in credited]
        metrics = _signal_metrics(every, kept) | entropy | of_teacher
        metrics["policy_lag"] = version - min((int(s.policy_versions.min()) for s in kept), default=version)
        metrics |= numbers
        seconds = time.perf_counter() - recomputed
        if self.token_statistics is not None:
            self.token_statistics.write(kept)
        metrics |= {
            "seconds_recomputing": recomputed - started,
            "seconds_updating": seconds,
            "tokens_per_second": sum(tokens - shared for tokens, shared in step_tokens) / seconds,
        }
        return UpdateResult(kept, step_tokens, metrics)

    def tasks_with_signal(self, samples: Sequence[Sample]) -> set[str]:
        """The tasks of a collection that an update learns from: those with a rollout whose advantage passes the filter
        and is not 0."""
        kept = self._with_signal(self._credited(samples))
        return {sample.task_id for sample in kept if sample.advantage}

    def _scored_by_their_step(self, samples: Sequence[CreditedSample], version: int, iteration: int) -> set[str]:
        """The rollouts of the first step, if its policy is, to the last bit, the one that sampled all their tokens, and
        no later step takes them.

        Then their old log-probs are those that the step computes anyway, and a pass over them is saved.
        """
        loss, config = self.loss, self.config
        if config.epochs > 1 or config.exact_entropy or loss.needs_reference or loss.compares_pairs or not samples:
            return set()
        first = self._planned(samples, iteration)[0]
        own = all(bool((sample.policy_versions == version).all()) for sample in first) and not drops_out(self.model)
        return {sample.rollout_id for sample in first} if own else set()

    def prepare(self, samples: Sequence[Sample]) -> list[CreditedSample]:
        """The samples of a fixed set that carry signal, for :meth:`train`, whoever sampled them.

        They have advantages, and for a loss on pairs the log-probs of the reference, which is version 0.
        """
        kept = self._with_signal(self._credited(samples))
        if not self.loss.compares_pairs:
            return kept
        reference = self.logprobs(kept, 0)
        return [scored(sample, reference[sample.rollout_id]) for sample in kept]

    def logprobs(
        self, samples: Sequence[Sample], version: int | None, versions: AdapterVersions | None = None
    ) -> dict[str, Tensor]:
        """Log-probs [n] of each rollout's sampled tokens under a kept version (None: the base model), by rollout id;
        no gradient. ``versions`` are other adapters of the same model than the policy's own."""
        with disable_adapter(self.model) if version is None else (versions or self.versions).active(version):
            return self._per_token(samples, self._logprobs)

    def hidden_states(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """Last hidden states [n, d] at the positions that predict each rollout's sampled tokens, by rollout id; of the
        adapter that is in the model, no gradient."""
        return self._per_token(samples, lambda batch: self.model(**batch.inputs(), with_hidden=True).hidden)

    def rehearse(self, samples: Sequence[ScoredSample]) -> None:
        """Forward and backward of rollouts on every rank, for the memory they take; no step, no gradient left.

        What an update holds beside them is held meanwhile: two moments of each weight and one more version.
        """
        trained = trained_parameters(self.model, self.critic).values()
        held = [torch.empty_like(local_part(parameter)) for parameter in trained for _ in range(3)]
        if self.critic is not None or self.loss.compares_pairs:
            samples = _with_token_advantages(samples, [torch.ones_like(s.sampler_logprobs) for s in samples])
        self.model.train()
        planned = step_batches(samples, self.config.micro_batch_tokens, PAD_ID, self.config.packed, part=self._part)
        for batch in planned:
            output, values, _ = self._losses(batch.to(self.device), policy_rests=False)
            (output.per_rollout_loss.sum() + values.sum()).backward()
        del held
        self.optimizer.zero_grad(set_to_none=True)

    def _with_signal(self, samples: list[CreditedSample]) -> list[CreditedSample]:
        if self.loss.compares_pairs:  # the advantage of a rollout without a partner is 0, which the filter may let pass
            return [sample for sample in samples if sample.pair]
        return [sample for sample in samples if abs(sample.advantage) >= self.config.min_abs_advantage]

    def _credited(self, samples: Sequence[Sample]) -> list[CreditedSample]:
        """In the order of their episodes. An episode has one return and one advantage, which all its rollouts get."""
        every = episodes(sorted(samples, key=lambda sample: (sample.episode, sample.segment)))
        first_segments = [members[0] for members in every]
        numbers = {task: number for number, task in enumerate(sorted({sample.task_id for sample in first_segments}))}
        rewards = torch.tensor([sample.reward for sample in first_segments])
        groups = torch.tensor([numbers[sample.task_id] for sample in first_segments])
        advantages = self.advantage(rewards, groups).tolist()
        pairs = self.advantage.pairs(rewards, groups) if isinstance(self.advantage, PairingAdvantage) else []
        names = pair_names([first.episode for first in first_segments], pairs)
        together = zip(every, advantages, names, strict=True)
        return [sample for members, value, pair in together for sample in credited(members, value, pair)]

    def _scored(self, samples: list[CreditedSample], version: int) -> tuple[list[ScoredSample], dict[str, float]]:
        """Each token's log-prob under the version that sampled it, and under the base model if a KL term asks for it.

        Dropout is off and the adapter of each version is put in for its tokens only. The mean entropy there, if asked
        for, comes out of the same pass, as a metric.
        """
        needed = sorted({int(v) for sample in samples for v in sample.policy_versions.unique()})
        compute = self._logprobs_and_entropy if self.config.exact_entropy else self._logprobs
        old: dict[str, Tensor] = {}
        for other in needed:
            of_version = [sample for sample in samples if bool((sample.policy_versions == other).any())]
            if other == version:
                computed = self._per_token(of_version, compute)
            else:
                with self.versions.active(other):
                    computed = self._per_token(of_version, compute)
            for sample in of_version:
                mine, values = sample.policy_versions == other, computed[sample.rollout_id]
                old.setdefault(sample.rollout_id, torch.zeros_like(values))[mine] = values[mine]
        metrics = {}
        if self.config.exact_entropy and samples:
            entropies = torch.cat([old[sample.rollout_id][:, 1] for sample in samples])
            metrics["entropy"] = entropies.double().mean().item()
            old = {rollout_id: values[:, 0] for rollout_id, values in old.items()}
        reference: dict[str, Tensor] = {}
        per_token = isinstance(self.advantage, TokenAdvantage) and getattr(self.advantage, "needs_reference", True)
        if self.loss.needs_reference or per_token:
            with disable_adapter(self.model):
                reference = self._per_token(samples, self._logprobs)
        names = [(sample, sample.rollout_id) for sample in samples]
        return [scored(sample, old[name], reference.get(name)) for sample, name in names], metrics

    def _token_advantages(self, samples: list[ScoredSample]) -> list[Tensor]:
        """Each token's own by the advantage, or its return less the critic's value before the update."""
        if isinstance(self.advantage, TokenAdvantage):
            return self.advantage.token_advantages(samples)
        advantages = self._per_token(samples, lambda batch: token_advantages(self._values(batch), batch))
        return [advantages[sample.rollout_id] for sample in samples]

    def _logprobs(self, batch: MicroBatch) -> Tensor:
        return self.model(**batch.inputs()).logprobs

    def _logprobs_and_entropy(self, batch: MicroBatch) -> Tensor:
        outputs = self.model(**batch.inputs(), with_entropy=True)
        return torch.stack([outputs.logprobs, outputs.entropy], dim=1)

    def _values(self, batch: MicroBatch) -> Tensor:
        if self.critic is None:
            raise RuntimeError("values need a critic")
        return self.critic(self.model(**batch.inputs(), with_hidden=True).hidden)

    @torch.no_grad()
    def _per_token(self, samples: Sequence[Sample], compute: Callable[[MicroBatch], Tensor]) -> dict[str, Tensor]:
        """``compute`` gives [n] or [n, k] for a micro-batch; here all ranks do it for all samples, for every rank."""
        if not samples:
            return {}
        self.model.eval()
        parts: dict[str, Tensor] = {}
        for batch in self._with_bar(micro_batches(*self._of_this_rank(samples)), "recomputing"):
            computed = compute(batch).cpu()
            parts |= batch.split(computed) if self._part.leads else {}
        return _of_all_ranks(parts, samples, computed)

    def train(
        self, samples: Sequence[CreditedSample], iteration: int, step_logprobs: dict[str, Tensor] | None = None
    ) -> tuple[list[tuple[int, int]], dict[str, Any]]:
        """All steps of an iteration; returns the tokens of those taken as in :class:`UpdateResult`, and metrics.

        Args:
            step_logprobs: where the first step is that of the policy that sampled; is given its log-probs [n], by
                rollout id, which are the old ones.

        Raises:
            ValueError: a sample with hidden information, for any loss but a critic's.
            NonFiniteLoss: before the step that it would have spoilt.
        """
        informed = next((sample.rollout_id for sample in samples if sample.hidden_tokens), None)
        if informed is not None and not self.loss.sees_hidden_information:
            raise ValueError(f"rollout {informed} begins with hidden information, which only a critic may learn from")
        self.model.train()
        planned = self._planned(samples, iteration)
        statistics, outcomes = RatioStatistics(), list[StepOutcome]()
        for number, minibatch in enumerate(planned):
            outcome = self._step(minibatch, statistics, iteration, None if number else step_logprobs)
            if outcome is None:
                break
            outcomes.append(outcome)
        metrics: dict[str, Any] = {"steps": len(outcomes), "steps_left_out": len(planned) - len(outcomes)}
        if outcomes:
            losses, value_losses, norms, preferences = zip(*outcomes, strict=True)
            metrics |= preference_metrics([each for each in preferences if each is not None])
            metrics |= {
                "loss": sum(losses) / len(losses),
                "grad_norm": sum(norms) / len(norms),
                "grad_norm_max": max(norms),
                "learning_rate": self.optimizer.param_groups[0]["lr"],
            }
            if self.critic is not None:
                metrics["value_loss"] = sum(value_losses) / len(value_losses)
        budget, packed, sharers = self.config.micro_batch_tokens, self.config.packed, self._part.of
        taken = planned[: len(outcomes)]
        step_tokens = [each for minibatch in taken for each in computed(minibatch, budget, packed, sharers)]
        return step_tokens, metrics | statistics.summary()

    def _planned(self, samples: Sequence[CreditedSample], iteration: int) -> list[list[CreditedSample]]:
        """The minibatches of an iteration, one a step."""
        seeds = [(self.seed * 1_000_003 + iteration) * 1_009 + epoch for epoch in range(self.config.epochs)]
        rollouts, full = self.config.minibatch_rollouts, self.config.minibatch_sizes == "full"
        return [each for seed in seeds for each in minibatches(samples, rollouts, seed, full)]

    def _step(
        self,
        minibatch: list[CreditedSample],
        statistics: RatioStatistics,
        iteration: int,
        step_logprobs: dict[str, Tensor] | None,
    ) -> StepOutcome | None:
        """One optimizer step; None if ``max_trajectory_log_ratio`` forbids it."""
        groups, _ = self._sharers
        divisor = self._divisor(minibatch)
        # In the critic's warm-up the adapter gets no gradient at all, so that the optimizer leaves it alone.
        policy_rests = self.critic is not None and self.critic.trains_alone(iteration - 1)
        totals = torch.zeros(3, dtype=torch.float64, device=self.device)
        coefficient = 0.0 if self.critic is None else self.critic.coefficient(iteration - 1)
        seen = RatioStatistics()
        preferences, weighted = self._preferences(minibatch) if self.loss.compares_pairs else (None, minibatch)
        parts: dict[str, Tensor] = {}
        for batch in self._with_bar(step_batches(*self._of_this_rank(weighted)), "updating"):
            output, values, logprobs = self._losses(batch, policy_rests, on_policy=step_logprobs is not None)
            mean_loss, mean_value_loss = output.per_rollout_loss.sum() / divisor, values.sum() / divisor
            # FSDP averages gradients over the ranks, but the loss is a sum over them.
            ((mean_loss + coefficient * mean_value_loss) * (groups * self._loss_scale)).backward()
            if not self._part.leads:
                continue
            # Summed over its tokens, mean over episodes.
            log_ratio = output.token_log_ratio.sum() / len(episodes(minibatch))
            squared_error = values.sum() / len(episodes(minibatch))  # whatever the loss is divided by
            totals += torch.stack([mean_loss, squared_error, log_ratio]).detach().double()
            # Copied to the CPU only now: before the backward pass it would wait for the forward pass's last kernel.
            seen.add(output)
            if self.token_statistics is not None:
                self.token_statistics.add(batch, output)
            if step_logprobs is not None:
                parts |= batch.split(logprobs.detach().cpu())
        if step_logprobs is not None:
            step_logprobs |= _of_all_ranks(parts, minibatch, torch.empty(0))
        loss, squared_error, log_ratio = sum_over_ranks(totals.cpu()).tolist()
        limit = self.config.max_trajectory_log_ratio
        if limit is not None and abs(log_ratio) > limit:
            self.optimizer.zero_grad(set_to_none=True)
            if self.token_statistics is not None:
                self.token_statistics.drop()
            return None
        if preferences is not None:  # the weighted log-likelihood has the pairs' gradient, but not their loss
            loss = preferences.losses.sum().item() / divisor
        norms = [clip_grad_norm(together, limit, self._loss_scale) for together, limit in self._clipped]
        finite_gradient = all(map(math.isfinite, norms))
        if math.isfinite(loss) and not finite_gradient and self._loss_scale > 1.0:
            # Scaled gradients ran over fp16's range, on every rank alike: the same minibatch again with half the scale.
            self._loss_scale, self._steps_at_scale = self._loss_scale / 2.0, 0
            self.optimizer.zero_grad(set_to_none=True)
            return self._step(minibatch, statistics, iteration, step_logprobs)
        if not (math.isfinite(loss) and finite_gradient):
            raise NonFiniteLoss(f"loss {loss}, gradient norm {norms}; the step was not taken")
        statistics.join(seen)
        if self.token_statistics is not None:
            self.token_statistics.keep()
        self.optimizer.step()
        self._grow_loss_scale()
        self.optimizer.zero_grad(set_to_none=True)
        return StepOutcome(loss, squared_error, norms[0], preferences)

    def _grow_loss_scale(self) -> None:
        self._steps_at_scale += self._scales
        if self._steps_at_scale == FP16_GROWTH_STEPS:
            self._loss_scale, self._steps_at_scale = self._loss_scale * 2.0, 0

    def _preferences(self, minibatch: Sequence[CreditedSample]) -> tuple[Preferences, Sequence[CreditedSample]]:
        """The minibatch's pairs under the policy as it stands now, and its samples with the weights of their tokens."""
        pairs = [sample for sample in minibatch if isinstance(sample, ScoredSample)]  # all: they have a reference
        preferences = self.loss.compare(pairs, self._per_token(pairs, self._logprobs))
        self.model.train()
        return preferences, preferences.weighted(pairs)

    def _divisor(self, minibatch: list[CreditedSample]) -> float:
        """Return the number by which the sum of a minibatch's losses is divided."""
        if self.config.loss_divisor == "mean":
            return len(minibatch_units(minibatch))
        if self.config.loss_divisor == "tokens":
            return sum(int(sample.mask.sum()) for sample in minibatch)
        return float(self.config.loss_divisor)

    def _losses(
        self, batch: StepBatch, policy_rests: bool, on_policy: bool = False
    ) -> tuple[LossOutput, Tensor, Tensor]:
        """The policy's loss, without gradient where it rests, the critic's [b] (zeros without a critic), and the
        log-probs [n], which are the old ones too where the step is ``on_policy``."""
        with torch.set_grad_enabled(not policy_rests):
            outputs = self.model(**batch.inputs(), with_hidden=self.critic is not None)
            if on_policy:
                batch = replace(batch, old_logprobs=outputs.logprobs.detach())
            output = self.loss(outputs.logprobs, batch)
        if self.critic is None:
            return output, torch.zeros_like(batch.rewards), outputs.logprobs
        return output, value_loss(self.critic(outputs.hidden), batch), outputs.logprobs

    def _of_this_rank(self, samples: Sequence[AnySample]) -> tuple[list[AnySample], int, int, bool, int, int, Part]:
        """The arguments that make this rank's batches of the samples of all ranks: as many as every other rank has."""
        ordered = sorted(samples, key=lambda sample: (-sample.tokens, sample.rollout_id))
        return ordered, self.config.micro_batch_tokens, PAD_ID, self.config.packed, *self._sharers, self._part

    def _with_bar(self, batches: list[AnyBatch], doing: str) -> Iterator[AnyBatch]:
        """The batches on this rank's device, with a progress bar on rank 0's terminal."""
        disable = None if self._rank == 0 else True
        for batch in tqdm(batches, desc=doing, leave=False, disable=disable, mininterval=1.0):
            yield batch.to(self.device)


def _of_all_ranks(parts: Mapping[str, Tensor], samples: Sequence[Sample], like: Tensor) -> dict[str, Tensor]:
    """This rank's ``parts`` [n, ...] and the other ranks', by rollout id; ``like`` has their dtype and last sizes."""
    counts = {sample.rollout_id: len(sample.sampler_logprobs) for sample in samples}
    # Another rank's are zeros here, so that the sum is exact.
    whole = [parts[name] if name in parts else like.new_zeros(n, *like.shape[1:]) for name, n in counts.items()]
    return dict(zip(counts, sum_over_ranks(torch.cat(whole)).split(list(counts.values())), strict=True))


def _with_token_advantages(samples: Sequence[ScoredSample], own: Sequence[Tensor]) -> list[ScoredSample]:
    return [replace(sample, token_advantages=each) for sample, each in zip(samples, own, strict=True)]


def _signal_metrics(samples: Sequence[CreditedSample], kept: Sequence[ScoredSample]) -> dict[str, Any]:
    tasks, with_signal = {sample.task_id for sample in samples}, {sample.task_id for sample in kept}
    own = [sample.token_advantages for sample in kept if sample.token_advantages is not None]
    if own:
        advantages = torch.cat(own).double()
    else:
        advantages = torch.tensor([members[0].advantage for members in episodes(samples)], dtype=torch.float64)
    return {
        "kept_fraction": len(episodes(kept)) / len(episodes(samples)),
        "groups": len(tasks),
        "groups_without_signal": len(tasks - with_signal),
        "advantage_std": advantages.std(correction=0).item(),
    }
