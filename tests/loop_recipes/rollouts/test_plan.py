"""What is asked of the rollout node: tasks, seeds, horizons, names."""

import json
from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from loop_formats.ids import CollectionName, parse_collection_id
from loop_formats.schema import ConfigError
from loop_recipes.config.loop_config import DevEvaluationConfig, LoopConfig, RolloutSourceConfig, read_config
from loop_recipes.rollouts.plan import CollectionPlan, run_name
from support.small_runs import replay_config

pytestmark = pytest.mark.slow

TASKS = [f"task_{number}" for number in range(1, 8)]


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    return replay_config(tmp_path_factory.mktemp("plan"), iterations=1)


def config(file, *overrides):
    return read_config(OmegaConf.merge(OmegaConf.load(file), OmegaConf.from_dotlist(list(overrides))), LoopConfig)


def test_each_iteration_draws_on_and_a_restored_plan_draws_the_same(config_file):
    plan = CollectionPlan(config(config_file), "run", TASKS)
    first, second = plan.training(1, 0, "a"), plan.training(2, 1, "b")
    assert (first.policy_version, first.rollouts_per_task) == (0, 4)
    assert parse_collection_id(first.id) == CollectionName("run", 1)
    assert not set(first.tasks) & set(second.tasks)
    assert first.seed != second.seed
    state = plan.state_dict()
    third = plan.training(3, 2, "c")
    other = CollectionPlan(config(config_file), "run", TASKS)
    other.load_state_dict(state)
    assert other.training(3, 2, "c") == third
    with pytest.raises(ConfigError, match="resume_from_checkpoint: the sampler's state is of seed 0, not 1"):
        CollectionPlan(config(config_file, "seed=1"), "run", TASKS).load_state_dict(state)


def test_the_share_that_may_be_lost_is_no_part_of_the_id_and_holds_for_what_was_asked_for_before(config_file):
    """So a run that ended for it goes on with another share, and with the rollouts that it has."""
    plans = [CollectionPlan(config(config_file, f"collection.max_lost_share={s}"), "run", TASKS) for s in (0.25, 0.4)]
    first, second = (plan.training(1, 0, "a") for plan in plans)
    assert (first.id, first) == (second.id, second)
    assert (first.max_lost, second.max_lost) == (3, 4)
    assert plans[1].with_loss_limit(first).max_lost == 4
    with pytest.raises(ConfigError, match=r"max_lost_share must be below 0\.5"):
        config(config_file, "collection.max_lost_share=0.5")


def refilling(file, budget):
    """Replayed logs hold what there is, so only a config with a node can ask for more."""
    conf = replace(config(file), rollout_node=RolloutSourceConfig(url="http://node:8700"))
    return replace(conf, collection=replace(conf.collection, refill_budget=budget))


def test_tasks_without_signal_are_replaced_within_the_budget_in_rounds(config_file):
    plan = CollectionPlan(refilling(config_file, 2), "run", TASKS)
    first = plan.training(1, 0, "a")
    asked, signal = [first], {first.tasks[0]}
    second = plan.refill(asked, signal, 2, 1, "b")
    assert (len(second.tasks), second.policy_version, second.seed) == (2, 1, first.seed)
    assert parse_collection_id(second.id) == CollectionName("run", 1, 1)
    assert second.max_lost == 3, "of 20 rollouts 5 may be lost, and 2 are"
    asked.append(second)
    third = plan.refill(asked, signal, 0, 1, "b")
    assert len(third.tasks) == 1, "the budget is 6 tasks"
    assert len({*first.tasks, *second.tasks, *third.tasks}) == 6
    assert plan.refill([*asked, third], signal, 0, 1, "b") is None
    assert plan.refill([first], set(first.tasks), 0, 1, "b") is None
    other = CollectionPlan(refilling(config_file, 2), "run", TASKS)
    assert [other.training(1, 0, "a"), other.refill([first], signal, 2, 1, "b")] == [first, second]
    assert other.refill(asked, signal, 0, 1, "c").id != third.id, "another adapter"


def test_a_refill_ends_with_the_tasks(config_file):
    plan = CollectionPlan(refilling(config_file, 9), "run", TASKS)
    asked = [plan.training(1, 0, "a")]
    while (request := plan.refill(asked, set(), 0, 0, "a")) is not None:
        asked.append(request)
    assert sorted(task for request in asked for task in request.tasks) == TASKS


@pytest.mark.parametrize("order", ["passes", "uniform"])
def test_nothing_is_drawn_where_nothing_is_refilled(config_file, order):
    plans = [CollectionPlan(config(config_file, f"collection.task_order={order}"), "run", TASKS) for _ in range(2)]
    for iteration in range(1, 6):
        first, second = (plan.training(iteration, 0, "a") for plan in plans)
        assert first == second
        assert plans[0].refill([first], set(), 0, 0, "a") is None
        assert plans[0].rest(iteration, first.tasks) == 0


