"""Credit for turns by Monte-Carlo continuations that the rollout node plays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from agent_environments.protocol import is_harness
from loop_contrib.turn_credit.branch_credit import credits_in_parts, with_unequal_returns
from loop_contrib.turn_credit.spread import TurnCredit
from loop_formats.collection_request import Sampling
from loop_formats.rollout import Rollout
from loop_formats.schema import Count, Positive, require
from loop_recipes.algorithm.credit import TrainingRun
from loop_recipes.config.loop_config import LoopConfig
from loop_recipes.engine.samples import ScoredSample
from loop_recipes.rollouts.branching import HowToSample
from loop_recipes.run.stop_request import StopRequested


class ByBranches(TurnCredit):
    """Spreads each rollout's advantage over its turns, according to the returns of continuations from every turn.

    Args:
        continuations: number of episodes played from every turn.
        strength: factor of the credits that are added to the advantage.
    """

    same_scale = False
    _run: TrainingRun

    def __init__(self, continuations: Count = 4, strength: Positive = 1.0) -> None:
        super().__init__(strength)
        self._continuations = continuations
        self._credits: dict[str, Tensor] = {}

    def check(self, config: LoopConfig) -> None:
        key, node = self.key, config.node
        stored = config.rollout_node.replay is None
        require(stored, f"{key} must be left out: stored rollouts cannot be gone on from; take credit by a critic")
        config.collection.limits.check_branching("collection.limits")
        require(
            not config.collection.environments,
            f"{key} must be left out: branches of a mixture of environments have no turn limits of their own",
        )
        require(
            node is None or not is_harness(node.environment.name),
            f"{key} must be left out: the node cannot go on from the turns of an agent that is a program",
        )

    def setup(self, run: TrainingRun) -> None:
        self._run = run

    def collected(self, rollouts: Sequence[Rollout], iteration: int) -> None:
        conf = self._run.config
        limits = replace(conf.collection.limits, max_turns=self._run.max_turns(iteration))
        versions = {version for rollout in rollouts for version in rollout.policy_versions}
        seed = conf.seed + iteration
        how = {v: HowToSample(self._continuations, v, Sampling(), limits, seed) for v in versions}
        unequal = with_unequal_returns(rollouts, conf.update)
        credits = credits_in_parts(self._run.ask, unequal, how, conf.update, conf.collection.deadline_s)
        if credits is None:
            raise StopRequested("while waiting for what goes on from the iteration's rollouts")
        self._credits = {name: torch.tensor(turns, dtype=torch.float64) for name, turns in credits.items()}

    def credits(self, samples: Sequence[ScoredSample]) -> Mapping[str, Tensor]:
        return self._credits
