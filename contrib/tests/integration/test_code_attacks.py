"""What agent code can do to the host and to others from a session of the tool ``python``: nothing."""

import asyncio
import time

import pytest

from agent_environments.tools.tool import ToolError
from loop_contrib.code_tool.python_tool import WORKER, PythonSessions
from support.adapter_attacks import ATTACKS, HANGS
from support.listener import Listener
from support.processes import processes
from support.waiting import wait_until

pytestmark = [pytest.mark.attack, pytest.mark.integration]
AT_ONCE = 4
CODE_DEADLINE_S = 3.0
OF_A_BOX = {"mode by setxattrat", "owner of a standard stream", "lock of a standard stream"}
"""What these reach is one for all sealed interpreters, and a box's own."""
DECEIVING_THEMSELVES = {"stdout replaced", "descriptors kept open", "fork bomb"}
"""Code that has no standard output any more, or writes answers itself, or whose children write more than is shown: its
own later calls are answered too early."""


@pytest.mark.parametrize("sealed", [False, True])
async def test_attacks_by_the_code_tool(tmp_path, monkeypatch, sealed):
    """The same list in a box and in a sealed interpreter: the host holds canary files and a listener."""
    if sealed:
        monkeypatch.setenv("PATH", "/nowhere")  # where no bubblewrap is
    sentinel, truth = tmp_path / "sentinel", tmp_path / "truth"
    sentinel.mkdir()
    truth.mkdir()
    canary = "the canary sings at noon"
    for name in ("evaluation.py", "private_data.json", "answer.json", "x.db"):
        (truth / name).write_text(f"# {canary}\n")
    listener = Listener()
    values = {"sentinel": sentinel, "truth": truth, "socket": truth / "socket", "port": listener.port}
    values |= {"email": "a@example.com", "volume": 50, "task": "a_1"}
    sessions = PythonSessions({"deadline_s": CODE_DEADLINE_S, "max_characters": 10_000})
    await sessions.open()
    server = sessions._server.pid
    servers = set(processes(str(WORKER)))
    places = asyncio.Semaphore(AT_ONCE)

    async def run(code: str) -> tuple[str, float, str]:
        """What was shown, in how many seconds, and what the session computes afterwards."""
        async with places:
            session = sessions.session()
            tool = session.tools[0]
            began = time.monotonic()
            try:
                shown = await tool.call({"code": code.format(**values)}, None)
            except ToolError as error:
                shown = str(error)
            took = time.monotonic() - began
            try:
                after = await tool.call({"code": "print(6 * 7)"}, None)
                left = await session.left_files()
            finally:
                await session.close()
            return shown + repr(left), took, after

    try:
        outcomes = dict(zip(ATTACKS, await asyncio.gather(*map(run, ATTACKS.values())), strict=True))
        assert list(sentinel.iterdir()) == []
        assert {path.read_text() for path in truth.iterdir()} == {f"# {canary}\n"}
        assert not listener.visited()
        assert sessions._server.pid == server
        assert sessions._server.alive
        await wait_until(lambda: processes(str(WORKER)).keys() <= servers)
        for name, (shown, took, after) in outcomes.items():
            print(f"{name:<48} {took:7.2f} {shown.splitlines()[-1][:70]!r}")
            assert canary not in shown, name
            assert "REACHED" not in shown or (name in OF_A_BOX and not sealed), name
            assert "42" in after.splitlines() or name in DECEIVING_THEMSELVES, name
        for name in HANGS:
            assert outcomes[name][1] < CODE_DEADLINE_S + 60, name
    finally:
        await sessions.close()
