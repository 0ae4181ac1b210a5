"""UCB over turns, on trees whose values are known, and the pairs that come of it."""

import math
import random

import pytest

from loop_contrib.dpo_mcts.turn_tree import TurnTree
from loop_contrib.turn_pairs import TurnIds


def said(words, answer=0):
    """Turns of one token each, all answered alike."""
    return [TurnIds((ord(word),), (answer,)) for word in words]


def own_turns(number, count):
    """As no other rollout has them."""
    return [TurnIds((number, turn), ()) for turn in range(count)]


def grow(tree, iterations, reward_of, depth=4):
    """Play episodes of ``depth`` turns; ``reward_of(path)`` is of the turns taken, each 0 or 1 in its state."""
    for number in range(2 + iterations):
        state = tree.root if number < 2 else tree.select()
        if state is None:
            return
        path, above = [], state.above
        while above is not None:
            path.insert(0, above.state.sampled.index(above))
            above = above.state.above
        path += [len(state.sampled), *[0] * (depth - len(path) - 1)]
        tree.add(state, f"r{number}", own_turns(number, depth - state.turn), reward_of(path))


def test_ucb_finds_the_best_child_of_a_bandit_tree():
    """Bernoulli returns, 0.7 below the better first turn and 0.3 below the other; over 20 seeds."""
    found = 0
    for seed in range(20):
        rng = random.Random(seed)
        tree = TurnTree("task", exploration=0.5)
        grow(tree, 100, lambda path: float(rng.random() < (0.7 if path[0] == 1 else 0.3)), depth=8)  # noqa: B023
        worse, better = tree.root.sampled
        assert worse.visits + better.visits == 102
        found += better.visits > 2 * worse.visits and better.value > worse.value
    assert found >= 18


def test_a_whole_tree_has_the_mean_of_its_leaves_as_values_and_is_then_exhausted():
    tree = TurnTree("task")
    grow(tree, 100, lambda path: path[0] / 2 + path[1] / 4 + path[2] / 8 + path[3] / 16)
    first, second = tree.root.sampled
    assert (first.visits, second.visits) == (8, 8)
    assert first.value == pytest.approx((1 / 4 + 1 / 8 + 1 / 16) / 2)
    assert second.value == pytest.approx(first.value + 1 / 2)
    assert tree.select() is None
    pairs = list(tree.pairs(threshold=0.0))
    assert len(pairs) == 15
    assert [pair.chosen_value - pair.rejected_value for pair in pairs if pair.turn == 3] == pytest.approx([1 / 16] * 8)
    assert {pair.turn for pair in tree.pairs(threshold=0.2)} == {0, 1}


def test_a_closed_state_is_passed_by():
    tree = TurnTree("task")
    tree.add(tree.root, "a", said("xyz"), 1.0)
    assert tree.select() is tree.root
    tree.root.closed = True
    below = tree.root.sampled[0].after
    assert tree.select() is below
    below.closed = below.sampled[0].after.closed = True
    assert tree.select() is None


def test_the_bound_is_ucb1():
    tree = TurnTree("task", exploration=2.0)
    tree.add(tree.root, "a", said("ax"), 0.25)
    tree.add(tree.root, "b", said("bx"), 0.5)
    tree.add(tree.root.sampled[0].after, "c", said("c"), 0.75)
    turn = tree.root.sampled[0]
    assert (turn.visits, turn.value) == (2, 0.5)
    assert tree._bound(turn, 3) == pytest.approx(0.5 + 2 * math.sqrt(math.log(3) / 2))
    assert tree.select() is tree.root.sampled[1].after, "fewer visits, the same value"


def test_rollouts_that_say_the_same_share_a_turn_and_make_no_pair_of_it():
    tree = TurnTree("task")
    tree.add(tree.root, "a", said("xyz"), 1.0)
    tree.add(tree.root, "b", said("xw"), 0.0)
    (first,) = tree.root.sampled
    assert (first.visits, first.value, tree.root.closed) == (2, 0.5, True)
    assert [(turn.rollout_id, turn.value) for turn in first.after.sampled] == [("a", 1.0), ("b", 0.0)]
    (pair,) = tree.pairs(threshold=0.0)
    assert (pair.turn, pair.chosen, pair.rejected) == (1, "a", "b")


def test_a_state_whose_second_sample_is_the_first_is_left():
    tree = TurnTree("task")
    tree.add(tree.root, "a", said("xyz"), 1.0)
    tree.add(tree.root, "b", said("vw"), 0.0)
    below = tree.select()
    tree.add(below, "c", said("yu"), 0.0)
    assert (len(below.sampled), below.closed) == (1, True)
    assert {turn.rollout_id for turn in below.sampled[0].after.sampled} == {"a", "c"}
    below.sampled[0].after.closed = True
    assert tree.select() is tree.root.sampled[1].after


def test_the_best_and_the_worst_of_three_turns_are_the_pair():
    tree = TurnTree("task")
    for rollout_id, words, reward in (("a", "xy", 0.5), ("b", "xz", 1.0), ("c", "xw", 0.0)):
        tree.add(tree.root, rollout_id, said(words), reward)
    (pair,) = tree.pairs(threshold=0.0)
    assert (pair.chosen, pair.rejected) == ("b", "c")


def test_the_same_words_with_another_answer_are_another_turn_but_no_pair():
    tree = TurnTree("task")
    tree.add(tree.root, "a", said("xy", answer=1), 1.0)
    tree.add(tree.root, "b", said("xy", answer=2), 0.0)
    assert [turn.value for turn in tree.root.sampled] == [1.0, 0.0]
    assert list(tree.pairs(threshold=0.0)) == []
