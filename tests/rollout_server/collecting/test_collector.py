import random
import sys
from collections import Counter

import pytest

from loop_formats.branch import Branch, BranchPoint, Exchange
from loop_formats.collection_request import MAX_ATTEMPTS, CollectionRequest, failures_warning
from loop_formats.rollout import BRANCH_DIFFERS
from loop_formats.schema import ConfigError
from rollout_server.collecting.collector import Collector, MissingRollout
from support.texts import texts_beside

TABLES = texts_beside(__file__)


def make_request(tasks=4, rollouts=3, floor=None, fraction=1.0, **others):
    return CollectionRequest(
        id="c",
        tasks=[f"t_{n}" for n in range(tasks)],
        rollouts_per_task=rollouts,
        policy_version=0,
        min_rollouts_per_task=floor,
        min_rollouts_fraction=fraction,
        **others,
    )


def start_all(collector):
    keys = []
    while (key := collector.start_next()) is not None:
        keys.append(key)
    return keys


def test_starts_are_spread_over_the_tasks():
    keys = start_all(Collector(make_request(tasks=3, rollouts=2)))
    assert [(key.task_id, key.index) for key in keys] == [(f"t_{t}", i) for i in range(2) for t in range(3)]


def test_an_episode_that_ended_leaves_one_place_to_its_task():
    collector = Collector(make_request(tasks=2, rollouts=4))
    first, _ = collector.start_next(), collector.start_next()
    collector.finished(first)
    assert [key.task_id for key in start_all(collector)] == ["t_0", "t_1"] * 3


def test_early_stop_needs_both_floors():
    collector = Collector(make_request(tasks=2, rollouts=4, floor=2, fraction=0.5))
    keys = start_all(collector)
    first, second = ([key for key in keys if key.task_id == f"t_{n}"] for n in range(2))
    for key in first:
        collector.finished(key)
    collector.finished(second[0])
    assert collector.outcome is None, "5 of 4 needed in all, but 1 of 2 of the second task"
    collector.finished(second[1])
    assert collector.outcome == "early_stop"
    assert collector.running == set(second[2:])
    for key in second[2:]:
        collector.drop(key)
    assert collector.progress().dropped == 2


def test_tasks_at_their_floor_start_nothing_once_the_total_is_there():
    collector = Collector(make_request(tasks=2, rollouts=6, floor=2, fraction=0.5))
    keys = [collector.start_next() for _ in range(6)]
    stuck = [key for key in keys if key.task_id == "t_1"]
    for key in keys:
        if key not in stuck[:2]:
            collector.finished(key)
    while collector.outcome is None and collector.progress().finished < 6:
        key = collector.start_next()
        if key.task_id == "t_0":
            collector.finished(key)
        else:
            stuck.append(key)
    assert collector.outcome is None
    assert {key.task_id for key in start_all(collector)} <= {"t_1"}


def test_failed_attempts_are_replaced_first_and_then_given_up():
    collector = Collector(make_request(tasks=3, rollouts=2, floor=1, fraction=0.5))
    seen = [collector.start_next()]
    for _ in range(MAX_ATTEMPTS):
        collector.failed(seen[-1], "server_error", "boom")
        seen.append(collector.start_next())
    assert [(key.task_id, key.index, key.attempt) for key in seen] == [
        *(("t_0", 0, attempt) for attempt in range(MAX_ATTEMPTS)),
        ("t_0", 1, 0),
    ]
    assert collector.failures == Counter(server_error=MAX_ATTEMPTS)
    assert collector.failures_by_task == {"t_0": MAX_ATTEMPTS}
    assert collector.outcome is None


def test_a_repeated_attempt_is_no_second_draw():
    collector = Collector(make_request(tasks=1, rollouts=1))
    draws = []
    for reason in ("environment_crashed", "bad_logprob", "server_error"):
        key = collector.start_next()
        draws.append(collector.draw(key))
        collector.failed(key, reason, "")
    assert draws == [0, 0, 1], "only tokens that were useless themselves are drawn anew"


def test_failed_attempts_are_named_when_they_are_not_rare():
    assert failures_warning(1000, {"server_error": 20}, {"t_0": 20}) is None
    assert failures_warning(2, {"server_error": 2}, {"t_0": 2}) is None
    failures = {"server_error": 1, "environment_crashed": 4}
    warning = failures_warning(95, failures, {"t_0": 2, "t_1": 3})
    assert warning.startswith(
        "5 of 100 attempts failed (environment_crashed 4, server_error 1), 3 of them at task t_1;"
    )


def lose(collector, key, reason="server_error", message="boom"):
    """Have all attempts at a running rollout fail; the others wait meanwhile."""
    for attempt in range(MAX_ATTEMPTS):
        if attempt:
            key = collector.start_next()
        gone = collector.failed(key, reason, message)
    assert gone


