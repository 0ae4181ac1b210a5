"""The rollout node as a process of its own, on a real vLLM server: parts of it are killed, nothing is lost."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest

from rollout_server.client import RolloutClient
from rollout_server.collection_request import CollectionRequest, Limits
from rollout_server.inference.process_guard import descendants
from rollout_server.node_process import NodeDied, NodeProcess
from rollout_server.rollout import Rollout
from support.random_policy import reference_logprobs

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

TOKEN = "secret"
LIMITS = Limits(max_turns=4, max_tokens_per_turn=24, max_context=1500, episode_deadline_s=300.0)


def request(collection_id, tasks, **changes):
    values = {"rollouts_per_task": 4, "policy_version": 0, "limits": LIMITS, **changes}
    return CollectionRequest(id=collection_id, tasks=tasks, **values)


def largest_gap(shared_vllm, rollouts, adapters):
    """The largest distance between what the sampler said and a reference forward of the version that sampled."""
    worst = 0.0
    for rollout in rollouts:
        rollout.validate()
        reference = {
            version: reference_logprobs(shared_vllm.model, adapters[version], rollout.token_ids)
            for version in rollout.policy_versions
        }
        for turn in rollout.turns:
            for position in range(turn.start, turn.end):
                expected = reference[turn.policy_version][position]
                worst = max(worst, abs(expected - rollout.sampler_logprobs[position]))
    return worst


class Reader(threading.Thread):
    """Reads a collection to its end while the test does harm; ``rollouts`` grows as they come."""

    def __init__(self, client, collection_id):
        super().__init__(daemon=True)
        self.stream = client.rollouts(collection_id)
        self.rollouts = []
        self.error = None
        self.start()

    def run(self):
        try:
            for event in self.stream:
                if isinstance(event, Rollout):
                    self.rollouts.append(event)
        except Exception as error:
            self.error = error

    def wait_for(self, count, deadline_s=120.0):
        give_up = time.monotonic() + deadline_s
        while len(self.rollouts) < count:
            assert self.error is None, self.error
            assert time.monotonic() < give_up, f"{len(self.rollouts)} of {count} rollouts"
            time.sleep(0.02)

    def finish(self, deadline_s=240.0):
        self.join(deadline_s)
        assert not self.is_alive(), f"{len(self.rollouts)} rollouts after {deadline_s} s"
        if self.error is not None:
            raise self.error
        return self.rollouts, self.stream.end


def until_dead(process, deadline_s=10.0):
    give_up = time.monotonic() + deadline_s
    while time.monotonic() < give_up:
        process.check()
        time.sleep(0.05)


@pytest.fixture
def free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def ready_node(config, folder):
    with NodeProcess(config, folder, TOKEN) as process:
        client = RolloutClient(process.url, TOKEN, reconnect_s=120.0)
        client.wait_ready(120.0, process.check)
        yield process, client


def test_logprobs_agree_with_the_version_that_sampled_across_a_swap(shared_vllm, tmp_path):
    adapters = [shared_vllm.adapter(0), shared_vllm.adapter(1)]
    with ready_node(shared_vllm.node_config(tmp_path / "node"), tmp_path) as (_, client):
        client.publish_policy(0, adapters[0])
        tasks = client.tasks("train").tasks[:4]
        client.start_collection(request("swap", tasks, policy_mode="latest"))
        reader = Reader(client, "swap")
        reader.wait_for(2)
        client.publish_policy(1, adapters[1])
        rollouts, end = reader.finish()
        assert end.reason == "complete"
        versions = {version for rollout in rollouts for version in rollout.policy_versions}
        assert versions == {0, 1}
        assert any(len(rollout.policy_versions) == 2 for rollout in rollouts), "a swap within an episode"
        assert largest_gap(shared_vllm, rollouts, adapters) < 1e-3


def test_pinned_collections_can_be_repeated(shared_vllm, tmp_path):
    with ready_node(shared_vllm.node_config(tmp_path / "node"), tmp_path) as (_, client):
        client.publish_policy(0, shared_vllm.adapter(0))
        tasks = client.tasks("train").tasks[:3]
        sampled = []
        for name in ("first", "second"):
            client.start_collection(request(name, tasks, rollouts_per_task=2, seed=3))
            rollouts, _ = Reader(client, name).finish()
            sampled.append({(rollout.task_id, rollout.index): rollout.token_ids for rollout in rollouts})
        assert sampled[0] == sampled[1]


def test_killed_node_goes_on_where_it_was(shared_vllm, tmp_path, free_address):
    """SIGKILL in mid-collection, twice; the reader holds on through both and sees every rollout once."""
    adapters = [shared_vllm.adapter(0)]
    config = shared_vllm.node_config(tmp_path / "node", port=free_address, max_concurrent_episodes=4)
    with ready_node(config, tmp_path) as (process, client):
        client.publish_policy(0, adapters[0])
        tasks = client.tasks("train").tasks[:6]
        client.start_collection(request("killed", tasks))
        reader = Reader(client, "killed")
        for count in (3, 10):
            reader.wait_for(count)
            os.kill(process.pid, signal.SIGKILL)
            with pytest.raises(NodeDied, match="ended with status -9"):
                until_dead(process)
            process.start()
        rollouts, end = reader.finish()
        assert end.reason == "complete"
        assert Counter((rollout.task_id, rollout.index) for rollout in rollouts) == {
            (task, index): 1 for task in tasks for index in range(4)
        }
        lines = (tmp_path / "node" / "collections" / "killed.jsonl").read_text().splitlines()
        assert lines == [rollout.to_json() for rollout in rollouts], "what was delivered is what is on disk"
        assert largest_gap(shared_vllm, rollouts, adapters) < 1e-4


class Relay:
    """A TCP relay to the real server: a second server that can be killed and brought back in no time."""

    def __init__(self, url):
        self._target = ("127.0.0.1", int(url.rsplit(":", 1)[1]))
        self._script = textwrap.dedent(f"""
            import asyncio, sys
            async def copy(reader, writer):
                while data := await reader.read(65536):
                    writer.write(data)
                writer.close()
            async def serve(reader, writer):
                there = await asyncio.open_connection(*{self._target!r})
                await asyncio.gather(copy(reader, there[1]), copy(there[0], writer), return_exceptions=True)
            async def main():
                await (await asyncio.start_server(serve, "127.0.0.1", int(sys.argv[1]))).serve_forever()
            asyncio.run(main())
        """)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self):
        self._process = subprocess.Popen([sys.executable, "-c", self._script, str(self.port)])

    def kill(self):
        self._process.kill()
        self._process.wait()


def test_episodes_move_when_a_server_dies(shared_vllm, tmp_path):
    adapters = [shared_vllm.adapter(0)]
    relay = Relay(shared_vllm.url)
    servers = {"urls": [shared_vllm.url, relay.url], "max_num_seqs": 32, "max_loras": 4}
    try:
        config = shared_vllm.node_config(tmp_path / "node", servers=servers, max_concurrent_episodes=6)
        with ready_node(config, tmp_path) as (_, client):
            client.publish_policy(0, adapters[0])
            started = time.monotonic()
            limits = replace(LIMITS, max_turns=8)
            client.start_collection(request("moved", client.tasks("train").tasks[:6], limits=limits))
            reader = Reader(client, "moved")
            reader.wait_for(2)
            # All six begin together, are sampled in step and end together: now the next six are at their first turn,
            # which leaves no trace of the server that began it. Half an episode later they are in the middle.
            time.sleep((time.monotonic() - started) / 2)
            relay.kill()
            rollouts, end = reader.finish()
            assert (end.reason, end.failures) == ("complete", {})
            assert len(rollouts) == 24
            moved = [rollout for rollout in rollouts if len({turn.server for turn in rollout.turns}) == 2]
            assert moved, "some episode went on at the other server"
            assert largest_gap(shared_vllm, rollouts, adapters) < 1e-4
            state = {server["name"]: server["state"] for server in client.status()["servers"]}
            assert state == {"vllm-0": "ready", "vllm-1": state["vllm-1"]}
            assert state["vllm-1"] != "ready"
    finally:
        relay.kill()


def test_nothing_outlives_a_killed_owner(shared_vllm, tmp_path):
    """The trainer is SIGKILLed while its node starts a vLLM server: node and server end by themselves."""
    config = shared_vllm.node_config(tmp_path / "node", servers={"count": 1, "kv_cache_bytes": 128 << 20})
    script = f"""
import time
from rollout_server.node_process import NodeProcess
NodeProcess({config!r}, {str(tmp_path)!r}, "secret").start()
time.sleep(600)
"""
    owner = subprocess.Popen([sys.executable, "-c", script])
    try:
        give_up = time.monotonic() + 60
        while len(below := descendants(owner.pid)) < 3:  # node, guard, server
            assert time.monotonic() < give_up
            assert owner.poll() is None
            time.sleep(0.1)
        owner.kill()
        owner.wait()
        give_up = time.monotonic() + 30
        while left := [pid for pid in below if os.path.exists(f"/proc/{pid}/cmdline") and is_alive(pid)]:
            assert time.monotonic() < give_up, left
            time.sleep(0.1)
    finally:
        owner.kill()


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
