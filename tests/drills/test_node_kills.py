"""Parts of a whole node are killed in mid-collection: two real vLLM servers, the real AppWorld engine. Drills.

    make drills K=node_kills

After each harm the collection completes, or stops with one clear error and then completes when asked for again; every
rollout is delivered once and is what is on disk; every log-prob agrees with a reference forward of its version.
"""

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from loop_formats.collection_request import Limits
from loop_formats.schema import from_mapping
from loop_plumbing.process_guard import descendants
from rollout_server.client import CollectionFailed, RolloutClient
from rollout_server.config import NodeConfig
from rollout_server.inference.server import free_port
from rollout_server.node_process import NodeProcess
from support.adapter_support import PYTHON, ROOT, needs_world
from support.node_reader import TOKEN, Reader, largest_gap, request
from support.processes import alive
from support.random_policy import write_adapter, write_model
from support.waiting import block_until

pytestmark = [pytest.mark.integration, pytest.mark.drill, pytest.mark.timeout(1800), needs_world]

TOLERANCE = 1e-4
ROLLOUTS = 4
LIMITS = Limits(max_turns=4, max_tokens_per_turn=24, max_context=1900, episode_deadline_s=600.0)
START_S = 900.0
NODE_KILLS = 10


class House:
    """A running node of two servers, and the policy it serves."""

    def __init__(self, folder: Path, root: Path):
        self.model, self.adapter, self.root = folder / "model", folder / "adapter", root
        write_model(self.model)
        write_adapter(self.adapter, seed=1)
        config = {
            "port": free_port(),
            "root": str(root),
            "model": {"path": str(self.model), "dtype": "float32", "max_context": 2048, "lora_rank": 16},
            "servers": {"count": 2, "max_num_seqs": 8, "kv_cache_bytes": 128 << 20, "start_timeout_s": START_S},
            "environment": {
                "name": "appworld",
                "python": PYTHON,
                "root": str(ROOT),
                "prompt": "tiny",
                "observation_max_tokens": 60,
                "max_worlds": 6,
            },
            "max_concurrent_episodes": 6,
        }
        self.process = NodeProcess(from_mapping(NodeConfig, config), folder, TOKEN)

    def client(self, url: str | None = None) -> RolloutClient:
        return RolloutClient(url or self.process.url, TOKEN, reconnect_s=START_S)

    def wait_ready(self) -> dict:
        return RolloutClient(self.process.url, TOKEN, alive=self.process.check).wait_ready(START_S)

    def begin(self, name: str, tasks: int = 6) -> list[str]:
        client = self.client()
        chosen = client.tasks("train").tasks[:tasks]
        client.start_collection(request(name, chosen, rollouts_per_task=ROLLOUTS, limits=LIMITS))
        return chosen

    def check(self, name: str, tasks: list[str], rollouts: list) -> None:
        assert Counter((rollout.task_id, rollout.index) for rollout in rollouts) == {
            (task, index): 1 for task in tasks for index in range(ROLLOUTS)
        }
        lines = (self.root / "collections" / f"{name}.jsonl").read_text().splitlines()
        assert lines == [rollout.to_json() for rollout in rollouts], "what was delivered is what is on disk"
        assert all(rollout.dataset.startswith("synthetic") for rollout in rollouts)
        assert largest_gap(self.model, rollouts, [self.adapter]) < TOLERANCE

    def pids_of(self, *words: str) -> list[int]:
        found = []
        for pid in descendants(self.process.pid):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_text()
                if all(word in command for word in words):
                    found.append(pid)
        return found

    def kill(self) -> None:
        """SIGKILL the node; returns when its servers and worlds have ended with it."""
        below = descendants(self.process.pid)
        os.kill(self.process.pid, signal.SIGKILL)
        block_until(lambda: not any(map(alive, below)))

    def wait_for_servers(self) -> None:
        def states() -> list[str]:
            return [server["state"] for server in self.client().status()["servers"]]

        block_until(lambda: states() == ["ready", "ready"], START_S)


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory):
    """A tmpfs of a few MiB for the node's root; None where mounting is not permitted."""
    root = tmp_path_factory.mktemp("node")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", root], capture_output=True)
    yield root, mounted.returncode == 0
    if mounted.returncode == 0:
        subprocess.run(["umount", "-l", root], check=True)


@pytest.fixture(scope="module")
def house(small_disk, tmp_path_factory):
    house = House(tmp_path_factory.mktemp("drills"), small_disk[0])
    with house.process:
        house.wait_ready()
        house.client().publish_policy(0, house.adapter)
        yield house


