"""A command that ends, that does not, and what it leaves behind."""

import asyncio
import os
import signal
import sys

import pytest

from agent_environments.harness.program import program_environment, run_program
from support.processes import exists
from support.texts import texts_beside
from support.waiting import DEADLINE_S, wait_until

TABLES = texts_beside(__file__)


def python(code):
    return [sys.executable, "-c", code]


async def test_a_program_has_its_variables_and_no_secrets_of_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLOUT_SERVER_TOKEN", "secret")
    ended = await run_program(
        python(
            "import os; print(sorted(n for n in os.environ if n in ('TASK_ID', 'ROLLOUT_SERVER_TOKEN')), os.getcwd())"
        ),
        {"TASK_ID": "t_1"},
        tmp_path,
    )
    assert (ended.status, ended.output) == (0, f"['TASK_ID'] {tmp_path}\n")


@pytest.mark.parametrize("given", [{}, {"no_proxy": "intranet"}, {"NO_PROXY": "intranet"}, {"no_proxy": "*"}])
async def test_no_proxy_stands_between_a_program_and_the_node(tmp_path, monkeypatch, given):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"http_proxy": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9", **given}.items():
        monkeypatch.setenv(name, value)
    hosts = ["127.0.0.1", "localhost", "node7", *(["intranet"] if given else [])]
    code = (
        f"from urllib.request import proxy_bypass; print(all(map(proxy_bypass, {hosts})), proxy_bypass('example.com'))"
    )
    ended = await run_program(python(code), {"OPENAI_BASE_URL": "http://node7:8700/v1"}, tmp_path)
    everything = "*" in given.values()
    assert ended.output.split() == ["True", "True" if everything else "False"] or ended.output.split() == ["1", "0"]


async def test_the_end_of_a_long_output_is_kept(tmp_path):
    ended = await run_program(python("print('x' * 1_000_000); print('the end'); raise SystemExit(3)"), {}, tmp_path)
    assert ended.status == 3
    assert ended.output.endswith("the end\n")
    assert len(ended.output) < 5000


async def test_a_program_that_never_ends_is_ended_with_all_that_it_started(tmp_path):
    file = tmp_path / "pid"
    child = f"import os, time; os.setsid(); open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(600)"
    running = asyncio.create_task(run_program(python(code), {}, tmp_path))
    await wait_until(lambda: file.exists() and file.read_text())
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not exists(file.read_text())


async def test_a_program_that_kills_its_guard_and_leaves_a_process_is_not_waited_for(tmp_path):
    file = tmp_path / "pid"
    child = f"import os, time; os.setsid(); open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    code = (
        f"import os, pathlib, signal, subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        f"pid = pathlib.Path({str(file)!r})\n"
        "while not (pid.exists() and pid.read_text()): time.sleep(0.01)\n"
        "print('bye', flush=True); os.kill(os.getppid(), signal.SIGKILL)"
    )
    try:
        ended = await asyncio.wait_for(run_program(python(code), {}, tmp_path), DEADLINE_S)
    finally:
        if file.exists() and exists(file.read_text()):
            os.kill(int(file.read_text()), signal.SIGKILL)
    assert (ended.status, ended.output) == (-signal.SIGKILL, "bye\n")


async def test_a_program_that_is_stopped_leaves_its_last_words(tmp_path):
    stop = asyncio.Event()
    code = "import time; print('please log in', flush=True); open('said', 'w'); time.sleep(600)"
    running = asyncio.create_task(run_program(python(code), {}, tmp_path, stop=stop))
    await wait_until((tmp_path / "said").exists)
    stop.set()
    ended = await running
    assert (ended.status, ended.output) == (None, "please log in\n")


async def test_a_time_limit(tmp_path):
    assert (await run_program(python("import time; time.sleep(600)"), {}, tmp_path, 0.5)).status is None


async def test_a_command_that_is_not_there_says_so(tmp_path):
    ended = await run_program(["/nowhere/agent"], {}, tmp_path)
    assert ended.status == 127
    assert "cannot start /nowhere/agent" in ended.output


SECRETS = TABLES["secrets"]
NEEDED = TABLES["needed"]


@pytest.mark.attack
@pytest.mark.fault("a key of the node's environment is handed to agents")
def test_a_program_sees_what_it_needs_to_run_and_nothing_else_of_the_nodes(monkeypatch):
    for name, value in {**SECRETS, **NEEDED}.items():
        monkeypatch.setenv(name, value)
    seen = program_environment({"SENTRY_DSN": "mine"})
    assert {name for name in SECRETS if name in seen} == {"SENTRY_DSN"}
    assert {name: seen.get(name) for name in NEEDED} == NEEDED
    assert seen["SENTRY_DSN"] == "mine", "what the config gives it has"


@pytest.mark.fault("a progress bar before the grade")
@pytest.mark.parametrize("code", TABLES["the_answer_is_the_last_line_of_standard_output_whole"])
async def test_the_answer_is_the_last_line_of_standard_output_whole(tmp_path, code):
    answer = '{"reward": 1, "why": "' + "y" * 20_000 + '"}'
    ended = await run_program(python(f"import sys; it = {answer!r}\n{code}"), {}, tmp_path, answers=True)
    assert (ended.status, ended.answer.strip()) == (0, answer)
