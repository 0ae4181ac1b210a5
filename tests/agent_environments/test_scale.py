"""Rewards on a scale of their own."""

import pytest

from agent_environments.scale import Scale


@pytest.mark.parametrize(("reward", "share"), [(-1, 0.0), (0, 0.25), (3, 1.0), (3 - 1e-12, 1.0), (-1 - 1e-12, 0.0)])
def test_a_reward_is_its_share_of_the_scale_and_the_highest_is_success(reward, share):
    assert Scale.of([-1, 3]).share(reward) == share


@pytest.mark.parametrize("reward", [1.01, -0.01, float("nan"), float("inf"), -float("inf")])
def test_what_is_not_on_the_scale_is_refused(reward):
    with pytest.raises(ValueError, match="is not from 0 to 1: give its scale"):
        Scale.of(None).share(reward)


@pytest.mark.parametrize("scale", [[1, 1], [2, 1], [0], "01", [0, True], [0, float("inf")], [float("nan"), 1]])
def test_a_scale_of_nothing_is_refused(scale):
    with pytest.raises(ValueError, match=r"a scale is \[lowest, highest\]"):
        Scale.of(scale)
