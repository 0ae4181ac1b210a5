"""Rollouts as a stream: which groups an iteration takes, that each is trained on once under the versions that sampled
it, whoever died when, and that a replay of the logs learns the same."""

import json
import random
import shutil
from collections import Counter, defaultdict
from contextlib import nullcontext

import pytest
import torch
from omegaconf import OmegaConf
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from loop_formats.collection_request import CollectionRequest
from loop_formats.ids import parse_collection_id
from loop_formats.run_files import STREAM_FILE, read_lines, write_rollouts
from loop_formats.run_folder import read_metrics
from loop_formats.schema import ConfigError
from loop_recipes.algorithm import scoring
from loop_recipes.config.loop_config import LoopConfig, read_config
from loop_recipes.engine.checkpoint import latest_checkpoint
from loop_recipes.rollouts.group_stream import Group
from loop_recipes.rollouts.stream import Stream
from loop_recipes.run.metrics import METRICS
from rollout_server.client import CollectionFailed
from support.counter_node import TOKEN, local_node
from support.deaths import Killed
from support.ranks import on_ranks
from support.refilled_runs import TOKEN_ENV, adapters
from support.small_runs import config_over, replay_config, train
from support.stream_node import FLOOR, ROLLOUTS, StreamDisk, train_streamed
from support.waiting import DEADLINE_S

TASKS, EPS = 3, 0.2
PINNED = {"policy_mode": "pinned", "max_policy_lag": 1}


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN_ENV, "unused")
    path = replay_config(tmp_path, iterations=4)
    OmegaConf.save(OmegaConf.merge(OmegaConf.load(path), {"keep_last_checkpoints": 4}), path)
    return path


@pytest.fixture
def run(config, tmp_path):
    def trained(name, disk, *moment, **collection):
        return train_streamed(config, tmp_path / name, disk, collection, *moment)

    return trained


def taken(folder):
    """The groups of each iteration."""
    groups = {}
    for line in read_lines(folder / STREAM_FILE):
        if "taken" in line.record:
            groups.setdefault(line.record["taken"]["iteration"], []).append(line.record["taken"])
    return groups


def replayed(config, folder, disk, changes=None, **collection):
    """Train on the logs of a run's stream, with these ``changes`` of the config."""
    logs = folder / "node" / "collections"
    for name, work in disk.groups.items():
        write_rollouts(logs, name, work.finished)
    cfg = OmegaConf.load(config)
    again = folder.with_name(f"{folder.name}_again")
    cfg.output_dir, cfg.rollout_node.replay = str(again), str(logs)
    cfg.sampler_gap, cfg["update"] = {"ok": 1e6, "broken": 1e6}, {"minibatch_rollouts": 4, "micro_batch_tokens": 600}
    settings = {"stream": True, "min_rollouts_per_task": FLOOR, **collection}
    cfg.collection = OmegaConf.merge(cfg.collection, settings)
    for key, value in (changes or {}).items():
        cfg[key] = value
    train(cfg)
    return again


def assert_once(folder, disk, lag):
    """Each group is in one iteration at most, with versions that may be; returns the lags."""
    iterations = taken(folder)
    assert list(iterations) == [1, 2, 3, 4]
    names = [each["group"] for groups in iterations.values() for each in groups]
    assert max(Counter(names).values()) == 1
    lags = []
    for iteration, groups in iterations.items():
        assert len(groups) == TASKS
        for each in groups:
            used = {v for rollout in disk.groups[each["group"]].finished for v in rollout.policy_versions}
            assert each["versions"] == sorted(used)
            lags.append(iteration - 1 - min(used))
    assert max(lags) <= lag
    return lags


