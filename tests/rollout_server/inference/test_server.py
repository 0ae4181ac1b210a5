"""Servers of a node as real child processes that run a fake vLLM: started, watched, replaced, refused, ended."""

import asyncio
import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from loop_plumbing import moving
from loop_plumbing.process_guard import descendants
from rollout_server.config import ModelConfig, ServersConfig
from rollout_server.inference import command as vllm_command
from rollout_server.inference import server as vllm_server
from rollout_server.inference import server_group
from rollout_server.inference.command import ServerStartError
from rollout_server.inference.server_group import ServerGroup
from support import fake_vllm
from support.processes import alive
from support.texts import texts_beside
from support.waiting import DEADLINE_S, block_until, wait_until

TABLES = texts_beside(__file__)

FAKE = fake_vllm.__file__


@pytest.fixture
def group_of(tmp_path, monkeypatch):
    """Builds groups whose servers are the arithmetic ones, as real child processes."""
    for module in (vllm_server, moving):
        monkeypatch.setattr(module, "POLL_S", 0.1)
    monkeypatch.setattr(server_group, "BACK_OFF_S", (0.05, 0.1))
    for module in (vllm_server, server_group):
        monkeypatch.setattr(module, "installed_vllm", lambda: vllm_command.Vllm("0.32.0+cpu", cpu=True))
    (tmp_path / "config.json").write_text("{}")

    def build(
        count: int = 1, misbehave: dict[int, str] | None = None, start_timeout_s: float = DEADLINE_S
    ) -> ServerGroup:
        starts = itertools.count()

        def command(model, servers, port, *, cpu):
            how = (misbehave or {}).get(next(starts))
            return [sys.executable, FAKE, "--port", str(port), *(["--misbehave", how] if how else [])]

        monkeypatch.setattr(vllm_server, "server_command", command)
        servers = ServersConfig(count=count, start_timeout_s=start_timeout_s)
        return ServerGroup(ModelConfig(path=str(tmp_path)), servers, tmp_path / "logs")

    return build


async def test_servers_start_and_stop_with_all_their_processes(group_of):
    group = group_of(count=2)
    await group.start()
    assert [server.state for server in group.servers] == ["ready", "ready"]
    pids = [pid for server in group.servers for pid in (server.pid, *descendants(server.pid))]
    assert len(pids) == 6, "a guard, a server and the server's own child, twice"
    assert [entry["url"] for entry in group.status()] == [server.url for server in group.servers]
    await group.stop()
    assert not any(alive(pid) for pid in pids)
    assert group.ready == []


async def test_servers_on_a_cpu_let_the_worlds_go_first(group_of):
    group = group_of(count=2)
    await group.start()
    for server in group.servers:
        for pid in (server.pid, *descendants(server.pid)):
            assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 5)
        assert autogroup_niceness(server.pid) in (5, None)
    await group.stop()


def autogroup_niceness(pid: int) -> int | None:
    """None where the kernel has no autogroups."""
    file = Path(f"/proc/{pid}/autogroup")
    return int(file.read_text().split()[-1]) if file.exists() else None


@pytest.mark.parametrize(("deaths", "starts"), [(1, 2), (2, 3), (3, 3)])
async def test_a_server_that_is_killed_while_it_loads_its_first_policies_is_started_again(group_of, deaths, starts):
    """A node that begins anew in the middle of a run goes on; one whose server is killed each time ends."""
    group, hooked = group_of(), []

    async def hook(server):
        hooked.append(server.name)
        if len(hooked) <= deaths:
            os.kill(descendants(server.pid)[0], signal.SIGKILL)
            await server.work("/inference/v1/generate", {}, timeout_s=DEADLINE_S)

    group.on_ready = hook
    if deaths < 3:
        await group.start()
        assert [server.state for server in group.servers] == ["ready"]
        await group.stop()
    else:
        with pytest.raises((ServerStartError, *vllm_server.TRANSPORT_ERRORS)):
            await group.start()
    assert len(hooked) == starts


