"""Keeps an agent's processes and folder from one call to the next; it is out of the agent's reach.

It is the first process of a box (agent_environments/sandbox/box.py), which ends with it, or stands before one sealed
interpreter (sandbox.py there). It alone holds the way to the owner. Between calls nothing of the agent's runs: all its
processes are stopped, and a process that does not stop is ended. It answers requests in lines of JSON:

    {"files": {name: base64}}       {"refused": why}                  null in place of a text removes; "" where it could
    {"run": kind, "text": text}     {"output": text, "gone": why, "over": over}
                                    why all that ran was ended, "" where it was not; whether the files are too many
    {"piece": n}                    {"name": name, "content": base64} of the files that are left, {} behind the last
"""

from __future__ import annotations

import binascii
import contextlib
import json
import os
import resource
import select
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import interpreter
import sandbox
import syscalls
import written_tree
from bounded_text import shortened

FOLDER = "/box"
MOST_FILES = 1000
PROCESSES = 64
USER = 65534
LOOK_S = 0.05
"""Seconds between two checks of the used memory and files during a call."""
IDLE_LOOK_S = 1.0
GRACE_S = 2.0
"""Seconds that a call has to end after the interrupt at its deadline; then all processes are killed."""
STOP_S = 2.0
"""The longest wait between two checks that all processes have stopped; the checks take three times as long."""
INTERPRETER_BYTES = 32 << 20
"""Memory that each session needs for itself."""
PIECE_BYTES = 16 << 20
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND = 1, 2, 4, 32, 4096
_CLONE_NEWUSER = 0x10000000

Play = Callable[[int, int], None]
"""The loop of an agent's process: it reads from the first descriptor, and after each text writes a line to the second:
the word that came with the text, which no earlier call could know, and as JSON the text of an error, or a status."""


def put(root: str, path: str, content: bytes | None) -> None:
    """Write or remove a file below a folder that an agent could write to. Links are not followed.

    Raises:
        OSError: another file or folder at this path prevents it.
    """
    *above, name = path.split("/")
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        for each in above:
            with contextlib.suppress(FileExistsError):
                os.mkdir(each, 0o755, dir_fd=folder)
            below = os.open(each, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = below
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
        if content is not None:
            with open(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=folder), "wb") as file:
                file.write(content)
    finally:
        os.close(folder)


class AgentProcess:
    """A process that runs the agent's code in its own session. It prints to the file descriptor ``printed``."""

    def __init__(self, play: Play, walls: Callable[[], None], printed: int) -> None:
        ask, self.ask = os.pipe()
        self.done, done = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                sandbox.silence((0,))
                os.dup2(printed, 1)
                os.dup2(printed, 2)
                sandbox.close_descriptors_except({0, 1, 2, ask, done})
                walls()
                play(ask, done)
            except BaseException as error:
                os.write(1, f"{type(error).__name__}: {error}\n".encode(errors="replace"))
            finally:
                os._exit(1)
        os.close(ask)
        os.close(done)
        os.set_blocking(self.ask, False)


