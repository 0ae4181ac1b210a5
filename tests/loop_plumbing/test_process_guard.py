"""The guard that lets nothing of a command outlive the process that asked for it."""

import os
import subprocess
import sys
from pathlib import Path

from loop_plumbing import process_guard
from loop_plumbing.process_guard import descendants
from support.processes import alive
from support.waiting import DEADLINE_S


def run_guard(*command: str, grace: float = 0.3) -> subprocess.Popen:
    guard = [sys.executable, process_guard.__file__, str(os.getpid()), str(grace), *command]
    return subprocess.Popen(guard, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_guard_ends_with_the_status_of_its_command():
    assert run_guard(sys.executable, "-c", "raise SystemExit(5)").wait(DEADLINE_S) == 5
    assert run_guard("/no/such/program").wait(DEADLINE_S) == 127


def test_guard_kills_what_ignores_sigterm():
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    guard = run_guard(sys.executable, "-c", code)
    assert guard.stdout.readline() == "\n", "it ignores SIGTERM by now"
    below = descendants(guard.pid)
    assert len(below) == 1
    guard.terminate()
    assert guard.wait(DEADLINE_S) == 137
    assert not alive(below[0])


def test_guard_removes_what_its_command_left_in_the_temporary_folder(tmp_path):
    code = (
        "import os, tempfile, time; path = tempfile.mkdtemp(); os.chdir(path); "
        "[(os.mkdir('within'), os.chdir('within')) for _ in range(1200)]; os.chmod(path, 0); "
        "print(path, file=sys.stderr, flush=True)"
    )
    for ending in ("", "os.kill(os.getpid(), 9)", "time.sleep(600)"):
        guard = run_guard(sys.executable, "-c", f"import sys; {code}; {ending}")
        folder = Path(guard.stderr.readline().strip())
        assert folder.name
        assert folder.parent.name.startswith("guard-")
        if "sleep" in ending:
            guard.terminate()
        guard.wait(DEADLINE_S)
        assert not folder.parent.exists()


def test_sockets_fit_into_the_temporary_folder_however_long_the_path_of_the_usual_one_is(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / ("ü" * 60)))
    Path(os.environ["TMPDIR"]).mkdir()
    code = "import os, socket, uuid; socket.socket(socket.AF_UNIX).bind(os.environ['TMPDIR'] + f'/{uuid.uuid4()}')"
    assert run_guard(sys.executable, "-c", code).wait(DEADLINE_S) == 0


def test_guard_of_a_dead_owner_starts_nothing(tmp_path):
    marker = tmp_path / "started"
    code = [sys.executable, process_guard.__file__, "1", "0", sys.executable, "-c", f"open({str(marker)!r}, 'w')"]
    assert subprocess.run(code, timeout=DEADLINE_S).returncode == 1
    assert not marker.exists()