@pytest.mark.fault("a child that is killed while it starts, without a word, ends the whole command")
@pytest.mark.parametrize("kills", [1, 2])
async def test_a_server_that_is_killed_before_it_answers_is_started_once_more(group_of, monkeypatch, kills):
    group, spawn, starts = group_of(), vllm_server.VllmServer._spawn, []

    async def spawned(server):
        await spawn(server)
        starts.append(server.pid)
        if len(starts) <= kills:
            os.kill(server.pid, signal.SIGKILL)

    monkeypatch.setattr(vllm_server.VllmServer, "_spawn", spawned)
    with pytest.raises(ServerStartError, match="ended while it starts") if kills == 2 else contextlib.nullcontext():
        await group.start()
    await group.stop()
    assert len(starts) == 2


async def test_killed_server_is_replaced_and_leaves_nothing_behind(group_of):
    group = group_of()
    hooked = []

    async def hook(server):
        hooked.append((server.name, server.state))

    group.on_ready = hook
    await group.start()
    for victim in ("server", "guard"):
        server = group.servers[0]
        below = descendants(server.pid)
        old = [server.pid, *below]
        os.kill(below[0] if victim == "server" else server.pid, signal.SIGKILL)
        await wait_until(lambda: group.servers[0].state != "ready")
        await wait_until(lambda: group.servers[0].state == "ready")
        if victim == "server":
            assert not any(alive(pid) for pid in old)
        assert server.pid not in old
    assert group.servers[0].restarts == 2
    assert "vllm-0 ended: its log names no error and ends with 'the fake is starting'" in group.servers[0].last_error
    assert hooked == [("vllm-0", "starting")] * 3
    await group.stop()


@pytest.mark.parametrize("sleeps", [True, False])
async def test_no_process_holds_the_gpu_in_the_trainers_turn_and_all_are_back_after_it(group_of, sleeps):
    group = group_of(count=2, misbehave={} if sleeps else {0: "refuse sleep"})
    await group.start()
    pids = [server.pid for server in group.servers]
    group.rest()
    await group.sleep()
    if sleeps:
        os.kill(descendants(pids[0])[0], signal.SIGKILL)
        await wait_until(lambda: group.servers[0].state == "waiting")
    assert [server.state for server in group.servers] == ["waiting", "asleep"]
    assert not any(alive(pid) for pid in (pids[0], *descendants(pids[0])))
    assert group.servers[1].pid == pids[1]
    await group.sleep()
    assert group.ready == []
    await group.wake()
    await wait_until(lambda: len(group.ready) == 2)
    assert [server.restarts for server in group.servers] == [1, 0]
    await group.stop()


@pytest.mark.fault("a server that can never sleep, or never wake, is ended and started anew at every turn, for ever")
@pytest.mark.parametrize(
    ("misbehaves", "starts", "turns", "said"),
    [
        ("fail sleep", range(9), 3, "vllm-0 does not fall asleep: vllm-0 .* refuses /sleep: HTTP 500 "),
        ("only says it sleeps", range(9), 3, "vllm-0 does not fall asleep: .* and did not do it"),
        ("refuse wake", range(9), 3, "vllm-0 did not wake as it was: .* refuses /wake_up: HTTP 500 .*out of memory"),
        ("only says it is awake", range(9), 3, "vllm-0 did not wake as it was: .* and did not do it"),
        ("fail sleep", (0, 1, 3, 4), 6, None),
    ],
)
async def test_a_server_that_cannot_take_turns_is_given_up_at_the_third(group_of, misbehaves, starts, turns, said):
    group = group_of(misbehave=dict.fromkeys(starts, misbehaves))
    await group.start()
    server = group.servers[0]
    for turn in range(1, 7):
        await wait_until(lambda: server.sampled or said is None)
        group.rest()
        await group.sleep()
        await group.wake()
        await wait_until(lambda: server.state in ("ready", "given up"))
        if server.state == "given up":
            break
        if (server.restarts, turn) == (2, 3):  # the third start takes turns well; the fourth does not
            os.kill(descendants(server.pid)[0], signal.SIGKILL)
            await wait_until(lambda: server.restarts == 3 and server.state == "ready")
    assert turn == turns
    if said is not None:
        why = await asyncio.wait_for(group.given_up(), DEADLINE_S)
        assert re.match(f"3 times in a row: {said}", why)
        assert server.pid is None
    await group.stop()


async def test_vllm_on_a_cpu_which_cannot_sleep_is_refused_before_it_starts(group_of):
    group = group_of()
    group._config = ServersConfig(share="trainer")
    group.rest()
    with pytest.raises(ServerStartError, match=r"servers\.share needs vLLM on a GPU: .* set it to null"):
        await group.start()
    assert group.servers == []


