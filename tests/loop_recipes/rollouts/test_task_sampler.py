import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_environments.description import environment_of
from loop_recipes.rollouts.mixed_tasks import MixedTaskSampler, apportion
from loop_recipes.rollouts.task_sampler import TaskSampler, UniformTaskSampler

task_sets = st.sets(st.integers(0, 40), min_size=1, max_size=20).map(lambda ids: [f"s{number}_1" for number in ids])


@given(task_sets, st.data())
def test_sampler_visits_everything_once_per_pass(tasks, data):
    size = data.draw(st.integers(1, len(tasks)))
    sampler = TaskSampler(tasks, size, seed=3)
    drawn = []
    for _ in range(30):
        iteration = sampler.next()
        assert len(iteration) == size == len(set(iteration))
        drawn += iteration
    for start in range(0, len(drawn) - len(tasks) + 1, len(tasks)):
        assert sorted(drawn[start : start + len(tasks)]) == sorted(tasks)


@pytest.mark.parametrize("kind", [TaskSampler, UniformTaskSampler])
@given(task_sets, st.integers(0, 15), st.integers(0, 5))
def test_sampler_resumes_and_ignores_the_order_of_its_tasks(kind, tasks, before, seed):
    size = max(1, len(tasks) // 3)
    one = kind(tasks, size, seed)
    for _ in range(before):
        one.next()
    state = json.loads(json.dumps(one.state_dict()))
    other = kind(tasks[::-1], size, seed)
    other.load_state_dict(state)
    assert [one.next() for _ in range(10)] == [other.next() for _ in range(10)]


def test_sampler_visits_every_scenario_before_any_twice():
    tasks = [f"s{scenario}_{number}" for scenario in range(7) for number in (1, 2, 3)]
    sampler = TaskSampler(tasks, 7, seed=0)
    iterations = [sampler.next() for _ in range(6)]
    for iteration in iterations:
        assert sorted(task[:2] for task in iteration) == [f"s{scenario}" for scenario in range(7)]
    assert iterations[0] != iterations[3], "another pass, another order"
    assert len(set(TaskSampler(["one", "two", "three"], 3, seed=0).next())) == 3, "ids without a scenario"


MIXTURE = [f"sums/s{number}_1" for number in range(5)] + [f"craft/c{number}_1" for number in range(12)]
TWO = ["a_1", "b_1"]
TOO_FEW = "environment craft: tasks_per_iteration is 0, but must lie between 1 and the number of tasks"


def given_state(sampler, other):
    return lambda: sampler.load_state_dict(other.state_dict())


def mixed(shares):
    return lambda: MixedTaskSampler(MIXTURE, 8, 0, shares)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (given_state(TaskSampler(TWO, 1, 0), TaskSampler(TWO[:1], 1, 0)), "of other tasks"),
        (given_state(TaskSampler(TWO, 1, 0), TaskSampler(TWO, 1, 1)), "of seed 1"),
        (given_state(mixed({})(), TaskSampler(MIXTURE, 8, 0)), "the sampler's state is of other"),
        (given_state(TaskSampler(MIXTURE, 8, 0), mixed({})()), "the sampler's state is of other"),
        (lambda: TaskSampler(TWO, 0, 0), "between 1 and the number of tasks, 2"),
        (lambda: TaskSampler(TWO, 3, 0), "between 1 and the number of tasks, 2"),
        (mixed({"chess": 1.0}), "environments.chess has no tasks; there are tasks of craft, sums"),
        (mixed({"craft": 0.01}), TOO_FEW),
        (mixed({"sums": 9.0}), "environment sums: tasks_per_iteration is 7, but must lie between 1 .*, 5"),
    ],
)
def test_states_of_others_and_shares_that_cannot_be_are_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


@settings(max_examples=30)
@given(task_sets, st.data())
def test_replacements_are_new_to_the_iteration_and_a_pass_still_visits_everything(tasks, data):
    size = data.draw(st.integers(1, len(tasks)))
    sampler = TaskSampler(tasks, size, seed=3)
    counts = Counter()
    for _ in range(20):
        iteration = sampler.next()
        of = iteration[: data.draw(st.integers(0, size))]
        more = sampler.replacements(of, iteration, ())
        assert len(more) == min(len(of), len(tasks) - size)
        assert len({*iteration, *more}) == size + len(more)
        counts.update([*iteration, *more])
    assert max(counts.values()) - min(counts[task] for task in tasks) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", [TaskSampler, UniformTaskSampler])
@settings(max_examples=30)
@given(tasks=task_sets, data=st.data())
def test_no_iteration_takes_a_task_that_rests_unless_it_must(kind, tasks, data):
    size = data.draw(st.integers(1, len(tasks)))
    sampler = kind(tasks, size, seed=3)
    for _ in range(10):
        resting = {task: data.draw(st.integers(1, 3)) for task in data.draw(st.sets(st.sampled_from(tasks)))}
        iteration = sampler.next(resting)
        assert len(iteration) == size == len(set(iteration))
        woken = [resting[task] for task in iteration if task in resting]
        assert len(woken) <= max(0, size - (len(tasks) - len(resting)))
        assert max(woken, default=0) <= min((resting[task] for task in resting if task not in iteration), default=9)
        assert not set(sampler.replacements(iteration, iteration, resting)) & {*iteration, *resting}


@pytest.mark.parametrize("kind", [TaskSampler, UniformTaskSampler])
def test_every_iteration_of_a_mixture_has_its_shares(kind):
    sampler = MixedTaskSampler(MIXTURE, 8, 0, {"craft": 3.0}, kind)
    iterations = [sampler.next() for _ in range(6)]
    for iteration in iterations:
        assert Counter(map(environment_of, iteration)) == {"craft": 6, "sums": 2}
        assert len(set(iteration)) == 8
        sums = [task for task in iteration if environment_of(task) == "sums"]
        more = sampler.replacements([*sums, iteration[0]], iteration, ())
        assert Counter(map(environment_of, more)) == {"craft": 1, "sums": 2}
        assert not set(more) & set(iteration)
    state = json.loads(json.dumps(sampler.state_dict()))
    other = MixedTaskSampler(MIXTURE[::-1], 8, 0, {"craft": 3.0}, kind)
    other.load_state_dict(state)
    assert [other.next() for _ in range(4)] == [sampler.next() for _ in range(4)]


@given(st.integers(0, 200), st.dictionaries(st.text(), st.floats(0.01, 100.0), min_size=1, max_size=5))
def test_apportionment_is_whole_and_within_one_of_exact(total, weights):
    counts = apportion(total, weights)
    assert sum(counts.values()) == total
    for name, weight in weights.items():
        assert abs(counts[name] - total * weight / sum(weights.values())) < 1.0 + 1e-6
