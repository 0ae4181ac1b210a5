"""A rollout node as a child: what is said of one that ended, and whose address is believed."""

import contextlib
import sys
from dataclasses import replace

import pytest

from agent_environments.tools.environment import ToolPool
from loop_formats.run_files import NODE_ADDRESS, node_address
from rollout_server.config import EnvironmentConfig, ModelConfig, NodeConfig
from rollout_server.node_process import NodeDied, NodeProcess
from support.counter_node import TOKEN
from support.processes import write_program


def test_a_node_that_died_is_not_explained_by_what_an_earlier_one_said(tmp_path, monkeypatch):
    config = NodeConfig(str(tmp_path / "node"), ModelConfig("model"), EnvironmentConfig("counter"))
    process = NodeProcess(config, tmp_path, "secret")
    process.log_path.write_text("rollout-server: cannot listen on 127.0.0.1:8700: choose another port\n")
    program = tmp_path / "program"
    monkeypatch.setattr(sys, "executable", str(program))
    for words, said in (("no such module", "no such module"), ("rollout-server: no GPU", ": no GPU (log: ")):
        write_program(program, f"echo '{words}'\nexit 3")
        with pytest.raises(NodeDied, match="ended with status 3") as died:
            process.start()
        assert said in str(died.value)
        assert "choose another port" not in str(died.value)


@pytest.mark.fault("a child that is killed while it starts, without a word, ends the whole command")
@pytest.mark.parametrize("kills", [0, 1, 2])
def test_a_node_that_is_killed_as_it_starts_is_started_once_more(tmp_path, monkeypatch, kills):
    process = NodeProcess(NodeConfig(str(tmp_path), ModelConfig("m"), EnvironmentConfig("counter")), tmp_path, "secret")
    program, starts = tmp_path / "program", tmp_path / "starts"
    program.write_text(
        f"#!/bin/sh\necho >> {starts}\n[ $(wc -l < {starts}) -gt {kills} ] || kill -9 $$\n"
        f'echo "{{\\"url\\": \\"http://here\\", \\"pid\\": $$}}" > {tmp_path / NODE_ADDRESS}\nexec sleep 3600\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(NodeDied, match="ended with status -9") if kills == 2 else contextlib.nullcontext(), process:
        assert process.url == "http://here"
    assert len(starts.read_text()) == min(2, kills + 1)


async def test_a_refused_child_leaves_the_address_of_the_node_that_runs(running, tmp_path):
    """And takes no dead node's address for its own: there is none until it listens itself."""
    config = replace(running.node.config, root=str(tmp_path / "root"))
    stale = tmp_path / "root" / NODE_ADDRESS
    stale.parent.mkdir()
    stale.write_text('{"url": "http://127.0.0.1:9", "pid": 1}')
    first, second = (NodeProcess(config, tmp_path / name, TOKEN) for name in ("first", "second"))
    try:
        await running.call(first.start)
        assert first.url != "http://127.0.0.1:9"
        with pytest.raises(NodeDied, match=r"another rollout node is using .*root \(.*stop it, or choose another root"):
            await running.call(second.start)
        assert node_address(tmp_path / "root") == first.url
    finally:
        await running.call(first.stop)
    assert node_address(tmp_path / "root") is None


NAMES = ("email", "calendar", "token", "json", "types", "random", "logging", "secrets", "queue", "select", "aiohttp")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a file of functions, and files that are called like modules of Python's and of packages."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('it was imported')\n")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import calendar, email.message\nfrom agent_environments.tools import reward\n"
        "TASKS = [{'question': '?'}]\n\n\n@reward\ndef right(answer: str) -> bool:\n    return True\n"
    )
    return tmp_path


def test_a_node_imports_no_file_of_the_working_folder_in_a_modules_place(folder):
    environment = EnvironmentConfig("tools", {"module": "mine"})
    config = NodeConfig(str(folder / "node"), ModelConfig(str(folder / "no-model")), environment)
    with pytest.raises(NodeDied, match="no-model") as died:
        NodeProcess(config, folder / "log", "secret").start()
    assert "it was imported" not in str(died.value)


async def test_a_dotted_module_of_the_working_folder_is_found_there_and_nothing_else_is(folder, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    pool = ToolPool(lambda text: [], "mine")
    await pool.open()
    await pool.close()
    monkeypatch.delitem(sys.modules, "mine")
