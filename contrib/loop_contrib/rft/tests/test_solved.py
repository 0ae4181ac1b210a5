"""Sampling until solved: rounds ask for what is missing only, and a search started again finds the same."""

from dataclasses import replace

import pytest

from loop_contrib.rft.solved import SearchState, SolvedSearch, search
from loop_formats.collection_request import Limits, LostRollout
from loop_formats.run_files import find_logs, read_rollouts
from loop_formats.schema import ConfigError
from loop_recipes.rollouts.source import NoRollouts
from rollout_server.client import CollectionFailed
from support.fake_node import collected
from support.small_runs import stored_rollout

TASKS = ["task_1", "task_2", "task_3"]
SOLVED_AT = {(0.5, "task_1"): 1, (0.5, "task_2"): 3, (1.0, "task_1"): 2, (1.0, "task_3"): 1}
"""(temperature, task) -> the attempt that solves it; others are never solved."""


class Source:
    """Plays by the table above, and counts what it is asked for."""

    def __init__(self):
        self.asked = []

    def start(self, request):
        self.asked.append((request.sampling.temperature, request.id, tuple(request.tasks)))

    def read(self, request):
        attempt, temperature = int(request.id[-3:]), request.sampling.temperature
        rollouts = [
            stored_rollout(request.id, task, 0, 0, float(SOLVED_AT.get((temperature, task)) == attempt), 50, attempt)
            for task in request.tasks
        ]
        return collected(rollouts)


def wanted(**changes):
    options = {"name": "rft", "tasks": TASKS, "temperatures": [0.5, 1.0], "attempts": 4, "limits": Limits()}
    return SolvedSearch(**{**options, **changes})


def test_each_round_asks_for_what_its_temperature_has_not_solved(tmp_path):
    source, rounds = Source(), []
    found = search(source, wanted(), tmp_path, rounds.append)
    assert found == rounds[-1] == SearchState(attempt=4, wanted=6, solved=4, tasks=3)
    assert [each.solved for each in rounds] == [2, 3, 4, 4]
    assert source.asked[:4] == [
        (0.5, "rft-t0.50-a001", ("task_1", "task_2", "task_3")),
        (1.0, "rft-t1.00-a001", ("task_1", "task_2", "task_3")),
        (0.5, "rft-t0.50-a002", ("task_2", "task_3")),
        (1.0, "rft-t1.00-a002", ("task_1", "task_2")),
    ]
    assert source.asked[-2:] == [(0.5, "rft-t0.50-a004", ("task_3",)), (1.0, "rft-t1.00-a004", ("task_2",))]
    kept = [rollout for log in find_logs(tmp_path) for rollout in read_rollouts(log)]
    assert {(rollout.collection_id, rollout.task_id) for rollout in kept} == {
        (f"rft-t{temperature:.2f}-a{attempt:03d}", task) for (temperature, task), attempt in SOLVED_AT.items()
    }
    assert {rollout.reward for rollout in kept} == {1.0}


class Losing(Source):
    """Loses every rollout of the ``lost`` tasks."""

    def __init__(self, *lost):
        super().__init__()
        self.lost = lost

    def read(self, request):
        found = super().read(request)
        lost = [LostRollout(task, 0, "server_error", "boom") for task in request.tasks if task in self.lost]
        end = replace(found.end, lost=lost)
        if len(lost) == len(request.tasks):
            raise CollectionFailed("all are lost", end)
        return replace(found, rollouts=[r for r in found.rollouts if r.task_id not in self.lost], end=end)


def test_a_task_that_is_always_lost_ends_nothing_until_all_are(tmp_path, caplog):
    found = search(Losing("task_3"), wanted(), tmp_path / "some")
    assert (found.attempt, found.solved, found.tasks) == (4, 3, 2)
    assert "collection rft-t0.50-a004: 1 of 1 rollouts lost (server_error 1)" in caplog.text
    with pytest.raises(NoRollouts, match="all of the 6 rollouts asked for are lost"):
        search(Losing(*TASKS), wanted(), tmp_path / "all")


def test_each_temperature_samples_with_seeds_of_its_own_in_each_round():
    asked = [wanted(seed=seed).request(t, attempt, TASKS) for seed in (0, 1) for t in (0.5, 1.0) for attempt in (1, 2)]
    assert len({request.seed for request in asked}) == len(asked)


def test_started_again_it_asks_for_the_same_collections_which_the_node_has(tmp_path):
    first, again = Source(), Source()
    before = search(first, wanted(), tmp_path)
    texts = {log.name: log.read_text() for log in find_logs(tmp_path)}
    assert search(again, wanted(), tmp_path) == before
    assert again.asked == first.asked
    assert {log.name: log.read_text() for log in find_logs(tmp_path)} == texts


def test_it_ends_when_all_is_solved_or_the_time_is_over(tmp_path):
    source = Source()
    assert search(source, wanted(tasks=["task_1"]), tmp_path / "all").attempt == 2
    assert search(Source(), wanted(), tmp_path / "late", out_of_time=lambda: True) == SearchState(0, 6, 0, 0)


def test_a_budget_of_rollouts_is_kept_and_cut_evenly_over_the_temperatures(tmp_path):
    source = Source()
    assert search(source, wanted(rollouts=9), tmp_path) == SearchState(attempt=2, wanted=6, solved=3, tasks=2)
    assert sum(len(tasks) for _, _, tasks in source.asked) == 9
    assert [(temperature, tasks) for temperature, _, tasks in source.asked[2:]] == [
        (0.5, ("task_2",)),
        (1.0, ("task_1", "task_2")),
    ]


@pytest.mark.parametrize(
    "changes", [{"temperatures": []}, {"temperatures": [0.5, 0.501]}, {"attempts": 0}, {"rollouts": 0}]
)
def test_a_search_that_cannot_be_made_is_refused(changes):
    with pytest.raises(ConfigError, match=r"temperatures|rollouts"):
        wanted(**changes)
