"""What the parts of a method need together."""

from dataclasses import asdict

import pytest

from loop_recipes.algorithm.advantages import LeaveOneOut, ReturnToGo, TurnReturns
from loop_recipes.algorithm.critic import Critic
from loop_recipes.algorithm.losses import ClippedPolicyLoss, LogLikelihood
from loop_recipes.algorithm.method import Method
from loop_recipes.algorithm.preferences import DPO, ReturnPairs
from support.small_runs import ByTokenPosition

OF_TOKENS = {"keeps_samples_without_signal": True, "starts_from_rollout_advantage": True}


@pytest.mark.parametrize(
    ("method", "needs"),
    [
        (Method(ClippedPolicyLoss(), LeaveOneOut()), {}),
        (Method(ClippedPolicyLoss(kl_coefficient=0.1), LeaveOneOut()), {"needs_reference": True}),
        (Method(LogLikelihood(), LeaveOneOut()), {"sums_tokens": True}),
        (Method(DPO(), ReturnPairs()), {"compares_pairs": True}),
        (Method(ClippedPolicyLoss(), ReturnToGo()), {**OF_TOKENS, "needs_reference": True}),
        (Method(ClippedPolicyLoss(), TurnReturns()), OF_TOKENS),
        (Method(ClippedPolicyLoss(), ByTokenPosition()), {**OF_TOKENS, "needs_reference": True}),
        (
            Method(ClippedPolicyLoss(), LeaveOneOut(), {"critic": Critic(warmup_iterations=3)}),
            {**OF_TOKENS, "policy_rests_iterations": 3},
        ),
    ],
    ids=["loop", "kl", "likelihood", "pairs", "to_go", "turns", "undeclared", "critic"],
)
def test_a_method_needs_what_its_parts_declare(method, needs):
    assert {name: value for name, value in asdict(method.plan).items() if value} == needs
