"""An agent cannot have its failures struck out: what its code causes ends in a grade, on the real engine.

The agent of these tests tosses a coin: heads, it solves its task; tails, it fails it, by one of the programs that are
meant to make the attempt void. Were one replaced, its reward would rise.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_environments.conformance import check_conformance
from support.adapter_attacks import CHANNEL, VOIDING
from support.adapter_support import PYTHON, fenced, honest_code, needs_world, no_op_reward, play, volume_task
from support.episodes import begun_episode
from support.processes import episode_processes
from support.scripted_policy import collect
from support.waiting import wait_until

pytestmark = [pytest.mark.attack, pytest.mark.integration, needs_world, pytest.mark.timeout(600)]
session_loop = pytest.mark.asyncio(loop_scope="session")

TOSSES = 2


def process_state(pid: int) -> str:
    """The letter of ps; T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def rewards_of_coin_tosses(pool, folder, failing_code: str) -> list[float]:
    """Reward of each rollout of one task, by its index."""
    card, volume = volume_task()

    def toss(rng: random.Random) -> str:
        return fenced(honest_code(card, volume) if rng.random() < 0.5 else failing_code)

    limits = {"max_tokens_per_turn": 4000}
    rollouts, collector = await collect(pool, folder, [card.task_id], TOSSES, toss, **limits)
    assert collector.outcome == "complete"
    assert not collector.failures, "no attempt was repeated"
    return [rollout.reward for rollout in sorted(rollouts, key=lambda rollout: rollout.index)]


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def honest(pool, tmp_path_factory) -> list[float]:
    rewards = await rewards_of_coin_tosses(pool, tmp_path_factory.mktemp("tokens"), "apis.supervisor.complete_task()")
    nothing = no_op_reward(volume_task()[0].task_id)
    assert set(rewards) == {1.0, nothing}, "the coin fell on both sides"
    return rewards


@session_loop
@pytest.mark.parametrize("name", VOIDING)
async def test_a_failure_stays_a_failure(pool, honest, tmp_path, name):
    rewards = await rewards_of_coin_tosses(pool, tmp_path, VOIDING[name])
    assert [reward == 1.0 for reward in rewards] == [reward == 1.0 for reward in honest]
    assert all(reward <= fair for reward, fair in zip(rewards, honest, strict=True))


@session_loop
async def test_appworld_conforms_to_the_protocol(pool):
    await check_conformance(pool, volume_task()[0].task_id)


@session_loop
async def test_a_program_that_forges_its_output_stands_still_while_the_agent_thinks(pool):
    async with begun_episode(pool, volume_task()[0].task_id) as environment:
        code = f"{CHANNEL}channel.send(dict(output='early'))\nwhile True: sum(range(1000))"
        assert (await environment.step(fenced(code))).observation.startswith("early")

        def stopped() -> int:
            return [process_state(pid) for pid in episode_processes(pool._servers["world"].pid)].count("T")

        await wait_until(lambda: stopped() == 1)  # a signal to a process on another processor takes a moment


@session_loop
async def test_a_program_that_speaks_out_of_turn_has_ended_its_episode(pool):
    card, _ = volume_task()
    two = r"""b'{"output": "early"}\n{"output": "again"}\n'"""
    code = f"{CHANNEL}__import__('channel')._write(channel.descriptor, {two})"
    results, grade = await play(pool, card.task_id, [code, "print(1)", "print(2)"])
    assert [result.done for result in results] == [False, True]
    assert "The interpreter ended while it ran this code" in results[1].observation
    assert grade.reward == no_op_reward(card.task_id)


@session_loop
async def test_honest_programs_go_on_after_every_stop(pool):
    results, _ = await play(pool, volume_task()[0].task_id, ["n = 0", *["n += 1"] * 20, "print(n)"])
    assert results[-1].observation.startswith("20\n")


@session_loop
async def test_nobody_looks_and_undoes(pool):
    """What a program wrote before it died is what is graded; for one that hung see test_adapter_pool.py."""
    card, volume = volume_task()
    results, grade = await play(pool, card.task_id, [f"{honest_code(card, volume)}\nimport os\nos.abort()"])
    assert results[0].done
    assert (grade.reward, grade.success) == (1.0, True)


