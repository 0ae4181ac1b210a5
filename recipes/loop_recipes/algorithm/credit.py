"""The first stage of an update: each rollout's advantage, and the hook for advantages of single tokens.

An ``advantage`` compares the returns of a task's rollouts. A :class:`Credit`, which a config names by ``_component_``
under ``credit``, then changes the advantages of single tokens; several do so one after the other. A
:class:`TrainedCredit` also has weights of its own and a further loss, which are trained beside the policy's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from loop_formats.rollout import Rollout
from loop_formats.schema import NotNegative, Positive
from loop_recipes.algorithm.advantages import Advantage, PairingAdvantage, TokenAdvantage
from loop_recipes.algorithm.method_plan import MethodPlan
from loop_recipes.config.loop_config import LoopConfig
from loop_recipes.engine.batching import StepBatch
from loop_recipes.engine.samples import CreditedSample, Sample, ScoredSample, credited, episodes

if TYPE_CHECKING:  # it imports torchtune, which takes seconds
    from loop_recipes.algorithm.scoring import Scorer


class CreditFailed(RuntimeError):
    """A credit cannot be given, through no fault of the trainer; the message says why, and the run ends with it."""


@dataclass(frozen=True)
class TrainingRun:
    """The parts of a run that its credits may use.

    Attributes:
        scorer: takes rollouts through the policy's model without a gradient.
        ask: has work done with the source of rollouts on rank 0 and returns its result, which must be JSON-able, on
            every rank; None when the run was asked to stop meanwhile.
        max_turns: how many turns an episode of an iteration may take.
        stop_requested: called while a credit waits; true ends the wait with ``StopRequested``.
    """

    config: LoopConfig
    scorer: Scorer
    ask: Callable[[Callable[[Any], Any]], Any]
    max_turns: Callable[[int], int]
    stop_requested: Callable[[], bool]


class Credit:
    """The base of components that give tokens advantages of their own. Every rank has one and calls each method."""

    plan = MethodPlan()
    """Its needs, declared to the update."""
    figures: ClassVar[Mapping[str, str]] = {}
    """The keys that it adds to ``metrics.jsonl``, each with its sentence."""
    key = "credit"
    """Its key in the config, for messages."""

    def check(self, config: LoopConfig) -> None:
        """Check that it fits ``config``, before any work begins.

        Raises:
            ConfigError: the method does not fit; one line that names the key and the cure.
        """

    def setup(self, run: TrainingRun) -> None:
        """Get ready, once the learner is there.

        Raises:
            ConfigError: something that its arguments name cannot be used.
        """

    def check_tasks(self, tasks: Sequence[str]) -> None:
        """Check that it can give credit for rollouts of these tasks, once they are known.

        Raises:
            ConfigError: the method cannot.
        """

    def collected(self, rollouts: Sequence[Rollout], iteration: int) -> None:
        """See a collection while the node is free, before the next request; texts are on rank 0 only.

        Raises:
            StopRequested: the run was asked to stop meanwhile.
        """

    def credit(self, samples: list[ScoredSample]) -> list[ScoredSample]:
        """Return the samples with other ``token_advantages``, in their order.

        Raises:
            CreditFailed: the method cannot give credit to these samples.
        """
        raise NotImplementedError

    def metrics(self) -> dict[str, float]:
        """Return the ``figures`` of the last :meth:`credit`."""
        return {}

    def saved(self) -> dict[str, Any]:
        """Return its state for a resumed run, JSON-able; :meth:`restore` gets it before :meth:`setup`."""
        return {}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take the state that :meth:`saved` returned in the run that is resumed."""


