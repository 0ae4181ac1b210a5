import asyncio
import http.client
import json
import os
import socket
import subprocess
import sys
import urllib.parse

import pytest
from prometheus_client.parser import text_string_to_metric_families

from agent_environments.counter import CounterPool
from agent_environments.description import description_of
from agent_environments.protocol import PoolStatus
from agent_environments.shared_grade import SHARED_GRADE
from loop_formats.collection_request import Progress
from loop_formats.ids import dev_id, evaluation_id, replay_id, search_id, share_id, training_id
from loop_plumbing import moving
from rollout_server import client as client_module
from rollout_server.cli import main
from rollout_server.client import CollectionFailed, NodeUnreachable, RolloutClient, RolloutNodeError
from rollout_server.policies import store
from support.counter_node import TOKEN, counter_request, local_node, read_all
from support.listener import Listener
from support.random_policy import write_adapter
from support.texts import texts_beside
from support.waiting import COMMAND_S, DEADLINE_S, wait_until

TABLES = texts_beside(__file__)


def ask(url, method, path, body=None, headers=None):
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=DEADLINE_S)
    authorization = {"Authorization": f"Bearer {TOKEN}"} if headers is None else headers
    connection.request(method, path, body, authorization)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


async def test_health_needs_no_token_and_everything_else_does(running):
    status, report = await asyncio.to_thread(ask, running.url, "GET", "/health", None, {})
    assert (status, report["status"], report["policy_versions"]) == (200, "ok", [0])
    paths = [
        "/metrics",
        "/v1/status",
        "/v1/tasks?split=train",
        "/v1/environment",
        "/v1/collections/c/rollouts",
    ]
    for path in paths:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}):
            status, report = await asyncio.to_thread(ask, running.url, "GET", path, None, headers)
            assert status == 401
            assert "bearer token" in report["error"]


async def test_a_node_without_an_endpoint_names_the_key(policy, tmp_path):
    async with local_node(policy, tmp_path / "node", endpoint=False) as local:
        for path in ("/v1/keys", "/v1/chat/completions", "/sessions/sk-x/v1/messages"):
            for headers in (None, {}):
                status, report = await asyncio.to_thread(ask, local.url, "POST", path, "{}", headers)
                assert (status, report["error"].partition(";")[2]) == (
                    404,
                    " for agents of your own start the node with endpoint=true",
                )
        assert len((await local.collect(counter_request()))[0]) == 12


async def test_a_full_node_tells_the_movement_of_its_episodes_alone(running, monkeypatch):
    monkeypatch.setattr("rollout_server.node.MAX_OPEN_COLLECTIONS", 1)
    running.vllm.mode = "hang"
    await running.call(running.client.start_collection, counter_request())
    wanted = json.dumps(counter_request("c2").to_dict()).encode()
    for _ in range(2):
        status, report = await asyncio.to_thread(ask, running.url, "POST", "/v1/collections", wanted)
        now = running.node.status()
        assert (status, report["moved"]) == (429, [1, now["running"], now["waiting"]])
        assert "1 collections are open; end some" in report["error"]
        moving.give_sign()  # as a server that starts does; no episode is nearer to its end for it


async def test_the_environment_describes_itself(running):
    described = await running.call(running.client.description)
    assert described == description_of("counter", CounterPool)


async def test_tasks(running):
    listed = await running.call(running.client.tasks, "train")
    assert listed.dataset == "counter"
    assert listed.tasks == running.node.pool.tasks("train")
    with pytest.raises(RolloutNodeError, match="no split 'trian'") as refused:
        await running.call(running.client.tasks, "trian")
    assert refused.value.status == 404


@pytest.mark.parametrize(("changes", "message"), TABLES["what_cannot_be_collected_is_refused"])
async def test_what_cannot_be_collected_is_refused(running, changes, message):
    with pytest.raises(RolloutNodeError, match=message) as refused:
        await running.call(running.client.start_collection, counter_request(**changes))
    assert refused.value.status == 400


