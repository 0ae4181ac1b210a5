import asyncio
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout_server.config import ModelConfig, ServersConfig
from rollout_server.inference import server as vllm_server
from rollout_server.inference.server import ServerGroup
from rollout_server.policies.adapter_check import AdapterError
from rollout_server.policies.merged import MergedPolicyStore
from rollout_server.policies.store import UnknownPolicy
from support import arithmetic_vllm
from support.arithmetic_vllm import prompt_logprob
from support.random_policy import MODEL_CONFIG


def write_weights(folder: Path, seed: int) -> Path:
    """Two shards of a model that has the wrong sizes for anything but this test."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    first = {"embed.weight": torch.randn(5, 4, generator=generator).bfloat16()}
    second = {"norm.weight": torch.randn(4, generator=generator), "steps": torch.zeros(1, dtype=torch.int64)}
    save_file(first, folder / "model-00001-of-00002.safetensors")
    save_file(second, folder / "model-00002-of-00002.safetensors")
    return folder


class House:
    def __init__(self, folder: Path):
        self.folder, self.source = folder, folder / "shared"
        self.base = write_weights(folder / "base", seed=0)
        (self.base / "config.json").write_text(json.dumps(MODEL_CONFIG))
        self.source.mkdir()

    async def open(self) -> None:
        pairs = [await arithmetic_vllm.serve() for _ in range(2)]
        self.fakes, self.http = [fake for fake, _ in pairs], [server for _, server in pairs]
        for fake in self.fakes:
            fake.loaded = {"base": self.base}
        model = ModelConfig(path=str(self.base), max_context=512, lora_rank=8)
        running = ServersConfig(urls=[str(server.make_url("")) for server in self.http], start_timeout_s=5.0)
        self.group = ServerGroup(model, running, self.folder / "logs")
        own = ServersConfig(weight_sync="merged")
        self.store = MergedPolicyStore(self.group, model, own, self.folder / "policies", self.source)
        await self.group.start()

    async def close(self) -> None:
        await self.group.stop()
        for server in self.http:
            await server.close()

    def weights(self, seed: int) -> Path:
        return write_weights(self.source / f"seed{seed}", seed)

    def served(self) -> list[Path]:
        return [fake.loaded.get("base") for fake in self.fakes]


@pytest.fixture
async def house(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_server, "POLL_S", 0.05)
    monkeypatch.setattr(vllm_server, "BACK_OFF_S", (0.05, 0.1))
    house = House(tmp_path)
    await house.open()
    yield house
    await house.close()


def canary_of(folder: Path, off: float = 0.0) -> dict:
    return {"token_ids": [1, 2, 3], "positions": [2], "logprobs": [prompt_logprob(folder) + off], "tolerance": 0.001}


async def test_version_takes_the_place_of_the_one_before(house):
    first = await house.store.publish(1, house.weights(1), canary_of(house.weights(1)))
    assert house.store.name_of(1) == "base", "requests name the model, whatever weights it has"
    second = await house.store.publish(2, house.weights(2), canary_of(house.weights(2)))
    assert first.name != second.name
    assert house.store.versions() == [2]
    folder = house.folder / "policies" / second.name
    assert house.served() == [folder, folder]
    assert [path.name for path in (house.folder / "policies").iterdir()] == [second.name]
    steps = [("pause", "mode=abort&clear_cache=true"), ("reload", second.name), ("resume", "")]
    assert house.fakes[0].log[-3:] == steps


async def test_version_in_use_is_not_replaced_under_its_users(house):
    await house.store.publish(1, house.weights(1))
    assert house.store.acquire(1) == "base"
    with pytest.raises(AdapterError, match="version 1 is in use; merged weights change only between uses"):
        await house.store.publish(2, house.weights(2))
    house.store.release(1)
    await house.store.publish(2, house.weights(2))
    with pytest.raises(UnknownPolicy):
        house.store.acquire(1)


@pytest.mark.parametrize("fault", ["fail reload once", "canary"])
async def test_failure_puts_the_last_good_weights_back_on_every_server(house, fault):
    first = await house.store.publish(1, house.weights(1))
    folder = house.folder / "policies" / first.name
    if fault == "canary":
        canary = canary_of(house.weights(2), off=0.5)
    else:
        house.fakes[1].mode, canary = fault, None
    with pytest.raises(
        AdapterError, match="not the same weights" if fault == "canary" else "/collective_rpc .*HTTP 500"
    ):
        await house.store.publish(2, house.weights(2), canary)
    assert house.served() == [folder, folder]
    assert house.store.versions() == [1]
    assert house.store.acquire(1) == "base"
    assert [path.name for path in (house.folder / "policies").iterdir()] == [first.name]
    assert not any(fake.paused for fake in house.fakes)
    # It did not resume between the failed reload and the good one: that would have killed the engine.
    assert all(server.state == "ready" for server in house.group.servers)
    assert all(fake.mode == "well" for fake in house.fakes)


async def test_first_version_that_fails_leaves_the_base_weights(house):
    house.fakes[0].mode = "fail reload once"
    with pytest.raises(AdapterError):
        await house.store.publish(1, house.weights(1))
    assert house.served() == [house.base, house.base]
    assert house.store.versions() == []


async def test_server_that_cannot_go_back_is_restarted(house):
    await house.store.publish(1, house.weights(1))
    house.fakes[1].mode = "fail reload"
    with pytest.raises(AdapterError):
        await house.store.publish(2, house.weights(2))
    async with asyncio.timeout(5):
        while house.group.servers[1].state == "ready":
            await house.group.wait_for_change()
    assert "could not go back to the last good weights" in house.group.servers[1].last_error
    house.fakes[1].mode, house.fakes[1].paused = "well", False
    async with asyncio.timeout(5):
        while house.group.servers[1].state != "ready":
            await house.group.wait_for_change()
    assert house.served()[0] == house.served()[1] == house.folder / "policies" / house.served()[0].name


def drop(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()


def add(folder: Path) -> None:
    save_file({"extra": torch.zeros(1)}, folder / "more.safetensors")


def widen(folder: Path) -> None:
    edit(folder, "norm.weight", lambda value: torch.zeros(5))


def retype(folder: Path) -> None:
    edit(folder, "norm.weight", lambda value: value.bfloat16())


def poison(folder: Path) -> None:
    edit(folder, "norm.weight", lambda value: torch.full_like(value, float("inf")))


def cut(folder: Path) -> None:
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def repeat(folder: Path) -> None:
    save_file({"norm.weight": torch.zeros(4)}, folder / "more.safetensors")


def swell(folder: Path) -> None:
    with open(folder / "more.safetensors", "wb") as file:
        file.truncate(10 << 30)  # sparse


def edit(folder: Path, name: str, change) -> None:
    file = folder / "model-00002-of-00002.safetensors"
    tensors = load_file(file)
    save_file({**tensors, name: change(tensors[name])}, file)


BAD = {
    drop: "tensor norm.weight is missing",
    add: "tensor extra is not in the base model",
    widen: r"tensor norm.weight is \('F32', \(5,\)\), must be \('F32', \(4,\)\)",
    retype: r"tensor norm.weight is \('BF16'",
    poison: "tensor norm.weight holds a NaN or an infinity",
    cut: "is not a whole safetensors file",
    repeat: "norm.weight is in two shards",
    swell: "bytes of weights; one of this model has at most",
}


@pytest.mark.parametrize("spoil", BAD, ids=lambda spoil: spoil.__name__)
async def test_wrong_weights_reach_no_server(house, spoil):
    folder = house.weights(1)
    spoil(folder)
    with pytest.raises(AdapterError, match=BAD[spoil]):
        await house.store.publish(1, folder)
    assert house.fakes[0].log == []
    assert list((house.folder / "policies").iterdir()) == []


async def test_servers_that_are_not_our_own_are_refused(house):
    model, servers = ModelConfig(path=str(house.base)), ServersConfig(urls=["http://h:1"], weight_sync="merged")
    with pytest.raises(ValueError, match=r"remove servers\.urls"):
        MergedPolicyStore(house.group, model, servers, house.folder / "other")
