"""A folder of runs: which folders are runs, what a list says of each, and what is read for it."""

import json
import shutil

import pytest
from aiohttp.test_utils import TestClient, TestServer

from loop_formats.folder_lock import lock_folder
from loop_recipes.verbs.view import main, open_runs
from loop_viewer import run_folder as subject
from loop_viewer.app import build_app
from loop_viewer.run_data import RunData
from loop_viewer.run_folder import RunFolder
from support.viewer_run import write_run


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("viewer") / "demo", iterations=2, tasks=1, per_task=2)


@pytest.fixture
def runs(written, tmp_path):
    """Two training runs, one of them further down, and an evaluation."""
    runs = tmp_path / "runs"
    for name in ("a", "sweep/b"):
        shutil.copytree(written, runs / name)
        (runs / name / "config.yaml").write_text("max_iterations: 2\nmodel: {path: /x/Tiny}\n")
    shutil.copytree(written / "node", runs / "scores/node")
    for folder in (runs / "a/evaluation", runs / "scores"):
        folder.mkdir(exist_ok=True)
        scores = [{"policy": name, "success": {"mean": mean}} for name, mean in (("before", 25.0), ("after", 75.0))]
        (folder / "report.json").write_text(json.dumps({"scores": scores}))
    (runs / ".hidden").mkdir()
    (runs / ".hidden/metrics.jsonl").touch()
    return runs


def collections(folder):
    """The runs of which collections are shown where all are looked at as one."""
    found = folder.run(folder.overview()["whole"]).overview()["collections"]
    return {each["id"].partition("-")[0] for each in found}


def other_names(run, name):
    """Have a copy's collections named as those of another run."""
    for log in (run / "node/collections").iterdir():
        log.rename(log.with_name(log.name.replace("demo", name, 1)))


def row(folder, name):
    return next(row for row in folder.overview()["runs"] if row["name"] == name)


def test_a_folder_that_is_no_run_itself_is_its_runs(runs):
    assert list(open_runs([runs]).runs()) == ["a", "scores", "sweep/b"]
    for run in (runs / "a", runs / "scores", runs / "a/node", runs / "a/node/collections/demo-i0001.jsonl"):
        assert isinstance(open_runs([run]), RunData)


def test_runs_may_be_named(runs):
    named = open_runs([runs / "a", runs / "sweep/b"])
    assert named.runs() == {"a": runs / "a", "b": runs / "sweep/b"}
    assert named.run("b").path == runs / "sweep/b"
    with pytest.raises(KeyError):
        named.run("scores")


def test_all_as_one_are_those_that_were_named(runs):
    other_names(runs / "sweep/b", "other")
    shutil.rmtree(runs / "scores/node")
    assert collections(RunFolder([runs / "a", runs / "a/node"])) == {"demo"}, "what is named twice is no copy"
    assert collections(RunFolder([runs / "a", runs / "sweep/b"])) == {"demo", "other"}
    assert collections(RunFolder([runs])) == {"demo", "other"}


def test_a_list_says_how_far_each_is_and_how_good(runs):
    folder = RunFolder([runs])
    known = row(folder, "a")
    assert (known["model"], known["state"], known["iterations"]) == ("Tiny", "ended", 2)
    assert (known["held_out_success"], known["held_out_policy"]) == (0.75, "after")
    assert known["reward"] == RunData(runs / "a").overview()["metrics"][-1]["reward"]
    assert row(folder, "scores")["iterations"] is None
    assert row(folder, "scores")["held_out_success"] == 0.75
    assert "reward" in folder.overview()["quantities"]
    assert "dataset" not in folder.overview()["quantities"]