def filling(times: int, app: str = "simple_note") -> str:
    """A program that writes so many times 5 MB into one app's database."""
    return (
        f"for i in range({times}):\n"
        f"    apis.{app}.signup(\n"
        "        first_name='x' * 5 * 10**6, last_name='y', email=f'a{i}@example.com', password='password'\n"
        "    )\n"
    )


@session_loop
@pytest.mark.parametrize("program", [filling(8), filling(3) + filling(1, "todoist")], ids=["one app", "two"])
async def test_a_state_that_is_too_large_to_save_ends_its_own_episode_and_takes_no_room(pool, program):
    card, volume = volume_task()
    async with begun_episode(pool, card.task_id) as environment:
        result = await environment.step(fenced(program))
        grade = await environment.grade()
        states = pool.run_folder.experiment(environment._experiment)
        assert sum(path.stat().st_size for path in states.rglob("*") if path.is_file()) < 1 << 20
    assert result.done
    assert (grade.reward, grade.success) == (0.0, False)
    assert "File too large" in grade.ungradable
    _, beside = await play(pool, card.task_id, [honest_code(card, volume)])
    assert beside.reward == 1.0


@session_loop
async def test_a_state_that_is_too_large_to_grade_is_worth_nothing(pool):
    card, _ = volume_task()
    usual = pool._servers["grader"]
    await pool._start(pool._server("grader", pool.run_folder.grader, {"memory_mb": 32}))
    try:
        results, grade = await play(pool, card.task_id, [filling(3)])
    finally:
        await pool._servers["grader"].close()
        pool._servers["grader"] = usual
    assert not results[0].done
    assert (grade.reward, grade.success) == (0.0, False)
    assert "memory" in grade.ungradable.lower()


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["nan", "1e999", "9" * 4000, "\ud800", "\0", "' or 1=1 --", [], [[]], {}, {"a": [1]}]),
).map(lambda value: repr(value).replace("nan", "float('nan')").replace("inf", "float('inf')"))
STATEMENTS = st.one_of(
    st.builds("apis.supervisor.complete_task(answer={})".format, VALUES),
    st.builds("print(apis.spotify.login(username={}, password={}))".format, VALUES, VALUES),
    st.builds("print(apis.venmo.search_users(query={}, access_token={}))".format, VALUES, VALUES),
    st.builds("apis.simple_note.signup(first_name={0}, last_name={1}, email={0}, password={1})".format, VALUES, VALUES),
    st.builds("print({}, {})".format, VALUES, VALUES),
    st.builds("x = {}; print(x + x, sorted([x, x]), f'{{x:>9}}')".format, VALUES),
    st.builds("raise ValueError({})".format, VALUES),
    st.sampled_from(
        [
            "raise KeyboardInterrupt",
            "raise SystemExit",
            "def f(): return f()\nf()",
            "apis = None",
            "del print",
            "import sys; sys.stdout = None",
            "print('\\ud800' * 10**5)",
            "yield 1",
            "class E(Exception):\n    def __repr__(self): raise E\n    __str__ = __repr__\nraise E",
        ]
    ),
)


@session_loop
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.lists(STATEMENTS, min_size=1, max_size=4).map("\n".join), min_size=1, max_size=4))
async def test_random_programs_never_end_without_a_grade(pool, steps):
    task = volume_task()[0].task_id
    results, grade = await play(pool, task, steps)
    for result in results:
        result.observation.encode()
    assert 0.0 <= grade.reward <= no_op_reward(task)
    assert not grade.success


@pytest.mark.parametrize("messages", [500, pytest.param(100_000, marks=pytest.mark.drill)])
async def test_fuzzed_messages_of_an_interpreter_end_in_a_grade_each_time(messages):
    program = Path(__file__).parents[1] / "support" / "fuzz_world.py"
    command = await asyncio.create_subprocess_exec(PYTHON, program, str(messages), "0", stdout=asyncio.subprocess.PIPE)
    output, _ = await command.communicate()
    assert command.returncode == 0
    result = json.loads(output)
    assert result["messages"] >= messages
    assert result["ended"] > 10 * result["lived"] > 0
    assert result["grown_mib"] < 64