@pytest.mark.parametrize("mode", ["latest", "pinned"])
@pytest.mark.parametrize(("lag", "every"), [(0, 1), (1, 1), (4, 1), (4, 3)])
def test_a_stream_is_trained_on_once_within_its_lag_and_a_replay_learns_the_same(
    run, config, tmp_path, lag, every, mode
):
    disk, settings = StreamDisk(), {"max_policy_lag": lag, "publish_every": every, "policy_mode": mode}
    names = run("run", disk, **settings)
    lags = assert_once(tmp_path / "run", disk, lag)
    lines = read_metrics(tmp_path / "run")
    for line, groups in zip(lines, taken(tmp_path / "run").values(), strict=True):
        rollouts = [rollout for each in groups for rollout in disk.groups[each["group"]].finished]
        behind = [line["iteration"] - 1 - min(rollout.policy_versions) for rollout in rollouts]
        assert (line["rollouts"], line["lag_mean"]) == (len(rollouts), pytest.approx(sum(behind) / len(behind)))
        assert line["policy_lag"] <= max(behind), "of those that carry signal"
    assert max(lags) > 0 or lag == 0, "what was not taken has gone on"
    assert names.count("publish") == {1: 5, 3: 2}[every]
    assert all(work.state != "running" for work in disk.groups.values()), "nothing runs on for nobody"
    for line in lines:
        assert {key for key, text in METRICS.items() if text.endswith("only of a stream")} <= set(line)
        assert sum(line[f"given_up_quarter_{n}"] for n in (1, 2, 3, 4)) == line["dropped_rollouts"]
    again = replayed(config, tmp_path / "run", disk, **settings)
    assert adapters(again) == adapters(tmp_path / "run")


@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.drill) for n in range(1, 20))])
def test_a_stream_that_was_killed_loses_nothing_and_takes_nothing_twice(run, config, tmp_path, number):
    """At a moment that chance draws, twice."""

    def kill():
        raise Killed

    draw, disk, folder = random.Random(number), StreamDisk(chance=random.Random(number)), tmp_path / "run"
    for first, last in ((5, 40), (0, 30)):
        with pytest.raises(Killed):
            run("run", disk, draw.randint(first, last), kill, max_policy_lag=2)
    run("run", disk, max_policy_lag=2)
    assert_once(folder, disk, 2)
    ended = {name for name, work in disk.groups.items() if work.state in ("complete", "early_stop")}
    used = {each["group"] for groups in taken(folder).values() for each in groups}
    state = json.loads((latest_checkpoint(folder / "checkpoints") / "state.json").read_text())
    still_open = {group["number"] for group in state["stream"]["groups"]}
    assert {parse_collection_id(name).group for name in ended - used} <= still_open, "they can be taken yet"
    again = replayed(config, folder, disk, max_policy_lag=2)
    assert adapters(again) == adapters(folder)


