"""SWEET-RL's critic of turns (arXiv 2503.15478): which turns of an episode helped, and which harmed.

The advantage of turn t, whose tokens a_1 .. a_L follow the tokens o of the episode, is their mean log-ratio (eq. 3)

    A(o, a, c) = 1/L sum_l [ log pi_critic(a_l | c, o, a_<l) - log pi_ref(a_l | c, o, a_<l) ]

with c the hidden information, which stands before the prompt and which the actor never sees. The critic learns from
pairs of rollouts of a task, by Bradley and Terry over the sums of their turns' advantages (eq. 2):

    - log sigmoid( beta sum_t A(chosen, t) - beta sum_t A(rejected, t) )

Both are an adapter on the actor's own base model, so that one model in memory is actor, critic and reference in turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from agent_environments.protocol import UnknownTask
from loop_formats.rollout import Rollout
from loop_formats.schema import ConfigError, NotNegative, Positive, require
from loop_plumbing.breakage import error_line, raised_as
from loop_recipes.algorithm.method_plan import MethodPlan
from loop_recipes.algorithm.preferences import PreferenceLoss
from loop_recipes.algorithm.scoring import Scorer
from loop_recipes.config.loop_config import UpdateConfig
from loop_recipes.config.sft_config import SftConfig
from loop_recipes.engine.adapter_versions import AdapterVersions
from loop_recipes.engine.model import check_context
from loop_recipes.engine.samples import Sample
from loop_recipes.rollouts.fixed_set import SampleMaker, sample_maker
from model_families.chat import open_chat
from model_families.chat.format import ChatFormat

HIDDEN_HEAD = "What the agent cannot see:\n"
PerTurn = Literal["mean", "sum"]


class HiddenInformation(Protocol):
    """Knows facts about a dataset's tasks that only the grader may know, such as a reference solution. A critic may
    see these facts in training, but no prompt contains them."""

    def hidden_information(self, task_id: str) -> str:
        """Return the hidden information of a task as text; "" if the task has none.

        Raises:
            UnknownTask: the dataset has no such task, or stores nothing about it.
        """


class TurnAdvantage(PreferenceLoss):
    """The critic's loss (eq. 2 with eq. 3). In a turn with L sampled tokens, each token has the weight ``1 / L``.

    Args:
        beta: see :class:`~loop_recipes.algorithm.preferences.PreferenceLoss`; the authors' is 0.1.
        nll: weight of the chosen rollout's cross-entropy; the authors' is 0.01.
        per_turn: ``sum`` leaves out ``1 / L``, as in the authors' ablation without normalization. All tokens of an
            episode then have equal weight, as in DPO.
    """

    plan = MethodPlan(compares_pairs=True, sees_hidden_information=True)

    def __init__(self, beta: Positive = 0.1, nll: NotNegative = 0.01, per_turn: PerTurn = "mean") -> None:
        super().__init__(beta, nll)
        self.per_turn = per_turn

    def token_weights(self, turns: Tensor) -> Tensor:
        if self.per_turn == "sum":
            return torch.ones(len(turns), dtype=torch.float64)
        _, index, counts = torch.unique(turns, return_inverse=True, return_counts=True)
        return 1.0 / counts.double()[index]


@dataclass(frozen=True)
class HiddenPrefix:
    """Puts a task's hidden information, as a system message, before the unchanged token ids of its rollouts."""

    information: HiddenInformation
    tokens: ChatFormat

    def of(self, task_id: str) -> list[int]:
        """Return the token ids to put before the prompt; [] if the task has no hidden information.

        Raises:
            ConfigError: the dataset does not give the task's hidden information, or fails on this task.
        """
        try:
            text = self.information.hidden_information(task_id)
        except (UnknownTask, ValueError, OSError) as error:
            raise ConfigError(f"hidden_information: {error}") from error
        except Exception as error:
            raise ConfigError(f"hidden_information broke over task {task_id}: {error_line(error)}") from error
        if not isinstance(text, str):
            raise ConfigError(f"hidden_information of task {task_id} is not a text but of type {type(text).__name__}")
        return self.tokens.aside(HIDDEN_HEAD + text) if text else []

    def before(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with their prefixes, as a critic sees them. The sampled tokens stay the same."""
        prefixes = {task_id: torch.tensor(self.of(task_id), dtype=torch.long) for task_id in _tasks(samples)}
        return [_after(prefixes[sample.task_id], sample) for sample in samples]


class WithHidden(SampleMaker):
    """Gives a critic the hidden information of each task, as a prefix of the task's rollouts.

    Args:
        information: source of a task's hidden information, such as its reference solution.
    """

    def __init__(self, information: HiddenInformation) -> None:
        self._information = information

    def check(self, config: SftConfig, plan: MethodPlan) -> None:
        actor = f"samples must be null: {config.loss['_component_']} trains an actor, not a critic"
        require(plan.sees_hidden_information, actor)

    def samples(self, rollouts: Sequence[Rollout], update: UpdateConfig, model_dir: str) -> list[Sample]:
        return self.prefix(model_dir).before(super().samples(rollouts, update, model_dir))

    def prefix(self, model_dir: str) -> HiddenPrefix:
        """Return the prefix of rollouts, in token ids of the model in ``model_dir``.

        Raises:
            ConfigError: the model has no tokenizer.
        """
        with raised_as(ConfigError, "samples: "):
            return HiddenPrefix(self._information, open_chat(model_dir))


def prefix_of(config: SftConfig) -> HiddenPrefix | None:
    """Return the prefix that a critic's run put before rollouts; None if the critic saw only what the actor sees."""
    maker = None if config.samples is None else sample_maker(config.samples)
    return maker.prefix(config.base_model) if isinstance(maker, WithHidden) else None


def _tasks(samples: Sequence[Sample]) -> list[str]:
    return sorted({sample.task_id for sample in samples})


def _after(prefix: Tensor, sample: Sample) -> Sample:
    return replace(
        sample,
        token_ids=torch.cat([prefix, sample.token_ids]),
        mask=torch.cat([torch.zeros(len(prefix), dtype=torch.bool), sample.mask]),
        turn_ids=torch.cat([torch.full_like(prefix, -1), sample.turn_ids]),
        hidden_tokens=sample.hidden_tokens + len(prefix),
    )


class TurnCritic:
    """Computes the advantages of the turns of rollouts.

    Args:
        scorer: scorer of a learner; the critic and its reference use the base model of this learner.
        adapter: the critic's full LoRA tensors by torchtune name.
        reference: such tensors of the policy with which the critic's training began; None is the base model.
        prefix: the prefix from the critic's training; None if the critic sees only what the actor sees.
        per_turn: the setting from the critic's training, see :class:`TurnAdvantage`.
        reference_sees_hidden: False leaves c out of the reference's log-probs, as in the authors' code that ranks
            candidates. Eq. 3 has c in both models.
    """

    def __init__(
        self,
        scorer: Scorer,
        adapter: Mapping[str, Tensor],
        reference: Mapping[str, Tensor] | None = None,
        prefix: HiddenPrefix | None = None,
        per_turn: PerTurn = "mean",
        reference_sees_hidden: bool = True,
    ) -> None:
        self._scorer, self._prefix, self._per_turn = scorer, prefix, per_turn
        self._reference_sees_hidden = reference_sees_hidden
        self._versions = AdapterVersions(scorer.model)
        self._versions.put(1, adapter)
        if reference is not None:
            self._versions.put(0, reference)
        self._reference = None if reference is None else 0

    def check_room(self, tasks: Sequence[str], tokens: int, key: str) -> None:
        """Check that hidden information and a rollout of ``tokens`` tokens fit the model together, for all tasks.

        Args:
            key: the config key of the critic, for the error message.

        Raises:
            ConfigError: both together are too long for the model.
        """
        hidden = 0 if self._prefix is None else max(len(self._prefix.of(task)) for task in tasks)
        longest = int(self._scorer.model.max_seq_len)  # type: ignore[arg-type]  # a module's attributes are untyped
        require(
            tokens + hidden <= longest,
            f"{key}: rollouts have up to {tokens} tokens, what their tasks hide up to {hidden}, and the "
            f"model's max_seq_len is {longest}; make update.max_tokens_per_rollout at most {longest - hidden}",
        )

    def advantages(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """Return A of each turn with a sampled token, [t] float64, by rollout id.

        A collective: every rank calls it with the same samples.

        Args:
            samples: samples as the actor sees them, in any order, from any policy.

        Raises:
            ConfigError: a sample with its hidden information is too long for the model.
        """
        with_hidden = samples if self._prefix is None else self._prefix.before(samples)
        longest = max((sample.tokens for sample in with_hidden), default=0)
        check_context(self._scorer.model, longest, "the longest rollout with its hidden information")
        critic = self._scorer.logprobs(with_hidden, 1, self._versions)
        inputs = with_hidden if self._reference_sees_hidden else samples
        reference = self._scorer.logprobs(inputs, self._reference, self._versions)
        return {
            sample.rollout_id: by_turn(
                critic[sample.rollout_id].double() - reference[sample.rollout_id].double(),
                sample.turn_ids[sample.mask],
                self._per_turn,
            )
            for sample in samples
        }


def by_turn(values: Tensor, turns: Tensor, per_turn: PerTurn = "mean") -> Tensor:
    """Return the mean or sum of the tokens' values [n] or [n, d] over each turn, [t] or [t, d]. ``turns`` [n] gives the
    turn of each token; the result is for the turns that occur there, in ascending order."""
    _, index, counts = torch.unique(turns, return_inverse=True, return_counts=True)
    sums = values.new_zeros(len(counts), *values.shape[1:]).index_add(0, index, values)
    return sums if per_turn == "sum" else sums / counts.view(-1, *[1] * (values.ndim - 1))
