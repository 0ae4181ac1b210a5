"""The recipe against a whole rollout node over HTTP: the counter environment, a scripted policy in vLLM's place."""

import asyncio
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import eval_appworld
from agent_environments.counter import CounterEnvironment
from agent_environments.description import Description
from eval_appworld import EvalAppWorldRecipe
from loop_formats.collection_request import is_collection_id
from loop_formats.ids import parse_collection_id, replay_id, share_id
from loop_formats.run_files import adapter_digest
from loop_formats.schema import ConfigError
from loop_recipes.config.files import compose
from loop_recipes.evaluation.collect import EvaluationTimeout, NoScore
from loop_recipes.evaluation.config import find_policies, read_eval_config
from loop_recipes.rollouts.waiting import Waiting
from support.counter_node import TOKEN, local_node, two_nodes
from support.random_policy import write_adapter, write_model
from support.small_runs import set_up
from support.texts import texts_beside

TABLES = texts_beside(__file__)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    write_model(folder / "model")
    for version in range(2):
        write_adapter(folder / f"run/policies/policy-v000{version}", seed=version)
    return folder


@pytest.fixture(autouse=True)
def _token(monkeypatch):
    monkeypatch.setenv("ROLLOUT_SERVER_TOKEN", TOKEN)


def config(policy, tmp_path, url="http://127.0.0.1:1", **changes):
    return OmegaConf.create(
        {
            "output_dir": str(tmp_path / "evaluation"),
            "policies": [{"name": "base"}, {"name": "trained", "adapter": str(policy / "run")}],
            "rollout_node": {"url": url},
            "limits": {"max_turns": 6, "max_tokens_per_turn": 64, "max_context": 1000, "episode_deadline_s": 300},
            "split": "dev",
            "samplings": [{"temperature": 0.0, "runs": 1}, {"temperature": 1.0, "runs": 3}],
            "statistics": {"resamples": 500},
            **changes,
        }
    )


def run(cfg):
    recipe = EvalAppWorldRecipe(cfg)
    with set_up(recipe):
        return recipe.evaluate()


def reports(files):
    results, report, markdown = (Path(file).read_text() for file in files)
    return [json.loads(line) for line in results.splitlines()], json.loads(report), markdown


def solve(target):
    """What the scripted policy says to reach ``target`` in one turn."""
    steps = "\n".join(f"add({min(9, target - done)})" for done in range(0, target, 9))
    return f"I assume nothing.\n```python\n{steps}\nfinish()\n```"