def test_more_lost_than_the_request_allows_ends_it_with_one_line_by_count():
    collector = Collector(make_request(tasks=3, rollouts=2, max_lost=2))
    keys = start_all(collector)
    lose(collector, keys[0])
    lose(collector, keys[1], "environment_crashed", "the world died")
    assert collector.outcome is None
    lose(collector, keys[2])
    assert collector.outcome == "failed"
    assert collector.error == (
        "3 of 6 rollouts lost (server_error 2, environment_crashed 1), such as rollout 0 of t_2: server_error: boom, "
        "where 2 may be"
    )
    assert collector.start_next() is None


def test_a_request_may_allow_one_attempt_and_name_single_rollouts():
    collector = Collector(make_request(tasks=3, rollouts=4, attempts=1, only={"t_0": [3], "t_2": [1, 0]}))
    keys = start_all(collector)
    assert Counter(key.task_id for key in keys) == {"t_0": 1, "t_1": 4, "t_2": 2}
    assert {key.index for key in keys if key.task_id != "t_1"} == {3, 1, 0}
    assert collector.failed(keys[0], "server_error", "boom"), "there is no second attempt"
    for key in keys[1:]:
        collector.finished(key)
    assert collector.outcome == "complete"
    assert [(lost.task_id, lost.index) for lost in collector.lost] == [("t_0", 3)]


def test_with_nothing_left_it_has_failed():
    collector = Collector(make_request(tasks=1, rollouts=2))
    first, second = start_all(collector)
    lose(collector, first)
    assert collector.outcome is None
    lose(collector, second)
    assert (collector.outcome, collector.error) == (
        "failed",
        "2 of 2 rollouts lost (server_error 2), such as rollout 1 of t_0: server_error: boom",
    )


def test_restart_collects_only_what_is_missing():
    done = {("t_0", 0), ("t_0", 2), ("t_1", 1)}
    collector = Collector(make_request(tasks=2, rollouts=3), done, opened_before=1)
    keys = start_all(collector)
    assert {(key.task_id, key.index) for key in keys} == {("t_0", 1), ("t_1", 0), ("t_1", 2)}
    assert keys[0].task_id == "t_1", "the task that lags comes first"
    assert {key.attempt for key in keys} == {MAX_ATTEMPTS}, "attempts of two openings never have the same number"
    assert {collector.attempts_before(key) for key in keys} == {0}


def test_restart_with_the_floors_reached_is_over_at_once():
    done = {("t_0", 0), ("t_1", 0)}
    assert Collector(make_request(tasks=2, rollouts=3, floor=1, fraction=0.3), done).outcome == "early_stop"


def simulate(rng):
    """One random schedule, checked at every event; returns the outcome."""
    rollouts = rng.randint(1, 6)
    request = make_request(
        tasks=rng.randint(1, 6),
        rollouts=rollouts,
        floor=rng.randint(1, rollouts),
        fraction=rng.uniform(0.05, 1.0),
        max_lost=rng.choice([None, rng.randint(0, 6)]),
    )
    every = [(task, index) for task in request.tasks for index in range(rollouts)]
    done = set(rng.sample(every, rng.randint(0, len(every)))) if rng.random() < 0.3 else set()
    failure_rate = rng.choice([0.0, 0.05, 0.4])
    slots = rng.randint(1, 12)
    collector = Collector(request, done, opened_before=rng.randint(0, 2))
    finished, attempts, lost, running = set(done), Counter(), Counter(), []
    while collector.outcome is None:
        while len(running) < slots and (key := collector.start_next()) is not None:
            rollout = (key.task_id, key.index)
            assert rollout not in finished
            assert rollout not in [(other.task_id, other.index) for other in running]
            attempts[rollout] += 1
            assert attempts[rollout] <= MAX_ATTEMPTS
            running.append(key)
        assert collector.running == set(running)
        assert running, "nothing runs, nothing can be started, and yet it has not ended"
        key = running.pop(rng.randrange(len(running)))
        if rng.random() < failure_rate:
            lost[key.task_id] += collector.failed(key, "server_error", "boom")
        else:
            collector.finished(key)
            finished.add((key.task_id, key.index))
        per_task = Counter(task for task, _ in finished)
        possible = len(every) - lost.total()
        floors = len(finished) >= min(request.floor_total, possible) and all(
            per_task[task] >= min(request.floor_per_task, rollouts - lost[task]) for task in request.tasks
        )
        too_many = lost.total() > (len(every) - 1 if request.max_lost is None else request.max_lost)
        assert (collector.outcome == "failed") == too_many
        assert (collector.outcome in ("complete", "early_stop")) == (floors and not too_many)
        assert collector.progress().finished == len(finished)
    if collector.outcome == "failed":
        assert failure_rate > 0
    assert collector.start_next() is None
    assert len(finished) == len(every) - lost.total() or collector.outcome != "complete"
    return collector.outcome