@pytest.mark.integration
def test_two_ranks_take_the_groups_that_one_does_and_learn_the_same(config, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    train_streamed(config, one, StreamDisk(), {"max_policy_lag": 2})
    on_ranks(2, train_streamed, config, two, StreamDisk(), {"max_policy_lag": 2})
    chosen = [[each for groups in taken(run).values() for each in groups] for run in (one, two)]
    for alone, shared in zip(*chosen, strict=True):
        assert parse_collection_id(alone["group"]).group == parse_collection_id(shared["group"]).group
        assert alone["versions"] == shared["versions"]
    for alone, shared in zip(read_metrics(one), read_metrics(two), strict=True):
        for key in ("loss", "grad_norm", "reward", "rollouts", "lag_mean", "dropped_rollouts", "open_groups"):
            assert shared[key] == pytest.approx(alone[key], rel=1e-4, abs=1e-6), (alone["iteration"], key)
    ended = [json.loads((latest_checkpoint(run / "checkpoints") / "state.json").read_text()) for run in (one, two)]
    for key in ("iteration", "policy_version", "sampler", "stream"):
        assert ended[1][key] == ended[0][key], key


def test_groups_that_are_lost_are_left_out_up_to_a_share(run, tmp_path):
    disk = StreamDisk(lose=(1, 7))
    run("run", disk, max_policy_lag=1, max_lost_share=0.49)
    assert_once(tmp_path / "run", disk, 1)
    assert sum(line["lost_rollouts"] for line in read_metrics(tmp_path / "run")) == 2 * ROLLOUTS
    with pytest.raises(CollectionFailed, match=r"of 12 rollouts lost .*collection\.max_lost_share"):
        run("other", StreamDisk(lose=range(99)), max_policy_lag=1)


def test_a_run_that_goes_back_begins_its_stream_where_the_checkpoint_was(run, tmp_path):
    disk, folder = StreamDisk(), tmp_path / "run"
    run("run", disk, max_policy_lag=1)
    for iteration in (2, 3, 4):
        shutil.rmtree(folder / "checkpoints" / f"iteration_{iteration:04d}")
    before = taken(folder)
    disk.served = 1
    for work in disk.groups.values():  # a version that was given up sampled these
        work.versions = [1]
    run("run", disk, max_policy_lag=1)
    assert list(taken(folder)) == [1, 2, 3, 4]
    assert taken(folder)[1] == before[1]
    again = [each["group"] for each in taken(folder)[2]]
    assert again == [each["group"] for each in before[2]], "chosen under version 1"
    run("run", StreamDisk(), max_policy_lag=1)  # all iterations are done: another node has nothing to stop
    assert list(taken(folder)) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("servers", "collection", "message"),
    [
        ({}, PINNED, r"node\.servers\.max_loras is 2; .* it must be at least 3"),
        ({"max_loras": 3}, PINNED, None),
        ({}, {"max_policy_lag": 4}, None),
    ],
)
def test_as_many_versions_are_pinned_as_servers_hold(tmp_path, servers, collection, message):
    cfg = OmegaConf.load(replay_config(tmp_path, iterations=1))
    cfg.rollout_node = {"launch": True}
    cfg.node = {"root": str(tmp_path), "model": {"path": "m"}, "environment": {"name": "counter"}, "servers": servers}
    cfg.collection = OmegaConf.merge(cfg.collection, {"stream": True, **collection})
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        read_config(cfg, LoopConfig)
    cfg.rollout_node = {"launch": False, "url": "http://a:1,http://b:1"}
    with pytest.raises(ConfigError, match=r"collection\.stream takes one node"):
        read_config(cfg, LoopConfig)


def loss_by_hand(rollouts, policies, newest):
    """LOOP's clipped loss (eq. 10) under ``policies[newest]``; each token's ratio is to the version that sampled it."""
    groups, terms = defaultdict(list), []
    for rollout in rollouts:
        groups[rollout.task_id].append(rollout)
    for members in groups.values():
        total = sum(rollout.reward for rollout in members)
        for rollout in members:
            advantage = rollout.reward - (total - rollout.reward) / (len(members) - 1)
            if abs(advantage) < 0.01:
                continue
            versions = sorted({*rollout.policy_versions, newest})
            ids = torch.tensor([rollout.token_ids])
            under = {
                v: policies[v](ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0] for v in versions
            }
            spans = [
                (turn.policy_version, place - 1) for turn in rollout.turns for place in range(turn.start, turn.end)
            ]
            ratios = torch.stack([(under[newest][at] - under[version][at].detach()).exp() for version, at in spans])
            terms.append(torch.minimum(ratios * advantage, torch.tensor(advantage + EPS * abs(advantage))).mean())
    return -torch.stack(terms).mean()