async def test_only_an_evaluation_is_collected_where_an_agent_could_forge_its_reward(running, monkeypatch):
    monkeypatch.setattr(running.node.pool, "dataset", f"counter ({SHARED_GRADE})")
    for name in (training_id("run", 1, ""), dev_id("run", 1, ""), search_id("run", 1.0, 1), "mine"):
        with pytest.raises(RolloutNodeError, match="could forge its own reward") as refused:
            await running.call(running.client.start_collection, counter_request(name))
        assert refused.value.status == 400
    share = share_id(evaluation_id("base", ""), 1, 2)
    for name in (share, replay_id(evaluation_id("base", ""), "only")):
        rollouts, end = await running.collect(counter_request(name, tasks=["reach3_1"], rollouts_per_task=1))
        assert (len(rollouts), end.reason) == (1, "complete")


async def test_context_above_the_servers_is_refused(running):
    body = {**counter_request().to_dict(), "limits": {"max_context": 5000}}
    status, report = await asyncio.to_thread(ask, running.url, "POST", "/v1/collections", json.dumps(body))
    assert status == 400
    assert "limits.max_context 5000 is above the servers' 1024" in report["error"]


@pytest.mark.parametrize("body", ["", "nonsense", "[]", '{"id": "c"}', "\x00" * 10])
async def test_bad_bodies_are_refused(running, body):
    for method, path in (("POST", "/v1/collections"), ("PUT", "/v1/policies/3")):
        status, report = await asyncio.to_thread(ask, running.url, method, path, body)
        assert status == 400
        assert "\n" not in report["error"]


async def test_upload_of_ten_gigabytes_is_refused_before_it_is_sent(running):
    parts = urllib.parse.urlsplit(running.url)

    def announce():
        with socket.create_connection((parts.hostname, parts.port), timeout=DEADLINE_S) as connection:
            head = f"PUT /v1/policies/1 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
            kind = "Content-Type: multipart/form-data; boundary=b\r\n"
            connection.sendall(f"{head}{kind}Content-Length: {10 << 30}\r\n\r\n".encode())
            return connection.recv(4096).decode()

    answer = await asyncio.to_thread(announce)
    assert "413" in answer.splitlines()[0]
    assert (await running.call(running.client.health))["policy_versions"] == [0]


async def test_oversized_part_is_refused_and_cleaned_up(running, policy, tmp_path):
    write_adapter(tmp_path / "adapter", 1)
    with open(tmp_path / "adapter" / "adapter_model.safetensors", "ab") as file:  # noqa: ASYNC230
        file.write(b"\0" * (20 << 20))  # too many for an adapter, few enough for a body
    with pytest.raises(RolloutNodeError, match=r"adapter_model\.safetensors has more than"):
        await running.call(running.client.publish_policy, 1, tmp_path / "adapter")
    assert len(list((running.node.root / "policies").iterdir())) == 1


async def test_bad_adapter_is_refused_with_the_reason(running, tmp_path):
    write_adapter(tmp_path / "adapter", 1, rank=16)
    with pytest.raises(RolloutNodeError, match="rank") as refused:
        await running.call(running.client.publish_policy, 1, tmp_path / "adapter")
    assert refused.value.status == 400
    with pytest.raises(RolloutNodeError, match="is not a whole number"):
        await running.call(running.client.publish_policy, -1, tmp_path / "adapter")


async def test_a_publication_that_finds_no_place_yet_is_to_be_tried_again(policy, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "RELEASE_TIMEOUT_S", 0.2)
    async with local_node(policy, tmp_path / "node") as local:
        hurried = RolloutClient(local.url, TOKEN, reconnect_s=0.0)
        local.node.policies.acquire(0)
        await local.call(hurried.publish_policy, 1, policy / "adapter1")
        no_place = r"versions in use \(0\) leave no place for version 2"
        with pytest.raises(RolloutNodeError, match=no_place):
            await local.call(hurried.publish_policy, 2, policy / "adapter1")
        await local.call(local.client.retire_policy, 0)
        with pytest.raises(NodeUnreachable, match=no_place):
            await local.call(hurried.publish_policy, 2, policy / "adapter1")
        publishing = asyncio.create_task(local.call(local.client.publish_policy, 2, policy / "adapter1"))
        local.node.policies.release(0)
        assert (await publishing).version == 2
        assert local.node.policies.versions() == [1, 2]


async def test_unknown_collection_and_policy(running):
    for name in ("never", "..", "../node"):
        with pytest.raises(RolloutNodeError) as refused:
            await running.call(running.client.cancel, name)
        assert refused.value.status == 404
    with pytest.raises(RolloutNodeError, match="version 7 is not served") as refused:
        await running.call(running.client.retire_policy, 7)
    assert refused.value.status == 404


