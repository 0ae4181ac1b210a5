"""How rollouts are dealt to minibatches: all of them, once, and together what belongs together."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from loop_recipes.algorithm.minibatches import minibatches
from support.learner_cases import as_pairs, make_samples


@given(count=st.integers(1, 60), size=st.integers(1, 40) | st.none(), seed=st.integers(0, 5))
def test_minibatches_use_every_rollout_once_and_differ_by_one_at_most(count, size, seed):
    samples = make_samples([5] * count)
    parts = minibatches(samples, size, seed)
    assert sorted(sample.rollout_id for part in parts for sample in part) == sorted(s.rollout_id for s in samples)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert len(parts) == (1 if size is None else max(1, round(count / size)))
    again = minibatches(samples, size, seed)
    assert [[sample.rollout_id for sample in part] for part in again] == [[s.rollout_id for s in p] for p in parts]


@given(count=st.integers(1, 100), size=st.integers(1, 40))
def test_full_minibatches_leave_the_rest_to_the_last(count, size):
    samples = make_samples([3] * count)
    parts = minibatches(samples, size, 4, full=True)
    assert [len(part) for part in parts[:-1]] == [size] * (count // size - (count % size == 0))
    assert len(parts[-1]) == (count % size or size)
    assert {sample.rollout_id for part in parts for sample in part} == {sample.rollout_id for sample in samples}
    order = [sample.rollout_id for part in parts for sample in part]
    assert order == [sample.rollout_id for part in minibatches(samples, None, 4) for sample in part]


def test_each_seed_gives_an_order_of_its_own():
    samples = make_samples([5] * 12)
    orders = {tuple(s.rollout_id for part in minibatches(samples, 4, seed) for s in part) for seed in range(3)}
    assert len(orders) == 3


def test_a_minibatch_holds_whole_episodes():
    samples = [replace(s, episode_id=f"episode-{n % 7}", segment=n // 7) for n, s in enumerate(make_samples([5] * 20))]
    parts = minibatches(samples, 2, 3)
    assert sorted(sample.rollout_id for part in parts for sample in part) == sorted(s.rollout_id for s in samples)
    of_part = [{sample.episode for sample in part} for part in parts]
    assert sum(map(len, of_part)) == 7
    assert {len(names) for names in of_part} <= {1, 2}


@given(pairs=st.integers(1, 12), singles=st.integers(0, 5), size=st.integers(1, 9), seed=st.integers(0, 3))
def test_minibatches_keep_pairs_together(pairs, singles, size, seed):
    samples = make_samples([6] * (2 * pairs + singles))
    samples = as_pairs(samples, [(i, 2 * pairs - 1 - i) for i in range(pairs)])
    parts = minibatches(samples, size, seed)
    assert sorted(s.rollout_id for part in parts for s in part) == sorted(s.rollout_id for s in samples)
    for part in parts:
        names = [sample.pair for sample in part if sample.pair]
        assert part
        assert all(names.count(name) == 2 for name in names)