def branched(points, rollouts, **others):
    """A request for rollouts from ``points`` points of one stored rollout."""
    where = [BranchPoint(turns, 2 + turns) for turns in range(points)]
    exchanges = [Exchange("act", "seen")] * points
    branch = Branch("c/t_0/0.0", "t_0", "made-up", [], exchanges, list(range(2 + points)), where)
    return make_request(tasks=0, rollouts=rollouts, branches=[branch], **others)


def test_every_point_of_a_branch_is_a_task_with_indices_of_its_own():
    collector = Collector(branched(points=3, rollouts=2))
    keys = start_all(collector)
    assert [key.index for key in keys] == [0, 2, 4, 1, 3, 5]
    assert [collector.start_of(key).origin.turns for key in keys] == [0, 1, 2, 0, 1, 2]


def test_a_refused_branch_is_neither_attempted_again_nor_counted():
    collector = Collector(branched(points=2, rollouts=2))
    first, second, third, fourth = start_all(collector)
    collector.failed(first, BRANCH_DIFFERS, "turn 0 is answered otherwise")
    assert collector.start_next() is None
    assert (collector.failures, collector.progress().needed) == ({}, 3)
    collector.finished(second)
    collector.failed(third, BRANCH_DIFFERS, "again")
    assert collector.outcome is None
    collector.finished(fourth)
    assert collector.outcome == "complete"
    assert collector.refused == {"c/t_0/0.0": "turn 0 is answered otherwise", "c/t_0/1.0": "again"}


def test_a_floor_that_only_refusals_keep_from_being_reached_is_lowered():
    """Of two points with two rollouts each, one from each is enough; the first point is refused altogether."""
    collector = Collector(branched(points=2, rollouts=2, floor=1, fraction=0.5))
    keys = start_all(collector)
    for key in keys:
        if key.index < 2:
            collector.failed(key, BRANCH_DIFFERS, "no")
    collector.finished(keys[1])
    assert collector.outcome is None, "two of the four were asked for, and two are possible"
    collector.finished(keys[3])
    assert collector.outcome == "complete"


@pytest.mark.parametrize("refused_first", [True, False])
def test_a_floor_that_refusals_and_losses_together_put_out_of_reach_is_lowered(refused_first):
    """Of six rollouts two end, two are lost and two are refused: four were asked for, and two can be had."""
    collector = Collector(branched(points=1, rollouts=6, floor=4, fraction=0.5))
    keys = start_all(collector)
    gone = [lambda: lose(collector, keys[4]), lambda: lose(collector, keys[5])]
    for key in keys[2:4]:
        gone.insert(0 if refused_first else 4, lambda key=key: collector.failed(key, BRANCH_DIFFERS, "otherwise"))
    for go in gone:
        go()
    assert collector.outcome is None
    for key in keys[:2]:
        collector.finished(key)
    assert (collector.outcome, len(collector.lost), len(collector.refused)) == ("complete", 2, 2)


def test_what_was_gone_before_a_restart_is_not_started_again():
    before = Collector(branched(points=3, rollouts=1))
    first, second, _ = start_all(before)
    before.failed(first, BRANCH_DIFFERS, "no")
    lose(before, second)
    gone = {first: MissingRollout(BRANCH_DIFFERS, "no"), second: MissingRollout("server_error", "boom")}
    after = Collector(branched(points=3, rollouts=1), [], 1, gone)
    assert [key.index for key in start_all(after)] == [2]
    assert (after.refused, after.lost) == (before.refused, before.lost)


@pytest.mark.fault("each start and end of an episode looks at all tasks of its collection")
def test_what_is_due_is_known_without_a_look_at_all_tasks():
    def lines_per_event(tasks):
        collector, lines = Collector(make_request(tasks)), 0

        def count(_frame, _event, _argument):
            nonlocal lines
            lines += 1
            return count

        before = sys.gettrace()
        sys.settrace(count)
        try:
            for key in start_all(collector):
                collector.finished(key)
        finally:
            sys.settrace(before)
        return lines / tasks

    assert lines_per_event(400) < 1.2 * lines_per_event(20)


@pytest.mark.slow
def test_ten_thousand_schedules():
    rng = random.Random(0)
    outcomes = Counter(simulate(rng) for _ in range(10_000))
    assert set(outcomes) == {"complete", "early_stop", "failed"}


@pytest.mark.parametrize(("change", "message"), TABLES["bad_requests_are_named"])
def test_bad_requests_are_named(change, message):
    body = {"id": "c", "tasks": ["a_1"], "rollouts_per_task": 6, "policy_version": 0, **change}
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        CollectionRequest.from_dict(body)


def test_missing_key_is_named():
    with pytest.raises(ConfigError, match="missing key 'rollouts_per_task'"):
        CollectionRequest.from_dict({"id": "c", "tasks": ["a_1"], "policy_version": 0})
