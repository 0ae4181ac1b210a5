"""A critic of turns on two ranks (gloo): the numbers and the policy of one process."""

import pytest

from support.sft_ranks import RANK_PAIRS, check_two_ranks

pytestmark = pytest.mark.integration
CRITIC = RANK_PAIRS | {
    "loss": {"_component_": "loop_contrib.sweet_rl.turn_critic.TurnAdvantage", "beta": 1.0},
    "samples": {
        "_component_": "loop_contrib.sweet_rl.turn_critic.WithHidden",
        "information": {"_component_": "contrib_support.hidden_tasks.MadeUpSecrets"},
    },
    "update": {"minibatch_rollouts": 4, "micro_batch_tokens": 300},
}


def test_two_ranks_train_the_same_critic(tmp_path):
    """The two rollouts of a pair may lie on different ranks."""
    check_two_ranks(tmp_path, CRITIC)