class TrainedCredit(nn.Module, Credit):
    """A credit with weights of its own: their loss is added to the policy's, from the policy's last hidden states.

    Those states come detached, so nothing of that loss reaches the policy's weights. The weights are float32, in the
    checkpoints, and sharded as the policy is.

    Args:
        lr: the learning rate of its weights; None is the policy's.
        clip_grad_norm: the largest norm of its gradient; None takes it and the policy's as one.
    """

    metric: ClassVar[str]
    """The key of its loss in ``figures``."""

    def __init__(self, lr: NotNegative | None = None, clip_grad_norm: Positive | None = None) -> None:
        super().__init__()
        self.lr, self.clip_grad_norm = lr, clip_grad_norm

    def make_weights(self, width: int) -> None:
        """Make its weights for hidden states [n, width], the same on every rank."""
        raise NotImplementedError

    def further_loss(self, hidden: Tensor, batch: StepBatch) -> Tensor:
        """Return the loss of each rollout [b], from the hidden states [n, d] that predict the sampled tokens."""
        raise NotImplementedError

    def coefficient(self, iteration: int) -> float:
        """Return the weight of its loss at an iteration counted from 0."""
        return 1.0


class CreditOfAdvantage(Credit):
    """The tokens' own advantages of an ``advantage`` that gives some."""

    def __init__(self, advantage: TokenAdvantage) -> None:
        self._advantage = advantage
        declared = getattr(advantage, "plan", MethodPlan(needs_reference=True))  # any callable may be an advantage
        self.plan = replace(declared, keeps_samples_without_signal=True, starts_from_rollout_advantage=True)

    def credit(self, samples: list[ScoredSample]) -> list[ScoredSample]:
        return with_token_advantages(samples, self._advantage.token_advantages(samples))


def with_token_advantages(samples: Sequence[ScoredSample], own: Sequence[Tensor]) -> list[ScoredSample]:
    """Return the samples with advantages ``own`` [n] of their tokens."""
    return [replace(sample, token_advantages=each) for sample, each in zip(samples, own, strict=True)]


def credited_samples(samples: Sequence[Sample], advantage: Advantage) -> list[CreditedSample]:
    """Return the samples with their advantages, in the order of their episodes.

    An episode has one return and one advantage, which all its rollouts get.
    """
    every = episodes(sorted(samples, key=lambda sample: (sample.episode, sample.segment)))
    first_segments = [members[0] for members in every]
    numbers = {task: number for number, task in enumerate(sorted({sample.task_id for sample in first_segments}))}
    rewards = torch.tensor([sample.reward for sample in first_segments])
    groups = torch.tensor([numbers[sample.task_id] for sample in first_segments])
    advantages = advantage(rewards, groups).tolist()
    pairs = advantage.pairs(rewards, groups) if isinstance(advantage, PairingAdvantage) else []
    names = pair_names([first.episode for first in first_segments], pairs)
    together = zip(every, advantages, names, strict=True)
    return [sample for members, value, pair in together for sample in credited(members, value, pair)]


def pair_names(episodes: Sequence[str], pairs: Sequence[tuple[int, int]]) -> list[str]:
    """Return for each episode the name of its pair, empty without one."""
    names = [""] * len(episodes)
    for chosen, rejected in pairs:
        names[chosen] = names[rejected] = f"{episodes[chosen]} > {episodes[rejected]}"
    return names


def signal_metrics(samples: Sequence[CreditedSample], with_signal: Sequence[ScoredSample]) -> dict[str, Any]:
    """Return figures of a collection's samples and of those ``with_signal``, which the update learned from."""
    tasks, learned = {sample.task_id for sample in samples}, {sample.task_id for sample in with_signal}
    own = [sample.token_advantages for sample in with_signal if sample.token_advantages is not None]
    if own:
        advantages = torch.cat(own).double()
    else:
        advantages = torch.tensor([members[0].advantage for members in episodes(samples)], dtype=torch.float64)
    return {
        "kept_fraction": len(episodes(with_signal)) / len(episodes(samples)),
        "groups": len(tasks),
        "groups_without_signal": len(tasks - learned),
        "advantage_std": advantages.std(correction=0).item(),
    }