async def test_metrics_count_what_happened(running, monkeypatch):
    rollouts, _ = await running.collect(counter_request())
    figures = PoolStatus(details={"episode_mb": 4.5, "of a member": {}})
    monkeypatch.setattr(running.node.pool, "status", lambda: figures)
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(running.url).netloc, timeout=DEADLINE_S)
    await asyncio.to_thread(connection.request, "GET", "/metrics", None, {"Authorization": f"Bearer {TOKEN}"})
    text = (await asyncio.to_thread(lambda: connection.getresponse().read())).decode()
    samples = {(s.name, *s.labels.values()): s.value for f in text_string_to_metric_families(text) for s in f.samples}
    assert samples["rollout_episodes_total", "finished"] == 12
    assert samples["rollout_turns_total",] == sum(len(rollout.turns) for rollout in rollouts)
    assert samples["rollout_sampled_tokens_total",] == sum(rollout.sampled_tokens for rollout in rollouts)
    assert samples["rollout_policy_version",] == 0
    assert samples["rollout_environment_episode_mb",] == 4.5
    assert samples["rollout_server_up", "vllm-0"] == 1
    assert samples["rollout_router_requests_total",] == sum(len(rollout.turns) for rollout in rollouts)
    assert samples["rollout_router_failed_attempts_total",] == 0


async def test_heartbeats_come_while_nothing_finishes(running, monkeypatch):
    monkeypatch.setattr("rollout_server.app.HEARTBEAT_S", 0.02)
    progress = []
    running.vllm.answers = lambda body: sum(event.running == 3 for event in progress) >= 3
    await running.call(running.client.start_collection, counter_request(rollouts_per_task=1))

    def read():
        for event in running.client.rollouts("c1"):
            if isinstance(event, Progress):
                progress.append(event)

    await running.call(read)
    assert {event.needed for event in progress if event.running == 3} == {3}


async def test_dropped_connections_neither_lose_nor_repeat(running, monkeypatch):
    """A proxy between client and node cuts every connection after a few thousand bytes, at any byte of a line."""
    monkeypatch.setattr(client_module, "RETRY_PAUSE_S", 0.01)
    parts = urllib.parse.urlsplit(running.url)
    cuts = iter([900, 3000, 10, 7001, 5000, 12345, 1, 9999] + [20000] * 1000)
    connections = 0

    async def pipe(client_reader, client_writer):
        nonlocal connections
        connections += 1
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(await client_reader.read(65536))
        left = next(cuts)
        while left > 0 and (data := await reader.read(left)):
            client_writer.write(data)
            await client_writer.drain()
            left -= len(data)
        client_writer.transport.abort()
        writer.close()

    await running.call(running.client.start_collection, counter_request(rollouts_per_task=8))
    async with await asyncio.start_server(pipe, "127.0.0.1", 0) as proxy:
        client = RolloutClient(f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}", TOKEN)
        rollouts, end = await asyncio.to_thread(read_all, client, "c1")
    direct, _ = await running.call(read_all, running.client, "c1")
    assert connections > 5
    assert rollouts == direct
    assert len(rollouts) == 24
    assert end.reason == "complete"


