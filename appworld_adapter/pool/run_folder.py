"""The folder in which one pool keeps its worlds' saved states, its servers' logs, and two views of the dataset.

    <base>/torchtune-loop-<uid>/run-<random>/
        owner.lock          held by the pool's process for as long as it lives
        agent/              APPWORLD_ROOT of the world server: no ground truth, only the tasks in use
        grader-<random>/    APPWORLD_ROOT of the grader: the whole dataset
        *.log

The world server sees a copy, so that nothing there reveals the dataset's place. The grader's view is links; its name
cannot be guessed, and bubblewrap shows an empty folder in its place. The base is a tmpfs where the machine has one,
because the engine rewrites a dozen small files per step.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import tempfile
from pathlib import Path

from loop_plumbing.written_tree import remove

logger = logging.getLogger(__name__)

KEEP_MARK = "keep"
SHARED = ("api_docs", "base_dbs")
"""The folders of the dataset that all tasks need."""
STATE_LIMIT = 16 << 20
"""Bytes of a world's saved state; an honest episode's are kilobytes. An episode whose state is larger is at its end."""


class WorldFolder:
    """A run folder. :meth:`create` makes the folder and removes those of dead processes; :meth:`remove` removes it.

    ``dataset`` is the data folder of which the run folder holds views.
    """

    def __init__(self, path: Path, dataset: Path, lock: int, keep: bool) -> None:
        self.path = path
        self.dataset = dataset
        self.agent = path / "agent"
        self.grader = path / f"grader-{secrets.token_hex(8)}"
        self._lock = lock
        self._keep = keep

    @classmethod
    def create(cls, base: str | None, dataset_root: Path, keep: bool, worlds: int = 1) -> WorldFolder:
        """Make a folder under ``base`` (None: tmpfs, else the temporary folder) with both views of ``dataset_root``.

        Warns if the largest possible states of ``worlds`` worlds would not fit in.

        Raises:
            OSError: the base cannot be written or is too small.
        """
        parent = Path(base or _fastest_base()) / f"torchtune-loop-{os.getuid()}"
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if parent.stat().st_uid != os.getuid():
            raise OSError(f"{parent} belongs to another user; set the environment's experiments_root to another folder")
        parent.chmod(0o700)
        remove_abandoned(parent)
        data = dataset_root.resolve() / "data"
        _require_room(parent, sum(_size(data / shared) for shared in SHARED), worlds)
        path = Path(tempfile.mkdtemp(prefix="run-", dir=parent)).resolve()
        lock = os.open(path / "owner.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        folder = cls(path, data, lock, keep)
        folder.grader.mkdir()
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder.grader / "data").symlink_to(data)
            (folder.grader / "experiments").symlink_to(folder.agent / "experiments")
        except OSError as error:
            folder.remove()
            cure = "set the environment's experiments_root to a folder of another file system"
            raise OSError(f"{parent} has no locks or links: {error.strerror}; {cure}") from error
        if keep:
            (path / KEEP_MARK).touch()
        (folder.agent / "data" / "tasks").mkdir(parents=True)
        for shared in SHARED:
            shutil.copytree(data / shared, folder.agent / "data" / shared)
        (folder.agent / "experiments" / "outputs").mkdir(parents=True)
        return folder

    def show_task(self, task_id: str) -> None:
        """Put a task's specification and start state into the agent view, without the ground truth."""
        view = self.agent / "data" / "tasks" / task_id
        if view.exists():
            return
        copy = Path(tempfile.mkdtemp(prefix=".", dir=view.parent))
        shutil.copy(self.dataset / "tasks" / task_id / "specs.json", copy / "specs.json")
        shutil.copytree(self.dataset / "tasks" / task_id / "dbs", copy / "dbs")
        try:
            copy.rename(view)
        except OSError:  # another episode of the same task was quicker
            remove(copy)

    def experiment(self, name: str) -> Path:
        """Return the folder in which the world of experiment ``name`` keeps its state."""
        return self.agent / "experiments" / "outputs" / name

    def remove_experiment(self, name: str) -> None:
        if not self._keep:
            remove(self.experiment(name))

    def remove(self) -> None:
        """Remove everything; with ``keep``, leave the worlds' states and logs and the servers' logs. May be called
        twice.
        """
        if self._lock < 0:
            return
        if self._keep:
            remove(self.agent / "data")
            remove(self.grader)  # links only
        else:
            remove(self.path)
        os.close(self._lock)
        self._lock = -1


def experiment_name(episode_id: str) -> str:
    """Return a name for the state of one attempt at an episode; every call returns a new name."""
    return f"{_stem(episode_id)}-{secrets.token_hex(4)}"


def kept_state(experiments_root: Path, episode_id: str, task_id: str) -> Path | None:
    """Return the folder with an episode's final state, left by a pool with ``keep_experiments`` in its
    ``experiments_root``: the state of the last attempt under this id; None if no pool left one."""
    pattern = f"torchtune-loop-*/run-*/agent/experiments/outputs/{_stem(episode_id)}-????????/tasks/{task_id}"
    return max(experiments_root.glob(pattern), key=lambda path: path.stat().st_mtime, default=None)


def _stem(episode_id: str) -> str:
    return episode_id.replace("/", "-")[-80:]  # a slash would make a folder


def remove_abandoned(parent: Path) -> None:
    """Remove the run folders in ``parent`` whose owners are dead."""
    for path in parent.glob("run-*"):
        with contextlib.suppress(OSError):
            lock = os.open(path / "owner.lock", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its owner lives
                if not (path / KEEP_MARK).exists():
                    remove(path)
            finally:
                os.close(lock)


def _require_room(parent: Path, databases: int, worlds: int) -> None:
    """Check that the databases fit on the disk; only warn if the states may not fit: only hostile agents' are large."""
    free = shutil.disk_usage(parent).free
    room = f"{parent} has {free / 2**20:.0f} MiB free, and the dataset's databases take {databases / 2**20:.0f} MiB"
    cure = "set the environment's experiments_root to a folder with more room"
    if free < databases:
        raise OSError(f"{room}; {cure}")
    states = worlds * 2 * STATE_LIMIT  # while a world saves, the state before is still there
    if free < databases + states:
        logger.warning(
            "%s, the largest states of %d worlds %d MiB: agents that fill the folder would end the episodes of others; "
            "%s (a container: a larger --shm-size), or lower max_worlds",
            *(room, worlds, states >> 20, cure),
        )


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _fastest_base() -> str:
    return "/dev/shm" if os.path.ismount("/dev/shm") and os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
