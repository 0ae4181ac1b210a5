"""A task's id is any text, from the request to the pictures."""

import json
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from agent_environments.description import OWN_BEHAVIOR, Description
from loop_formats.collection_request import CollectionRequest
from loop_formats.rollout import Rollout
from loop_formats.run_files import read_rollouts, write_rollouts
from loop_formats.run_folder import write_description
from loop_recipes.evaluation.comparison import compare, comparison_document
from loop_recipes.evaluation.groups import task_groups
from loop_recipes.evaluation.scores import NamedResults, TaskResult, score
from loop_recipes.evaluation.tables import to_markdown
from loop_recipes.plots.curves import main as plot
from loop_recipes.rollouts.task_sampler import TaskSampler
from loop_recipes.run.metrics import behavior_metrics, environment_metrics, rollout_metrics
from loop_viewer.run_data import RunData
from support.small_runs import stored_rollout

NASTY = [
    "gsm8k-17",
    "a/b c",
    "a|b",
    "$x_{1",
    "[/red] [bold",
    "é 任务\u2028\x85",
    "..",
    "%2F?#&",
    "a_1",
    "a_2",
    "x\ny",
    "\\",
]
ids = st.lists(st.text(min_size=1), min_size=2, max_size=6, unique=True)
ENVIRONMENTS = [Description(), Description(numbered=True), Description(environments={"a": Description()})]


def attempts(collection, tasks):
    """Two rollouts of each task, with texts."""
    rollouts = []
    for place, task in enumerate(tasks):
        for index in range(2):
            made = stored_rollout(collection, task, index, 0, float((place + index) % 2), 300, seed=place)
            said = [{"role": "assistant", "content": "```python\napis.a.b()\n```"} for _ in made.turns]
            rollouts.append(replace(made, messages=said))
    return rollouts


@settings(max_examples=20)
@given(ids, st.sampled_from(ENVIRONMENTS))
def test_any_text_goes_from_the_sampler_to_a_score(tasks, environment):
    sampler = TaskSampler(tasks, 2, seed=0, environment=environment)
    state = json.loads(json.dumps(sampler.state_dict()))
    drawn = [task for _ in range(len(tasks)) for task in sampler.next()]
    again = TaskSampler(tasks, 2, seed=0, environment=environment)
    again.load_state_dict(state)
    assert [task for _ in range(len(tasks)) for task in again.next()] == drawn
    assert set(drawn) == set(tasks)
    request = CollectionRequest(id="c", tasks=tasks, rollouts_per_task=2, policy_version=0)
    assert CollectionRequest.from_dict(json.loads(json.dumps(request.to_dict()))) == request
    assert [item.task_id for item in request.items()] == tasks
    rollouts = [Rollout.from_dict(json.loads(rollout.to_json())) for rollout in attempts("c", tasks)]
    assert [rollout.task_id for rollout in rollouts] == [task for task in tasks for _ in range(2)]
    means = rollout_metrics(rollouts) | environment_metrics(rollouts, environment)
    assert means["rollouts"] == sum(part["rollouts"] for part in means.get("environments", {"": means}).values())
    assert behavior_metrics(rollouts, environment) == {}
    results = [TaskResult.from_dict(TaskResult.from_rollout(r, environment=environment).to_dict()) for r in rollouts]
    scored = score(results, None, environment, resamples=100)
    assert (scored.tasks, scored.success.mean) == (len(tasks), 50.0)
    assert scored.group_count == len(set(map(environment.group_of, tasks)))
    groups = task_groups(tasks, {}, environment)
    sides = [NamedResults(name, "T=0", results) for name in ("one", "other")]
    difference = compare(*sides, groups, environment, resamples=100)
    assert (difference.tasks, difference.gained, difference.lost) == (len(tasks), [], [])
    assert to_markdown(comparison_document([difference], {"dataset": "d"}, environment))


def test_any_text_is_stored_looked_at_and_drawn(tmp_path):
    write_rollouts(tmp_path / "node/collections", "run-i0001", attempts("run-i0001", NASTY))
    assert [r.task_id for r in read_rollouts(tmp_path / "node/collections/run-i0001.jsonl")][::2] == NASTY
    data = RunData(tmp_path)
    assert [entry["task"] for entry in data.summaries("run-i0001")][::2] == NASTY
    assert [data.rollout("run-i0001", 1 + 2 * place)["task_id"] for place in range(len(NASTY))] == NASTY
    write_description(tmp_path, Description(behavior=OWN_BEHAVIOR))
    for task in ("$x_{1", "a/b c"):
        assert plot(["--rollouts", str(tmp_path), "--task", task]) == 0
