import asyncio
import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest

from loop_formats.schema import ConfigError, from_mapping
from rollout_server.config import ModelConfig, ServersConfig
from rollout_server.inference import server as vllm_server
from rollout_server.inference import server_group
from rollout_server.inference.router import ServerUnavailable
from rollout_server.inference.server_group import ServerGroup
from rollout_server.policies import store as policies
from rollout_server.policies.adapter_check import AdapterError
from rollout_server.policies.folder import PolicyFolder
from rollout_server.policies.store import PolicyStore, StillInUse, UnknownPolicy
from support.episodes import open_pool
from support.fake_vllm import FakeVllm, prompt_logprob
from support.random_policy import MODEL_CONFIG, write_adapter
from support.waiting import DEADLINE_S, wait_until


class House:
    """Two fake servers, the group and the store on them, and adapters to publish."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.source = folder / "shared"
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text(json.dumps(MODEL_CONFIG))

    async def open(self, count: int = 2, max_loras: int = 3) -> None:
        self.fakes = [FakeVllm() for _ in range(count)]
        self.model_config = ModelConfig(path=str(self.model), dtype="float32", max_context=512, lora_rank=8)
        urls = [await fake.start() for fake in self.fakes]
        self.servers_config = ServersConfig(urls=urls, max_loras=max_loras, start_timeout_s=DEADLINE_S)
        self.store = self.new_store()
        self.group = self.store._group
        await self.group.start()

    def new_store(self, policies: Path | None = None, max_loras: int | None = None) -> PolicyStore:
        """A store, and servers that have yet to start: at first, or of a node that starts again, perhaps on a copy of
        the folder of policies or with another ``max_loras``."""
        servers = dataclasses.replace(self.servers_config, max_loras=max_loras or self.servers_config.max_loras)
        group = ServerGroup(self.model_config, servers, self.folder / "logs")
        return PolicyStore(group, self.model_config, servers, policies or self.folder / "policies")

    async def close(self) -> None:
        await self.group.stop()
        for fake in self.fakes:
            await fake.stop()

    def adapter(self, seed: int) -> Path:
        write_adapter(self.source / f"seed{seed}", seed=seed)
        return self.source / f"seed{seed}"

    def folders(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "policies").iterdir())


@pytest.fixture
async def house(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_server, "POLL_S", 0.05)
    monkeypatch.setattr(server_group, "BACK_OFF_S", (0.05, 0.1))
    async with open_pool(House(tmp_path)) as house:
        yield house


async def test_published_version_is_on_every_server_under_a_name_of_its_content(house):
    weights = (house.adapter(1) / "adapter_model.safetensors").stat().st_ino
    info = await house.store.publish(7, house.source / "seed1")
    assert info.version == 7
    assert info.name.startswith("policy-v0007-")
    assert info.seconds > 0
    assert house.store.versions() == [7]
    assert house.store.acquire(7) == info.name
    for fake in house.fakes:
        assert fake.loaded == {info.name: house.folder / "policies" / info.name}
    assert house.folders() == [info.name]
    published = house.folder / "policies" / info.name / "adapter_model.safetensors"
    assert published.stat().st_ino == weights, "an upload is moved"


async def test_no_two_contents_share_a_name_or_a_folder(house):
    first = await house.store.publish(1, house.adapter(1))
    await house.store.retire(1)
    again = await house.store.publish(1, house.adapter(2))
    second = await house.store.publish(2, house.adapter(1))
    assert len({first.name, again.name, second.name}) == 3
    loads = [name for what, name in house.fakes[0].log if what == "load"]
    assert len(loads) == len(set(loads)) == 3


async def test_same_content_again_is_no_change(house):
    first = await house.store.publish(1, house.adapter(1))
    await house.store.publish(2, house.adapter(2))
    assert house.store.latest() == 2
    assert await house.store.publish(1, house.adapter(1)) == first
    assert [what for what, _ in house.fakes[0].log] == ["load", "load"]
    assert house.store.latest() == 1, "the version published last is the latest, also after going back"


async def test_canary_decides(house):
    adapter = house.adapter(1)
    right = prompt_logprob(adapter)
    canary = {"token_ids": [5, 6, 7], "positions": [1, 2], "logprobs": [right, right + 0.01], "tolerance": 0.02}
    first = await house.store.publish(1, adapter, canary)
    other = house.adapter(2)
    with pytest.raises(
        AdapterError, match=r"canary: vllm-\d differs from the trainer's log-probs by 0\.\d+ in the mean"
    ):
        await house.store.publish(2, other, {**canary, "logprobs": [right + 0.5, right + 0.5]})
    assert house.store.versions() == [1]
    assert all(list(fake.loaded) == [first.name] for fake in house.fakes)
    assert house.folders() == [first.name]


@pytest.mark.parametrize(
    ("canary", "reason"),
    [
        ([], "canary must be a mapping"),
        ({"tokens": [1]}, "unknown key 'canary.tokens'"),
        ({"token_ids": [1, 2], "positions": [1]}, "missing key 'canary.logprobs'"),
        ({"token_ids": [1], "positions": [1], "logprobs": [-1.0]}, "indices of token_ids from 1"),
        ({"token_ids": [1, 2], "positions": [1], "logprobs": [-1.0, -2.0]}, "1 positions and 2 logprobs"),
        ({"token_ids": [1, 2], "positions": [1], "logprobs": [float("nan")]}, "finite"),
        ({"token_ids": list(range(512)), "positions": [1], "logprobs": [-1.0]}, "must be fewer than 512"),
        ({"token_ids": [1, 2], "positions": [1], "logprobs": [-1.0], "tolerance": 0}, "tolerance"),
    ],
)
async def test_canary_that_makes_no_sense_is_refused(house, canary, reason):
    with pytest.raises(ConfigError, match=reason):
        await house.store.publish(1, house.adapter(1), canary)
    assert house.fakes[0].log == []


@pytest.mark.parametrize(("mode", "servers"), [("poisoned", [1]), ("refuse load", [0, 1]), ("error", [0, 1])])
async def test_what_speaks_against_the_adapter_rolls_it_back_everywhere(house, mode, servers):
    kept = await house.store.publish(1, house.adapter(1))
    for server in servers:
        house.fakes[server].mode = mode
    with pytest.raises(AdapterError, match=r"vllm-\d"):
        await house.store.publish(2, house.adapter(2))
    assert house.store.versions() == [1]
    assert all(list(fake.loaded) == [kept.name] for fake in house.fakes)
    assert house.folders() == [kept.name]


@pytest.mark.parametrize("mode", ["refuse load", "die of load", "error", "hang up"])
async def test_a_server_that_fails_alone_is_replaced_and_gets_the_version_as_it_comes_back(house, mode):
    house.fakes[1].mode = mode
    info = await house.store.publish(1, house.adapter(1))
    assert house.store.versions() == [1]
    assert house.group.ready == [house.group.servers[0]], "nothing is sent to a server without the version"
    house.fakes[1].loaded.clear()
    house.fakes[1].mode = "well"
    await wait_until(lambda: len(house.group.ready) == 2)
    assert house.group.servers[1].restarts > 0
    assert set(house.fakes[1].loaded) == {info.name}


async def test_engines_that_die_of_a_load_do_not_speak_against_the_adapter(house):
    for fake in house.fakes:
        fake.mode = "die of load"
    with pytest.raises(ServerUnavailable, match=r"no server could load policy-v0001-\w+: .* HTTP 500 .*no memory"):
        await house.store.publish(1, house.adapter(1))
    for fake in house.fakes:
        fake.mode = "well"
    await house.store.publish(1, house.adapter(1))
    assert house.store.versions() == [1]


async def test_retired_version_stays_until_its_last_user_is_done(house):
    info = await house.store.publish(1, house.adapter(1))
    house.store.acquire(1)
    house.store.acquire(1)
    assert await house.store.retire(1) is False
    assert house.store.versions() == []
    assert house.folders() == [info.name], "who holds it goes on"
    with pytest.raises(UnknownPolicy, match="being retired"):
        house.store.acquire(1)
    before = asyncio.all_tasks()
    house.store.release(1)
    assert asyncio.all_tasks() <= before, "nothing has been set off"
    assert info.name in house.fakes[0].loaded
    house.store.release(1)
    await wait_until(lambda: house.folders() == [])
    # The fake notes an unload whose folder is already gone.
    assert house.fakes[0].log == [("load", info.name), ("unload", info.name)]
    with pytest.raises(UnknownPolicy, match="version 1 is not served; served: none"):
        house.store.acquire(1)


async def test_full_house_retires_the_oldest_unused_and_never_serves_more_than_max_loras(house, monkeypatch):
    monkeypatch.setattr(policies, "RELEASE_TIMEOUT_S", 0.2)
    for version in (1, 2, 3):
        await house.store.publish(version, house.adapter(version))
    house.store.acquire(1)
    await house.store.publish(4, house.adapter(4))
    assert house.store.versions() == [1, 3, 4]
    house.store.acquire(3)
    with pytest.raises(
        AdapterError, match=r"versions in use \(1, 3\) leave no place for version 5 beside the latest \(4"
    ):
        await house.store.publish(5, house.adapter(5))
    assert house.store.versions() == [1, 3, 4]
    assert len(house.fakes[0].loaded) == 3


@pytest.mark.parametrize("retired", [False, True])
@pytest.mark.parametrize("version", [1, 4], ids=["other content", "full house"])
async def test_a_version_in_use_that_has_to_go_is_waited_for(house, caplog, version, retired):
    caplog.set_level("INFO")
    for served in (1, 2, 3):
        await house.store.publish(served, house.adapter(served))
    for served in (1, 1, 2):
        house.store.acquire(served)
    publishing = asyncio.create_task(house.store.publish(version, house.adapter(9)))
    await wait_until(lambda: publishing.done() or f"version {version} waits" in caplog.text)
    if retired:
        await house.store.retire(1)
    house.store.release(1)
    assert not publishing.done()
    house.store.release(1)
    info = await publishing
    assert house.store.versions() == sorted({2, 3, version})
    assert house.store.acquire(version) == info.name
    await wait_until(lambda: len(house.folders()) == 3)


async def test_a_retiring_version_that_stays_in_use_is_no_last_word(house, monkeypatch):
    monkeypatch.setattr(policies, "RELEASE_TIMEOUT_S", 0.2)
    for version in (1, 2, 3):
        await house.store.publish(version, house.adapter(version))
    for version in (1, 2):
        house.store.acquire(version)
    await house.store.retire(1)
    with pytest.raises(StillInUse, match=r"versions in use \(1, 2\) leave no place for version 4"):
        await house.store.publish(4, house.adapter(4))
    with pytest.raises(StillInUse, match="version 1 is in use with other content"):
        await house.store.publish(1, house.adapter(4))
    with pytest.raises(AdapterError, match="version 2 is in use with other content"):
        await house.store.publish(2, house.adapter(4))
    house.store.release(1)
    await house.store.publish(4, house.adapter(4))
    assert house.store.versions() == [2, 3, 4]


@pytest.mark.parametrize("version", [2, 3, 4], ids=["other content", "other content of the latest", "full house"])
async def test_a_refused_version_leaves_what_it_would_have_replaced(house, version):
    names = [(await house.store.publish(served, house.adapter(served))).name for served in (1, 2, 3)]
    canary = {"token_ids": [5, 6, 7], "positions": [1, 2], "logprobs": [-9.0, -9.0]}
    with pytest.raises(AdapterError, match="not the same weights"):
        await house.store.publish(version, house.adapter(9), canary)
    assert house.store.latest() == 3
    assert [house.store.acquire(served) for served in house.store.versions()] == names
    assert all(set(fake.loaded) == set(names) for fake in house.fakes)
    assert house.folders() == names
    store = house.new_store()
    assert await store.restore() == [1, 2, 3]
    assert store.latest() == 3


async def test_nobody_can_begin_to_use_a_version_while_its_successor_is_proven(house):
    """Requests of more adapters than max_loras would wait in vLLM, the canary among them."""
    for version in (1, 2, 3):
        await house.store.publish(version, house.adapter(version))
    for fake in house.fakes:
        fake.mode = "hang"
    proven = len(house.fakes[0].seen)
    publishing = asyncio.create_task(house.store.publish(4, house.adapter(4)))
    await wait_until(lambda: len(house.fakes[0].seen) > proven)
    with pytest.raises(UnknownPolicy, match="version 1 is not served; served: 2, 3"):
        house.store.acquire(1)
    assert house.store.latest() == 3
    for fake in house.fakes:
        fake.mode = "well"
    await publishing
    assert house.store.versions() == [2, 3, 4]
    assert len(house.folders()) == len(house.fakes[0].loaded) == 3


async def test_release_without_acquire_is_an_error(house):
    await house.store.publish(1, house.adapter(1))
    with pytest.raises(RuntimeError, match="released more often"):
        house.store.release(1)


async def test_server_that_comes_back_gets_the_live_versions_before_it_is_ready(house):
    first = await house.store.publish(1, house.adapter(1))
    second = await house.store.publish(2, house.adapter(2))
    house.fakes[0].mode = "dead engine"
    await wait_until(lambda: house.group.servers[0].state != "ready")
    house.fakes[0].loaded.clear()
    third = await house.store.publish(3, house.adapter(3))
    await house.store.retire(1)
    house.fakes[0].mode = "well"
    await wait_until(lambda: house.group.servers[0].state == "ready")
    assert set(house.fakes[0].loaded) == {second.name, third.name}
    assert first.name not in house.fakes[0].loaded


async def test_server_that_fails_the_canary_after_a_restart_is_not_used(house):
    adapter = house.adapter(1)
    canary = {"token_ids": [5, 6], "positions": [1], "logprobs": [prompt_logprob(adapter)]}
    await house.store.publish(1, adapter, canary)
    house.fakes[0].mode = "dead engine"
    await wait_until(lambda: house.group.servers[0].state != "ready")
    house.fakes[0].mode = "poisoned"
    await wait_until(lambda: house.group.servers[0].restarts >= 2)
    assert house.group.ready == [house.group.servers[1]]
    assert "log-probs that are not numbers" in house.group.servers[0].last_error


async def test_publishing_waits_for_a_server_and_gives_up(house, monkeypatch):
    monkeypatch.setattr(policies, "READY_TIMEOUT_S", 0.2)
    for fake in house.fakes:
        fake.mode = "dead engine"
    await wait_until(lambda: not house.group.ready)
    with pytest.raises(ServerUnavailable, match=r"no vLLM server is ready after 0\.2 s: vllm-0 "):
        await house.store.publish(1, house.adapter(1))
    assert house.folders() == []


async def test_an_upload_that_is_refused_is_not_served(house):
    adapter = house.adapter(1)
    os.truncate(adapter / "adapter_model.safetensors", 100)
    with pytest.raises(AdapterError, match="not a whole safetensors file"):
        await house.store.publish(1, adapter)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterError, match=r"the upload has no adapter_model\.safetensors"):
        await house.store.publish(1, adapter)
    assert house.folders() == []
    assert house.fakes[0].log == []


async def test_only_whole_newest_versions_come_back_after_a_crash(house):
    names = {version: (await house.store.publish(version, house.adapter(version))).name for version in (1, 2, 3)}
    root = house.folder / "policies"
    weights = root / names[3] / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    shutil.copytree(root / names[1], root / "policy-v0004-00000000")
    (root / ".incoming-left-over").mkdir()
    store = house.new_store()
    assert await store.restore() == [1, 2]
    assert house.folders() == [names[1], names[2]]
    for fake in house.fakes:
        fake.loaded.clear()
    await store._group.start()
    assert all(set(fake.loaded) == {names[1], names[2]} for fake in house.fakes)
    await store._group.stop()


@pytest.mark.parametrize("moment", ["load", "canary", "discard"])
async def test_a_version_that_was_not_proven_when_the_node_died_is_not_served_by_the_next(house, monkeypatch, moment):
    """The folder as SIGKILL leaves it in mid-load, in mid-canary, and while a refused adapter is being removed."""
    first = await house.store.publish(1, house.adapter(1))
    killed, copy = asyncio.Event(), house.folder / "policies at the kill"

    async def kill(*_):
        if not killed.is_set():  # both servers are asked
            shutil.copytree(house.folder / "policies", copy)
            killed.set()
        await asyncio.Event().wait()

    name = {"load": "load", "canary": "_prove", "discard": "_unload"}[moment]
    monkeypatch.setattr(house.store._placement, name, kill)
    canary = {"token_ids": [5, 6, 7], "positions": [1, 2], "logprobs": [-9.0, -9.0]}
    publishing = asyncio.create_task(house.store.publish(2, house.adapter(2), canary))
    await killed.wait()
    assert any(path.name.startswith("policy-v0002-") for path in copy.iterdir())
    monkeypatch.undo()
    publishing.cancel()
    await asyncio.gather(publishing, return_exceptions=True)
    assert await house.new_store(copy).restore() == [1]
    assert [path.name for path in copy.iterdir()] == [first.name]


async def test_a_restart_keeps_the_order_of_publication(house):
    """A run that went back publishes lower numbers: they are the newest, and the higher ones the first to go."""
    for version in (12, 9, 3, 9):
        await house.store.publish(version, house.adapter(version))
    store = house.new_store()
    assert await store.restore() == [3, 9, 12]
    assert store.latest() == 9
    store = house.new_store(max_loras=2)
    assert await store.restore() == [3, 9]
    assert store.latest() == 9


async def test_publications_after_a_restart_are_later_than_those_before(house):
    for version in (1, 2):
        await house.store.publish(version, house.adapter(version))
    await house.group.stop()
    store = house.new_store()
    await store.restore()
    await store._group.start()
    await store.publish(1, house.adapter(1))
    await store._group.stop()
    store = house.new_store()
    await store.restore()
    assert store.latest() == 1


async def test_a_retired_version_does_not_come_back_with_a_restart(house):
    """Nobody uses it any more then; its last user may have held it until the node died."""
    await house.store.publish(1, house.adapter(1))
    await house.store.publish(2, house.adapter(2))
    house.store.acquire(2)
    assert await house.store.retire(2) is False
    assert await house.new_store().restore() == [1]


async def test_a_retired_version_that_is_published_again_stays(house, monkeypatch):
    """Its last user leaves while it is being published: the removal that this set off finds it served again."""
    await house.store.publish(1, house.adapter(1))
    house.store.acquire(1)
    await house.store.retire(1)
    loop, mark = asyncio.get_running_loop(), PolicyFolder.mark_published

    def mark_while_the_last_user_leaves(folder, path):
        loop.call_soon_threadsafe(house.store.release, 1)
        mark(folder, path)

    monkeypatch.setattr(PolicyFolder, "mark_published", mark_while_the_last_user_leaves)
    await house.store.publish(1, house.adapter(1))
    await asyncio.gather(*house.store._retirements)
    assert house.store.versions() == [1]
    assert await house.new_store().restore() == [1]


def test_one_lora_slot_is_too_few():
    with pytest.raises(ConfigError, match=r"max_loras must be at least 2"):
        from_mapping(ServersConfig, {"max_loras": 1})