def test_a_task_without_signal_rests_also_in_a_restored_plan(config_file):
    conf = config(config_file, "collection.rest_iterations=2", "collection.tasks_per_iteration=1")
    plan = CollectionPlan(conf, "run", TASKS[:3])
    drawn, counts = [], []
    for iteration in range(1, 7):
        drawn += plan.training(iteration, 0, "a").tasks
        counts.append(plan.rest(iteration, drawn[-1:]))
        restored = CollectionPlan(conf, "run", TASKS[:3])
        restored.load_state_dict(json.loads(json.dumps(plan.state_dict())))
        plan = restored
    assert all(len(set(three)) == 3 for three in zip(drawn, drawn[1:], drawn[2:], strict=False))
    assert counts == [1, 2, 2, 2, 2, 2]


def test_another_adapter_or_another_request_is_another_collection(config_file):
    """Also of the same version number, which a run that went back gives to other weights."""

    def ids(adapter, *overrides):
        conf = evaluating(config_file, 1, *overrides)
        plan = CollectionPlan(conf, "run", TASKS, TASKS)
        return plan.training(1, 0, adapter).id, plan.evaluation(1, 0, adapter).id

    assert ids("a") == ids("a")
    for training, dev in (ids("b"), ids("a", "collection.limits.max_context=400")):
        assert training != ids("a")[0]
        assert dev != ids("a")[1]
    assert ids("a", "collection.rollouts_per_task=5")[1] == ids("a")[1]


def test_horizons_begin_at_their_iterations(config_file):
    stages = "collection.horizons=[{from_iteration: 3, max_turns: 2}, {from_iteration: 5, max_turns: 4}]"
    plan = CollectionPlan(config(config_file, stages), "run", TASKS)
    assert [plan.training(iteration, 0, "a").limits.max_turns for iteration in range(1, 7)] == [5, 5, 2, 2, 4, 4]


def test_environments_of_a_mixture_have_shares_and_horizons_of_their_own(config_file):
    tasks = [f"{name}/s{number}_1" for name in ("sums", "craft", "maze") for number in range(4)]
    parts = (
        "collection.environments={sums: {max_turns: 2}, "
        "craft: {share: 2, max_turns: 3, horizons: [{from_iteration: 2, max_turns: 7}]}}"
    )
    plan = CollectionPlan(config(config_file, parts, "collection.tasks_per_iteration=4"), "run", tasks)
    first, second = plan.training(1, 0, "a"), plan.training(2, 0, "a")
    assert sorted(task.partition("/")[0] for task in first.tasks) == ["craft", "craft", "maze", "sums"]
    assert [first.max_turns(f"{name}/s1_1") for name in ("sums", "craft", "maze")] == [2, 3, 5]
    assert [second.max_turns(f"{name}/s1_1") for name in ("sums", "craft", "maze")] == [2, 7, 5]


def evaluating(file, every, *overrides):
    """Replayed logs hold no evaluations, so only a config with a node can ask for one."""
    node = RolloutSourceConfig(url="http://node:8700")
    return replace(config(file, *overrides), rollout_node=node, dev_evaluation=DevEvaluationConfig(every=every))


def test_an_evaluation_is_greedy_once_per_task_and_does_not_draw(config_file):
    plan = CollectionPlan(evaluating(config_file, every=2), "run", TASKS, TASKS[:3])
    before = plan.state_dict()
    request = plan.evaluation(4, 3, "d")
    assert (request.tasks, request.rollouts_per_task) == (TASKS[:3], 1)
    assert parse_collection_id(request.id) == CollectionName("run", 4, dev=True)
    assert (request.sampling.temperature, request.limits.max_turns) == (0.0, 50)
    assert plan.state_dict() == before


def test_an_evaluation_has_turns_for_each_environment_of_a_mixture(config_file):
    conf = evaluating(config_file, every=1)
    conf = replace(conf, dev_evaluation=replace(conf.dev_evaluation, environment_turns={"craft": 20}))
    tasks = ["craft/goal1_1", "sums/sum1_1"]
    request = CollectionPlan(conf, "run", TASKS, tasks).evaluation(1, 0, "a")
    assert [request.max_turns(task) for task in tasks] == [20, 50]
    with pytest.raises(
        ConfigError, match=r"dev_evaluation\.environment_turns\.craft has no tasks; there are tasks of sums"
    ):
        CollectionPlan(conf, "run", TASKS, tasks[1:])


def test_every_nth_policy_is_evaluated_the_first_one_too(config_file):
    plan = CollectionPlan(evaluating(config_file, every=2), "run", TASKS, TASKS)
    assert [bool(plan.evaluation(iteration, 0, "a")) for iteration in range(5)] == [True, False, True, False, True]
    assert CollectionPlan(config(config_file), "run", TASKS).evaluation(0, 0, "a") is None


def test_a_run_keeps_the_name_it_was_given_or_made(config_file, tmp_path):
    named, unnamed = config(config_file), config(config_file, "run_name=null")
    assert run_name(named, tmp_path) == "made-up"
    made = run_name(unnamed, tmp_path)
    assert run_name(unnamed, tmp_path) == made
    assert made.startswith(tmp_path.name[:10])
    (tmp_path / "run.json").unlink()
    assert run_name(unnamed, tmp_path) != made


@pytest.mark.fault("small files that a power cut emptied")
@pytest.mark.parametrize("content", [b"", b"\0" * 30, b"{", b"[]", b"{}"])
def test_a_name_that_cannot_be_read_is_one_line(config_file, tmp_path, content):
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"run\.json holds no name of a run, as after a power cut; give run_name"):
        run_name(config(config_file, "run_name=null"), tmp_path)
