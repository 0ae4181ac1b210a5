"""What integration tests, those of contrib too, share because it is dear: a real vLLM server on CPU, a pool of real
AppWorld worlds, a browser.

Starting a server takes half a minute of a core, opening a pool a quarter. A node that is given
``servers: {urls: [shared_vllm.url]}`` starts in a second and is otherwise a node like any other. The tests that use one
of them run on one worker, whatever their files, and first: see ``conftest.py``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from appworld_adapter.pool import episode
from loop_plumbing import process_guard
from rollout_server.config import ModelConfig, ServersConfig
from rollout_server.inference.command import server_command, server_environment
from rollout_server.inference.server import free_port
from support.adapter_support import PYTHON, ROOT, make_pool, sealed_pool
from support.waiting import DEADLINE_S, wait_until_healthy

MAX_CONTEXT = 2048
ALARM_S = 20
"""For one program in the shared pool, four of which may run beside much else."""


@dataclass(frozen=True)
class SharedVllm:
    """A running server, and the random policy it serves, under a tokenizer without an end."""

    url: str
    model: Path
    tokenizer: Path
    scratch: Path

    def adapter(self, seed: int, scale: float = 0.05) -> Path:
        """The folder of a random adapter for this policy."""
        folder = self.scratch / f"adapter-{seed}-{scale:g}"
        if not folder.exists():
            from support.random_policy import write_adapter

            write_adapter(folder, seed, scale=scale, model=self.model)
        return folder

    def node_config(self, root: Path, **changes: object) -> dict:
        """A node's configuration on this server and the counter environment."""
        return {
            "port": 0,
            "root": str(root),
            "model": {"path": str(self.model), "dtype": "float32", "max_context": MAX_CONTEXT, "lora_rank": 16},
            "servers": {"urls": [self.url], "max_num_seqs": 32, "max_loras": 4},
            "environment": {"name": "counter"},
            "max_concurrent_episodes": 12,
            **changes,
        }


def write_endless_tokenizer(model: Path, folder: Path) -> Path:
    """The model's tokenizer with an end token that it has no logit for: what is not told to stop samples to its limit.

    A node tells its server where to stop.
    """
    folder.mkdir()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|never|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((model / "tokenizer_config.json").read_text()) | {"eos_token": "<|never|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def shared_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedVllm]:
    from support.random_policy import write_model  # imports torch, which most sessions of one test do without

    scratch = tmp_path_factory.mktemp("shared_vllm")
    policy = scratch / "model"
    write_model(policy)
    tokenizer = write_endless_tokenizer(policy, scratch / "tokenizer")
    model = ModelConfig(path=str(policy), dtype="float32", max_context=MAX_CONTEXT, lora_rank=16)
    servers = ServersConfig(
        max_num_seqs=32,
        kv_cache_bytes=256 << 20,
        max_loras=4,
        max_cpu_loras=16,
        extra_args=["--tokenizer", str(tokenizer)],
    )
    port = free_port()
    command = server_command(model, servers, port, cpu=True)
    locked = command.index("--middleware")
    del command[locked : locked + 2]  # as a server of one's own, without a key
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
        wait_until_healthy(process, f"http://127.0.0.1:{port}/health", log_path)
        yield SharedVllm(f"http://127.0.0.1:{port}", policy, tokenizer, scratch)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(DEADLINE_S)


def _relative_paths() -> dict[str, str]:
    return {"python": os.path.relpath(PYTHON), "root": os.path.relpath(ROOT)}


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def pool() -> AsyncIterator[Any]:
    """An open pool of four worlds, whose paths are relative to the folder in which it was made."""
    options = {"execute_timeout_s": ALARM_S, "memory_limit_mb": 256, "max_worlds": 4}
    pool = make_pool(**_relative_paths(), **options)
    with pytest.MonkeyPatch.context() as elsewhere:
        elsewhere.chdir("/")
        await pool.open()
    yield pool
    await pool.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def unguarded() -> AsyncIterator[Any]:
    """A pool in seccomp's sandbox whose engine lets agent code import anything, so that it is the kernel that holds."""
    options = {"execute_timeout_s": 3, "memory_limit_mb": 256, "max_worlds": 4}
    async with sealed_pool("seccomp", agent_may_import_anything=True, **options) as pool:
        yield pool


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the half minute that a program has between the engine's alarm and its end a few seconds are left."""
    monkeypatch.setattr(episode, "KILL_GRACE_S", 3.0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Any]:
    from support.browser import open_browser  # Playwright, which no other test here needs

    async with open_browser() as browser:
        yield browser


@pytest.fixture
def viewing(browser: Any) -> Callable[..., Any]:
    """Opens a page of the viewer: ``async with viewing(folder) as (page, address)``."""
    from support import viewer_pages

    return partial(viewer_pages.viewing, browser)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A made-up run for the viewer."""
    from support.viewer_run import write_run

    return write_run(tmp_path_factory.mktemp("viewer") / "demo")
