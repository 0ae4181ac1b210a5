"""What an evaluation asks of a node."""

from loop_recipes.evaluation.collect import evaluation_request
from loop_recipes.evaluation.config import SamplingConfig
from rollout_server.collection_request import Limits

TASKS = ["craft/goal1_1", "sums/sum1_1"]


def request(**changes):
    return evaluation_request("base", TASKS, 0, SamplingConfig(), Limits(max_turns=50), 0, ["mixed"], **changes)


def test_environments_of_a_mixture_may_have_turns_of_their_own():
    asked = request(environment_turns={"craft": 20})
    assert [asked.max_turns(task) for task in TASKS] == [20, 50]


def test_another_protocol_is_another_collection():
    """What is on disk under an id is found again, so the id says all that a result depends on."""
    ids = [request(**turns).id for turns in ({}, {"environment_turns": {}}, {"environment_turns": {"craft": 20}})]
    assert ids[0] == ids[1] != ids[2]
    assert ids[0] == "eval-base-c47ac20695"
