"""The commands that start the servers of worlds and of grades."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_environments.protocol import EnvironmentCrashed
from loop_plumbing.forked_process import ForkServer, scrubbed_environment

WORKER_FOLDER = Path(__file__).resolve().parents[1] / "worker"


@dataclass(frozen=True)
class ServerSpec:
    """A server of ``role``, "world" or "grader", with its data in ``root`` and its log in ``folder``.

    ``prefix`` is put before its command (bubblewrap).
    """

    role: str
    python: str
    folder: Path
    root: Path
    warm_up_task: str
    settings: Mapping[str, Any]
    prefix: Sequence[str] = ()

    def server(self) -> ForkServer:
        """Return the server, which is not started yet."""
        return ForkServer(
            self.role,
            [*self.prefix, self.python, str(WORKER_FOLDER / "serve.py"), self.role, str(self.folder)],
            {"warm_up_task": self.warm_up_task, "settings": {**self.settings, "root": str(self.root)}},
            EnvironmentCrashed,
            environment_of(self.root),
            self.folder / f"{self.role}.log",
        )


def environment_of(root: Path) -> dict[str, str]:
    """Return the whole environment of a process that runs the engine on the data in ``root``."""
    return scrubbed_environment(
        APPWORLD_ROOT=str(root),
        APPWORLD_CACHE=str(root / ".cache"),
        HOME=str(root),
        PATH="/usr/bin:/bin",
        TZ=os.environ.get("TZ", "UTC"),
    )