async def test_a_server_that_starts_is_ready_before_it_sleeps(group_of):
    group = group_of(misbehave={0: "slow start"})
    starting = asyncio.create_task(group.start())
    await wait_until(lambda: group.servers and group.servers[0].pid)
    group.rest()
    await group.sleep()
    assert group.servers[0].state == "asleep"
    await starting
    assert group.ready == []
    await group.wake()
    assert group.ready == group.servers
    await group.stop()


@pytest.mark.parametrize(
    ("misbehaves", "timeout_s", "said"),
    [
        ("exit", DEADLINE_S, r"^vllm-0 ended while it starts: ValueError: no such model \(log: .*\)$"),
        ("slow start", 0.1, r"not ready after 0.1 s, though it moves; raise servers.start_timeout_s"),
        (
            "die of requests",
            DEADLINE_S,
            r"^vllm-0 .* its first request: RuntimeError: Unsupported CPU attention: head_dim=16 \(log: ",
        ),
    ],
)
async def test_server_that_does_not_start_is_noticed_with_its_last_words(group_of, misbehaves, timeout_s, said):
    with pytest.raises(ServerStartError, match=said):
        await group_of(misbehave={0: misbehaves}, start_timeout_s=timeout_s).start()


async def test_server_that_hangs_while_it_starts_is_noticed_and_takes_the_others_with_it(group_of, monkeypatch):
    monkeypatch.setattr(vllm_server, "HANG_S", 2.5)
    group = group_of(count=2, misbehave={1: "never ready"})
    with pytest.raises(ServerStartError, match=r"^vllm-\d starts and has not moved for 2.5 s: it hangs; read .*log$"):
        await group.start()
    assert [server.pid for server in group.servers] == [None, None]
    assert not any(FAKE in command for command in commands_of_children(os.getpid()))


async def test_server_that_is_slow_to_start_is_waited_for(group_of, monkeypatch):
    monkeypatch.setattr(vllm_server, "HANG_S", 1.0)
    group, before = group_of(misbehave={0: "slow start"}), moving.signs()
    await group.start()
    assert (group.servers[0].state, group.servers[0].restarts) == ("ready", 0)
    assert moving.signs() > before
    await group.stop()


async def test_server_that_dies_of_the_same_error_each_time_is_given_up(group_of):
    group = group_of(misbehave={start: "exit" for start in range(1, 20)})
    await group.start()
    os.kill(descendants(group.servers[0].pid)[0], signal.SIGKILL)
    why = await asyncio.wait_for(group.given_up(), DEADLINE_S)
    assert why.startswith("3 times in a row, without a token in between: vllm-0 ended while it starts: ValueError: no ")
    assert "\n" not in why
    assert (group.servers[0].state, group.servers[0].pid) == ("given up", None)
    assert group.waits_for()[0].startswith("vllm-0 is given up, for ")
    await group.stop()


def test_only_deaths_of_one_cause_and_without_any_use_are_counted():
    record = server_group._Record()
    causes = ["of port 4001", "of port 4002", None, "of port 4003"]
    assert [record.died(cause, useful=False) for cause in causes] == [False, False, False, True]
    record = server_group._Record()
    assert not any(record.died(cause, useful=False) for cause in ["a", "b", "a", "b", "a", None, None, None, None])
    record = server_group._Record()
    assert not any(record.died("a", useful=count % 2 == 1) for count in range(20))


def test_pauses_grow_and_a_server_that_hangs_again_is_left_alone_as_long_as_its_start_took():
    record = server_group._Record()
    assert [record.pause(0.0, 30.0, hung=False) for _ in range(3)] == [1.0, 2.0, 4.0]
    assert record.pause(0.0, 900.0, hung=True) == 8.0
    assert record.pause(0.0, 900.0, hung=True) == 900.0
    assert record.pause(server_group.STABLE_S + 1, 900.0, hung=True) == 1.0


