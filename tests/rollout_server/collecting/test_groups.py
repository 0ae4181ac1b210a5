"""Groups that are graded together, in whole collections: when, what is in the record, and once, whatever dies when."""

import errno

import pytest

from agent_environments.tools import environment
from loop_formats.collection_request import Limits
from loop_formats.rollout import by_episode
from support.counter_node import counter_request, local_node
from support.in_process_tools import InProcessServer
from support.texts import texts_beside
from support.tool_modules import write
from support.waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.slow  # the policy is written by transformers

SOURCE = texts_beside(__file__)["source"]


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "ForkServer", InProcessServer)
    return write(tmp_path, SOURCE.replace("PATH", str(tmp_path / "calls")))


@pytest.fixture
def calls(tmp_path):
    """What the group's reward was called with, a line each time."""
    return lambda: (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []


def request(**changes):
    limits = Limits(max_turns=1, max_tokens_per_turn=8, max_context=200, episode_deadline_s=DEADLINE_S)
    return counter_request(**{"tasks": ["t_1", "t_2"], "rollouts_per_task": 3, "limits": limits, **changes})


def node(policy, root, file):
    return local_node(policy, root, environment={"name": "tools", "module": file})


def counting(running, first=1):
    """Have the policy answer 1, 2, 3 and so on; with ``9`` at most."""
    numbers = iter(range(first, 99))
    running.vllm.speak = lambda rng: str(min(9, next(numbers)))


def is_of(body, rollout):
    """Whether a request is for a turn of this rollout, ``task/index``."""
    return f"/{rollout}." in body["request_id"]


def said(rollout):
    return rollout.messages[rollout.turns[0].message]["content"]


def stated(rollout):
    return rollout.extra["stated"]["rewards"]


def by_task(rollouts):
    found = {}
    for rollout in rollouts:
        found.setdefault(rollout.task_id, []).append(rollout)
    return found


def check_groups(rollouts, calls):
    """Each group's numbers are those of the one call for it."""
    for times, line in enumerate(calls, 1):
        task, *answers = line.split()
        group = [rollout for rollout in by_task(rollouts)[task] if rollout.ungradable is None]
        assert sorted(map(said, group)) == answers
        for rollout in group:
            answer = int(said(rollout))
            share = (answer + times / 100) / (sum(map(int, answers)) + 1)
            assert stated(rollout) == pytest.approx({"number": answer / 10, "share": share})
            assert rollout.reward == pytest.approx((answer / 10 + share) / 2)


async def test_a_group_is_graded_when_it_is_whole_and_its_numbers_are_in_the_record(policy, tmp_path, file, calls):
    async with node(policy, tmp_path / "node", file) as running:
        counting(running)
        rollouts, end = await running.collect(request())
        files = sorted(path.name for path in (tmp_path / "node/collections").iterdir())
    assert (end.reason, end.finished, len(rollouts), len(calls())) == ("complete", 6, 6, 2)
    check_groups(rollouts, calls())
    assert files == ["c1.jsonl", "c1.meta.jsonl"]


async def test_a_group_that_is_whole_is_delivered_before_the_collection_ends(policy, tmp_path, file, calls):
    async with node(policy, tmp_path / "node", file) as running:
        counting(running)
        held = True
        running.vllm.answers = lambda body: not (held and is_of(body, "t_2/1"))
        await running.call(running.client.start_collection, request())
        run = await running.node.collection("c1")
        await wait_until(lambda: run.stored.rollouts.count == 3)
        assert run.end is None
        assert [line.split()[0] for line in calls()] == ["t_1"]
        held = False
        rollouts, _ = await running.collect(request())
    assert [line.split()[0] for line in calls()] == ["t_1", "t_2"]
    check_groups(rollouts, calls())


async def test_a_group_at_its_floor_is_graded_by_what_there_is(policy, tmp_path, file, calls):
    async with node(policy, tmp_path / "node", file) as running:
        counting(running)
        running.vllm.answers = lambda body: not is_of(body, "t_2/2")
        asked = request(min_rollouts_per_task=2, min_rollouts_fraction=5 / 6)
        rollouts, end = await running.collect(asked)
    assert (end.reason, end.finished, len(rollouts)) == ("early_stop", 5, 5)
    assert [len(line.split()) - 1 for line in calls()] == [3, 2]
    check_groups(rollouts, calls())


async def test_a_member_that_is_lost_is_not_waited_for(policy, tmp_path, file, calls):
    async with node(policy, tmp_path / "node", file) as running:
        counting(running)
        running.vllm.fault = lambda body: 400 if is_of(body, "t_1/1") else None
        rollouts, end = await running.collect(request(tasks=["t_1"], max_lost=1))
        assert (end.reason, len(end.lost)) == ("complete", 1)
        assert [len(line.split()) - 1 for line in calls()] == [2]
        check_groups(rollouts, calls())
        # Asked for again: the one that comes late is graded beside the others, whose numbers stand.
        before = {rollout.rollout_id: rollout.reward for rollout in rollouts}
        await running.call(running.client.cancel, "c1")
        running.vllm.fault = lambda body: None
        rollouts, end = await running.collect(request(tasks=["t_1"], max_lost=1))
    assert [len(line.split()) - 1 for line in calls()] == [2, 3]
    assert len(rollouts) == 3
    assert {name: reward for name, reward in before.items()} == {
        rollout.rollout_id: rollout.reward for rollout in rollouts if rollout.rollout_id in before
    }


async def test_a_member_that_cannot_be_graded_counts_as_it_did_and_is_seen_by_none(policy, tmp_path, file, calls):
    async with node(policy, tmp_path / "node", file) as running:
        counting(running, first=6)
        rollouts, end = await running.collect(request(tasks=["t_1"]))
    assert (end.reason, len(rollouts)) == ("complete", 3)
    assert calls() == ["t_1 6 8"]
    [broken] = [rollout for rollout in rollouts if rollout.ungradable is not None]
    assert (broken.reward, broken.broke["where"]) == (0.0, "reward number")
    check_groups(rollouts, calls())


async def test_an_episode_that_was_held_is_not_played_again_after_a_restart(policy, tmp_path, file, calls):
    async with node(policy, tmp_path / "node", file) as running:
        counting(running)
        running.vllm.answers = lambda body: not (is_of(body, "t_1/2") or is_of(body, "t_2/2"))
        await running.call(running.client.start_collection, request())
        run = await running.node.collection("c1")
        await wait_until(lambda: len(run.stored.held) == 4)
        assert (calls(), run.stored.rollouts.count) == ([], 0)
    async with node(policy, tmp_path / "node", file) as running:
        counting(running, first=8)
        rollouts, end = await running.collect(request())
        assert len(running.vllm.requests) == 2
    assert (end.reason, len(rollouts)) == ("complete", 6)
    check_groups(rollouts, calls())


def full(lines):
    raise OSError(errno.ENOSPC, "No space left on device")


async def ended_where(running, asked, spoil):
    """The run of a collection of which something is spoilt before any of its rollouts ends."""
    counting(running)
    running.vllm.answers = lambda body: False
    await running.call(running.client.start_collection, asked)
    run = await running.node.collection("c1")
    spoil(run.stored)
    running.vllm.answers = lambda body: True
    await wait_until(lambda: run.end is not None)
    return run


async def test_what_was_noted_counts_where_it_could_not_be_written(policy, tmp_path, file, calls):
    """The reward gives other numbers at each call, so that a second one would be seen."""

    async with node(policy, tmp_path / "node", file) as running:
        run = await ended_where(
            running, request(tasks=["t_1"]), lambda stored: setattr(stored.rollouts, "append", full)
        )
        assert (run.end.reason, "No space left" in run.end.error, len(calls())) == ("failed", True, 1)
    async with node(policy, tmp_path / "node", file) as running:
        rollouts, end = await running.collect(request(tasks=["t_1"]))
        assert not running.vllm.requests
    assert (end.reason, len(rollouts), len(calls())) == ("complete", 3, 1)
    check_groups(rollouts, calls())


async def test_what_could_not_be_held_is_written_when_it_is_asked_for_again(policy, tmp_path, file, calls):
    async with node(policy, tmp_path / "node", file) as running:
        asked = request(tasks=["t_1"], rollouts_per_task=1)
        run = await ended_where(running, asked, lambda stored: setattr(stored, "hold", full))
        assert (run.end.reason, len(run.unheld)) == ("failed", 1)
        rollouts, end = await running.collect(request(tasks=["t_1"], rollouts_per_task=1))
        assert len(running.vllm.requests) == 1
    assert (end.reason, len(rollouts)) == ("complete", 1)
    check_groups(rollouts, calls())


async def test_a_group_that_nothing_can_grade_ends_the_collection_all_the_same(policy, tmp_path, file, monkeypatch):
    def broken(*_):
        raise AssertionError("never foreseen")

    monkeypatch.setattr("rollout_server.collecting.run.regraded", broken)
    async with node(policy, tmp_path / "node", file) as running:
        counting(running)
        _, end = await running.collect(request(tasks=["t_1"]))
    assert (end.reason, "never foreseen" in end.error) == ("failed", True)


async def held_by_the_last(running):
    """A collection of which two episodes wait for the third of their group."""
    counting(running)
    running.vllm.answers = lambda body: not (is_of(body, "t_1/2") or is_of(body, "t_2/2"))
    await running.call(running.client.start_collection, request(tasks=["t_1"]))
    run = await running.node.collection("c1")
    await wait_until(lambda: len(run.stored.held) == 2)
    return run


async def test_a_cancelled_collection_grades_nothing_until_it_is_asked_for_again(policy, tmp_path, file, calls):
    async with node(policy, tmp_path / "node", file) as running:
        run = await held_by_the_last(running)
        await running.call(running.client.cancel, "c1")
        await wait_until(lambda: run.idle)
        assert (run.end.reason, calls()) == ("cancelled", [])
        running.vllm.answers = lambda body: True
        rollouts, end = await running.collect(request(tasks=["t_1"]))
        assert (end.reason, len(rollouts), len(calls())) == ("complete", 3, 1)
    check_groups(rollouts, calls())


async def test_episodes_that_waited_for_a_collection_whose_files_are_gone_are_forgotten(policy, tmp_path, file, calls):
    folder = tmp_path / "node/collections"
    async with node(policy, tmp_path / "node", file) as running:
        await held_by_the_last(running)
    for name in ("c1.jsonl", "c1.meta.jsonl"):
        (folder / name).unlink()
    assert (folder / "c1.held").exists()
    async with node(policy, tmp_path / "node", file) as running:
        counting(running, first=3)
        rollouts, _ = await running.collect(request(tasks=["t_1"]))
        assert len(running.vllm.requests) == 3
    assert len(by_episode(rollouts)) == 3
    check_groups(rollouts, calls())
