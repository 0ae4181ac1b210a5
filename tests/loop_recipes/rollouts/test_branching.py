"""How branches are cut into requests that a node takes."""

import json

import pytest

from agent_environments.protocol import Message
from loop_formats.branch import Branch, BranchPoint, Exchange
from loop_formats.collection_request import Limits, Sampling
from loop_recipes.rollouts.branching import BRANCHES_OF_A_REQUEST, HowToSample, branch_requests
from rollout_server.app import MAX_JSON_BYTES


def branches(count, tokens):
    """As of rollouts of ``tokens`` ids of Qwen2.5's vocabulary, and a text of three bytes for each id."""
    exchanges = [Exchange("日" * tokens, "seen")]
    opening = [Message("user", "Do it.")]
    return [
        Branch(f"c/t_{n}/0.0", f"t_{n}", "d", opening, exchanges, [151_000] * tokens, [BranchPoint(1, tokens)])
        for n in range(count)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "requests"), [(100, 3), (65_536, 40)])
def test_no_request_is_larger_than_a_node_takes(tokens, requests):
    wanted = branches(2 * BRANCHES_OF_A_REQUEST + 8, tokens)
    limits = Limits(max_context=1 << 20)
    made = branch_requests(iter(wanted), HowToSample(1, 0, Sampling(), limits))
    assert [branch for request in made for branch in request.branches] == wanted
    assert len(made) <= requests
    assert len({request.id for request in made}) == len(made)
    for request in made:
        assert len(request.branches) <= BRANCHES_OF_A_REQUEST
        assert len(json.dumps(request.to_dict(), ensure_ascii=False).encode()) < MAX_JSON_BYTES


def test_of_no_branches_there_is_no_request():
    assert branch_requests([], HowToSample(1, 0, Sampling(), Limits())) == []