async def test_server_that_is_slow_to_answer_is_not_replaced(group_of, monkeypatch):
    missed = []
    request = vllm_server.VllmServer.request

    async def counted(server, method, path, payload=None, *, timeout_s):
        try:
            return await request(server, method, path, payload, timeout_s=timeout_s)
        except TimeoutError:
            missed.append(path)
            raise

    monkeypatch.setattr(vllm_server.VllmServer, "request", counted)
    group = group_of(misbehave={0: "slow answers"})
    await group.start()
    monkeypatch.setattr(vllm_server, "PROBE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(vllm_server, "HANG_S", 0.5)
    missed.clear()
    await wait_until(lambda: len(missed) > 4 * vllm_server.PROBES_MISSED)
    assert (group.servers[0].state, group.servers[0].restarts) == ("ready", 0)
    await group.stop()


def commands_of_children(root: int) -> list[str]:
    found = []
    for pid in descendants(root):
        if alive(pid):
            found.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
    return found


async def test_server_that_stops_answering_is_replaced(group_of, monkeypatch):
    monkeypatch.setattr(vllm_server, "GRACE_S", 0.3)
    group = group_of()
    await group.start()
    monkeypatch.setattr(vllm_server, "PROBE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(vllm_server, "HANG_S", 2.0)
    old = group.servers[0].pid
    os.kill(descendants(old)[0], signal.SIGSTOP)
    await wait_until(lambda: group.servers[0].restarts > 0 and group.servers[0].state == "ready")
    assert "does not answer" in group.servers[0].last_error
    assert not alive(old)
    await group.stop()


async def test_running_requests_without_progress_count_as_hung(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_server, "POLL_S", 0.05)
    monkeypatch.setattr(vllm_server, "STALL_S", 0.3)
    monkeypatch.setattr(vllm_server, "HANG_S", 0.3)
    fake = fake_vllm.FakeVllm()
    url = await fake.start()
    group = ServerGroup(ModelConfig(path="unused"), ServersConfig(urls=[url]), tmp_path)
    await group.start()
    fake.load_metrics["num_requests_running"] = 2.0
    fake.tokens_per_scrape, started = 1.0, time.monotonic()
    await wait_until(lambda: fake.scrapes > 20 and time.monotonic() - started > 2 * vllm_server.STALL_S)
    assert (group.servers[0].restarts, group.servers[0].last_error) == (0, None)
    fake.tokens_per_scrape = 0.0
    await wait_until(lambda: group.servers[0].last_error is not None)
    assert group.servers[0].last_error.startswith("vllm-0 has 2 running requests and no token, after ")
    await group.stop()
    await fake.stop()


OWNER = texts_beside(__file__)["owner"]


def test_nothing_survives_a_killed_owner(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    code = textwrap.dedent(OWNER).format(path=sys.path, fake=FAKE, folder=str(tmp_path))
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout.readline() == "ready\n"
        pids = descendants(owner.pid)
        assert len(pids) == 6
    finally:
        owner.kill()
        owner.wait()
    block_until(lambda: not any(alive(pid) for pid in pids))


@pytest.mark.parametrize(("settings", "context", "said"), TABLES["external_server_that_holds_less_is_refused"])
async def test_external_server_that_holds_less_is_refused(tmp_path, settings, context, said):
    """Its requests would be cut or refused, one by one."""
    fake = fake_vllm.FakeVllm()
    url = await fake.start()
    fake.loaded["else"] = tmp_path
    for name, value in settings.items():
        setattr(fake, name, value)
    servers = ServersConfig(urls=[url], start_timeout_s=DEADLINE_S)
    group = ServerGroup(ModelConfig(path="unused", max_context=context), servers, tmp_path)
    if said is None:
        await group.start()
        await group.stop()
    else:
        with pytest.raises(ServerStartError, match=said):
            await group.start()
    await fake.stop()


async def test_external_server_that_is_not_there_is_named(tmp_path):
    url = f"http://127.0.0.1:{vllm_server.free_port()}"
    servers = ServersConfig(urls=[url], start_timeout_s=0.6)
    with pytest.raises(ServerStartError, match=rf"vllm-0 \({url}\) not ready after 0.6 s; is the URL right"):
        await ServerGroup(ModelConfig(path="unused"), servers, tmp_path).start()


async def test_missing_model_is_named_before_anything_starts(tmp_path):
    group = ServerGroup(ModelConfig(path=str(tmp_path / "nowhere")), ServersConfig(), tmp_path / "logs")
    with pytest.raises(ServerStartError, match=r"no model at .*nowhere \(config.json is missing\); check model.path"):
        await group.start()
    assert group.servers == []
