"""A rollout node as a child of the training process: started, watched, and never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

from loop_formats.run_files import node_address
from loop_plumbing import running_time
from rollout_server.config import NodeConfig, node_url, write_node_config

TAIL_LINES = 15


class NodeDied(RuntimeError):
    """The node's process ended by itself. The message holds the last lines of the node's log."""


class NodeProcess:
    """``rollout-server`` as a child process. Use it as a context manager.

    The node watches its owner and stops, with all its servers and worlds, when this process ends in any way.

    Args:
        config: the node's configuration. Port 0 is the right choice here.
        output_dir: the folder of ``rollout_node.yaml`` and ``rollout_node.log``.
        token: the bearer token; the node gets it in the environment variable that the configuration names.
    """

    def __init__(self, config: NodeConfig, output_dir: str | Path, token: str):
        self._config = config
        self._token = token
        self._root = Path(self._config.root)
        self.log_path = Path(output_dir) / "rollout_node.log"
        self._yaml = Path(output_dir) / "rollout_node.yaml"
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    def start(self, deadline_s: float = 60.0, again: bool = True) -> NodeProcess:
        """Start the node and wait until it listens; if it is killed first and ``again`` is set, start it again. To wait
        until it is ready, see RolloutClient.wait_ready.

        Raises:
            NodeDied: the node ended, or did not listen before the deadline.
        """
        self._yaml.parent.mkdir(parents=True, exist_ok=True)
        write_node_config(self._config, self._yaml)
        command = [sys.executable, "-P", "-m", "rollout_server.cli", "--config", str(self._yaml)]
        with open(self.log_path, "ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [*command, "--owner-pid", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, self._config.token_env: self._token},
                # Ctrl-C in the terminal reaches the trainer, which stops the node in its own order.
                start_new_session=True,
            )
        give_up = running_time.now() + deadline_s
        # By its process id: a node that was killed left its address, and one that runs keeps it while ours is refused.
        while node_address(self._root, self._process.pid) is None:
            if again and self._process.poll() == -signal.SIGKILL:
                return self.start(deadline_s, again=False)
            self.check()
            if running_time.now() > give_up:
                self.stop(5.0)
                raise NodeDied(f"the rollout node did not listen within {deadline_s:g} s{self._tail()}")
            time.sleep(0.05)
        return self

    @property
    def url(self) -> str:
        """The URL at which the node listens."""
        url = node_address(self._root, self.pid)
        if url is None:
            raise NodeDied(f"the rollout node does not listen (any more){self._tail()}")
        # The address file has this machine's name then, which need not resolve here.
        here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._config.host)
        return url if here is None else node_url(here, urlsplit(url).port or 0)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def check(self) -> None:
        """Raise NodeDied, with the end of the node's log, if the node is not running."""
        if self._process is None or self._process.poll() is not None:
            status = "was not started" if self._process is None else f"ended with status {self._process.returncode}"
            raise NodeDied(f"the rollout node {status}{self._tail()}")

    def stop(self, deadline_s: float = 120.0) -> None:
        """Stop the node in good order, or by force after the deadline. The node's children end in both cases."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _tail(self) -> str:
        if not self.log_path.exists():
            return ""
        with open(self.log_path, "rb") as log:
            log.seek(self._log_start)  # the lines before are an earlier node's
            lines = log.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
        # The node's last line names what was wrong; its children may have printed more after that.
        for line in reversed(lines):
            if line.startswith("rollout-server: "):
                return f": {line.removeprefix('rollout-server: ')} (log: {self.log_path})"
        return "; its log ends:\n" + "\n".join([*lines, f"(all of it: {self.log_path})"])

    def __enter__(self) -> NodeProcess:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
