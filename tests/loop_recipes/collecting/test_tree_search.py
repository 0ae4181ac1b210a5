"""Turn trees grown on a node with the counter environment."""

import pytest

from loop_recipes.collecting import tree_search
from loop_recipes.collecting.branching import HowToSample
from loop_recipes.collecting.node_source import NodeSource
from loop_recipes.collecting.tree_search import TreeSearch
from loop_recipes.collecting.turn_pairs import PairBuffer
from rollout_server.collection_request import Limits, Sampling
from rollout_server.run_files import find_logs, read_rollouts
from support.counter_node import local_node
from support.waiting import COMMAND_S, DEADLINE_S

LIMITS = Limits(max_turns=4, max_tokens_per_turn=64, max_context=1000, episode_deadline_s=DEADLINE_S)
TASKS = ["reach3_1", "reach5_1"]


class Stopped(Exception):
    pass


class Stopping(NodeSource):
    """Raises once it has been asked for ``most`` collections."""

    def __init__(self, local, most=1000):
        super().__init__(local.client, None, DEADLINE_S, COMMAND_S, lambda: False)
        self.left = most

    def start(self, request):
        self.left -= 1
        if self.left < 0:
            raise Stopped
        super().start(request)


def search(iterations=6, **changes):
    how = HowToSample(1, 0, Sampling(), LIMITS)
    return TreeSearch("demo", TASKS, how, iterations=iterations, **changes)


def check_pairs(pairs, root):
    """Both turns follow the same ids, and are sampled; what was chosen is worth more."""
    rollouts = {rollout.rollout_id: rollout for log in find_logs(root) for rollout in read_rollouts(log)}
    for pair in pairs:
        chosen, rejected = rollouts[pair.chosen], rollouts[pair.rejected]
        turns = [rollout.turns[pair.turn - rollout.turns_before] for rollout in (chosen, rejected)]
        assert turns[0].start == turns[1].start
        assert chosen.token_ids[: turns[0].start] == rejected.token_ids[: turns[0].start]
        assert all(chosen.mask[turns[0].start : turns[0].end])
        assert all(rejected.mask[turns[1].start : turns[1].end])
        assert {chosen.task_id, rejected.task_id} == {pair.task_id}
        assert pair.chosen_value > pair.rejected_value


async def test_trees_grow_and_their_pairs_are_kept(policy, tmp_path, monkeypatch):
    """With a request for each task by itself."""
    monkeypatch.setattr(tree_search, "BRANCHES_OF_A_REQUEST", 1)
    buffer = tmp_path / "pairs.jsonl"
    async with local_node(policy, tmp_path / "node") as local:
        trees = await local.call(search().run, Stopping(local), buffer)
        for tree in trees:
            assert sum(turn.visits for turn in tree.root.sampled) <= 8
            assert len(tree.root.sampled) == 2
    with PairBuffer(buffer) as kept:
        assert kept.pairs
        check_pairs(kept.pairs, tmp_path / "node")


async def test_a_search_that_was_stopped_samples_nothing_twice(policy, tmp_path):
    """On the same node root, and of the same size as one that was never stopped."""
    async with local_node(policy, tmp_path / "whole") as local:
        await local.call(search().run, Stopping(local), tmp_path / "whole.jsonl")
        whole = len(local.vllm.requests)
    asked = 0
    for most in (3, 1000):
        async with local_node(policy, tmp_path / "node") as local:
            if most == 3:
                with pytest.raises(Stopped):
                    await local.call(search().run, Stopping(local, most), tmp_path / "stopped.jsonl")
            else:
                await local.call(search().run, Stopping(local, most), tmp_path / "stopped.jsonl")
            asked += len(local.vllm.requests)
    assert asked == whole
    assert (tmp_path / "stopped.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