class Keeper:
    """Answers the requests of one episode.

    Args:
        limits: ``deadline_s``, ``memory_mb``, ``folder_mb`` and ``max_characters``.
        walls: function that each process calls first, to drop its rights.
        folder: the folder with the agent's files.
    """

    def __init__(self, limits: Mapping[str, Any], walls: Callable[[], None], folder: str) -> None:
        self._limits, self._walls, self._folder = limits, walls, folder
        self._ended: dict[int, int] = {}
        self._over = False
        self._boxed = os.getpid() == 1
        self._sessions: dict[str, AgentProcess] = {}
        self._output, self._printed = os.pipe()
        os.set_blocking(self._output, False)
        self._left: list[dict[str, str]] = []

    def serve(self, connection: int) -> None:
        """Answer requests until the other end closes the connection."""
        with os.fdopen(connection, "rb") as requests:
            while True:
                while not select.select([connection], [], [], IDLE_LOOK_S)[0]:
                    self._freeze()
                if not (line := requests.readline()):
                    return self._end_all()
                rest = memoryview(json.dumps(self.answer(json.loads(line))).encode() + b"\n")
                while rest:
                    rest = rest[os.write(connection, rest) :]

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to one request."""
        if "run" in request:
            return self._run(request["run"], request["text"])
        if "piece" in request:
            if request["piece"] == 0:
                self._left = list(self._pieces())
            return (self._left[request["piece"] :] or [{}])[0]
        self._freeze()
        for name, text in request.get("files", {}).items():
            try:
                put(self._folder, name, None if text is None else binascii.a2b_base64(text))
            except OSError as error:
                return {"refused": f"{name}: {error.strerror}"}
        return {"refused": ""}

    def _run(self, kind: str, text: str) -> dict[str, Any]:
        play, read_for = interpreter.KINDS[kind]
        if kind not in self._sessions:
            self._sessions[kind] = AgentProcess(play, self._walls, self._printed)
        session = self._sessions[kind]
        self._signal(signal.SIGCONT)
        word = os.urandom(8).hex()  # an answer of an earlier call, or of code that pretends to be over, lacks it
        asked, done, printed = memoryview(read_for(word, text)), b"", bytearray()
        most, gone, late = self._limits["max_characters"], "", ""
        until, look = time.monotonic() + self._limits["deadline_s"], 0.0
        while not gone and b"\n" not in (answer := done.partition(word.encode())[2]):
            ready, writable, _ = select.select([self._output, session.done], [session.ask] if asked else [], [], LOOK_S)
            if writable:
                with contextlib.suppress(BrokenPipeError):
                    asked = asked[os.write(session.ask, asked[:4096]) :]
            if session.done in ready:
                data = os.read(session.done, 1 << 16)
                done += data
                if not data or len(done) > 16 * most + (1 << 16):
                    gone = self._how_it_ended(session)
            self._read(printed)
            now = time.monotonic()
            if now > look:
                self._reap()
                look, gone = now + LOOK_S, gone or self._passed()
            if now > until and late:
                gone = gone or late
            elif now > until:
                late, until = f"the code took longer than {self._limits['deadline_s']:g} s", now + GRACE_S
                with contextlib.suppress(ProcessLookupError):
                    if session.pid not in self._ended:
                        os.killpg(session.pid, signal.SIGINT)
        gone = gone or self._passed() or ("" if self._freeze() else "it does not let itself be stopped")
        if gone:
            self._end_all()
            gone += "; variables and files are gone" if self._over else "; variables are gone, files are kept"
        self._read(printed)
        error = "" if gone else f"TimeoutError: {late}\n" if late else _error(answer)
        output = shortened(printed.decode(errors="replace"), most - len(error := shortened(error, most // 2)))
        output += ("\n" if error and output[-1:] not in ("", "\n") else "") + error
        return {"output": output, "gone": gone, "over": self._over}

    def _read(self, printed: bytearray) -> None:
        """Return the printed output; drop the middle if it is too long."""
        room = 4 * self._limits["max_characters"]
        with contextlib.suppress(BlockingIOError):
            printed += os.read(self._output, 1 << 16)
        if len(printed) > 4 * room:
            del printed[room:-room]

    def _how_it_ended(self, session: AgentProcess) -> str:
        with contextlib.suppress(ProcessLookupError):
            os.kill(session.pid, signal.SIGKILL)  # it has closed its answers' pipe, and may still run
        with contextlib.suppress(ChildProcessError):
            self._ended[session.pid] = os.waitpid(session.pid, 0)[1]
        status = os.waitstatus_to_exitcode(self._ended[session.pid])
        return f"its process ended with {f'status {status}' if status >= 0 else f'signal {-status}'}"

    def _reap(self, how: int = os.WNOHANG) -> None:
        """Collect the processes that have ended. With 0, first wait until all have ended."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, how))[0]:
                self._ended[ended[0]] = ended[1]

    def _pieces(self) -> Iterator[dict[str, str]]:
        self._freeze()
        room = self._limits["folder_mb"] << 20
        for written in written_tree.walk(self._folder):
            size = written.about.st_size
            if not stat.S_ISREG(written.about.st_mode) or size > room:
                continue
            room -= size
            name = os.fsencode(written.path).decode(errors="backslashreplace")
            with contextlib.suppress(OSError):
                if not written.about.st_mode & stat.S_IRUSR:  # its writer may have made it unreadable
                    os.chmod(written.name, 0o600, dir_fd=written.folder)
                file = os.open(written.name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=written.folder)
                with os.fdopen(file, "rb") as opened:
                    for _ in range(0, size + 1, PIECE_BYTES):
                        content = binascii.b2a_base64(opened.read(PIECE_BYTES), newline=False)
                        yield {"name": name, "content": content.decode()}

    def _processes(self) -> list[int]:
        if not self._boxed:
            return [session.pid for session in self._sessions.values() if session.pid not in self._ended]
        return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and entry != "1"]

    def _signal(self, number: int) -> None:
        for pid in [-1] if self._boxed else self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _freeze(self) -> bool:
        """Stop all processes and return True. If one does not stop in time, kill all and return False."""
        wait = 0.0001
        while wait < STOP_S:
            self._signal(signal.SIGSTOP)
            if not any(_state(pid) in ("R", "S") for pid in self._processes()):
                return True
            time.sleep(wait)
            wait *= 1.5
        self._end_all()
        return False

    def _end_all(self) -> None:
        self._signal(signal.SIGKILL)
        self._reap(0)
        for session in self._sessions.values():
            os.close(session.ask)
            os.close(session.done)
        self._sessions.clear()

    def _passed(self) -> str:
        """Return a sentence about the bound that memory or files exceed; "" if they exceed none."""
        if not self._boxed:
            sizes = [written.about.st_size for written in written_tree.walk(self._folder)]
            self._over = len(sizes) > MOST_FILES or sum(sizes) > self._limits["folder_mb"] << 20
            words = f"its files are more than {MOST_FILES}, or take more than {self._limits['folder_mb']} MiB"
            return words if self._over else ""
        most = (self._limits["memory_mb"] << 20) + INTERPRETER_BYTES * len(self._sessions)
        much = sum(map(_memory, self._processes())) > most
        return f"its processes together took more than {self._limits['memory_mb']} MiB of memory" if much else ""