def test_vllm_server_killed(house):
    tasks = house.begin("server")
    reader = Reader(house.client(), "server")
    reader.wait_for(3)
    victim = house.client().status()["servers"][0]
    os.kill(descendants(victim["pid"])[0], signal.SIGKILL)
    rollouts, end = reader.finish()
    assert (end.reason, end.failures) == ("complete", {})
    house.check("server", tasks, rollouts)
    assert any({turn.server for turn in rollout.turns} == {"vllm-0", "vllm-1"} for rollout in rollouts), "one moved"
    house.wait_for_servers()
    assert house.client().status()["servers"][0]["restarts"] == 1


def test_fork_server_killed(house):
    tasks = house.begin("worlds")
    reader = Reader(house.client(), "worlds")
    reader.wait_for(3)
    killed = house.pids_of("serve.py", "\0world\0")
    assert killed
    for pid in killed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    rollouts, end = reader.finish()
    assert end.reason == "complete"
    assert set(end.failures) <= {"environment_crashed"}
    house.check("worlds", tasks, rollouts)
    assert house.client().status()["environment"]["restarts"] >= 1


class CuttingProxy(threading.Thread):
    """Relays connections to the node and drops each after some thousand bytes of its answer."""

    def __init__(self, port: int):
        super().__init__(daemon=True)
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self.start()

    def run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                self.connections += 1
                left = 3000 * self.connections
                with here, socket.create_connection(("127.0.0.1", self._target)) as there:
                    there.sendall(here.recv(1 << 16))
                    while left > 0 and (data := there.recv(min(left, 1 << 16))):
                        here.sendall(data)
                        left -= len(data)

    def close(self) -> None:
        self._listener.close()


def test_stream_dropped(house):
    tasks = house.begin("stream")
    proxy = CuttingProxy(int(house.process.url.rsplit(":", 1)[1]))
    reader = Reader(house.client(proxy.url), "stream")
    rollouts, end = reader.finish()
    proxy.close()
    assert end.reason == "complete"
    assert proxy.connections > 3
    house.check("stream", tasks, rollouts)


def test_disk_full(house, small_disk):
    root, mounted = small_disk
    if not mounted:
        pytest.skip("mounting a small tmpfs is not permitted here")
    tasks = house.begin("full")
    reader = Reader(house.client(), "full")
    reader.wait_for(3)
    ballast = root / "ballast"
    fill(ballast)
    with pytest.raises(CollectionFailed, match=r"cannot write .*No space left on device; free some space"):
        reader.finish()
    there = list(reader.rollouts)
    ballast.unlink()
    assert house.begin("full") == tasks
    rollouts, end = Reader(house.client(), "full").finish()
    assert end.reason == "complete"
    assert rollouts[: len(there)] == there, "what was delivered before stays where it was"
    house.check("full", tasks, rollouts)


def fill(file: Path) -> None:
    """Write to ``file`` until the disk is full."""
    with contextlib.suppress(OSError), open(file, "wb", buffering=0) as ballast:
        while True:
            ballast.write(b"x" * 4096)


def test_node_killed(house):
    tasks = house.begin("node")
    reader = Reader(house.client(), "node")
    reader.wait_for(3)
    house.kill()
    house.process.start()
    rollouts, end = reader.finish()
    assert end.reason == "complete"
    house.check("node", tasks, rollouts)


@pytest.mark.timeout(3600)
def test_node_killed_while_it_starts(house):
    """Ten times in a row, from its first second to the loading of its policies; then it serves what it had."""
    served = house.client().health()["policy_versions"]
    for kill in range(NODE_KILLS):
        house.kill()
        house.process.start()
        time.sleep(3.0 * kill)
    house.kill()
    house.process.start()
    assert house.wait_ready()["policy_versions"] == served


@pytest.mark.timeout(3600)
def test_node_killed_during_publications(house):
    """Ten times, from the upload to the proof; whoever publishes goes on trying, and has its version served."""
    with ThreadPoolExecutor(1) as publisher:
        for version in range(NODE_KILLS):
            publication = publisher.submit(house.client().publish_policy, version, house.adapter)
            time.sleep(0.05 * version)
            house.kill()
            house.process.start()
            assert publication.result(START_S).version == version
            served = house.wait_ready()["policy_versions"]
            assert version in served, "a publication that came through outlives the node"
            for other in set(served) - {version}:
                house.client().retire_policy(other)
