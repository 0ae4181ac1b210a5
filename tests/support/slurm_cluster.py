"""A real Slurm cluster of three nodes on one machine, for tests: slurmctld, three slurmd, each in a network of its own.

Needs root, and Debian's slurmctld, slurmd, slurm-client, munge and iproute2. Nothing outside the temporary folder and
the network namespaces made here is touched; :meth:`SlurmCluster.stop` removes all of it.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

from support.two_networks import BridgedNetworks, address, inside, missing_for_networks

NODES = ("loopnode1", "loopnode2", "loopnode3")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "unshare", "setpriv")


def missing_for_cluster() -> str | None:
    """Why no cluster can be brought up here, or None."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (apt-get install slurmctld slurmd slurm-client munge)"
    return missing_for_networks()


class SlurmCluster:
    """The nodes ``loopnode1`` to ``loopnode3``, with ``gpus`` pretended GPUs each.

    Args:
        folder: an empty folder for sockets, state, spool and logs.
        user: the unprivileged user who submits jobs.
        kill_wait: seconds between TERM and KILL when Slurm ends a step.
    """

    def __init__(self, folder: Path, *, user: str = "nobody", gpus: int = 2, kill_wait: int = 15) -> None:
        self.folder = folder
        self.user = user
        self.gpus = gpus
        self.kill_wait = kill_wait
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self.networks = BridgedNetworks(NODES)
        self._daemons: list[subprocess.Popen] = []

    def start(self) -> None:
        self._write_configuration()
        self.networks.start()
        munge = ["munged", "--foreground", "--force", f"--key-file={self.folder}/munge.key"]
        munge += [f"--socket={self.folder}/munge.sock", f"--pid-file={self.folder}/munged.pid"]
        munge += [f"--seed-file={self.folder}/munge.seed", f"--log-file={self.folder}/munged.log"]
        self._daemon("munged", munge)
        self._wait(lambda: (self.folder / "munge.sock").exists(), "munged's socket")
        self._daemon("slurmctld", ["slurmctld", "-D", "-i"])
        for node in NODES:
            # Hosts find each other by name, in a mount namespace of the node's own. A process namespace, so that
            # a node that is switched off takes all that runs on it along.
            setup = f"mount --bind {self.folder}/hosts /etc/hosts; hostname {node}; exec slurmd -D -N {node}"
            own = ("unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
            self._daemon(node, inside(node, *own, "sh", "-c", setup))
        self.wait_idle()

    def wait_idle(self, timeout: float = 60) -> None:
        """Wait until all nodes can take a job."""
        self._wait(lambda: self.command("sinfo", "-h", "-o", "%T").split() == ["idle"], "idle nodes", timeout)

    def stop(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.kill()  # what ran on a node goes with it; the state is of no more use
            daemon.wait(10)
        self.networks.stop()

    def processes(self) -> set[tuple[int, str]]:
        """All processes on the nodes but Slurm's own, as (process id, start time), which is unique.

        Those in a node's network namespace, and their children, which may have a sandbox's namespaces.
        """
        found: set[tuple[int, str]] = set()
        pending = [int(pid) for node in NODES for pid in self.command("ip", "netns", "pids", node).split()]
        own = {daemon.pid for daemon in self._daemons}  # of a node: unshare, whose child is slurmd
        while pending:
            pid = pending.pop()
            try:
                stat = Path(f"/proc/{pid}/stat").read_text()
                children = [task.read_text().split() for task in Path(f"/proc/{pid}/task").glob("*/children")]
            except OSError:  # gone meanwhile
                continue
            name, fields = stat[stat.index("(") + 1 : stat.rindex(")")], stat[stat.rindex(")") + 2 :].split()
            identity = (pid, fields[19])
            if identity in found or fields[0] == "Z":
                continue
            if pid not in own and name != "slurmd":
                found.add(identity)
            if name != "slurmd":
                pending += [int(child) for group in children for child in group]
        return found

    def command(self, *words: str, check: bool = True) -> str:
        """Run a Slurm command as the controller's administrator and return its output."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    def submit(
        self, script: Path, *words: str, options: tuple[str, ...] = (), cwd: Path, env: dict | None = None
    ) -> int:
        """sbatch as the unprivileged user; returns the job's id."""
        sbatch = ["sbatch", "--parsable", *options, str(script), *words]
        done = subprocess.run(
            ["setpriv", f"--reuid={self.user}", "--clear-groups", *sbatch],
            env={**self.environment, **(env or {})},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=60,
        )
        if done.returncode:
            raise RuntimeError(f"sbatch: {done.stderr.strip()}")
        return int(done.stdout.split(";")[0])

    def job(self, job_id: int | str) -> dict[str, str]:
        """The fields of ``scontrol show job``."""
        line = self.command("scontrol", "-o", "show", "job", str(job_id))
        return dict(re.findall(r"(\w+)=(\S*)", line))

    def wait_for(self, job_id: int | str, *states: str, timeout: float = 300) -> dict[str, str]:
        """Poll until the job is in one of ``states``; raises with the state it was in at the deadline."""
        deadline = time.monotonic() + timeout
        while True:
            fields = self.job(job_id)
            if fields["JobState"] in states:
                return fields
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {job_id} is {fields['JobState']}, not {' or '.join(states)}")
            time.sleep(0.2)

    def _daemon(self, name: str, command: list[str]) -> None:
        log = open(self.folder / f"{name}.out", "wb")  # noqa: SIM115 - the daemon's, for as long as it lives
        command = ["setpriv", "--pdeathsig", "KILL", *command]  # no daemon outlives the tests, however they end
        self._daemons.append(subprocess.Popen(command, env=self.environment, stdout=log, stderr=log))

    def _wait(self, condition, what: str, timeout: float = 20) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            try:
                if condition():
                    return
            except (RuntimeError, OSError):
                pass
            time.sleep(0.2)
        raise TimeoutError(f"no {what} within {timeout:.0f} s; see the logs in {self.folder}")

    def _write_configuration(self) -> None:
        folder = self.folder
        (folder / "state").mkdir(parents=True)
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        folder.chmod(0o755)
        gpu_lines = []
        for number in range(self.gpus):
            # slurmd only counts character devices, or CUDA_VISIBLE_DEVICES stays empty.
            device = folder / f"gpu{number}"
            os.mknod(device, 0o666 | 0o020000, os.makedev(1, 3))
            gpu_lines.append(f"NodeName={','.join(NODES)} Name=gpu File={device}")
        (folder / "gres.conf").write_text("\n".join(gpu_lines) + "\n")
        hosts = [("127.0.0.1", "localhost"), *((address(number), node) for number, node in enumerate(NODES, start=2))]
        (folder / "hosts").write_text("".join(f"{ip} {name}\n" for ip, name in hosts))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={node} NodeAddr={address(number)} Port=68{number}8 "
            f"CPUs=8 RealMemory=16000 Gres=gpu:{self.gpus}"
            for number, node in enumerate(NODES, start=2)
        )
        template = Path(__file__).with_name("slurm.conf").read_text()
        values = {"host": socket.gethostname(), "address": address(1), "kill_wait": self.kill_wait, "nodes": nodes}
        (folder / "slurm.conf").write_text(template.format(folder=folder, **values))
