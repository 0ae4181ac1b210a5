"""Rollouts that can never be had, in training and evaluation: what goes on, what is counted, what the figures say."""

import asyncio
import json
import re
import time
import zlib
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from agent_environments.counter import TARGETS, CounterEnvironment
from agent_environments.protocol import EnvironmentCrashed
from eval_appworld import EvalAppWorldRecipe
from loop_appworld import LoopAppWorldRecipe
from loop_formats.run_folder import read_metrics
from rollout_server.client import CollectionFailed
from support.counter_node import TOKEN, local_node, two_nodes
from support.small_runs import config_over, set_up
from support.waiting import DEADLINE_S

pytestmark = pytest.mark.drill
TOKEN_ENV = "ROLLOUT_SERVER_TOKEN"
COPIES = 14
"""Counters of the mixture: with the 12 tasks of each, 168 as in AppWorld's test_normal."""
ATTEMPT_S = 6.0
"""How long the world that cannot be brought up is tried each time."""


@pytest.fixture(autouse=True)
def _token(monkeypatch):
    monkeypatch.setenv(TOKEN_ENV, TOKEN)


def never(percent):
    """A fault of the scripted vLLM: of ``percent`` of all rollouts, drawn by task and index, no request is answered."""

    def fault(body):
        rollout = re.fullmatch(r"[^/]+/(.+)\.\d+-.*", body["request_id"])
        return 400 if rollout and zlib.crc32(rollout[1].encode()) % 100 < percent else None

    return fault


def lost_of(tasks, rollouts, percent):
    return sum(zlib.crc32(f"{task}/{index}".encode()) % 100 < percent for task in tasks for index in range(rollouts))


class Died(Exception):
    pass


def trained(cfg, dies_in=None):
    """The lines of a whole run; raises Died before the update of iteration ``dies_in``."""
    recipe = LoopAppWorldRecipe(cfg)
    recipe._stop.listen = lambda: None  # signals are for main threads
    update = recipe.update

    def mortal(rollouts, iteration, *others):
        if iteration == dies_in:
            raise Died
        return update(rollouts, iteration, *others)

    recipe.update = mortal
    with set_up(recipe):
        recipe.train()
    return read_metrics(Path(cfg.output_dir))


def training_config(url, policy, folder):
    cfg = OmegaConf.load(config_over(url, policy, folder, TOKEN_ENV, DEADLINE_S))
    cfg.sampler_gap = {"ok": 1e6, "broken": 1e6}  # what the scripted servers claim is made up
    cfg.collection.tasks = list(TARGETS["train"])
    cfg.collection.tasks_per_iteration, cfg.collection.rollouts_per_task = 12, 8
    cfg.collection.min_rollouts_per_task, cfg.collection.max_policy_lag = 8, 1
    cfg.dev_evaluation = {"every": 1, "max_turns": 4}
    cfg["update"] = {"epochs": 1, "minibatch_rollouts": None, "micro_batch_tokens": 4000}
    cfg.max_iterations = 4
    return cfg


async def test_training_goes_on_without_two_of_a_hundred_rollouts(policy, tmp_path):
    """With a policy lag, over two nodes, with dev scores; and a run that is resumed halfway ends with the same line."""
    expected = lost_of(TARGETS["train"], 8, 2)
    assert expected
    async with two_nodes(policy, tmp_path, publish=False) as (west, east):
        west.vllm.fault = east.vllm.fault = never(2)
        cfg = training_config(f"{west.url},{east.url}", policy, tmp_path)
        cfg.run_name = "whole"
        whole = await west.call(trained, cfg)
        half = OmegaConf.merge(cfg, {"output_dir": str(tmp_path / "half")})
        with pytest.raises(Died):
            await west.call(trained, half, 3)
        resumed = await west.call(trained, OmegaConf.merge(half, {"resume_from_checkpoint": True}))
    for line in whole:
        assert (line["lost_rollouts"], line["rollouts"]) == (expected, 96 - expected)
        assert line["tasks_left_out"] == 0
        assert line["dev_lost"] == lost_of(TARGETS["dev"], 1, 2)
    steps = [line["steps"] for line in whole]
    print(f"\n{len(whole)} iterations of 96 rollouts, {expected} of each lost; steps {steps}")
    assert all(steps)
    for key in ("loss", "reward", "lost_rollouts", "policy_version"):
        assert [line[key] for line in resumed] == [line[key] for line in whole]


