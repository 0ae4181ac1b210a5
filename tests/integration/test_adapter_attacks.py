"""What agent code can do to the host, to the reward and to the pool: nothing.

The attacks run with the paper's syntax settings where those give more (any module may be imported), except that
log-in tokens are signed with the pool's own key, as by default. Run with ``-s`` to see the table.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sqlite3
import time

import pytest
import pytest_asyncio

from agent_environments.protocol import EnvironmentTimeout
from support.adapter_attacks import ATTACKS, HANGS
from support.adapter_support import (
    ROOT,
    fenced,
    honest_code,
    needs_world,
    no_op_reward,
    play,
    sealed_pool,
    volume_task,
)
from support.listener import Listener
from support.processes import processes
from support.waiting import wait_until

pytestmark = [pytest.mark.attack, pytest.mark.integration, needs_world]

AT_ONCE = 4


@dataclasses.dataclass
class Outcome:
    """What one attack came to."""

    shown: str
    reward: float
    success: bool
    seconds: float
    whole_again_s: float


@pytest_asyncio.fixture(
    loop_scope="session", scope="module", params=["seccomp", pytest.param("bubblewrap", marks=pytest.mark.drill)]
)
async def sealed(request, unguarded):
    """A pool whose engine lets agent code import anything, so that it is the kernel that must hold."""
    if request.param == "seccomp":
        yield unguarded
    else:
        options = {
            "execute_timeout_s": unguarded.execute_timeout_s,
            "memory_limit_mb": 256,
            "max_worlds": AT_ONCE,
        }
        async with sealed_pool(request.param, agent_may_import_anything=True, **options) as pool:
            yield pool


async def attack(pool, code: str) -> Outcome:
    card, _ = volume_task()
    environment = await pool.acquire("attack")
    began = time.monotonic()
    try:
        await environment.start(card.task_id)
        try:
            shown = (await environment.step(fenced(code))).observation
        except EnvironmentTimeout as error:
            shown = f"EnvironmentTimeout: {error}"
        grade = await environment.grade()
        ended = time.monotonic()
    finally:
        await environment.close()
    return Outcome(shown, grade.reward, grade.success, ended - began, time.monotonic() - ended)


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.usefixtures("short_grace")
async def test_attacks(sealed, tmp_path_factory):
    assert len(ATTACKS) >= 40
    sentinel = tmp_path_factory.mktemp("sentinel")
    card, volume = volume_task()
    truth = ROOT / "data" / "tasks" / card.task_id / "ground_truth"
    listener = Listener()
    values = {
        "sentinel": sentinel,
        "truth": truth,
        "socket": sealed.run_folder.path / "world.sock",
        "port": listener.port,
        "email": card.email,
        "volume": volume,
        "task": card.task_id,
    }
    truth_before = {path.name: path.read_bytes() for path in truth.iterdir()}
    server = sealed._servers["world"].pid
    servers = set(processes(str(sealed.run_folder.path)))
    places = asyncio.Semaphore(AT_ONCE)

    async def run(name: str, code: str) -> tuple[str, Outcome]:
        async with places:
            return name, await attack(sealed, code.format(**values))

    outcomes = dict(await asyncio.gather(*(run(name, code) for name, code in ATTACKS.items())))

    baseline = no_op_reward(card.task_id)
    print(f"\n{'attack':<48} {'seconds':>7} {'whole':>6} {'reward':>6}  shown (doing nothing is worth {baseline:.2f})")
    for name, outcome in outcomes.items():
        last = outcome.shown.partition("\nAs a reminder")[0].strip().splitlines() or [""]
        print(
            f"{name:<48} {outcome.seconds:7.2f} {outcome.whole_again_s:6.3f} {outcome.reward:6.2f}  {last[-1][:70]!r}"
        )

    # The host: nothing written or read, nobody called, nothing left running, and the server that forks is the same.
    assert list(sentinel.iterdir()) == []
    assert {path.name: path.read_bytes() for path in truth.iterdir()} == truth_before
    assert not listener.visited()
    assert sealed._servers["world"].pid == server
    assert sealed._servers["world"].alive
    await wait_until(lambda: processes(str(sealed.run_folder.path)).keys() == servers)
    secrets = [line.strip() for line in (truth / "private_data.json").read_text().splitlines()]
    secrets = [line for line in secrets if len(line) > 12] + passwords()
    for name, outcome in outcomes.items():
        # The reward: no more than doing nothing is worth.
        assert outcome.reward <= baseline, name
        assert not outcome.success, name
        assert not any(secret in outcome.shown for secret in secrets), name
        assert "REACHED" not in outcome.shown, name
        # The pool: the place is free again at once, as machines with much to do understand it.
        assert outcome.whole_again_s < 20, name
    for name in HANGS:
        assert outcomes[name].seconds < sealed.execute_timeout_s + 60, name

    # And it still works: the honest way is paid in full.
    _, grade = await play(sealed, card.task_id, [honest_code(card, volume)])
    assert grade.success


def passwords() -> list[str]:
    """Those of everybody in the world; none of the attacks asks an API for one."""
    with contextlib.closing(sqlite3.connect(ROOT / "data" / "base_dbs" / "admin.db")) as database:
        return [row[0] for row in database.execute("select password from account_passwords")]


@pytest.mark.asyncio(loop_scope="session")
async def test_an_agent_that_only_completes_is_paid_no_more_than_nothing(sealed):
    card, _ = volume_task()
    nothing = await play(sealed, card.task_id, [])
    only_completes = await play(sealed, card.task_id, ["apis.supervisor.complete_task()"])
    assert only_completes[1].reward <= nothing[1].reward == no_op_reward(card.task_id)
