"""One real vLLM server on CPU for all integration tests: starting one costs half a minute, so they share it.

A node that is given ``servers: {urls: [shared_vllm.url]}`` starts in a second and is otherwise a node like any other.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from loop_plumbing import process_guard
from rollout_server.config import ModelConfig, ServersConfig
from rollout_server.inference.command import server_command, server_environment
from rollout_server.inference.server import free_port
from support.random_policy import write_adapter, write_model
from support.waiting import COMMAND_S, DEADLINE_S

MAX_CONTEXT = 2048


@dataclass(frozen=True)
class SharedVllm:
    """A running server, and the random policy it serves."""

    url: str
    model: Path
    scratch: Path

    def adapter(self, seed: int, scale: float = 0.05) -> Path:
        """The folder of a random adapter for this policy."""
        folder = self.scratch / f"adapter-{seed}-{scale:g}"
        if not folder.exists():
            write_adapter(folder, seed, scale=scale, model=self.model)
        return folder

    def node_config(self, root: Path, **changes: object) -> dict:
        """A node's configuration on this server and the counter environment."""
        return {
            "port": 0,
            "root": str(root),
            "model": {"path": str(self.model), "dtype": "float32", "max_context": MAX_CONTEXT, "lora_rank": 16},
            "servers": {"urls": [self.url], "max_num_seqs": 32, "max_loras": 4},
            "environment": {"name": "counter", "config": {}},
            "max_concurrent_episodes": 12,
            **changes,
        }


@pytest.fixture(scope="session")
def shared_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedVllm]:
    scratch = tmp_path_factory.mktemp("shared_vllm")
    policy = scratch / "model"
    write_model(policy)
    model = ModelConfig(path=str(policy), dtype="float32", max_context=MAX_CONTEXT, lora_rank=16)
    servers = ServersConfig(max_num_seqs=32, kv_cache_bytes=256 << 20, max_loras=4, max_cpu_loras=16)
    port = free_port()
    command = server_command(model, servers, port, cpu=True)
    guard = [sys.executable, "-I", process_guard.__file__, str(os.getpid()), "5", *command]
    log_path, environment = scratch / "vllm.log", server_environment(servers, 0, "", scratch, cpu=True)
    with open(log_path, "wb") as log:
        process = subprocess.Popen(
            guard,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=environment,
        )
    try:
        _wait_until_healthy(process, f"http://127.0.0.1:{port}/health", log_path)
        yield SharedVllm(f"http://127.0.0.1:{port}", policy, scratch)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(DEADLINE_S)


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log_path: Path) -> None:
    give_up = time.monotonic() + COMMAND_S
    while process.poll() is None and time.monotonic() < give_up:
        try:
            with urllib.request.urlopen(url, timeout=DEADLINE_S):
                return
        except OSError:
            time.sleep(0.25)
    pytest.fail(f"vLLM did not start:\n{log_path.read_text()[-4000:]}")