async def test_training_ends_with_one_line_when_two_fifths_are_lost_and_goes_on_when_that_is_mended(policy, tmp_path):
    async with local_node(policy, tmp_path / "node", publish=False) as local:
        local.vllm.fault = never(40)
        cfg = training_config(local.url, policy, tmp_path)
        with pytest.raises(CollectionFailed) as raised:
            await local.call(trained, cfg)
        line = str(raised.value)
        print(f"\n{line}")
        assert re.search(r"25 of 96 rollouts lost \(server_error 25\), such as rollout \d of reach\d+_\d: server", line)
        assert "where 24 may be; mend" in line
        assert "or raise collection.max_lost_share" in line
        assert "\n" not in line
        local.vllm.fault = never(0)
        lines = await local.call(trained, OmegaConf.merge(cfg, {"resume_from_checkpoint": True}))
        assert [entry["lost_rollouts"] for entry in lines] == [0, 0, 0, 0]


def mixture(**more):
    """COPIES counters, whose dev tasks are the counters' training tasks."""
    counter = {"name": "counter", "splits": {"dev": "train"}, **more}
    return {"name": "mixed", "environments": {f"n{number}": counter for number in range(COPIES)}}


def evaluated(url, output_dir, runs=1):
    recipe = EvalAppWorldRecipe(
        OmegaConf.create(
            {
                "output_dir": str(output_dir),
                "policies": [{"name": "base"}],
                "rollout_node": {"url": url},
                "limits": {"max_turns": 4, "max_tokens_per_turn": 64, "max_context": 1000, "episode_deadline_s": 600},
                "split": "dev",
                "samplings": [{"temperature": 1.0, "runs": runs}],
                "statistics": {"resamples": 500},
            }
        )
    )
    began = time.monotonic()
    with set_up(recipe):
        recipe.evaluate()
    return json.loads((Path(output_dir) / "report.json").read_text())["scores"][0], time.monotonic() - began


def ends(root):
    """(id, seconds) of a node's collections that have ended."""
    metas = (Path(root) / "collections").glob("*.meta.jsonl")
    records = [(meta.stem, json.loads(line)) for meta in metas for line in meta.read_text().splitlines()]
    return [(name, record["end"]["seconds"]) for name, record in records if "end" in record]


async def test_one_task_of_168_that_cannot_be_brought_up_costs_about_one_attempt(policy, tmp_path, monkeypatch):
    start, attempts, broken = CounterEnvironment.start, [], []

    async def hopeless(environment, task_id):
        if task_id == "reach8_2" and environment._pool in broken:
            attempts.append(task_id)
            await asyncio.sleep(ATTEMPT_S)
            raise EnvironmentCrashed("the world does not come up")
        return await start(environment, task_id)

    monkeypatch.setattr(CounterEnvironment, "start", hopeless)
    seconds = {}
    for name in ("sound", "hopeless"):
        async with local_node(
            policy, tmp_path / name, publish=False, environment=mixture(step_seconds=2.0), max_concurrent_episodes=16
        ) as local:
            if name == "hopeless":
                broken.append(local.node.pool._pools["n3"])
            score, seconds[name] = await local.call(evaluated, local.url, tmp_path / f"{name}-evaluation")
    again = max(ends(tmp_path / "hopeless"), key=lambda end: len(end[0]))  # its id is that of the whole, and more
    print(
        f"\n168 tasks: {seconds['sound']:.1f} s; with one that is never up, {ATTEMPT_S:g} s an attempt: "
        f"{seconds['hopeless']:.1f} s, of them {again[1]:.1f} s at the end"
    )
    assert [(task, run) for task, run, _ in score["lost"]] == [("n3/reach8_2", 0)]
    assert len(attempts) == 4, "three, and one more at the end"