async def test_a_reader_that_goes_away_is_no_error_of_the_node(running, monkeypatch, caplog):
    monkeypatch.setattr("rollout_server.app.HEARTBEAT_S", 0.02)
    went_away, progress = False, []
    running.vllm.answers = lambda body: went_away and len(progress) >= 5
    await running.call(running.client.start_collection, counter_request(rollouts_per_task=1))
    parts = urllib.parse.urlsplit(running.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    path = "/v1/collections/c1/rollouts?after=0"
    writer.write(f"GET {path} HTTP/1.1\r\nHost: node\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
    assert b" 200 " in await reader.readline()
    writer.transport.abort()
    went_away = True

    def read():  # heartbeats that come here were tried there too
        stream = running.client.rollouts("c1")
        for event in stream:
            if isinstance(event, Progress):
                progress.append(event)
        return stream.end

    assert (await running.call(read)).reason == "complete"
    assert [record.getMessage() for record in caplog.records if record.name == "aiohttp.server"] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
async def test_full_disk_stops_work_and_loses_nothing(policy, tmp_path):
    root = tmp_path / "node"
    root.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", root], capture_output=True).returncode:  # noqa: ASYNC221
        pytest.skip("mounting is not permitted here")
    try:
        async with local_node(policy, root) as local:
            ballast = root / "ballast"
            request = counter_request(rollouts_per_task=20)
            local.vllm.delay = lambda body: 0.02
            await local.call(local.client.start_collection, request)
            await wait_until(lambda: local.node.status()["collections"][0]["finished"] >= 10)
            with pytest.raises(OSError, match="No space"), open(ballast, "wb") as file:  # noqa: ASYNC230, PT012
                while True:
                    file.write(b"x" * 4096)
                    file.flush()
            with pytest.raises(CollectionFailed, match=r"cannot write .*No space left on device; free some space"):
                await local.call(lambda: list(local.client.rollouts("c1")))
            assert local.node.status()["running"] == 0
            there, _ = await local.call(read_all, local.client, "c1")
            with pytest.raises(RolloutNodeError, match="cannot write") as refused:
                await local.call(local.client.start_collection, request)
            assert refused.value.status == 507
            ballast.unlink()
            rollouts, end = await local.collect(request)
            assert end.reason == "complete"
            assert rollouts[: len(there)] == there
            assert len({(rollout.task_id, rollout.index) for rollout in rollouts}) == len(rollouts) == 60
    finally:
        subprocess.run(["umount", "-l", root], check=True)  # noqa: ASYNC221


async def test_a_node_that_gives_up_says_why_to_everybody_who_waits(running):
    running.node.failure = "no vLLM server is left: 3 times in a row: vllm-0 ended: ValueError: no such model"
    assert (await running.call(running.client.status))["status"] == "failed"
    with pytest.raises(NodeUnreachable, match=r"gave up: no vLLM server is left: .*ValueError: no such model"):
        await running.call(running.client.wait_ready, DEADLINE_S)
    for call in (lambda: running.client.tasks("train"), lambda: list(running.client.rollouts("c1"))):
        with pytest.raises(
            RolloutNodeError, match=r"gave up: no vLLM server is left: .*ValueError: no such model"
        ) as refused:
            await running.call(call)
        assert refused.value.status == 500


def rollout_server(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "rollout_server.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        env={**os.environ, "ROLLOUT_SERVER_TOKEN": TOKEN, **environment},
    )


def refusal(monkeypatch, token, *arguments):
    """What the command line exits with: sys.exit of a text prints it to stderr and exits with status 1."""
    monkeypatch.setenv("ROLLOUT_SERVER_TOKEN", token)
    with pytest.raises(SystemExit) as exit_:
        main(list(arguments))
    assert isinstance(exit_.value.code, str)
    return exit_.value.code


@pytest.fixture
def yaml(policy, tmp_path):
    path = tmp_path / "node.yaml"
    path.write_text(
        f"port: 0\nroot: {tmp_path}/node\n"
        f"model: {{path: {policy}/model, dtype: float32, lora_rank: 8, max_context: 1024}}\n"
        "environment: {name: counter}\nservers: {urls: ['http://127.0.0.1:9']}\n"
    )
    return str(path)


@pytest.mark.parametrize(("override", "message"), TABLES["bad_configurations_end_in_one_line"])
def test_bad_configurations_end_in_one_line(yaml, override, message, monkeypatch):
    done = refusal(monkeypatch, TOKEN, "--config", yaml, override)
    assert message in done
    assert "\n" not in done


def test_no_token_no_file_and_broken_yaml_end_in_one_line(yaml, monkeypatch, tmp_path):
    assert "set the environment variable ROLLOUT_SERVER_TOKEN" in refusal(monkeypatch, " ", "--config", yaml)
    (tmp_path / "broken.yaml").write_text("a: [1\nb: }")
    (tmp_path / "list.yaml").write_text("- a")
    for name in ("none.yaml", "broken.yaml", "list.yaml"):
        message = refusal(monkeypatch, TOKEN, "--config", str(tmp_path / name))
        assert name in message
        assert "\n" not in message


def test_port_in_use_ends_in_one_line(yaml):
    taken = Listener()
    done = rollout_server("--config", yaml, f"port={taken.port}")
    assert done.returncode == 1
    assert f"cannot listen on http://127.0.0.1:{taken.port}" in done.stderr
    assert "choose another port" in done.stderr
