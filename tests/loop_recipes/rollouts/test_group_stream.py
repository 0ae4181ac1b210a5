"""Which groups start, end early and are taken: by hand, and over drawn schedules."""

import itertools
import random

import pytest

from loop_recipes.rollouts.group_stream import Group, GroupStream


def stream(lag=1, **others):
    return GroupStream(tasks=2, rollouts=4, floor=2, fraction=0.5, lag=lag, **others)


def at(number, finished=0, seconds=0.0, ended=False, lost=0):
    return Group(number, 0, finished, lost, seconds, ended)


@pytest.mark.parametrize(
    ("seen", "version", "chosen"),
    [
        ([at(0, 4, ended=True), at(1, 3, 1.0)], 0, None),
        ([at(0, 4, ended=True), at(1, 3, 1.0), at(2, 4, ended=True)], 0, [0, 2]),
        ([at(0, 3, 1.0), at(1, 1, 1.0), at(2, 4, ended=True)], 1, None),
        ([at(0, 3, 1.0), at(1, 2, 1.0), at(2, 4, ended=True)], 1, [0, 1]),
        ([at(0, 1, 1.0, lost=3), at(1, 0, 1.0, lost=4), at(2, 4, ended=True)], 1, [0, 1]),
    ],
    ids=["a floor is not enough", "whole ones first", "old, below its floor", "old, at its floor", "of what is left"],
)
def test_what_an_iteration_takes(seen, version, chosen):
    groups = stream()
    for _ in range(3):
        groups.open(0)
    groups.note(seen, 0)
    found = groups.choose(version)
    assert (found and [group.number for group in found]) == chosen


def test_a_group_that_waits_is_as_old_as_the_version_that_is_served_and_one_that_is_pinned_as_it_was():
    for pinned in (False, True):
        groups = stream(pinned=pinned)
        for _ in range(2):
            groups.open(0)
        groups.note([at(0, seconds=1.0), at(1)], 3)
        assert [group.oldest for group in groups.groups.values()] == [0, 0 if pinned else 3]


def test_a_group_that_runs_for_long_is_ended_at_its_floor_once_the_median_is_known():
    groups = stream()
    for _ in range(3):
        groups.open(0)
    groups.note([at(0, 2, 51.0), at(1, 1, 51.0), at(2, 2, 49.0)], 0)
    assert groups.late() == []
    groups.take([], [10.0] * 20)
    assert [group.number for group in groups.late()] == [0]


def test_a_node_that_is_faster_than_the_trainer_does_not_run_ahead():
    groups, lags = stream(lag=4), []
    for version, updating in itertools.product(range(4), (False, True)):
        for _ in range(groups.due(updating)):
            groups.open(version)
        groups.note([at(number, 4, 1.0, ended=True) for number in groups.groups], version)
        if not updating:
            chosen = groups.choose(version)
            lags.append(version - min(group.oldest for group in chosen))
            groups.take(chosen)
    assert lags == [0, 1, 1, 1]


@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_older_than_it_may_be_whatever_comes_first(seed):
    """Groups that start, grow and end in any order, versions that are served late, and a process that begins anew."""
    draw = random.Random(seed)
    lag, pinned = draw.randint(0, 4), draw.random() < 0.5
    every = draw.randint(1, lag + 1)
    groups, version, served, began = stream(lag, every=every, pinned=pinned), 0, 0, {}
    while version < 30:
        for _ in range(groups.due()):
            began[groups.open(served)] = served if pinned else None
        seen = []
        for number, group in groups.groups.items():
            started = group.seconds or draw.random() < 0.6
            if started and began[number] is None:
                began[number] = served
            finished = min(4, group.finished + draw.choice([0, 0, 1])) if started else 0
            seen.append(at(number, finished, float(bool(started)), ended=finished == 4))
        groups.note(seen, served)
        if (chosen := groups.choose(version)) is not None:
            assert max(version - began[group.number] for group in chosen) <= lag
            groups.take(chosen)
            assert all(version - each.oldest < lag for each in groups.groups.values()), "the next one is too late"
            for _ in range(groups.due(updating=True)):
                began[groups.open(served)] = served if pinned else None
            version += 1
            served = version if version - served >= every else served
        if draw.random() < 0.1:
            state, groups = groups.state_dict(), stream(lag, every=every, pinned=pinned)
            groups.load_state_dict(state)
