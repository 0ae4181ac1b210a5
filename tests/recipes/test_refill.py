"""Groups without signal are replaced, and their tasks rest: what is trained on, counted, and found again by a run that
was killed at any moment."""

import random
import zlib

import pytest
from omegaconf import OmegaConf

import loop_appworld
from loop_formats.collection_request import CollectionEnd
from loop_formats.ids import parse_collection_id
from loop_recipes.rollouts.replay_source import ReplaySource
from loop_recipes.rollouts.several_nodes import SeveralNodes
from loop_recipes.rollouts.source import Collected
from loop_recipes.run.metrics import read_metrics
from support.small_runs import replay_config, stored_rollout, train

TOKEN_ENV = "LOOP_TEST_TOKEN"
TASKS = [f"task_{number}" for number in range(1, 9)]
DULL = ("task_1", "task_3", "task_4", "task_8")
"""The first half of them are always solved, the others never."""


class Killed(BaseException):
    """As the end of a process: nothing that would tidy up catches it."""


class Disk:
    """What nodes keep: the rollouts of each collection, from which early stop has cut what chance would have it cut."""

    def __init__(self):
        self.collections, self.chance = {}, random.Random()

    def read(self, request):
        if request.id not in self.collections:
            kept = self.chance.choices([2, 3, 4], k=len(request.tasks))
            parts = zip(request.tasks, kept, strict=True)
            self.collections[request.id] = [rollout(request, task, n) for task, count in parts for n in range(count)]
        return self.collections[request.id]


def rollout(request, task, index):
    reward = (index % 2) if task not in DULL else float(DULL.index(task) < 2)
    seed = zlib.crc32(f"{request.seed}/{task}/{index}".encode())
    return stored_rollout(request.id, task, index, request.policy_version, float(reward), 300, seed)


class Node(ReplaySource):
    """Plays what it is asked for; the process ends at the ``killed_at``-th call of it."""

    def __init__(self, logs, disk, killed_at=None):
        super().__init__(logs)
        self.disk, self.calls, self.killed_at = disk, 0, killed_at

    def _call(self):
        self.calls += 1
        if self.calls == self.killed_at:
            raise Killed

    def tasks(self, split):
        return "made-up", TASKS

    def publish(self, version, folder, canary=None):
        self._call()

    def start(self, request):
        self._call()

    def read(self, request, deadline_s=0.0):
        rollouts = self.disk.read(request)
        self._call()
        dropped = request.episodes - len(rollouts)
        return Collected(rollouts, CollectionEnd("early_stop", len(rollouts), dropped, 10 * dropped, {}, 1.0), 0.0)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Trains into ``<tmp>/<name>`` on a node with this disk; returns the node."""
    monkeypatch.setenv(TOKEN_ENV, "unused")
    file = replay_config(tmp_path, iterations=2)

    def trained(name, disk, killed_at=None, nodes=1, **collection):
        cfg = OmegaConf.load(file)
        cfg.output_dir = str(tmp_path / name)
        cfg.rollout_node = {"url": "http://127.0.0.1:1", "launch": False, "token_env": TOKEN_ENV}
        cfg.sampler_gap = {"ok": 1e6, "broken": 1e6}  # nobody sampled these
        cfg["update"] = {"minibatch_rollouts": 4, "micro_batch_tokens": 600}
        cfg.resume_from_checkpoint = True
        cfg.collection = OmegaConf.merge(cfg.collection, collection)
        node = Node(tmp_path / "logs", disk, killed_at)
        urls = [f"http://node{number}:1" for number in range(nodes)]
        source = node if nodes == 1 else SeveralNodes(lambda url, stop: node, urls, lambda: False)
        monkeypatch.setattr(loop_appworld, "open_source", lambda *_: source)
        train(cfg)
        return node

    return trained


def adapters(folder):
    return {file.parent.name: file.read_bytes() for file in sorted(folder.glob("policies/*/adapter_model.safetensors"))}


def told(folder):
    timed = ("second", "flops", "memory")
    lines = read_metrics(folder)
    return [{key: value for key, value in line.items() if not any(word in key for word in timed)} for line in lines]


def test_an_iteration_has_the_groups_it_asked_for_and_counts_those_it_threw_away(run, tmp_path):
    disk = Disk()
    run("run", disk, refill_budget=2)
    for line in read_metrics(tmp_path / "run"):
        names = {id_: parse_collection_id(id_) for id_ in disk.collections}
        mine = {names[id_].refill: disk.collections[id_] for id_ in names if names[id_].iteration == line["iteration"]}
        tasks = [rollout.task_id for rollouts in mine.values() for rollout in rollouts]
        assert line["groups"] == len(set(tasks)) <= 6
        with_signal = line["groups"] - line["groups_without_signal"]
        assert with_signal == 3 or line["groups"] == 6, "until there are as many as it asked for, or the budget is used"
        assert line["refilled_groups"] == line["groups"] - 3
        assert (line["rollouts"], line["all_rollouts"]) == (len(tasks), 4 * line["groups"])
        sampled = sum(rollout.sampled_tokens for rollouts in mine.values() for rollout in rollouts)
        assert line["all_sampled_tokens"] == sampled + 10 * line["dropped_rollouts"]
        assert line["reward"] == pytest.approx(
            sum(rollout.reward for rollouts in mine.values() for rollout in rollouts) / len(tasks)
        ), "of all that was sampled, not of what was chosen for its rewards"
    assert any(line["refilled_groups"] for line in read_metrics(tmp_path / "run"))


def test_dull_tasks_rest(run, tmp_path):
    disk = Disk()
    run("run", disk, rest_iterations=2, tasks_per_iteration=4)
    drawn = [{rollout.task_id for rollout in rollouts} for rollouts in disk.collections.values()]
    assert not drawn[1] & drawn[0] & {*DULL}
    resting = [line["resting_tasks"] for line in read_metrics(tmp_path / "run")]
    assert resting[:2] == [len(drawn[0] & {*DULL}), len((drawn[0] | drawn[1]) & {*DULL})]


def test_off_is_as_before(run, tmp_path):
    disk = Disk()
    run("run", disk)
    assert [parse_collection_id(id_).refill for id_ in disk.collections] == [0, 0]
    assert all(line["refilled_groups"] == line["resting_tasks"] == 0 for line in read_metrics(tmp_path / "run"))


@pytest.mark.parametrize(
    ("lag", "nodes", "step"),
    [(0, 1, 5), (1, 2, 9), *(pytest.param(lag, lag + 1, 1, marks=pytest.mark.drill) for lag in (0, 1))],
)
def test_a_run_killed_at_any_call_of_the_node_goes_on_as_if_it_had_not_been(run, tmp_path, lag, nodes, step):
    """With the step 1 at every one of them; of two nodes, at a call of either."""
    disk = Disk()
    settings = {"refill_budget": 2, "rest_iterations": 1, "max_policy_lag": lag, "nodes": nodes}
    whole = run("whole", disk, **settings)
    asked = list(disk.collections)
    for at in range(whole.calls - 1, 1, -step):
        with pytest.raises(Killed):
            run(f"killed_{at}", disk, killed_at=at, **settings)
        run(f"killed_{at}", disk, **settings)
        assert sorted(disk.collections) == sorted(asked), "it finds what it asked for before"
        assert adapters(tmp_path / f"killed_{at}") == adapters(tmp_path / "whole")
        assert told(tmp_path / f"killed_{at}") == told(tmp_path / "whole")
    assert any(parse_collection_id(id_).refill for id_ in asked)
