"""What `rollout-server` does to its own process before it serves, and its commands on a node that runs."""

import asyncio
import os
import socket
import stat
import subprocess
import sys
from dataclasses import replace
from urllib.parse import urlsplit

import pytest

from loop_formats.run_files import NODE_SECRET, new_node_secret, node_address
from rollout_server import cli
from rollout_server.asking import DEFAULT_TOKEN_ENV
from rollout_server.cli import main
from rollout_server.client import RolloutClient
from rollout_server.config import node_url
from rollout_server.node_process import NodeProcess
from support.counter_node import TOKEN, counter_request
from support.texts import texts_beside
from support.waiting import DEADLINE_S, wait_until

TABLES = texts_beside(__file__)

LIMITED = TABLES["limited"]


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "said"), TABLES["the_limit_of_open_files_is_raised_to_what_the_episodes_need"]
)
def test_the_limit_of_open_files_is_raised_to_what_the_episodes_need(soft, hard, raised, said):
    program = [sys.executable, "-c", LIMITED.format(soft=soft, hard=hard)]
    *warnings, limits = subprocess.run(program, check=True, capture_output=True, text=True).stdout.splitlines()
    assert limits == f"{raised} {hard}"
    assert [line.startswith(said) for line in warnings] == [True] * bool(said)


async def test_status_says_who_uses_a_version_and_cancel_ends_its_use(running, policy, monkeypatch, capsys):
    monkeypatch.setenv(DEFAULT_TOKEN_ENV, TOKEN)
    running.node.servers.servers[0].last_error = "[/a.cc:5] closed\nand more"
    running.vllm.answers = lambda body: False
    await running.call(running.client.publish_policy, 1, policy / "adapter1")
    await running.call(running.client.start_collection, counter_request())

    async def said(*arguments):
        await running.call(main, [arguments[0], running.url, *arguments[1:]])
        return capsys.readouterr().out

    shown = await said("status")
    assert "policy versions 0 (1 using it), 1 (0 using it)" in shown
    assert "last error: [/a.cc:5] closed\nc1: running, 0 of " in shown, "whole, whatever is in it"
    assert await said("cancel", "c1") == "c1: cancelled\n"
    run = await running.node.collection("c1")
    await wait_until(lambda: run.idle)
    assert "policy versions 0 (0 using it), 1 (0 using it)" in await said("status")
    with pytest.raises(SystemExit, match="no collection 'c2'"):
        await said("cancel", "c2")


@pytest.mark.fault("nobody could ask the node that a run had started: its secret was kept nowhere")
async def test_the_node_of_a_run_is_asked_by_its_folder(running, monkeypatch, capsys):
    monkeypatch.delenv(DEFAULT_TOKEN_ENV, raising=False)
    root = running.node.root
    with pytest.raises(SystemExit, match="no rollout node is running in"):
        await running.call(main, ["status", str(root)])
    running.node.write_address(running.url, os.getpid())
    with pytest.raises(SystemExit, match=f"set the environment variable {DEFAULT_TOKEN_ENV}"):
        await running.call(main, ["status", str(root)])
    assert len(new_node_secret(root)) == 32
    assert stat.S_IMODE((root / NODE_SECRET).stat().st_mode) == 0o600
    (root / NODE_SECRET).write_text(TOKEN)
    await running.call(main, ["status", str(root)])
    assert running.url in capsys.readouterr().out
    running.node.remove_address()
    assert not (root / NODE_SECRET).exists()


@pytest.mark.parametrize(
    ("host", "written", "for_its_owner"),
    [
        ("0.0.0.0", socket.gethostname(), "127.0.0.1"),
        ("::", socket.gethostname(), "[::1]"),
        ("::1", "[::1]", "[::1]"),
    ],
)
async def test_a_node_is_found_from_other_machines_and_by_its_owner(running, tmp_path, host, written, for_its_owner):
    if ":" in host and not has_ipv6():
        pytest.skip("no IPv6 on this machine")
    config = replace(running.node.config, root=str(tmp_path / "open"), host=host)
    process = NodeProcess(config, tmp_path, TOKEN)
    try:
        await running.call(process.start)
        assert node_address(tmp_path / "open") == process.url.replace(for_its_owner, written)
        client = RolloutClient(process.url, TOKEN, alive=process.check)
        assert (await running.call(client.wait_ready, DEADLINE_S))["status"] == "ok"
    finally:
        await running.call(process.stop)


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("host", ["::1", "127.0.0.1", "node-3"])
def test_the_address_of_a_node_is_one_that_its_client_takes(host):
    url = node_url(host, 8700)
    assert (urlsplit(url).hostname, urlsplit(url).port) == (host, 8700)
    RolloutClient(url, TOKEN)


class FailingNode:
    """As much of a node as its program needs to see it fail."""

    def __init__(self, start_error=None):
        self.failure = None
        self.stopped = False
        self._start_error = start_error

    async def start(self):
        if self._start_error is not None:
            raise self._start_error

    async def until_given_up(self):
        if self._start_error is not None:
            await asyncio.Event().wait()
        self.failure = "no vLLM server is left: vllm-0 ended"

    async def stop(self):
        self.stopped = True


@pytest.mark.parametrize(
    ("start_error", "said"),
    [
        (None, r"^rollout-server: no vLLM server is left: vllm-0 ended$"),
        (TimeoutError(), r"^rollout-server: TimeoutError\(\) in start \(.*test_cli.py:\d+\)$"),
        (KeyError("users"), r"^rollout-server: KeyError\('users'\) in start \(.*test_cli.py:\d+\)$"),
        (RuntimeError("two\nlines"), r"^rollout-server: two lines$"),
    ],
)
def test_a_node_that_ends_by_itself_says_why_in_one_line(monkeypatch, start_error, said):
    monkeypatch.setattr(cli, "FAREWELL_S", 0.0)
    node = FailingNode(start_error)
    monkeypatch.setattr(cli, "_serve", lambda arguments, program: asyncio.run(cli._until_stopped(node)))
    with pytest.raises(SystemExit, match=said):
        main([])
    assert node.stopped
    assert node.failure is not None
