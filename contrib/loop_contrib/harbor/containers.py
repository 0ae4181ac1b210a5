"""Containers by the command line of podman or docker: images, containers, a shell that is kept open, files out and in.

The host ends a container and takes its files out, never a program in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import re
import secrets
import shlex
import shutil
import subprocess
import tarfile
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from agent_environments.protocol import EnvironmentCrashed
from loop_contrib.harbor.tasks import HarborTask, check_artifact

INSTALL = {"podman": "apt-get install podman", "docker": "install docker.io, and start its daemon"}
NAMED = "loop-harbor"
CALL_S = 300.0
"""Seconds for a call that does not run the task's own programs."""
END_S = 10.0
REMOVAL_S = (1.0, 2.0)
"""Seconds between the looks at an ended container, which somebody may be about to remove."""
_NAME = re.compile(rf"{NAMED}-(\d+)-(\d+)-\d+-[0-9a-f]+")
PROCESSES = 512
MOST_FILES = 100_000

logger = logging.getLogger(__name__)


class TooLong(EnvironmentCrashed):
    """A command was still running at its deadline."""


class Unusable(Exception):
    """A container cannot be graded, or the files that an agent left in it cannot."""


class Containers:
    """The containers of this process, run by ``backend``. Each name says which process owns the container."""

    def __init__(self, backend: str) -> None:
        if backend not in INSTALL:
            raise ValueError(f"backend is {backend!r}; it must be podman or docker")
        self.client = backend
        self._own = f"{NAMED}-{os.getpid()}-{_began(os.getpid())}"
        self._numbers = itertools.count()
        self.peaks_mb: deque[float] = deque(maxlen=100)
        """The most memory, with files in the cache, of the containers that were seen to run last."""

    def find(self) -> None:
        """Look for the back end's client. Raises FileNotFoundError if it is not installed."""
        if shutil.which(self.client) is None:
            raise FileNotFoundError(f"there is no {self.client} here: {INSTALL[self.client]}")

    async def open(self) -> None:
        """Look for the back end, and remove the containers of processes that have ended.

        Raises:
            FileNotFoundError: the back end is not installed.
            EnvironmentCrashed: the back end does not work, for example because its daemon is not running; one line.
        """
        self.find()
        code, _, errors = await self.call("info")
        if code:
            raise EnvironmentCrashed(f"{self.client} does not work here: {_last(errors)} ({INSTALL[self.client]})")
        for name, owner, began in await self.left():
            if _began(owner) != began:
                await self.remove(name)

    async def close(self) -> None:
        """Remove all containers of this process."""
        for name, *_ in await self.left():
            if name.startswith(f"{self._own}-"):
                await self.remove(name)

    async def left(self) -> list[tuple[str, int, str]]:
        """Return (name, process id, process's start time) for each container that a process like this one has started.

        An image may have the same label, so the name must have the form of :meth:`name`.
        """
        listed = await self.must("ps", "-a", "--filter", f"label={NAMED}", "--format", "{{.Names}}")
        return [(match[0], int(match[1]), match[2]) for match in map(_NAME.fullmatch, listed.split()) if match]

    async def image(self, task: HarborTask) -> str:
        """Return the name of a task's image. Pull or build the image if it is missing.

        Raises:
            EnvironmentCrashed: the image cannot be pulled or built; the message is the back end's last line.
        """
        name = task.image or f"localhost/{NAMED}:{task.digest('environment')}"
        if (await self.call("image", "inspect", name))[0]:
            how = ["pull", name] if task.image else ["build", "-t", name, str(task.folder / "environment")]
            logger.info("task %s: %s %s", task.id, self.client, shlex.join(how))
            began = time.monotonic()
            code, _, errors = await self.call(*how, limit_s=task.build_s)
            if code:
                raise EnvironmentCrashed(f"task {task.id}: its image {name} cannot be had: {_last(errors)}")
            logger.info("task %s: its image is there after %.0f s", task.id, time.monotonic() - began)
        return name

    async def workdir(self, task: HarborTask, image: str) -> str:
        """Return the working folder of a task in its container.

        Raises:
            ValueError: the task names no artifacts, and the folder holds more than the agent's files.
        """
        output = await self.must("image", "inspect", "-f", "{{.Config.WorkingDir}}", image)
        folder = task.workdir or output.strip() or "/"
        if not task.artifacts:
            try:
                check_artifact(folder)
            except ValueError as error:
                raise ValueError(f"{task.folder / 'task.toml'}: {error}, or set WORKDIR in its Dockerfile") from error
        return folder

    def name(self) -> str:
        """Return a name for a new container."""
        return f"{self._own}-{next(self._numbers)}-{secrets.token_hex(3)}"

    async def begin(self, name: str, task: HarborTask, image: str, workdir: str, mounted: Path | None = None) -> None:
        """Start a container of a task without any program. It can read the folder ``mounted`` as /loop."""
        limits = [f"--memory={task.memory_mb}m", f"--cpus={task.cpus:g}", f"--pids-limit={PROCESSES}"]
        flags = ["--init", "--stop-timeout=0", f"--label={NAMED}"]
        if mounted is not None:
            flags.append(f"--volume={mounted}:/loop:ro")
        if task.workdir is not None:
            flags.append(f"--workdir={workdir}")
        if self.client == "podman":
            flags.append("--http-proxy=false")  # else the host's variables come in, which may hold a password
        network = [] if task.network else ["--network=none"]
        env = [f"--env={key}={value}" for key, value in task.variables.items()]
        await self.must(
            "run", "-d", f"--name={name}", *flags, *limits, *network, *env, "--entrypoint=sleep", image, "infinity"
        )
        loose = task.folder / "environment"
        if task.image and not (loose / "Dockerfile").exists() and loose.is_dir():
            await self.must("cp", f"{loose}/.", f"{name}:{workdir}")

    async def is_running(self, name: str) -> bool:
        """Return whether a container runs. Raises EnvironmentCrashed if it is gone; nothing in it can remove it."""
        for wait_s in (*REMOVAL_S, 0.0):
            status, process = (await self.must("inspect", "-f", "{{.State.Status}} {{.State.Pid}}", name)).split()
            if status == "running":
                self.peaks_mb.extend(_peak_mb(process))
                return True
            await asyncio.sleep(wait_s)
        return False

    async def end_processes(self, name: str) -> None:
        """End all processes of a container and start it again; its files stay. If the start fails, it stays ended.

        Close its shell first: podman does not notice the end of a shell whose output nobody reads.
        """
        await self.call("restart", name)

    async def stop(self, name: str) -> None:
        """End a container. Its files can still be taken out.

        Raises:
            Unusable: the container exists but does not end.
            EnvironmentCrashed: the container is gone.
        """
        code, _, errors = await self.call("stop", name)
        if code and await self.is_running(name):
            raise Unusable(f"its container does not end: {_last(errors)}")

    async def remove(self, name: str) -> None:
        """End a container, if it exists, and remove its files."""
        await self.call("rm", "-f", name)

    async def must(self, *words: str, error: type[Exception] = EnvironmentCrashed) -> str:
        """Make a call of the client and return what it prints. Raises ``error`` if the call fails, and as
        :meth:`call`."""
        code, output, errors = await self.call(*words)
        if code:
            raise error(f"{self.client} {words[0]}: {_last(errors)}")
        return output

    async def call(self, *words: str, limit_s: float = CALL_S) -> tuple[int, str, str]:
        """Make a call of the client. Return its exit status, output and errors.

        Raises:
            TooLong: the call takes longer than ``limit_s``.
            EnvironmentCrashed: somebody on this machine has killed the client.
        """
        process = await asyncio.create_subprocess_exec(
            self.client,
            *words,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            cwd=tempfile.gettempdir(),  # podman leaves a file `oom` there where a container has no more memory
        )
        try:
            async with asyncio.timeout(limit_s):
                out, error = await process.communicate()
        except TimeoutError:
            raise TooLong(f"{self.client} {words[0]} takes longer than {limit_s:g} s") from None
        finally:
            await _end(process)
        code = _not_killed(self.client, words[0], process.returncode)
        return code, out.decode(errors="replace"), error.decode(errors="replace")

    async def take(self, name: str, path: str, most_bytes: int) -> IO[bytes] | None:
        """Return the files at a path of an ended container as a tar file whose top is ``path``; None without any.

        Raises:
            Unusable: the tar file holds more than ``most_bytes``, or more than :data:`MOST_FILES` files.
            EnvironmentCrashed: as for :meth:`call`.
        """
        return await asyncio.to_thread(self._take, name, path, most_bytes)

    def _take(self, name: str, path: str, most_bytes: int) -> IO[bytes] | None:
        taken = tempfile.TemporaryFile()  # noqa: SIM115  (whoever asked closes it)
        room, count = most_bytes, 0
        with subprocess.Popen([self.client, "cp", f"{name}:{path}", "-"], stdout=PIPE, stderr=subprocess.DEVNULL) as cp:
            try:
                with (
                    tarfile.open(fileobj=cp.stdout, mode="r|") as source,
                    tarfile.open(fileobj=taken, mode="w", format=tarfile.PAX_FORMAT) as copy,
                ):
                    for member in source:
                        room, count = room - member.size, count + 1
                        if room < 0 or count > MOST_FILES:
                            raise Unusable(f"{path} holds more than {most_bytes >> 20} MiB or {MOST_FILES} files")
                        if member.isreg() or member.isdir() or member.issym() or member.islnk():
                            copy.addfile(_under(path, member), source.extractfile(member) if member.isreg() else None)
                self._copied(cp)
            except tarfile.ReadError:
                taken.close()
                self._copied(cp)
                return None
            except BaseException:
                taken.close()
                raise
            finally:
                cp.kill()
        taken.seek(0)
        return taken

    def _copied(self, cp: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may have more to say than was read
            _not_killed(self.client, "cp", cp.wait(END_S))

    async def give(self, name: str, files: IO[bytes]) -> None:
        """Unpack a tar file from :meth:`take` in another container.

        Raises:
            Unusable: the tar file cannot be unpacked in that container.
        """
        words = [self.client, "cp", "-", f"{name}:/"]
        done = await asyncio.to_thread(subprocess.run, words, stdin=files, capture_output=True)
        if _not_killed(self.client, "cp", done.returncode):
            raise Unusable(f"what it left cannot be unpacked: {_last(done.stderr.decode(errors='replace'))}")


def _under(path: str, member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return the member with its names moved below ``path``. If ``path`` is a link, the back end names its target."""

    def moved(name: str) -> str:
        return f"{path.lstrip('/')}/{name.partition('/')[2]}".rstrip("/")

    member.name, member.mode, member.pax_headers = moved(member.name), member.mode & 0o777, {}
    if member.islnk():
        member.linkname = moved(member.linkname)
    return member


class Shell:
    """A bash in a container. Its working folder and variables last from one command to the next."""

    def __init__(self, process: Process, max_characters: int) -> None:
        self._process = process
        self._half = max_characters // 2

    @classmethod
    async def begin(cls, client: str, name: str, user: str | None, max_characters: int) -> Shell:
        """Start a shell. If the container has no bash, this shows only at the first command."""
        words = ["exec", "-i", *([] if user is None else ["-u", user]), name, "bash", "--noprofile", "--norc"]
        shell = cls(
            await asyncio.create_subprocess_exec(client, *words, stdin=PIPE, stdout=PIPE, stderr=DEVNULL),
            max_characters,
        )
        shell._write("exec 2>&1")
        return shell

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode("utf-8", "replace"))

    async def run(self, command: str, limit_s: float) -> tuple[str, str | None]:
        """Run a command. Return the beginning and end of its output, and its status (None if the shell has ended).

        Raises:
            TooLong: the deadline passed; the command still runs. The message is the output so far.
            EnvironmentCrashed: somebody on this machine has killed the shell's client.
        """
        mark = f"\n{secrets.token_hex(16)} ".encode()
        self._write(f"eval {shlex.quote(command)} </dev/null; printf '\\n%s %s\\n' {mark.decode().strip()} $?")
        head, tail, cut = b"", b"", 0
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(limit_s):
                while read := await self._process.stdout.read(65536):
                    room = self._half - len(head)
                    head, tail = head + read[:room], tail + read[room:]
                    printed, marked, after = (head + tail).rpartition(mark)
                    status, ends, _ = after.partition(b"\n")
                    if marked and ends:
                        return _cut_text(printed[: self._half], printed[self._half :], cut, self._half), status.decode()
                    over = max(0, len(tail) - self._half - 100)
                    cut, tail = cut + over, tail[over:]
        except TimeoutError:
            raise TooLong(_cut_text(head, tail, cut, self._half)) from None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):  # an agent may close the output and go on
                _not_killed("the shell", "exec", await self._process.wait())
        return _cut_text(head, tail, cut, self._half), None

    async def close(self) -> None:
        """End the shell's client. This ends the programs that the shell started in the container."""
        await _end(self._process)


async def _end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            await process.communicate()  # while its output is not read to its end, it counts as running


def _cut_text(head: bytes, tail: bytes, cut: int, half: int) -> str:
    cut += max(0, len(tail) - half)
    mark = f"\n[... {cut} bytes are not shown ...]\n".encode() if cut else b""
    return (head + mark + tail[-half:]).decode(errors="replace")


def _not_killed(client: str, word: str, status: int | None) -> int:
    """Return a client's exit status. Raises EnvironmentCrashed if a signal from outside the container ended it."""
    if status is not None and status < 0:
        raise EnvironmentCrashed(f"{client} {word}: a signal ended it ({-status})")
    return int(status or 0)


def _began(process: int) -> str:
    """Return the start time of a process in clock ticks; "" if there is no such process."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _peak_mb(process: str) -> list[float]:
    """Return the most memory that a process's control group has had, in MB; [] if the kernel does not count it."""
    try:
        groups = [line.split(":", 2)[1:] for line in Path(f"/proc/{process}/cgroup").read_text().splitlines()]
        of_memory = {"memory": "memory{}/memory.max_usage_in_bytes", "": "{}/memory.peak"}
        files = [f"/sys/fs/cgroup/{of_memory[kind].format(path)}" for kind, path in groups if kind in of_memory]
        return [int(Path(file).read_text()) / 1e6 for file in files if os.path.exists(file)]
    except OSError:
        return []


def _last(text: str) -> str:
    lines: Sequence[str] = text.strip().splitlines() or ["it says nothing"]
    return lines[-1][:300]