def _error(answer: bytes) -> str:
    with contextlib.suppress(ValueError, RecursionError):
        outcome = json.loads(answer.partition(b"\n")[0])
        if isinstance(outcome, str):
            return outcome
        return f"exit status {outcome}\n" if outcome else ""
    return ""


def _of_process(pid: int, file: str) -> str:
    try:
        with open(f"/proc/{pid}/{file}", encoding="ascii", errors="replace") as opened:
            return opened.read()
    except OSError:  # it has ended
        return ""


def _state(pid: int) -> str:
    return _of_process(pid, "stat").rpartition(") ")[2][:1]


def _memory(pid: int) -> int:
    """Return a process's memory in bytes, with its share of shared pages."""
    return int((_of_process(pid, "smaps_rollup").partition("\nPss:")[2] or "0").split()[0]) * 1024


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    words = (source.encode(), target.encode(), kind.encode(), flags, options.encode())
    sandbox.check(sandbox.libc.mount(*words), f"mount {target}")


def furnish(folder_mb: int) -> None:
    """Mount the folders that a box may write to, with one limit on all their bytes and files. The rest is read-only."""
    options = f"size={folder_mb}m,nr_inodes={MOST_FILES},mode=755"
    _mount("files", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    for name in (FOLDER, "/dev/shm", "/tmp"):  # the last one hides the others' place
        os.mkdir(f"/tmp/{os.path.basename(name)}", 0o700)
        _mount(f"/tmp/{os.path.basename(name)}", name, "", _MS_BIND)
    for name, text in {
        "passwd": f"agent:x:{USER}:{USER}::{FOLDER}:/bin/bash\n",
        "group": f"agent:x:{USER}:\n",
        "hosts": "127.0.0.1 localhost box\n::1 localhost\n",
    }.items():
        with open(f"/etc/{name}", "w", encoding="ascii") as file:
            file.write(text)
    _mount("", "/", "", _MS_REMOUNT | _MS_BIND | _MS_RDONLY)
    os.chdir(FOLDER)


def walls_of_a_box(memory_mb: int) -> Callable[[], None]:
    """Return the function by which a process of agent's code in a box drops its rights and changes its user."""
    program = syscalls.filter_program(syscalls.refused_in_a_box(os.uname().machine), listed_only=False)

    def take() -> None:
        sandbox.undumpable(False)
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("1000")  # where memory ends, an agent's processes end first
        sandbox.check(sandbox.libc.unshare(_CLONE_NEWUSER), "a user of its own")
        for name, text in {"setgroups": "deny", "uid_map": f"{USER} 0 1", "gid_map": f"{USER} 0 1"}.items():
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
        sandbox.limit_memory(memory_mb)
        sandbox.lower({resource.RLIMIT_NPROC: PROCESSES, resource.RLIMIT_NOFILE: 256, resource.RLIMIT_CORE: 0})
        sandbox.lower({resource.RLIMIT_MEMLOCK: 0, resource.RLIMIT_MSGQUEUE: 0})
        sandbox.give_up_rights()
        sandbox.install_filter(program)

    return take


def main() -> None:
    limits = json.loads(sys.argv[1])
    furnish(limits["folder_mb"])
    sandbox.undumpable()
    del sys.path[0]  # agents' code does not need it
    keeper = Keeper(limits, walls_of_a_box(limits["memory_mb"]), FOLDER)
    if len(sys.argv) > 2:
        keeper.serve(int(sys.argv[2]))
        os._exit(0)
    tried = keeper.answer({"run": "python", "text": limits["trial"]})
    print(tried["output"], tried["gone"], flush=True)
    os._exit(bool(tried["gone"]))


if __name__ == "__main__":
    main()
