"""Twenty SIGKILLs of trainer, node and server over the phases of a GPU that they have in turns. A drill.

    make drills K=shared_gpu

The server is scripted and computes real log-probs, the policy is a random one, the environment counts. Whoever is
killed is started again by its owner: the server by the node, the others by the drill. The run that was never killed
has the same rollouts, and bit for bit the same adapters.
"""

import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from loop_formats.rollout import Rollout
from loop_formats.run_files import read_rollouts
from loop_plumbing.process_guard import descendants
from rollout_server.client import RolloutClient
from support.counter_node import TOKEN
from support.held_turns import Places
from support.processes import IMPORT_PATH, alive
from support.small_runs import config_over
from support.waiting import block_until

pytestmark = [pytest.mark.integration, pytest.mark.drill, pytest.mark.timeout(1800)]

KILLS, ITERATIONS = 20, 8
TASKS, ROLLOUTS = ("reach3_1", "reach5_1"), 4
PHASES = (
    "asking for sleep",
    "falling asleep",
    "weights coming, asleep",
    "update",
    "weights leaving",
    "half a checkpoint",
    "asking to wake",
    "waking",
    "canary",
    "collecting",
)
VICTIMS = ("trainer", "node", "server")


class House:
    """A node with its server, and a trainer that uses it, as processes."""

    def __init__(self, folder: Path, policy: Path, port: int):
        folder.mkdir()
        self.root, self.run, self.sampled = folder / "node", folder / "run", folder / "sampled.jsonl"
        (folder / "places").mkdir()
        self.places = Places(folder / "places")
        self._folder, self._environ = folder, {**os.environ, "PYTHONPATH": IMPORT_PATH, "TOKEN": TOKEN}
        url = f"http://127.0.0.1:{port}"
        self.client = RolloutClient(url, TOKEN, reconnect_s=60.0)
        node = {
            "root": str(self.root),
            "port": port,
            "token_env": "TOKEN",
            "model": {"path": str(policy / "model"), "dtype": "float32", "max_context": 1024, "lora_rank": 8},
            "servers": {"share": "trainer", "max_num_seqs": 16},
            "environment": {"name": "counter"},
            "max_concurrent_episodes": 6,
        }
        cfg = OmegaConf.load(config_over(url, policy, folder, "TOKEN", 600.0))
        cfg.node, cfg.max_iterations = node, ITERATIONS
        cfg.advantage = {"_component_": "support.small_runs.ByPosition"}
        cfg.collection.min_rollouts_per_task, cfg.collection.min_rollouts_fraction = ROLLOUTS, 1.0
        cfg.keep_last_checkpoints = 1
        OmegaConf.save(cfg, folder / "config.yaml")
        OmegaConf.save(OmegaConf.merge(cfg, {"resume_from_checkpoint": True}), folder / "again.yaml")
        OmegaConf.save(OmegaConf.create(node), folder / "node.yaml")
        self.start_node()
        self.start_trainer()

    def _start(self, role: str, *words: Path) -> subprocess.Popen:
        command = [sys.executable, "-m", "support.held_turns", role, str(self._folder / "places"), *map(str, words)]
        with (self._folder / f"{role}.log").open("ab") as log:
            return subprocess.Popen(command, env=self._environ, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def start_node(self) -> None:
        self.node = self._start("node", self._folder / "node.yaml", self.sampled)

    def start_trainer(self) -> None:
        begun = any((self.run / "checkpoints").glob("iteration_*"))
        self.trainer = self._start("trainer", self._folder / ("again.yaml" if begun else "config.yaml"))

    def check(self) -> None:
        """Both live: neither ends because the other, or the server, was killed."""
        for role in ("node", "trainer"):
            if getattr(self, role).poll() is not None:
                last = (self._folder / f"{role}.log").read_text()[-3000:]
                raise AssertionError(f"the {role} ended with {getattr(self, role).returncode}: {last}")

    def server(self) -> int | None:
        """The process that is the server, below its guard; None where a turn's node has started none."""
        found: list[int] = []

        def known() -> bool:
            status = self.client.status()["servers"]
            server = status[0] if status else {"state": "waiting", "pid": None}
            guard = server["pid"]
            found[:] = [] if guard is None or not alive(guard) else descendants(guard)[:1]
            return bool(found) or server["state"] == "waiting"

        block_until(known, 60.0)
        return found[0] if found else None

    def come_to(self, victim: str, phase: str) -> int:
        """Hold whoever comes to ``phase``; returns the victim, which a server is from the next turn on, if need be."""
        self.places.hold(phase)
        self.places.wait_for(phase, self.check)
        pid = self.server() if victim == "server" else getattr(self, victim).pid
        if pid is not None:
            return pid
        self.places.hold("collecting")
        self.places.let_go(phase)
        self.places.wait_for("collecting", self.check)
        self.places.let_go("collecting")
        return self.come_to(victim, phase)

    def kill(self, victim: str, phase: str) -> None:
        """Kill ``victim`` while somebody is at ``phase``, and start it again."""
        pid = self.come_to(victim, phase)
        below = descendants(pid)
        os.kill(pid, signal.SIGKILL)
        block_until(lambda: not any(map(alive, [pid, *below])), 60.0)
        self.places.let_go(phase)
        if victim == "node":
            self.node.wait()
            self.start_node()
        if victim == "trainer":
            self.trainer.wait()
            self.start_trainer()

    def finish(self) -> None:
        while self.trainer.poll() is None:
            assert self.node.poll() is None, "the node ended"
            time.sleep(0.05)
        assert self.trainer.returncode == 0, (self._folder / "trainer.log").read_text()[-3000:]

    def stop(self) -> None:
        for process in (self.trainer, self.node):
            process.terminate()
            try:
                process.wait(30.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def rollouts(self) -> dict[str, list[Rollout]]:
        """By collection, as the node has them on disk."""
        files = sorted((self.root / "collections").glob("*-i????-??????????.jsonl"))
        return {file.stem: read_rollouts(file) for file in files}

    def adapters(self) -> dict[int, bytes]:
        return {
            int(file.parent.name.removeprefix("policy-v")): file.read_bytes()
            for file in (self.run / "policies").glob("policy-v*/adapter_model.safetensors")
        }


@pytest.fixture(scope="module")
def ports():
    return itertools.count(18_900 + os.getpid() % 500)


@pytest.fixture(scope="module")
def undisturbed(policy, tmp_path_factory, ports):
    house = House(tmp_path_factory.mktemp("turns") / "whole", policy, next(ports))
    try:
        house.finish()
    finally:
        house.stop()
    return house


def test_nothing_is_lost_or_wrong_whoever_is_killed_in_whichever_phase(policy, tmp_path, undisturbed, ports):
    house, killed, began = House(tmp_path / "killed", policy, next(ports)), [], time.monotonic()
    try:
        for number in range(KILLS):
            phase = PHASES[number % len(PHASES)]
            victim = VICTIMS[(number + number // len(PHASES)) % len(VICTIMS)]
            house.kill(victim, phase)
            killed.append((phase, victim))
            print(f"{time.monotonic() - began:6.1f} s  {victim} at {phase}", flush=True)
        house.finish()
        print(f"{time.monotonic() - began:6.1f} s  the end")
    finally:
        house.stop()
    assert len(set(killed)) == KILLS, "no pair twice"

    lines = [json.loads(line) for line in (house.run / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [*range(1, ITERATIONS + 1)]
    assert all(line["gap_p99"] < 1e-3 for line in lines), "the log-probs are those of the version"

    once = {(task, index): 1 for task in TASKS for index in range(ROLLOUTS)}
    found, wanted = house.rollouts(), undisturbed.rollouts()
    assert len(found) == ITERATIONS
    assert found.keys() == wanted.keys()
    for name, rollouts in found.items():
        assert Counter((rollout.task_id, rollout.index) for rollout in rollouts) == once, name
        assert told(rollouts) == told(wanted[name]), name

    adapters, weights = house.adapters(), {}
    assert adapters == undisturbed.adapters()
    assert adapters.keys() == {*range(ITERATIONS + 1)} or adapters.keys() == {*range(ITERATIONS)}
    for version, content in adapters.items():
        weights[hashlib.sha256(content).hexdigest()] = version
    seen = [json.loads(line) for line in house.sampled.read_text().splitlines()]
    asked = {line["request"]: weights[line["weights"]] for line in seen}
    versions = {name: rollouts[0].turns[0].policy_version for name, rollouts in found.items()}
    for request, version in asked.items():
        (name,) = [name for name in versions if request.startswith(name)]
        assert version == versions[name], f"{request} was sampled from version {version}"
    print(f"{len(seen)} turns sampled, {sum(len(r.turns) for all_of in found.values() for r in all_of)} kept")


def told(rollouts: list[Rollout]) -> list[tuple]:
    """What a rollout says, without where and how fast it was sampled."""
    return sorted(
        (rollout.task_id, rollout.index, tuple(rollout.token_ids), tuple(rollout.sampler_logprobs), rollout.reward)
        for rollout in rollouts
    )