def test_the_last_dev_score_stays_when_later_iterations_have_none(runs):
    lines = [json.loads(line) for line in (runs / "a/metrics.jsonl").read_text().splitlines()]
    lines[0]["dev_success"] = 0.5
    (runs / "a/metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert row(RunFolder([runs]), "a")["dev_success"] == 0.5


def test_what_is_no_number_is_not_listed_as_one(runs):
    with (runs / "a/metrics.jsonl").open("a") as file:
        file.write('{"iteration": 3, "reward": "high", "success": {}, "dev_success": [1], "dataset": 5}\n')
    before, shown = row(RunFolder([runs]), "sweep/b"), row(RunFolder([runs]), "a")
    assert [shown[key] for key in ("reward", "success")] == [before[key] for key in ("reward", "success")]
    assert (shown["dev_success"], shown["dataset"]) == (None, "5")


@pytest.mark.parametrize(
    "text", ["[1]", '{"reward": 1}', '{"iteration": "2"}', "{", "NaN", "\0", "[" * 100_000], ids=lambda _: ""
)
def test_a_damaged_line_keeps_no_run_from_being_listed(runs, text):
    file = runs / "a/metrics.jsonl"
    file.write_text(f"{text}\n{file.read_text()}")
    folder = RunFolder([runs])
    whole, damaged = row(folder, "sweep/b"), row(folder, "a")
    assert f"{file}, line 1, is not a line of metrics" in damaged["damage"][0]
    assert ".py" not in damaged["damage"][0], "no place in our own files"
    assert [damaged[key] for key in ("state", "reward", "iterations")] == [
        whole[key] for key in ("state", "reward", "iterations")
    ]
    curves = folder.curves("reward", ["a", "sweep/b"])
    assert curves["a"] == curves["sweep/b"]


@pytest.mark.parametrize("text", ["", "[]", '{"scores": []}', '{"scores": [{"success": 1, "policy": "a"}]}', "\0"])
def test_a_report_that_says_nothing_is_left_out(runs, text):
    (runs / "a/evaluation/report.json").write_text(text)
    assert row(RunFolder([runs]), "a")["held_out_success"] is None


def test_a_run_that_did_not_change_is_not_read_again(runs, monkeypatch):
    folder = RunFolder([runs])
    before = folder.overview()
    read = []
    numbers = subject.read_numbers
    monkeypatch.setattr(subject, "read_numbers", lambda path, *told: read.append(path.name) or numbers(path, *told))
    assert folder.overview() == before
    assert read == []
    with (runs / "a/metrics.jsonl").open("a") as file:
        file.write('{"iteration": 3, "reward": 0.125}\n')
    assert row(folder, "a")["reward"] == 0.125
    assert read == ["a"]


def test_a_run_at_work_is_read_no_further_than_its_state(runs):
    (runs / "a/metrics.jsonl").write_text((runs / "a/metrics.jsonl").read_text().splitlines()[0] + "\n")
    (runs / "a/node/collections/demo-i0002.meta.jsonl").write_text('{"end": {}}\n')
    folder = RunFolder([runs])
    with lock_folder(runs / "a", "run.lock", "run", "output_dir"):
        assert row(folder, "a")["state"] == "iteration 2 of 2: updating"
        assert row(folder, "a")["runs"]
        read = {name: log.read_to for name, log in folder.run("a")._logs.items()}
    assert read["demo-i0001"] == 0 < read["demo-i0002"]
    assert row(folder, "a")["state"] == "stopped after iteration 1 of 2"


def test_a_curve_holds_one_quantity(runs):
    first, second = RunFolder([runs]).curves("reward", ["sweep/b"])["sweep/b"]
    assert first.keys() == second.keys() == {"iteration", "reward"}


async def test_each_run_has_an_address_and_none_lies_outside_the_folder(runs):
    async with TestClient(TestServer(build_app(open_runs([runs])))) as client:
        answer = await (await client.get("/api/run")).json()
        assert [run["name"] for run in answer["runs"]] == ["a", "scores", "sweep/b"]
        for name in ("a", "sweep%2Fb"):
            assert (await client.get(f"/run/{name}/")).status == 200
            one = await (await client.get(f"/run/{name}/api/run")).json()
            assert (one["name"], one["folder"]) == (name[-1], "runs")
            listed = await (await client.get(f"/run/{name}/api/collections/demo-i0001")).json()
            assert listed["columns"]["cursors"] == [[1], [2]]
            assert (await client.get(f"/run/{name}/api/collections/demo-i0001/rollouts/1")).status == 200
            found = await (await client.get(f"/run/{name}/api/collections/demo-i0001/search?q=task")).json()
            assert found == [1, 2]
            note = f"/run/{name}/api/collections/demo-i0001/rollouts/1/note"
            assert (await client.post(note, json={"note": name})).status == 200
        assert json.loads((runs / "sweep/b/notes.json").read_text()) != json.loads((runs / "a/notes.json").read_text())
        copied = await (await client.get("/run/*/api/run")).json()
        assert [item["id"] for item in copied["collections"]] == ["demo-i0001", "demo-i0002"]
        assert copied["shown_once"].startswith(
            "2 collections were asked for by the same request in several runs, such as "
        )
        other_names(runs / "sweep/b", "b")
        other_names(runs / "scores", "scores")
        together = await (await client.get("/run/*/api/run")).json()
        expected = [f"{name}-i000{number}" for number in (1, 2) for name in ("b", "demo", "scores")]
        assert [item["id"] for item in together["collections"]] == expected
        assert together["shown_once"] == ""
        curves = await (await client.get("/api/curves/reward?run=a&run=scores")).json()
        assert [len(lines) for lines in curves.values()] == [2, 0]
        for path in ("a%2F..%2F..", "%2Fetc", "nosuch", "sweep", ".hidden"):
            assert (await client.get(f"/run/{path}/api/run")).status == 404, path


async def test_a_run_that_is_removed_or_begun_anew_while_it_is_shown(runs):
    async with TestClient(TestServer(build_app(open_runs([runs])))) as client:

        async def said(path):
            return await (await client.get(path)).json()

        log, kept = "/run/a/api/collections/demo-i0001", "/run/sweep%2Fb/api/collections/demo-i0001"
        assert (await said(log))["columns"]["cursors"] == [[1], [2]]
        shutil.rmtree(runs / "a")
        for path in (log, f"{log}/rollouts/1", f"{log}/search?q=a"):
            assert "No such file" in (await said(path))["error"], path
        assert [row["name"] for row in (await said("/api/run"))["runs"]] == ["scores", "sweep/b"]
        assert (await said("/run/a/api/run"))["error"] == "not there: a"
        assert (await said(kept))["columns"]["cursors"] == [[1], [2]]
        write_run(runs / "a", iterations=2, tasks=1, per_task=1)
        assert (await said("/run/a/api/run"))["collections"][0]["totals"]["rollouts"] == 1
        assert (await said(log))["columns"]["cursors"] == [[1]]


def test_a_new_run_appears(runs):
    folder = RunFolder([runs])
    shutil.copytree(runs / "a", runs / "new")
    assert "new" in folder.runs()
    assert folder.run("new").name == "new"


def test_what_has_no_form_for_several_runs_is_refused_in_one_line(runs, tmp_path, capsys):
    assert main([str(runs), "--export", str(tmp_path / "x.html")]) == 1
    assert f"loop view {runs / 'a'} --export FILE" in capsys.readouterr().err
    assert not (tmp_path / "x.html").exists()
    assert main([str(runs), "--text", "task0_1"]) == 1
    assert "--text TASK is of one run, and here are 3: a, scores, sweep/b" in capsys.readouterr().err
    assert main([str(runs / "a"), str(runs / "nosuch")]) == 1
    assert "nosuch does not exist" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / "empty")]) == 1
    assert "holds no run" in capsys.readouterr().err


def test_runs_are_listed_without_a_browser(runs, capsys):
    assert main([str(runs), "--text"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("a: ended, reward 0.")
    assert lines[0].endswith("held-out success 0.750")
    assert [line.partition(":")[0] for line in lines] == ["a", "scores", "sweep/b"]
