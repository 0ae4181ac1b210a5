"""A trainer that shares its GPU with the servers: the same adapters bit for bit, killed or not."""

import pytest
import torch
from omegaconf import OmegaConf

from loop_appworld import LoopAppWorldRecipe
from loop_formats.schema import ConfigError
from loop_recipes.config.loop_config import LoopConfig, read_config
from loop_recipes.engine.checkpoint import load_latest
from loop_recipes.engine.frozen_weights import FrozenWeights
from loop_recipes.rollouts import open as opening
from support.deaths import Killed
from support.fake_node import FakeNode
from support.small_runs import replay_config, set_up

TOKEN_ENV = "LOOP_TEST_TOKEN"
ITERATIONS = 2


class Machine(FakeNode):
    """A node on a GPU of its own make, which only one side may hold; dies at its ``dies_at``-th event."""

    def __init__(self, logs, dies_at=None):
        super().__init__(logs)
        self.dies_at, self.recipe, self.asleep = dies_at, None, False

    def note(self, event, servers_need_it=True):
        super().note(event)
        if len(self.events) - 1 == self.dies_at:
            raise Killed(event)
        if servers_need_it:
            assert not self.asleep, event
            assert self.held() == 0, f"{event} while the trainer holds the GPU"

    def held(self):
        """Bytes of frozen weights on the device."""
        if self.recipe is None or not hasattr(self.recipe, "_learner"):
            return 0
        return sum(
            weight.untyped_storage().nbytes() for _, weight in FrozenWeights(self.recipe._learner.model)._weights()
        )

    def sleep(self):
        self.note("sleep", servers_need_it=False)
        self.asleep = True

    def wake(self):
        self.note("wake", servers_need_it=False)
        self.asleep = False
        assert self.held() == 0, "the servers cannot have their memory"


def config_of(folder, shares, **changes):
    cfg = OmegaConf.load(replay_config(folder, iterations=ITERATIONS))
    cfg.rollout_node = {"url": "http://127.0.0.1:1", "launch": False, "token_env": TOKEN_ENV}
    cfg.node = {
        "root": str(folder / "node"),
        "model": {"path": str(folder / "base"), "lora_rank": 8},
        "environment": {"name": "counter"},
        "servers": {"share": "trainer" if shares else None},
    }
    return OmegaConf.merge(cfg, changes)


def logs(folder):
    replay_config(folder, iterations=ITERATIONS)
    return folder / "logs"


def run(cfg, machine, monkeypatch):
    monkeypatch.setenv(TOKEN_ENV, "unused")
    monkeypatch.setattr(opening, "open_nodes", lambda *_: machine)
    machine.recipe = recipe = LoopAppWorldRecipe(cfg)
    update, save = recipe.update, recipe.save_checkpoint

    def watched(*arguments):
        machine.note("update", servers_need_it=False)
        assert machine.held() > 0
        assert machine.asleep == (cfg.node.servers.share is not None)
        return update(*arguments)

    def saved():
        save()
        machine.note("saved", servers_need_it=False)

    recipe.update, recipe.save_checkpoint = watched, saved
    with set_up(recipe):
        recipe.train()


class Divided(Machine):
    """A machine on which each side has a part for good."""

    def note(self, event, servers_need_it=True):
        super().note(event, servers_need_it=False)


def assert_same_state(folder, other):
    saved, wanted = (load_latest(each / "run/checkpoints") for each in (folder, other))
    assert saved.adapters.keys() == wanted.adapters.keys()
    for version, adapter in wanted.adapters.items():
        for name, tensor in adapter.items():
            assert torch.equal(saved.adapters[version][name], tensor), (version, name)
    assert saved.state["canary"] == wanted.state["canary"]
    assert saved.optimizer.keys() == wanted.optimizer.keys()
    assert all(torch.equal(saved.optimizer[name], tensor) for name, tensor in wanted.optimizer.items())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_adapters_are_those_of_a_divided_gpu(tmp_path, monkeypatch, dtype):
    for name, machine, shares in (("divided", Divided, False), ("shared", Machine, True)):
        (tmp_path / name).mkdir()
        cfg = config_of(tmp_path / name, shares, dtype=dtype, stress_test=True, sampler_gap={"ok": 9, "broken": 99})
        run(cfg, machine(logs(tmp_path / name)), monkeypatch)
    assert load_latest(tmp_path / "shared/run/checkpoints").state["policy_version"] == ITERATIONS
    assert_same_state(tmp_path / "shared", tmp_path / "divided")


EVENTS = ["sleep", "wake", "publish", "start", "read", "sleep", "update", "saved", "wake", "publish"]
"""Of a run, up to its second version; a trainer is killed at each."""


@pytest.mark.parametrize("dies_at", range(2 * len(EVENTS) - 4))
def test_a_trainer_that_is_killed_anywhere_goes_on_to_the_same_adapters(tmp_path, monkeypatch, whole, dies_at):
    machine = Machine(logs(tmp_path), dies_at)
    cfg = config_of(tmp_path, True, sampler_gap={"ok": 9, "broken": 99})
    with pytest.raises(Killed):
        run(cfg, machine, monkeypatch)
    again = Machine(logs(tmp_path))
    again.asleep = machine.asleep
    run(OmegaConf.merge(cfg, {"resume_from_checkpoint": True}), again, monkeypatch)
    assert_same_state(tmp_path, whole)
    turns = [event for event in again.events if event in ("sleep", "wake")]
    assert turns == ["sleep", "wake"] * (len(turns) // 2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    machine = Machine(logs(folder))
    with pytest.MonkeyPatch.context() as monkeypatch:
        run(config_of(folder, True, sampler_gap={"ok": 9, "broken": 99}), machine, monkeypatch)
    of_versions = [event.partition(" ")[0] for event in machine.events]
    assert of_versions[: len(EVENTS)] == EVENTS
    return folder


def test_turns_leave_no_room_for_lag(tmp_path):
    cfg = config_of(tmp_path, True)
    cfg.collection.max_policy_lag = 1
    with pytest.raises(ConfigError, match=r"collection\.max_policy_lag must be 0 with node.servers.share: trainer"):
        read_config(cfg, LoopConfig)
    cfg.collection.max_policy_lag, cfg.collection.stream = 0, True
    with pytest.raises(ConfigError, match=r"collection\.stream must be false with node.servers.share: trainer"):
        read_config(cfg, LoopConfig)
    cfg.collection.max_policy_lag, cfg.collection.stream = 1, False
    cfg.node.servers.share = None
    assert read_config(cfg, LoopConfig).collection.max_policy_lag == 1


def test_a_node_to_launch_on_a_cpu_is_refused(tmp_path):
    cfg = config_of(tmp_path, True)
    cfg.rollout_node = {"launch": True}
    with pytest.raises(ConfigError, match=r"node\.servers\.share must be null with device: cpu"):
        read_config(cfg, LoopConfig)
    cfg.device = "cuda"
    assert read_config(cfg, LoopConfig).takes_turns
