"""The real worlds (``make environments``): the expert's score, doing nothing, a rerun, and the protocol's rules."""

import re
import shutil
from dataclasses import dataclass, field

import pytest

from agent_environments.conformance import HOSTILE_ACTIONS, check_conformance
from agent_environments.protocol import create_pool
from contrib_support.real_worlds import NEEDS_WORLDS, PYTHON, expert_messages, play
from support.adapter_support import word_spans
from support.episodes import open_pool, play_steps

pytestmark = NEEDS_WORLDS
NEEDS_JAVA = "needs Java (Debian: apt-get install default-jre-headless)"


@dataclass(frozen=True)
class Expected:
    """What is known of a world. ``tasks`` are played by the expert, ``score`` is its reward in each of them."""

    splits: dict[str, int]
    tasks: tuple[str, ...]
    hostile: tuple[str, ...]
    score: float = 1.0
    java: bool = False
    nothing: float = 0.0
    """The most that doing nothing may be worth: some tasks start with a sub-goal reached."""
    options: dict[str, str] = field(default_factory=dict)


WORLDS = {
    "textcraft": Expected(
        splits={"train": 380, "dev": 55, "test": 98, "test_challenge": 11},
        tasks=("acacia-stairs_1", "crossbow_1", "yellow-banner_1"),
        hostile=("get " + "9" * 5000 + " stick", "craft 1 stick using 0 bamboo", "craft", "get -1 bamboo", "inventory"),
    ),
    "babyai": Expected(
        splits={"train": 1400, "dev": 140, "test": 350, "test_challenge": 85},
        tasks=("GoToLocal_1000", "PutNextLocal_2000"),
        hostile=("move forward", "toggle", "drop", "pick up", "done", "turn"),
    ),
    "scienceworld": Expected(
        splits={"train": 3592, "dev": 1796, "test": 1819},
        tasks=("power-component_15", "lifespan-longest-lived_93"),
        hostile=("focus on air", "0", "eat agent", "open", "wait", "look in the door to the hallway"),
        java=True,
        nothing=0.1,
    ),
    "textworldexpress": Expected(
        splits={"train": 800, "dev": 800, "test": 800},
        tasks=("simonsays_20000", "coin_0"),
        hostile=("help", "quit", "task", "take coin", "eat eat eat", "\\ {} [] %s"),
        java=True,
    ),
    "tau2": Expected(
        options={"domain": "telecom"},
        splits={"train": 74, "test": 40},
        tasks=("service-issue_293", "service-issue_274", "mms-issue_660"),
        hostile=(
            '[{"name": "refuel_data", "arguments": {"customer_id": "C1001", "line_id": "L1002", "gb_amount": "much"}}]',
            '[{"name": "get_data_usage", "arguments": {"requestor": "user", "tool_name": "done"}}]',
            '[{"name": "set_apn_settings", "arguments": {"apn_settings": [[[]]]}}]',
            '[{"name": "grant_app_permission", "arguments": {"app_name": "\\ud800", "permission": null}}]',
            '[{"name": "no_such_tool", "arguments": {}}, {"name": "reboot_device", "arguments": {}}]',
        ),
    ),
}


@pytest.fixture(params=WORLDS)
async def world(request):
    expected = WORLDS[request.param]
    if expected.java and shutil.which("java") is None:
        pytest.skip(NEEDS_JAVA)
    async with open_pool(
        create_pool(request.param, {"python": PYTHON, "max_worlds": 2, **expected.options}, word_spans)
    ) as pool:
        yield pool, expected


async def test_splits(world):
    pool, expected = world
    assert {split: len(pool.tasks(split)) for split in expected.splits} == expected.splits
    ids = [task for split in expected.splits for task in pool.tasks(split)]
    assert len(set(ids)) == len(ids)
    assert all(task.partition("_")[2].isdigit() for task in ids)


async def test_the_expert_scores_what_it_should_and_nothing_less(world):
    pool, expected = world
    for task in expected.tasks:
        _, nothing = await play(pool, task, [])
        assert nothing.reward <= expected.nothing
        assert not nothing.success
        _, grade = await play(pool, task, await expert_messages(pool, task))
        assert (grade.reward, grade.success) == (expected.score, True), task


async def test_a_rerun_is_the_same(world):
    """In one process, and in another one: what a lost worker comes back as."""
    pool, expected = world
    task = expected.tasks[-1]
    messages = await expert_messages(pool, task)
    first = await play(pool, task, messages)
    assert await play(pool, task, messages) == first
    for worker in list(pool._worlds):
        worker.kill()
    assert await play(pool, task, messages) == first


@pytest.mark.parametrize(
    ("name", "suffix", "sizes", "most"),
    [("babyai", "one_room", (780, 52, 65), 20), ("textworldexpress", "following", (80, 80, 80), 10)],
)
async def test_the_tasks_for_small_policies(name, suffix, sizes, most):
    if WORLDS[name].java and shutil.which("java") is None:
        pytest.skip(NEEDS_JAVA)
    pool = create_pool(name, {"python": PYTHON}, word_spans)
    await pool.open()
    try:
        splits = [f"{split}_{suffix}" for split in ("train", "dev", "test")]
        assert tuple(len(pool.tasks(split)) for split in splits) == sizes
        assert not set(pool.tasks(splits[0])) & set(pool.tasks(splits[2]))
        solved = 0
        for task in pool.tasks(splits[2])[:24]:
            messages = await expert_messages(pool, task)
            assert len(messages) <= most
            _, grade = await play(pool, task, messages)
            solved += grade.success
    finally:
        await pool.close()
    assert solved >= 23, "something may stand in the way of one who goes straight"


async def test_babyai_says_where_things_are_and_how_far_the_way_is_free():
    pool = create_pool("babyai", {"python": PYTHON}, word_spans)
    await pool.open()
    try:
        environment = await pool.acquire("episode")
        task = (await environment.start("GoToLocalS8N3_1"))[-1].content
        shown = (await environment.step(pool.message("turn right"))).observation
        await environment.close()
    finally:
        await pool.close()
    assert task.startswith(
        "Instruction: go to a yellow key\n\nYou see:\n- grey key ahead 2, right 3\nFree cells ahead: 3, then a wall.\n"
    )
    line = r"- \w+ \w+ (ahead \d(, (left|right) \d)?|(left|right) \d)\n"
    assert re.fullmatch(
        rf"(You see:\n({line})+|You see no objects.\n)Free cells ahead: \d(, then a [\w ]+)?\.\nYou carry: nothing\.",
        shown,
    )


async def test_scienceworld_says_which_commands_failed():
    if shutil.which("java") is None:
        pytest.skip(NEEDS_JAVA)
    pool = create_pool("scienceworld", {"python": PYTHON, "max_worlds": 1}, word_spans)
    await pool.open()
    try:
        commands = ["look around", "fly", "focus on door", "look around", "look around"]
        _, steps, _ = await play_steps(pool, "find-living-thing_0", [pool.message(command) for command in commands])
    finally:
        await pool.close()
    assert [step.failed for step in steps] == [False, True, False, True, False], "the third asked for a number"


async def test_it_conforms(world):
    pool, expected = world
    hostile = [pool.message(command) for command in expected.hostile]
    await check_conformance(pool, expected.tasks[0], [*HOSTILE_ACTIONS, *hostile])
