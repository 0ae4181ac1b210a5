"""Turn trees grown on a node with the counter environment."""

import pytest

from loop_contrib.dpo_mcts.tree_search import TreeSearch
from loop_contrib.turn_pairs import read_pairs, turns_of
from loop_formats.collection_request import Limits, Sampling
from loop_formats.run_files import find_logs, read_rollouts
from loop_formats.schema import ConfigError
from loop_recipes.rollouts import branching
from loop_recipes.rollouts.branching import HowToSample
from loop_recipes.rollouts.node_source import NodeSource
from loop_recipes.rollouts.source import NoRollouts
from support.counter_node import local_node
from support.waiting import COMMAND_S, DEADLINE_S

pytestmark = pytest.mark.slow

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


def check_pairs(pairs, folder):
    """Both turns follow the same ids, and are sampled; what was chosen is worth more; only their rollouts are kept."""
    rollouts = {rollout.rollout_id: rollout for log in find_logs(folder) for rollout in read_rollouts(log)}
    assert set(rollouts) == {name for pair in pairs for name in (pair.chosen, pair.rejected)}
    for pair in pairs:
        chosen, rejected = rollouts[pair.chosen], rollouts[pair.rejected]
        turns = [rollout.turns[pair.turn - rollout.turns_before] for rollout in (chosen, rejected)]
        assert turns[0].start == turns[1].start
        assert chosen.token_ids[: turns[0].start] == rejected.token_ids[: turns[0].start]
        assert all(chosen.mask[turns[0].start : turns[0].end])
        assert all(rejected.mask[turns[1].start : turns[1].end])
        said = [
            rollout.token_ids[turn.start : turn.end] for rollout, turn in zip((chosen, rejected), turns, strict=True)
        ]
        assert said[0] != said[1]
        assert {chosen.task_id, rejected.task_id} == {pair.task_id}
        assert pair.chosen_value > pair.rejected_value


async def test_trees_grow_and_their_pairs_are_kept(policy, tmp_path, monkeypatch):
    """With a request for each task by itself."""
    monkeypatch.setattr(branching, "BRANCHES_OF_A_REQUEST", 1)
    async with local_node(policy, tmp_path / "node") as local:
        trees = await local.call(search().run, Stopping(local), tmp_path / "trees")
        sampled = [rollout for log in find_logs(tmp_path / "node") for rollout in read_rollouts(log)]
        for tree in trees:
            assert sum(turn.visits for turn in tree.root.sampled) <= 8
            first = [one for one in sampled if one.task_id == tree.task_id and one.branch_of is None]
            assert len(first) == 2
            # Where both said the same, the tree asks for another beginning.
            again = [
                one for one in sampled if one.task_id == tree.task_id and one.branch_of and not one.branch_of.turns
            ]
            assert {turn.ids for turn in tree.root.sampled} == {turns_of(rollout)[0] for rollout in first + again}
    pairs = read_pairs(tmp_path / "trees/pairs.jsonl")
    assert pairs
    check_pairs(pairs, tmp_path / "trees")


async def test_a_search_that_was_stopped_samples_nothing_twice(policy, tmp_path):
    """On the same node root, and of the same size as one that was never stopped."""
    async with local_node(policy, tmp_path / "whole") as local:
        await local.call(search().run, Stopping(local), tmp_path / "whole/trees")
        whole = len(local.vllm.requests)
    asked = 0
    for most in (3, 1000):
        async with local_node(policy, tmp_path / "node") as local:
            if most == 3:
                with pytest.raises(Stopped):
                    await local.call(search().run, Stopping(local, most), tmp_path / "stopped")
            else:
                await local.call(search().run, Stopping(local, most), tmp_path / "stopped")
            asked += len(local.vllm.requests)
    assert asked == whole
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole/trees")


def contents(folder):
    pairs = (folder / "pairs.jsonl").read_text()
    return pairs, {log.name: [rollout.token_ids for rollout in read_rollouts(log)] for log in find_logs(folder)}


def test_what_cannot_be_searched_is_refused():
    for changes in ({"iterations": 0}, {"exploration": -1.0}, {"threshold": -0.1}):
        with pytest.raises(ConfigError, match=f"{next(iter(changes))} is"):
            search(**changes)


async def test_the_tree_of_a_task_that_is_lost_stays_empty_and_without_any_rollout_there_is_no_search(policy, tmp_path):
    async with local_node(policy, tmp_path / "node") as local:
        hopeless = local.node.tokens.encode_text("from 0 to 5")

        def fault(body):
            ids = body["token_ids"]
            return 400 if any(ids[i : i + len(hopeless)] == hopeless for i in range(len(ids))) else None

        local.vllm.fault = fault
        found = {tree.task_id: tree for tree in await local.call(search(2).run, Stopping(local), tmp_path / "some")}
        assert found["reach3_1"].root.sampled
        assert not found["reach5_1"].root.sampled
        local.vllm.fault = lambda body: 400
        other = TreeSearch("other", TASKS, HowToSample(1, 0, Sampling(), LIMITS), iterations=2)
        with pytest.raises(NoRollouts, match="every first rollout is lost"):
            await local.call(other.run, Stopping(local), tmp_path / "none")
