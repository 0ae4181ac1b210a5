"""The rollout node as a process of its own, on a real vLLM server: parts of it are killed, nothing is lost."""

import os
import signal
import subprocess
import sys
from collections import Counter

import pytest

from loop_formats.branch import Branch
from loop_formats.collection_request import Sampling
from loop_plumbing.process_guard import descendants
from rollout_server.inference.server import free_port
from rollout_server.node_process import NodeDied
from support.node_reader import Reader, largest_gap, ready_node, request
from support.processes import alive
from support.vllm_proxy import VllmProxy
from support.waiting import block_until

pytestmark = pytest.mark.integration


def test_logprobs_agree_with_the_version_that_sampled_across_a_swap(shared_vllm, tmp_path):
    adapters = [shared_vllm.adapter(0), shared_vllm.adapter(1)]
    with VllmProxy(shared_vllm.url) as proxy:
        servers = {"urls": [proxy.url], "max_num_seqs": 32, "max_loras": 4}
        with ready_node(shared_vllm.node_config(tmp_path / "node", servers=servers), tmp_path) as (_, client):
            client.publish_policy(0, adapters[0])
            tasks = client.tasks("train").tasks[:4]
            client.start_collection(request("swap", tasks, policy_mode="latest"))
            reader = Reader(client, "swap")
            block_until(lambda: proxy.held)
            client.publish_policy(1, adapters[1])
            proxy.release()
            rollouts, end = reader.finish()
        assert end.reason == "complete"
        versions = {version for rollout in rollouts for version in rollout.policy_versions}
        assert versions == {0, 1}
        assert any(len(rollout.policy_versions) == 2 for rollout in rollouts), "a swap within an episode"
        assert largest_gap(shared_vllm.model, rollouts, adapters) < 1e-3


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


def test_a_greedy_branch_of_a_branch_makes_the_same_rollout(shared_vllm, tmp_path):
    """Token for token and, to the rounding of cached keys and values, log-prob for log-prob."""
    greedy = Sampling(temperature=0.0)
    with ready_node(shared_vllm.node_config(tmp_path / "node"), tmp_path) as (_, client):
        client.publish_policy(0, shared_vllm.adapter(0))
        client.start_collection(
            request("parents", client.tasks("train").tasks[:2], rollouts_per_task=1, sampling=greedy)
        )
        parents, _ = Reader(client, "parents").finish()
        assert {len(parent.turns) for parent in parents} == {4}
        known = {parent.task_id: parent for parent in parents}
        for turn in (1, 3):
            branches = [Branch.of(rollout, [turn]) for rollout in known.values()]
            name = f"after-{turn}"
            client.start_collection(request(name, [], rollouts_per_task=1, sampling=greedy, branches=branches))
            rollouts, end = Reader(client, name).finish()
            assert (end.finished, end.refused) == (2, {})
            known = {rollout.task_id: rollout for rollout in rollouts}
            for parent in parents:
                again = known[parent.task_id]
                start = parent.turns[turn].start
                assert again.token_ids == parent.token_ids
                assert again.mask == [False] * start + parent.mask[start:]
                assert again.sampler_logprobs[start:] == pytest.approx(parent.sampler_logprobs[start:], abs=1e-3)


def test_killed_node_goes_on_where_it_was(shared_vllm, tmp_path):
    """SIGKILL in mid-collection, twice; the reader holds on through both and sees every rollout once."""
    adapters = [shared_vllm.adapter(0)]
    config = shared_vllm.node_config(tmp_path / "node", port=free_port(), max_concurrent_episodes=4)
    with ready_node(config, tmp_path) as (process, client):
        client.publish_policy(0, adapters[0])
        tasks = client.tasks("train").tasks[:6]
        client.start_collection(request("killed", tasks))
        reader = Reader(client, "killed")
        for count in (3, 10):
            reader.wait_for(count)
            os.kill(process.pid, signal.SIGKILL)
            with pytest.raises(NodeDied, match="ended with status -9"):
                block_until(process.check)
            process.start()
        rollouts, end = reader.finish()
        assert end.reason == "complete"
        assert Counter((rollout.task_id, rollout.index) for rollout in rollouts) == {
            (task, index): 1 for task in tasks for index in range(4)
        }
        lines = (tmp_path / "node" / "collections" / "killed.jsonl").read_text().splitlines()
        assert lines == [rollout.to_json() for rollout in rollouts], "what was delivered is what is on disk"
        assert largest_gap(shared_vllm.model, rollouts, adapters) < 1e-4


def test_episodes_move_when_a_server_dies(shared_vllm, tmp_path):
    adapters = [shared_vllm.adapter(0)]
    with VllmProxy(shared_vllm.url) as dying:
        servers = {"urls": [shared_vllm.url, dying.url], "max_num_seqs": 32, "max_loras": 4}
        config = shared_vllm.node_config(tmp_path / "node", servers=servers, max_concurrent_episodes=6)
        with ready_node(config, tmp_path) as (_, client):
            client.publish_policy(0, adapters[0])
            client.start_collection(request("moved", client.tasks("train").tasks[:6]))
            reader = Reader(client, "moved")
            block_until(lambda: dying.held)  # an episode in the middle
            dying.kill()
            rollouts, end = reader.finish()
            assert (end.reason, end.failures) == ("complete", {})
            assert len(rollouts) == 24
            moved = [rollout for rollout in rollouts if len({turn.server for turn in rollout.turns}) == 2]
            assert moved, "some episode went on at the other server"
            assert largest_gap(shared_vllm.model, rollouts, adapters) < 1e-4

            def state() -> dict[str, str]:
                return {server["name"]: server["state"] for server in client.status()["servers"]}

            block_until(lambda: state()["vllm-1"] != "ready")
            assert state()["vllm-0"] == "ready"


def test_nothing_outlives_a_killed_owner(shared_vllm, tmp_path):
    """The trainer is SIGKILLed while its node starts a vLLM server: node and server end by themselves."""
    config = shared_vllm.node_config(tmp_path / "node", servers={"count": 1, "kv_cache_bytes": 128 << 20})
    script = f"""
import time
from rollout_server.config import NodeConfig
from rollout_server.node_process import NodeProcess
from loop_formats.schema import from_mapping
NodeProcess(from_mapping(NodeConfig, {config!r}), {str(tmp_path)!r}, "secret").start()
time.sleep(600)
"""
    owner = subprocess.Popen([sys.executable, "-c", script])
    try:
        below: list[int] = []

        def started() -> bool:
            below[:] = descendants(owner.pid)
            return len(below) >= 3 or owner.poll() is not None

        block_until(started)
        assert owner.poll() is None
        owner.kill()
        owner.wait()
        block_until(lambda: not any(map(alive, below)))
    finally:
        owner.kill()
