"""Whatever breaks once the policy has had a turn, the attempt ends in a grade: a coin earns what a coin is worth.

The policy tosses a coin. Where it fell wrong, the world breaks in a way that is drawn, in a call that is drawn: in each
kind of environment, in histories that are shortened, and in turns that no environment is shown.
"""

import pytest

from rollout_server.collecting.policy_client import EpisodeFailed
from rollout_server.collecting.sampling_client import SamplingClient
from support.breaking_worlds import BreakingPool, Breaks, Fault, attempt, check_coins
from support.chat_tokenizers import write_formats


@pytest.fixture(scope="module")
def formats(tmp_path_factory):
    return write_formats(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("kind", ["own", "harness", "remote"])
def test_a_coin_earns_a_coins_worth_whatever_breaks_where_it_fell_wrong(formats, kind):
    check_coins(kind, formats)


async def test_only_an_attempt_without_a_turn_is_repeated(formats, monkeypatch):
    for where, coin in (("start", "heads"), ("start", "tails")):
        monkeypatch.setattr(BreakingPool, "fault", Fault(where, "an error"))

        async def start(self, task_id):
            raise AttributeError("no world")

        monkeypatch.setattr(Breaks, "start", start)
        with pytest.raises(EpisodeFailed, match="no world"):
            await attempt("own", formats["chatml"], Fault(where, "an error"), coin, False, None, monkeypatch)


async def test_what_the_node_itself_breaks_over_after_a_turn_ends_the_episode_in_a_grade(formats, monkeypatch):
    def hear(self, observation):
        raise ValueError("the format has no form for this")

    monkeypatch.setattr(SamplingClient, "hear", hear)
    for coin in ("heads", "tails"):
        [rollout] = await attempt("own", formats["chatml"], Fault("", ""), coin, False, None, monkeypatch)
        assert rollout.reward == float(coin == "heads")
        assert rollout.broke["where"] == "node"
        assert rollout.broke["what"].startswith("ValueError: the format has no form for this")
