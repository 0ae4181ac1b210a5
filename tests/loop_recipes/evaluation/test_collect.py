"""What an evaluation asks of a node."""

import random

from loop_formats.collection_request import CollectionEnd, Limits, LostRollout
from loop_recipes.evaluation.collect import ResultStore, evaluation_cell, run_cells
from loop_recipes.evaluation.config import PolicyUnderTest, SamplingConfig
from rollout_server.client import CollectionFailed
from support.random_policy import write_tokenizer
from support.small_runs import in_sequences
from support.viewer_run import ordinary

TASKS = ["craft/goal1_1", "sums/sum1_1"]


BASE = PolicyUnderTest("base", None, "base")


def request(**changes):
    return evaluation_cell(BASE, TASKS, SamplingConfig(), Limits(max_turns=50), 0, {"dataset": "x"}, **changes).request


def test_environments_of_a_mixture_may_have_turns_of_their_own():
    asked = request(environment_turns={"craft": 20})
    assert [asked.max_turns(task) for task in TASKS] == [20, 50]


def test_another_protocol_is_another_collection():
    """What is on disk under an id is found again, so the id says all that a result depends on."""
    ids = [request(**turns).id for turns in ({}, {"environment_turns": {}}, {"environment_turns": {"craft": 20}})]
    assert ids[0] == ids[1] != ids[2]
    assert ids[0].startswith("eval-base-t0-")


def test_the_last_rollout_before_a_failure_is_kept(tmp_path):
    """Of a task whose other run is lost, in one sequence and in several."""
    write_tokenizer(tmp_path / "model")

    class Nodes:
        def start(self, request):
            pass

        def events(self, request):
            rollout = ordinary(tmp_path, request.id, request.tasks[0], 0, random.Random(0))
            yield from in_sequences(rollout) if request.tasks == ["b_1"] else [rollout]
            lost = [LostRollout(request.tasks[0], 1, "server_error", "boom")]
            if request.only:
                raise CollectionFailed("1 of 1 rollouts lost", CollectionEnd("failed", 0, 0, 0, {}, 1.0, lost=lost))
            yield CollectionEnd("complete", 1, 0, 0, {}, 1.0, lost=lost)

    sampling = SamplingConfig(temperature=1.0, runs=2)
    for task in ("a_1", "b_1"):
        cell = evaluation_cell(BASE, [task], sampling, Limits(max_turns=5), 0)
        store = ResultStore(tmp_path / f"{task}.jsonl")
        run_cells(Nodes(), [cell], store, retries=1, deadline_s=100.0)
        assert [(result.run, result.failure) for result in store.results(cell)] == [
            (0, None),
            (1, "server_error: boom"),
        ]
