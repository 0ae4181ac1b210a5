"""A method of learning: a loss, an advantage, and credits that give tokens advantages of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from loop_formats.schema import require
from loop_recipes.algorithm.advantages import Advantage, PairingAdvantage, TokenAdvantage
from loop_recipes.algorithm.credit import Credit, CreditOfAdvantage, TrainedCredit
from loop_recipes.algorithm.losses import PolicyLoss
from loop_recipes.algorithm.method_plan import MethodPlan
from loop_recipes.algorithm.minibatches import check_divisor
from loop_recipes.config.components import build_checked
from loop_recipes.config.loop_config import LearnerConfig, LoopConfig
from loop_recipes.config.preflight import check_learner, check_rollout_node


@dataclass(frozen=True)
class Method:
    """The parts of a method, and their joint plan.

    Attributes:
        credit: the credits by their names in the config, in the order in which they apply.
    """

    loss: PolicyLoss
    advantage: Advantage
    credit: Mapping[str, Credit] = field(default_factory=dict)

    @cached_property
    def token_credits(self) -> list[Credit]:
        """All credits of single tokens, in order. An ``advantage`` that gives each token one comes first."""
        own = [CreditOfAdvantage(self.advantage)] if isinstance(self.advantage, TokenAdvantage) else []
        return [*own, *self.credit.values()]

    @cached_property
    def trained(self) -> dict[str, TrainedCredit]:
        """The credits that have weights of their own, by their names."""
        return {name: each for name, each in self.credit.items() if isinstance(each, TrainedCredit)}

    @cached_property
    def plan(self) -> MethodPlan:
        """The joint plan of all parts."""
        return MethodPlan.joined([self.loss.plan, *(each.plan for each in self.token_credits)])


def check_run(config: LoopConfig) -> Method:
    """Check everything that the config names, for a run that starts here and now. Return the run's method.

    Raises:
        ConfigError: one line that names the key and the cure.
    """
    method = check_method(config)
    check_rollout_node(config)
    return method


def check_method(config: LoopConfig, *, starts_now: bool = True) -> Method:
    """Check everything that ``config`` names except the source of rollouts.

    Args:
        starts_now: true if the run starts on this machine now; then no other run may use the output folder.
    """
    method = build_method(config)
    check_learner(config, starts_now=starts_now)
    for credit in method.credit.values():
        credit.check(config)
    return method


def build_method(config: LearnerConfig) -> Method:
    """Build the method that ``config`` names, and check that its parts fit each other and the config.

    Raises:
        ConfigError: one line that names the key and the cure.
    """
    advantage = build_checked("advantage", config.advantage, object)
    loss = build_checked("loss", config.loss, PolicyLoss)
    advantage_name, loss_name = config.advantage["_component_"], config.loss["_component_"]
    require(
        callable(advantage),
        f"advantage: {advantage_name} cannot be called with returns and groups; see loop_recipes.algorithm.advantages",
    )
    check_divisor(config.update, loss, loss_name)
    require(
        not loss.plan.compares_pairs or isinstance(advantage, PairingAdvantage),
        f"loss: {loss_name} compares pairs of rollouts; it needs "
        "advantage._component_=loop_recipes.algorithm.preferences.ReturnPairs",
    )
    require(
        not isinstance(advantage, TokenAdvantage) or loss.level == "token",
        f"advantage: {advantage_name} gives each token its own; it needs loss.level=token",
    )
    if not isinstance(config, LoopConfig):
        return Method(loss, advantage)
    method = Method(loss, advantage, _build_credit(config, loss, advantage))
    require(
        not (method.plan.keeps_samples_without_signal and config.collection.depends_on_signal),
        "collection.refill_budget must be 1 and rest_iterations 0: where each token has its own advantage, no "
        "rollout is without signal",
    )
    return method


def _build_credit(config: LoopConfig, loss: PolicyLoss, advantage: Advantage) -> dict[str, Credit]:
    """Build the credits that the config names under ``credit``, by their names.

    Raises:
        ConfigError: a credit does not fit the loss, or the one before it.
    """
    credit: dict[str, Credit] = {}
    before = "advantage" if isinstance(advantage, TokenAdvantage) else None
    for name, component in config.credit.items():
        key = f"credit.{name}"
        each = build_checked(key, component, Credit)
        require(
            loss.level == "token",
            f"loss.level is {loss.level!r}; {key} gives tokens advantages of their own: choose token",
        )
        require(
            not loss.plan.compares_pairs,
            f"{key} must be left out: the loss compares pairs of rollouts, which have no use for it",
        )
        require(
            before is None or not each.plan.starts_from_rollout_advantage,
            f"{key} must be left out or come first: it starts from the one advantage of a rollout, and {before} gives "
            "each token its own already",
        )
        each.key = before = key
        credit[name] = each
    return credit