@pytest.mark.parametrize("lag", [0, 1, 4])
def test_the_step_on_mixed_versions_is_the_one_by_hand_in_float64(run, config, tmp_path, monkeypatch, lag):
    disk, last = StreamDisk(), 4
    run("run", disk, max_policy_lag=lag)
    changes = {
        "optimizer": {"_component_": "torch.optim.SGD", "lr": 1.0},
        "update": {"minibatch_rollouts": None, "micro_batch_tokens": 600, "clip_grad_norm": None},
        "loss": {"_component_": "loop_recipes.algorithm.losses.ClippedPolicyLoss", "level": "token", "eps": EPS},
    }
    cut, until = [], scoring._until
    monkeypatch.setattr(scoring, "_until", lambda *of: cut.append(until(*of).tokens < of[0].tokens) or until(*of))
    again = replayed(config, tmp_path / "run", disk, changes, max_policy_lag=lag)
    assert any(cut) == (lag > 0), "the tokens after those of an older version are not computed for it"
    folders = [again / f"policies/policy-v{version:04d}" for version in range(last + 1)]
    policies = []
    for folder in folders[:last]:
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64)
        policies.append(PeftModel.from_pretrained(base, folder, is_trainable=True).double().eval())
    rollouts = [rollout for each in taken(tmp_path / "run")[last] for rollout in disk.groups[each["group"]].finished]
    assert (len({v for rollout in rollouts for v in rollout.policy_versions}) > 1) == (lag > 0)
    loss_by_hand(rollouts, policies, last - 1).backward()
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in folders[last - 1 :])
    largest, rate = 0.0, read_metrics(again)[-1]["learning_rate"]
    for name, parameter in policies[-1].named_parameters():
        if parameter.grad is not None:
            own = name.replace(".default", "")
            step = (after[own].double() - before[own].double()) / -rate
            largest = max(largest, step.abs().max().item())
            torch.testing.assert_close(step, parameter.grad, rtol=1e-3, atol=2e-6)
    assert largest > 1e-3, "there is a gradient to compare"


async def test_a_real_node_streams_with_versions_that_take_over_in_mid_episode(policy, tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN_ENV, TOKEN)
    async with local_node(policy, tmp_path / "node", publish=False) as local:
        local.vllm.delay = lambda body: 0.3 if "/0." in body["request_id"] else 0.01
        cfg = OmegaConf.load(config_over(local.url, policy, tmp_path, TOKEN_ENV, DEADLINE_S))
        cfg.sampler_gap = {"ok": 1e6, "broken": 1e6}  # what the scripted servers claim is made up
        cfg.advantage = {"_component_": "support.small_runs.ByPosition"}
        cfg.max_iterations, cfg.dev_evaluation = 4, {"every": 2}
        cfg.collection.stream, cfg.collection.max_policy_lag = True, 2
        await local.call(train, cfg)
        rows = local.node.collections()
    lines = read_metrics(tmp_path / "run")
    assert [line["policy_version"] for line in lines] == [1, 2, 3, 4]
    assert {line["dev_iteration"] for line in lines if "dev_iteration" in line} == {0, 2, 4}
    assert not [row for row in rows if row["state"] == "running"]
    names = [each["group"] for groups in taken(tmp_path / "run").values() for each in groups]
    assert len(names) == len(set(names)) == 4 * cfg.collection.tasks_per_iteration


STATE = {"opened": 1, "groups": [], "durations": []}
ONE_OPEN = STATE | {"groups": [vars(Group(0, 0))]}
REQUEST = CollectionRequest("a", ["task_1"], 4, 0, 2)
OPENED = json.dumps({"opened": 1, "request": REQUEST.to_dict()}) + "\n"
TAKEN = '{"taken": {"group": "a", "iteration": 2}}\n'


@pytest.mark.parametrize(
    ("state", "lines", "give_up", "message"),
    [
        (False, "{oops\n", False, ""),  # it was no stream until now
        (STATE, OPENED + TAKEN, True, ""),
        (STATE, TAKEN, False, "stream.jsonl:1 is not a line of this stream; remove it and the lines after it"),
        (STATE, "{oops\n", False, "stream.jsonl:1 is not a JSON object"),
        (ONE_OPEN, "", False, "stream.jsonl does not say what group 0 is; bring the file"),
    ],
)
@pytest.mark.fault("a resumed run ended with a traceback because its stream began only now, or had a damaged line")
def test_a_stream_begins_anew_or_says_why_it_cannot_go_on(config, tmp_path, state, lines, give_up, message):
    (tmp_path / STREAM_FILE).write_text(lines)
    collection = read_config(OmegaConf.load(config), LoopConfig).collection
    with pytest.raises(ConfigError, match=f"^resume_from_checkpoint: .*{message}") if message else nullcontext():
        Stream(collection, None, tmp_path, 1, state, give_up)
    assert (tmp_path / STREAM_FILE).read_text() == (lines if message else "")
