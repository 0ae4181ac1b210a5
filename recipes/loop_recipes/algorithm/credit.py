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
    """A credit cannot be given, through no fault of the trainer. The run ends with the message, which says why."""


@dataclass(frozen=True)
class TrainingRun:
    """The parts of a run that its credits may use.

    Attributes:
        scorer: runs the policy's model over rollouts without a gradient.
        ask: does work with the source of rollouts on rank 0 and returns the JSON-able result on every rank; returns
            None if the run was asked to stop meanwhile.
        max_turns: how many turns an episode of an iteration may take.
        stop_requested: called while a credit waits; true ends the wait with ``StopRequested``.
    """

    config: LoopConfig
    scorer: Scorer
    ask: Callable[[Callable[[Any], Any]], Any]
    max_turns: Callable[[int], int]
    stop_requested: Callable[[], bool]


class Credit:
    """The base of components that give each token an advantage. Every rank has an instance and calls each method."""

    plan = MethodPlan()
    """Its needs, declared to the update."""
    figures: ClassVar[Mapping[str, str]] = {}
    """The keys that it adds to ``metrics.jsonl``, each with its sentence."""
    key = "credit"
    """Its key in the config, for messages."""

    def check(self, config: LoopConfig) -> None:
        """Check that the credit fits ``config``, before any work begins.

        Raises:
            ConfigError: the method does not fit; one line that names the key and the cure.
        """

    def setup(self, run: TrainingRun) -> None:
        """Get ready, once the learner exists.

        Raises:
            ConfigError: something that the credit's arguments name cannot be used.
        """

    def check_tasks(self, tasks: Sequence[str]) -> None:
        """Check, once the tasks are known, that credit can be given for their rollouts.

        Raises:
            ConfigError: credit cannot be given.
        """

    def collected(self, rollouts: Sequence[Rollout], iteration: int) -> None:
        """Look at a collection before the next request, while the node is free; only rank 0 gets the texts.

        Raises:
            StopRequested: the run was asked to stop meanwhile.
        """

    def credit(self, samples: list[ScoredSample]) -> list[ScoredSample]:
        """Return the samples, in the same order, with new ``token_advantages``.

        Raises:
            CreditFailed: the method cannot give credit to these samples.
        """
        raise NotImplementedError

    def metrics(self) -> dict[str, float]:
        """Return the ``figures`` of the last :meth:`credit`."""
        return {}

    def saved(self) -> dict[str, Any]:
        """Return the JSON-able state for a resumed run, which calls :meth:`restore` with it before :meth:`setup`."""
        return {}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`saved` returned before the run was resumed."""


class TrainedCredit(nn.Module, Credit):
    """A credit that trains weights of its own: their loss is added to the policy's loss.

    The loss reads the policy's last hidden states, detached, so its gradient never reaches the policy's weights. The
    credit's weights are float32, stored in the checkpoints, and sharded in the same way as the policy.

    Args:
        lr: the learning rate of the credit's weights; None takes the policy's.
        clip_grad_norm: the largest norm of the credit's gradient; None clips it jointly with the policy's gradient.
    """

    metric: ClassVar[str]
    """The key of its loss in ``figures``."""

    def __init__(self, lr: NotNegative | None = None, clip_grad_norm: Positive | None = None) -> None:
        super().__init__()
        self.lr, self.clip_grad_norm = lr, clip_grad_norm

    def make_weights(self, width: int) -> None:
        """Make the credit's weights for hidden states [n, width], the same on every rank."""
        raise NotImplementedError

    def further_loss(self, hidden: Tensor, batch: StepBatch) -> Tensor:
        """Return the loss [b] of each rollout, from the hidden states [n, d] that predict the sampled tokens."""
        raise NotImplementedError

    def coefficient(self, iteration: int) -> float:
        """Return the weight of the credit's loss at an iteration, counted from 0."""
        return 1.0


class CreditOfAdvantage(Credit):
    """The credit of an ``advantage`` component that gives each token an advantage."""

    def __init__(self, advantage: TokenAdvantage) -> None:
        self._advantage = advantage
        declared = getattr(advantage, "plan", MethodPlan(needs_reference=True))  # any callable may be an advantage
        self.plan = replace(declared, keeps_samples_without_signal=True, starts_from_rollout_advantage=True)

    def credit(self, samples: list[ScoredSample]) -> list[ScoredSample]:
        return with_token_advantages(samples, self._advantage.token_advantages(samples))


def with_token_advantages(samples: Sequence[ScoredSample], own: Sequence[Tensor]) -> list[ScoredSample]:
    """Return the samples with ``own``, tensors [n], as token advantages."""
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
    """Return the name of each episode's pair, "" for an episode without a pair."""
    names = [""] * len(episodes)
    for chosen, rejected in pairs:
        names[chosen] = names[rejected] = f"{episodes[chosen]} > {episodes[rejected]}"
    return names


def signal_metrics(samples: Sequence[CreditedSample], with_signal: Sequence[ScoredSample]) -> dict[str, Any]:
    """Return metrics of a collection's samples, and of the samples ``with_signal``, from which the update learned."""
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