async def test_a_whole_evaluation(policy, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(Waiting, "report", lambda self, line: told.append(line))
    async with local_node(policy, tmp_path / "node", publish=False) as local:
        local.vllm.speak = lambda rng: solve(4)  # dev asks for 4, 6, 8 and 10, 12, 14: one task of six
        files = await asyncio.to_thread(run, config(policy, tmp_path, local.url))
        assert local.node.policies.versions() == []  # nothing of ours stays behind
        served = {request["model"] for request in local.vllm.requests}
        assert len(served) == 2
        temperatures = {request["sampling_params"]["temperature"] for request in local.vllm.requests}
        assert temperatures == {0.0, 1.0}
        said = [line for line in told if " of 48 rollouts" in line]
        assert len(said) == 48
        assert " rollouts, left " in said[-2]
        assert said[-1] == "trained, T=1: 48 of 48 rollouts"
    results, report, markdown = reports(files)
    assert len(results) == 2 * (6 + 18)
    assert {(line["policy"], line["sampling"], line["run"]) for line in results} == {
        (name, sampling, number)
        for name in ("base", "trained")
        for sampling, runs in (("T=0", 1), ("T=1", 3))
        for number in range(runs)
    }
    assert report["dataset"] == "counter"
    assert report["packages"]["torch"]
    assert [score["success"]["mean"] for score in report["scores"]] == pytest.approx([100 / 6] * 4)
    assert [score["group_success"]["mean"] for score in report["scores"]] == [0.0] * 4
    assert report["scores"][1]["success"]["std"] == 0.0
    assert report["scores"][0]["behavior"] is None, "the counter names no figures of behaviour"
    assert report["policies"][1]["sha256"] == adapter_digest(policy / "run/policies/policy-v0001")
    assert len(report["comparisons"]) == 2
    assert report["comparisons"][0]["success"]["p_value"] == 1.0
    assert "# Evaluation on counter, dev" in markdown
    assert "AppWorld" not in markdown
    assert "6 turns, 64 tokens a turn, 1000 tokens of context" in markdown
    assert "Best policy (T=0): **base**" in markdown


async def test_a_finished_evaluation_needs_no_node(policy, tmp_path, monkeypatch, capsys):
    """Asked again with a node to launch; whatever a result rests on is looked at before."""
    async with local_node(policy, tmp_path / "node", publish=False) as local:
        local.vllm.speak = lambda rng: solve(4)
        launched = {"launch": True}
        node = {"root": str(tmp_path / "node2"), "model": {"path": str(policy / "model")}}
        cfg = config(policy, tmp_path, rollout_node=launched, samplings=[{"runs": 1}])
        cfg = OmegaConf.merge(cfg, {"node": node | {"environment": {"name": "counter"}}})
        opened = []

        def open_nodes(conf, child, output_dir, deadline_s):
            opened.append(output_dir)
            return real(replace(conf, launch=False, url=local.url), None, output_dir, deadline_s)

        real = eval_appworld.open_nodes
        monkeypatch.setattr(eval_appworld, "open_nodes", open_nodes)
        files = await asyncio.to_thread(run, cfg)
        first = [path.read_text() for path in files]
        assert len(opened) == 1
        capsys.readouterr()
        again = await asyncio.to_thread(run, cfg)
        assert len(opened) == 1, "a node was started to print a table"
        assert [path.read_text() for path in again] == first
        shown = capsys.readouterr().out
        assert "every rollout is there from an earlier start" in shown
        assert "counter, dev" in shown
        for change in ({"seed": 1}, {"limits": {"max_turns": 5}}, {"samplings": [{"runs": 2}]}, {"split": "train"}):
            before = len(opened)
            await asyncio.to_thread(run, OmegaConf.merge(cfg, change))
            assert len(opened) == before + 1, change


async def test_a_mixture_is_scored_by_environment_and_group(policy, tmp_path):
    counter = {"name": "counter"}
    mixture = {
        "name": "mixed",
        "environments": {"one": counter, "two": {**counter, "splits": {"dev": "test_normal"}}},
    }
    async with local_node(policy, tmp_path / "node", publish=False, environment=mixture) as local:
        local.vllm.speak = lambda rng: solve(4)  # one task of the six of dev, none of the six of test_normal
        cfg = config(policy, tmp_path, local.url, samplings=[{"runs": 1}], groups={"low": "*/reach[46]_1"})
        cfg = OmegaConf.merge(cfg, {"environment_turns": {"two": 3}})
        _, report, markdown = reports(await asyncio.to_thread(run, cfg))
        with pytest.raises(ConfigError, match=r"groups\.low: no task matches 'reach4_1'; ids are such as one/reach4_1"):
            await asyncio.to_thread(run, OmegaConf.merge(cfg, {"groups": {"low": "reach4_1"}}))
        with pytest.raises(ConfigError, match=r"environment_turns\.to has no tasks; there are tasks of one, two"):
            await asyncio.to_thread(run, OmegaConf.merge(cfg, {"environment_turns": {"to": 3}}))
    assert report["dataset"] == "one:counter + two:counter"
    scored = {group["group"]: group for group in report["scores"][0]["groups"]}
    assert {name: group["tasks"] for name, group in scored.items()} == {"all tasks": 12, "one": 6, "two": 6, "low": 2}
    assert scored["one"]["success"]["estimate"] == pytest.approx(100 / 6)
    assert scored["two"]["success"]["estimate"] == 0.0
    assert scored["low"]["success"]["estimate"] == 50.0
    assert [group["group"] for group in report["comparisons"][0]["groups"]] == list(scored)
    assert "## By environment and group" in markdown
    assert report["environment_turns"] == {"two": 3}
    assert "6 turns (two 3), 64 tokens a turn" in markdown
    assert "| base | T=0 | low | 2 | 50.0 [" in markdown


async def test_an_interrupted_evaluation_goes_on_where_it_was(policy, tmp_path, monkeypatch):
    async with local_node(policy, tmp_path / "node", publish=False) as local:
        cfg = config(policy, tmp_path, local.url)
        monkeypatch.setattr("rollout_server.app.HEARTBEAT_S", 0.1)
        local.vllm.answers = lambda body: sum(c["finished"] for c in local.node.status()["collections"]) < 5
        with pytest.raises(EvaluationTimeout):
            await asyncio.to_thread(run, OmegaConf.merge(cfg, {"deadline_s": 3.0}))
        local.vllm.answers = lambda body: True
        journal = tmp_path / "evaluation/journal.jsonl"
        lines = [json.loads(line) for line in journal.read_text().splitlines()]
        before = [line["rollout_id"] for line in lines if "fingerprint" not in line]
        assert 0 < len(before) < 48
        with journal.open("a") as file:
            file.write('{"cell": "cut sh\n{"cell": "cut sh')  # the first as earlier versions left them
        results, _, _ = reports(await asyncio.to_thread(run, cfg))
        asked = len(local.vllm.requests)
        assert set(before) <= {line["rollout_id"] for line in results}
        assert len({line["rollout_id"] for line in results}) == len(results) == 48
        again, _, _ = reports(await asyncio.to_thread(run, cfg))
        assert again == results
        assert len(local.vllm.requests) == asked  # all was there, nothing was sampled again


def hopeless(node, target, status=400):
    """A fault of the scripted vLLM: no request of the task to reach ``target`` is answered."""
    wanted = node.node.tokens.encode_text(f"from 0 to {target}")

    def fault(body):
        ids = body["token_ids"]
        return status if any(ids[i : i + len(wanted)] == wanted for i in range(len(ids))) else None

    return fault


async def test_a_lost_rollout_is_played_again_at_the_end_then_named_beside_the_score(policy, tmp_path):
    async with local_node(policy, tmp_path / "node", publish=False) as local:
        local.vllm.fault = hopeless(local, 8)
        local.vllm.speak = lambda rng: solve(4)
        cfg = config(policy, tmp_path, local.url, samplings=[{"temperature": 0.0, "runs": 1}])
        results, report, markdown = reports(await asyncio.to_thread(run, cfg))
        score = report["scores"][0]
        assert score["success"]["mean"] == pytest.approx(100 / 5), "one of the five that there are"
        assert score["bounds"]["success"] == pytest.approx([100 / 6, 200 / 6])
        ((task, number, reason),) = score["lost"]
        assert (task, number) == ("reach4_3", 0)
        assert "request_refused" in reason
        lost = (
            "base, T=0: 1 of 6 rollouts lost, and with them all of 1 of 6 tasks; had they all failed or all succeeded"
        )
        assert f"{lost}, success 20.0 would be 16.7 to 33.3" in markdown
        assert f"lost: base, T=0: {task}, run 0: request_refused:" in markdown
        assert "0 and 1 rollouts lost" not in markdown
        assert "1 and 1 rollouts lost, compared on 5 tasks" in markdown
        assert [line["failure"] is None for line in results if line["task_id"] == task] == [False, False]
        logs = [path for path in (tmp_path / "node/collections").glob("eval-base-*.meta.jsonl")]
        attempts = [path.read_text().count('{"failure"') for path in logs]
        assert sorted(attempts) == [1, 1], "what is refused is refused again: once, and once more at the end"
        # The same command tries it again, and only it.
        local.vllm.fault = lambda body: None
        asked = len(local.vllm.requests)
        _, report, _ = reports(await asyncio.to_thread(run, cfg))
        assert (report["scores"][0]["lost"], report["scores"][0]["bounds"]) == ([], None)
        assert len(local.vllm.requests) == asked + 2


async def test_an_environment_that_breaks_is_told_at_once_and_counted(policy, tmp_path, monkeypatch, capsys):
    def broken(self, action):
        raise IndexError("list index out of range")

    monkeypatch.setattr(CounterEnvironment, "step", broken)
    async with local_node(policy, tmp_path / "node", publish=False) as local:
        local.vllm.speak = lambda rng: solve(4)
        samplings = [{"temperature": 0.0, "runs": 1}]
        cfg = config(policy, tmp_path, local.url, policies=[{"name": "base"}], samplings=samplings)
        results, *_ = reports(await asyncio.to_thread(run, cfg))
    printed = capsys.readouterr().out
    printed = " ".join(printed.split())  # as wide as the terminal is
    first = re.search(r"task reach\d+_\d: the environment broke in 1 of 1 rollouts in (.*?); mend it", printed)
    assert "IndexError: list index out of range" in first[1]
    assert printed.count("mend it before reading scores") == 1
    assert f"the environment broke in 6 of 6 rollouts in {first[1]}; the figures count them as graded" in printed
    assert {f"{line['broke']['where']}: {line['broke']['what']}" for line in results} == {first[1]}


async def test_where_everything_is_lost_there_is_no_score(policy, tmp_path):
    async with local_node(policy, tmp_path / "node", publish=False) as local:
        local.vllm.fault = lambda body: 400
        cfg = config(policy, tmp_path, local.url, samplings=[{"temperature": 0.0, "runs": 1}])
        with pytest.raises(
            NoScore, match=r"no score of base, T=0: 6 of 6 rollouts lost \(request_refused 6\), such as"
        ):
            await asyncio.to_thread(run, cfg)
        assert not (tmp_path / "evaluation/report.json").exists()
        local.vllm.fault = lambda body: None
        _, report, _ = reports(await asyncio.to_thread(run, cfg))
        assert report["scores"][0]["lost"] == [], "started again, it is tried again"


async def test_several_nodes_share_the_tasks_and_what_is_played_again(policy, tmp_path):
    """What one node cannot do another may; what none can do is named, and what else they did is kept."""
    async with two_nodes(policy, tmp_path, publish=False) as (west, east):
        for node in (west, east):
            node.vllm.speak = lambda rng: solve(4)
            node.vllm.fault = hopeless(node, 8)
        urls = f"{west.url},{east.url}"
        cfg = config(policy, tmp_path, urls, policies=[{"name": "base"}], samplings=[{"runs": 2}], retries=1)
        results, report, _ = reports(await asyncio.to_thread(run, cfg))
        for node in (west, east):
            assert node.vllm.requests
            assert node.node.policies.versions() == []
        sound = [line["rollout_id"] for line in results if line["failure"] is None]
        assert len(sound) == 10
        assert any("-2of2/" in rollout_id for rollout_id in sound)
        assert {task for task, _, _ in report["scores"][0]["lost"]} == {"reach4_3"}
        for node in (west, east):
            node.vllm.fault = lambda body: None
        results, report, _ = reports(await asyncio.to_thread(run, cfg))
        assert report["scores"][0]["lost"] == []
        assert set(sound) < {line["rollout_id"] for line in results}


async def test_the_base_model_is_served_by_an_adapter_without_effect(policy, tmp_path):
    from safetensors.numpy import load_file

    async with local_node(policy, tmp_path / "node", publish=False) as local:
        taken = []
        publish = local.node.policies.publish

        async def keep(version, folder, canary=None):
            taken.append(load_file(Path(folder) / "adapter_model.safetensors"))
            return await publish(version, folder, canary)

        local.node.policies.publish = keep
        cfg = config(policy, tmp_path, local.url, policies=[{"name": "base"}], tasks=["reach4_1"], split=None)
        await asyncio.to_thread(run, cfg)
    assert len(taken) == 1
    assert all(not values.any() for values in taken[0].values())


async def test_a_model_that_is_built_anew_in_the_same_folder_is_scored_anew(tmp_path):
    asked = []
    for seed in (0, 0, 1):
        write_model(tmp_path / "model", seed)
        async with local_node(tmp_path, tmp_path / "node", publish=False) as local:
            changes = {"policies": [{"name": "base"}], "samplings": [{"runs": 1}]}
            await asyncio.to_thread(run, config(tmp_path, tmp_path, local.url, **changes))
            asked.append(len(local.vllm.requests))
    assert asked[0] > 0
    assert asked == [asked[0], 0, asked[0]]


FOLDERS = ["best model (2)", "最良", "a|b", "[bold]", "$HOME", "x" * 200, "-v1", "é à", "a&b;c"]


@pytest.mark.fault("an adapter's folder with a name of its own")
@pytest.mark.parametrize("name", FOLDERS, ids=range(len(FOLDERS)))
def test_an_adapter_may_be_called_anything(policy, tmp_path, name):
    """By a pattern: each has a request that a node takes, another than its neighbours."""
    for folder, seed in ((name, 0), (f"{name} ", 1)):
        write_adapter(tmp_path / "policies" / folder, seed)
    cfg = config(policy, tmp_path, policies=[{"name": "at-", "adapter": f"{tmp_path}/policies/*"}], tasks=["a_1"])
    recipe = EvalAppWorldRecipe(cfg)
    recipe._dataset, recipe._model, recipe._model_digest, recipe._tasks = "synthetic", "model", "0", ["a_1"]
    recipe._environment = Description()
    assert [each.name for each in recipe._policies] == [f"at-{name}", f"at-{name} "]
    ids = [cell.request.id for each in recipe._policies for cell in recipe._cells(each)]
    assert len({*ids}) == 4
    assert all(parse_collection_id(f"{each}-1of2").score == each for each in ids)
    replayed = replay_id(share_id(ids[0], 1, 2), "again")
    assert is_collection_id(replayed)


def test_patterns_and_runs_name_adapters(policy, tmp_path):
    cfg = config(policy, tmp_path, policies=[{"name": "at-", "adapter": str(policy / "run/policies/policy-v*")}])
    found = find_policies(read_eval_config(cfg))
    assert [item.name for item in found] == ["at-policy-v0000", "at-policy-v0001"]
    assert found[0].served_version != found[1].served_version
    newest = find_policies(read_eval_config(config(policy, tmp_path)))[1]
    assert newest.adapter.name == "policy-v0001"
    assert newest.digest == found[1].digest


def test_results_of_another_environment_or_precision_are_not_taken(policy, tmp_path, monkeypatch):
    """One output_dir, several commands: a finished rollout counts only for what it was made with."""

    def ids(run, *words):
        name, *chosen = run.split()
        recipe = EvalAppWorldRecipe(compose(name, [*chosen, *words, f"output_dir={tmp_path}"], "eval_appworld"))
        recipe._dataset, recipe._model_digest, recipe._tasks = "synthetic", "0", ["a_1"]
        recipe._environment = Description()
        return [cell.request.id for policy in recipe._policies for cell in recipe._cells(policy)]

    node, world = "node", "node.environment"
    within = f"{world}.environments.babyai"
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    for name, same, others in (
        (
            "tiny_cpu",
            [f"{world}.max_worlds=3", f"{node}.port=1", "deadline_s=9"],
            [f"{world}.prompt=loop", f"{world}.observation_max_tokens=400", f"{node}.model.dtype=bfloat16"],
        ),
        ("tiny_cpu world=mixed", [f"{within}.max_worlds=3"], [f"{within}.observation_max_tokens=400"]),
        ("endpoint", [], [f"{world}.prompt=tiny"]),
    ):
        own = ["endpoint.model=m"] if name == "endpoint" else [f"adapter={policy / 'run'}"]
        usual = ids(name, *own)
        assert [ids(name, *own, word) for word in same] == [usual] * len(same)
        for word in others:
            assert not {*ids(name, *own, word)} & {*usual}, word


async def test_the_best_on_one_split_is_taken_to_another(policy, tmp_path):
    async with local_node(policy, tmp_path / "node", publish=False) as local:
        versions = [{"name": "at-", "adapter": str(policy / "run/policies/policy-v*")}]
        selection = config(policy, tmp_path, local.url, policies=versions, samplings=[{"runs": 1}])
        served = {f"{p.served_version}": p.name for p in find_policies(read_eval_config(selection))}

        def generate(body):  # only the second version solves a task
            version = next(name for number, name in served.items() if number in body["model"])
            local.vllm.speak = lambda rng: solve(4) if version == "at-policy-v0001" else solve(5)

        local.vllm.delay = lambda body: generate(body) or 0.0
        _, report, markdown = reports(await asyncio.to_thread(run, selection))
    assert report["best"] == "at-policy-v0001"
    assert "Best policy (T=0): **at-policy-v0001**" in markdown
    chosen = config(policy, tmp_path, policies=[{"name": "best", "adapter": str(tmp_path / "evaluation")}])
    (found,) = find_policies(read_eval_config(chosen))
    assert found.adapter == policy / "run/policies/policy-v0001"
    assert found.chosen == "best of 2 on dev of counter: at-policy-v0001, success 16.7 at T=0"
    stored = json.loads((tmp_path / "evaluation/report.json").read_text())
    moved = shutil.copytree(policy / "run", tmp_path / "moved/run")
    shutil.copytree(tmp_path / "evaluation", moved / "selection")
    stored["policies"] = [{**each, "adapter": f"/gone{each['adapter']}"} for each in stored["policies"]]
    (moved / "selection/report.json").write_text(json.dumps(stored))
    elsewhere = config(policy, tmp_path, policies=[{"name": "best", "adapter": str(moved / "selection")}])
    (found,) = find_policies(read_eval_config(elsewhere))
    assert found.adapter == moved / "policies/policy-v0001", "found beside the selection, by its digest"
    (tmp_path / "evaluation/report.json").write_text(json.dumps({**report, "split": "test_normal:1,2"}))
    with pytest.raises(ConfigError, match=r"evaluation scored on test_normal:1,2; choose among adapters on dev"):
        find_policies(read_eval_config(chosen))
    report["policies"][1]["sha256"] = "of other weights"
    (tmp_path / "evaluation/report.json").write_text(json.dumps(report))
    with pytest.raises(ConfigError, match="is gone or has changed since"):
        find_policies(read_eval_config(chosen))
    for damaged in ("{", "{}", "[]"):
        (tmp_path / "evaluation/report.json").write_text(damaged)
        with pytest.raises(ConfigError, match=r"^policies\[0\]\.adapter: .*report\.json is damaged; evaluate again$"):
            find_policies(read_eval_config(chosen))


@pytest.mark.parametrize(("changes", "message"), TABLES["config_errors_are_one_clear_line"])
def test_config_errors_are_one_clear_line(policy, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        EvalAppWorldRecipe(config(policy, tmp_path, **changes))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "evaluation").exists()


def test_a_run_by_its_name_alone_is_found_in_runs(policy, tmp_path, monkeypatch):
    (tmp_path / "runs/mine").mkdir(parents=True)
    (tmp_path / "runs/mine/metrics.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"adapter: there is no folder mine; did you mean runs/mine\?$"):
        EvalAppWorldRecipe(config(policy, tmp_path, policies=[{"name": "a", "adapter": "mine"}]))
