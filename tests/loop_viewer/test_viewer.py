"""The viewer's data, HTTP face and exported page."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

from agent_environments.description import Description
from loop_formats.rollout import BranchOf
from loop_formats.run_files import read_rollouts
from loop_formats.run_folder import write_description
from loop_recipes.verbs.view import main
from loop_viewer.app import STATIC, build_app
from loop_viewer.export import write_export
from loop_viewer.sequences import sequence_beginning
from loop_viewer.summaries import ListedMessage, question_of
from support.listener import Listener
from support.texts import texts_beside
from support.viewer_run import HOSTILE, LONG_TOKENS, SCRIPT, opened, write_run
from support.waiting import COMMAND_S

TABLES = texts_beside(__file__)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("viewer") / "demo")


@pytest.fixture
def run(run_folder):
    return opened(run_folder)


def test_overview_lists_iterations_and_metrics(run):
    overview = run.overview()
    assert overview["name"] == "demo"
    assert [(item["id"], item["iteration"], item["kind"]) for item in overview["collections"]] == [
        (f"demo-i000{number}", number, "training") for number in (1, 2, 3)
    ]
    assert [line["iteration"] for line in overview["metrics"]] == [1, 2, 3]
    assert [item["failures"] for item in overview["collections"]] == [{"task1_1": {"environment_crashed": 2}}, {}, {}]


def test_summaries_hold_the_leave_one_out_advantage_of_the_task(run):
    entries = run.summaries("demo-i0002")
    assert len(entries) == 24
    group = [entry for entry in entries if entry["task"] == "task1_1"]
    rewards = [entry["reward"] for entry in group]
    for entry in group:
        others = (sum(rewards) - entry["reward"]) / (len(rewards) - 1)
        assert entry["advantage"] == pytest.approx(entry["reward"] - others)
    assert run.rollout("demo-i0002", group[0]["cursor"])["calls"][-1] == "supervisor.complete_task"
    assert group[0]["gap"] is None
    alone = [entry for entry in run.summaries("demo-i0003") if entry["task"] == "long_1"]
    assert alone[0]["advantage"] is None


def test_a_continuation_is_compared_with_those_from_the_same_turn(run_folder, tmp_path):
    stored = list(read_rollouts(run_folder / "node/collections/demo-i0002.jsonl"))[:6]
    origins = [BranchOf("demo-i0001/task0_1/0.0", turns) for turns in (0, 0, 0, 1, 1, 2)]
    rewards = [1.0, 0.0, 0.5, 0.25, 0.75, 1.0]
    log = tmp_path / "branch-demo-i0001-0123456789.jsonl"
    log.write_text(
        "".join(
            replace(rollout, branch_of=origin, reward=reward).to_json() + "\n"
            for rollout, origin, reward in zip(stored, origins, rewards, strict=True)
        )
    )
    entries = opened(log).summaries(log.stem)
    assert [entry["advantage"] for entry in entries] == [0.75, -0.75, 0.0, -0.5, 0.5, None]


def test_shares_of_an_iteration_are_told_apart(run_folder, tmp_path):
    lines = (run_folder / "node/collections/demo-i0002.jsonl").read_text().splitlines(keepends=True)
    for node, share in (("node", lines[:10]), ("node-1", lines[10:])):
        folder = tmp_path / node / "collections"
        folder.mkdir(parents=True)
        (folder / f"demo-i0002-{1 if node == 'node' else 2}of2.jsonl").write_text("".join(share))
    first, second = opened(tmp_path).overview()["collections"]
    assert [item["name"] for item in (first, second)] == ["iteration 2, share 1 of 2", "iteration 2, share 2 of 2"]
    assert [item["totals"]["rollouts"] for item in (first, second)] == [10, 14]
    assert [first["whole"], second["whole"]] == [False, False]
    assert {item["whole"] for item in opened(run_folder).overview()["collections"]} == {True}


def test_an_iteration_that_was_collected_twice_is_marked(run_folder, tmp_path):
    """A run went back to an earlier checkpoint: whose metrics those of the iteration are cannot be told."""
    folder = tmp_path / "node/collections"
    folder.mkdir(parents=True)
    for name in (
        "demo-i0001-aaaaaaaaaa",
        "demo-i0002-aaaaaaaaaa",
        "demo-i0002-bbbbbbbbbb",
        "demo-i0002-dev-cccccccccc",
    ):
        (folder / f"{name}.jsonl").write_bytes((run_folder / "node/collections/demo-i0002.jsonl").read_bytes())
    collections = opened(tmp_path).overview()["collections"]
    assert [item["whole"] for item in collections] == [True, False, False, False]
    twice = ["demo-i0002-aaaaaaaaaa", "demo-i0002-bbbbbbbbbb"]
    assert [item["name"] for item in collections] == ["iteration 1", *twice, "dev tasks after iteration 2"]


def test_a_group_of_a_stream_is_of_the_iteration_that_took_it(run_folder, tmp_path):
    folder, names = tmp_path / "node/collections", [f"demo-i0001-g{number}-aaaaaaaaaa" for number in range(3)]
    folder.mkdir(parents=True)
    for name in names:
        (folder / f"{name}.jsonl").write_bytes((run_folder / "node/collections/demo-i0002.jsonl").read_bytes())
    took = [
        {"opened": 1},
        {"taken": {"group": names[1], "iteration": 1}},
        {"taken": {"group": names[0], "iteration": 2}},
    ]
    (tmp_path / "stream.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in took))
    collections = opened(tmp_path).overview()["collections"]
    named = ["iteration 1, group 1", "iteration 2, group 0", "iteration 3, group 2"]
    assert [(item["name"], item["whole"]) for item in collections] == [(name, False) for name in named]


def test_token_statistics_are_shown_where_there_are_some(run):
    entries = run.summaries("demo-i0001")
    assert [entry["gap"] for entry in entries] == pytest.approx([1e-4 * (i + 1) for i in range(24)])
    rollout = run.rollout("demo-i0001", 1)
    sampled = sum(rollout["mask"])
    assert len(rollout["ratios"]) == len(rollout["clipped"]) == len(rollout["old_logprobs"]) == sampled
    assert [entry["advantage"] for entry in entries] == [(i + 1) / 8 for i in range(24)]
    assert rollout["advantages"] == [1 / 8] * sampled  # the rollout's, as no token has its own
    assert rollout["entropies"] is None
    assert run.rollout("demo-i0002", 1)["ratios"] is run.rollout("demo-i0002", 1)["advantages"] is None


def test_what_is_known_of_an_agents_program_is_shown(run_folder, run, tmp_path):
    first, *_ = read_rollouts(run_folder / "node/collections/demo-i0002.jsonl")
    told = {"refusals": [{"status": 400, "said": "too long", "times": 2}], "exit_status": None, "output": "log in"}
    log = tmp_path / "agent.jsonl"
    log.write_text(replace(first, extra={"harness": told}).to_json() + "\n")
    assert opened(log).rollout("agent", 1)["program"] == told
    assert run.rollout("demo-i0002", 1)["program"] is None


def test_tokens_spell_the_rollout(run):
    rollout = run.rollout("demo-i0001", 3)
    texts = rollout["tokens"]["texts"]
    spelled = "".join(texts[i] for i in rollout["tokens"]["index"])
    turn = rollout["turns"][0]
    action = "".join(texts[i] for i in rollout["tokens"]["index"][turn["start"] : turn["end"]])
    assert action == rollout["messages"][2]["content"]
    assert spelled.startswith("Task: task0_1")


def test_a_log_that_grows_is_read_on(run_folder, tmp_path):
    source = (run_folder / "node/collections/demo-i0001.jsonl").read_text().splitlines(keepends=True)
    log = tmp_path / "live.jsonl"
    log.write_text("".join(source[:2]) + source[2][:100])
    run = opened(log)
    assert len(run.summaries("live")) == 2
    log.write_text("".join(source[:5]))
    assert [entry["cursor"] for entry in run.summaries("live")] == [1, 2, 3, 4, 5]
    assert run.rollout("live", 5)["rollout_id"] == json.loads(source[4])["rollout_id"]


@pytest.mark.parametrize("anew", ["fewer", "as long", "gone"])
def test_a_log_that_is_begun_anew_is_read_anew(run_folder, tmp_path, anew):
    folder = tmp_path / "run"
    shutil.copytree(run_folder, folder)
    log = folder / "node/collections/demo-i0002.jsonl"
    shown = opened(folder)
    assert len(shown.summaries("demo-i0002")) == 24
    lines = log.read_text().splitlines(keepends=True)
    (tmp_path / "next").write_text("".join({"fewer": lines[:2], "as long": lines[::-1], "gone": []}[anew]))
    (tmp_path / "next").rename(log)
    if anew == "gone":
        log.unlink()
    listed = [item["id"] for item in shown.overview()["collections"]]
    assert ("demo-i0002" in listed) == (anew != "gone")
    if anew == "gone":
        with pytest.raises(KeyError):
            shown.summaries("demo-i0002")
        return
    first = shown.summaries("demo-i0002")[0]
    assert first["id"] == json.loads(log.read_text().splitlines()[0])["rollout_id"]
    assert shown.rollout("demo-i0002", 1)["rollout_id"] == first["id"]


def test_a_folder_that_is_gone_is_said_to_be(run_folder, tmp_path):
    shown = opened(shutil.copytree(run_folder, tmp_path / "run"))
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(ValueError, match=r"run does not exist any more$"):
        shown.overview()


async def test_numbers_that_no_browser_can_read_are_left_open(run_folder, tmp_path):
    """Whoever wrote the log: of one such number the whole page would stay empty."""
    folder = tmp_path / "run"
    shutil.copytree(run_folder, folder)
    log = folder / "node/collections/demo-i0002.jsonl"
    first, second, *others = map(json.loads, log.read_text().splitlines())
    first["reward"] = float("nan")
    second["sampler_logprobs"][-1] = -float("inf")
    log.write_text("".join(f"{json.dumps(line)}\n" for line in (first, second, *others)))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 4, "ratio_max": Infinity, "loss": NaN, "environments": {"game": {"wins": NaN}}}\n')
    run = opened(folder)

    def refused(text):
        raise AssertionError(text)

    async with TestClient(TestServer(build_app(run))) as client:
        answers = {}
        for path in ("run", "collections/demo-i0002", *(f"collections/demo-i0002/rollouts/{n}" for n in (1, 2))):
            text = await (await client.get(f"/api/{path}")).text()
            answers[path] = json.loads(text, parse_constant=refused)
    assert answers["collections/demo-i0002"]["columns"]["reward"][0] is None
    assert answers["collections/demo-i0002/rollouts/2"]["logprobs"][-1] is None
    last = {"iteration": 4, "ratio_max": None, "loss": None, "environments": {"game": {"wins": None}}}
    assert answers["run"]["metrics"][-1] == last
    write_export(run, tmp_path / "page.html", ["demo-i0002"])
    for text in re.findall(
        r'<script type="application/json"[^>]*>(.*?)</script>', (tmp_path / "page.html").read_text()
    ):
        json.loads(text, parse_constant=refused)


def test_search_finds_texts_in_messages_and_ids(run):
    assert run.search("demo-i0003", "ONERROR") == [25]
    assert run.search("demo-i0003", "step 0") != []
    assert run.search("demo-i0003", "not in any message") == []
    found = run.search("demo-i0001", "TASK1_1")
    assert found == [entry["cursor"] for entry in run.summaries("demo-i0001") if entry["task"] == "task1_1"]


OPENED = [("system", "s"), ("user", "u")]
ONE = [*OPENED, ("assistant", "a"), ("user", "b"), ("assistant", "c"), ("user", "d")]


@pytest.mark.parametrize(
    ("messages", "shared", "begins"),
    [
        ([*ONE, ("assistant", "e")], 6, "the same history was encoded anew"),
        ([*ONE[:3], ("user", "left out"), *ONE[4:]], 3, "its history was changed"),
        ([*ONE[:4], ("assistant", "e")], 4, "another answer to the same messages"),
        ([*OPENED, ("assistant", "e")], 2, "another answer to the same messages"),
        ([("system", "s"), ("user", "v"), ("assistant", "e")], 1, "a conversation of its own, such as a sub-agent's"),
    ],
)
def test_where_a_sequence_begins_and_why(messages, shared, begins):
    earlier = [[("system", "other")], ONE]
    as_records = [[{"role": role, "content": text} for role, text in each] for each in (messages, *earlier)]
    assert sequence_beginning(as_records[0], as_records[1:]) == (shared, begins)
    assert sequence_beginning(as_records[0], []) == (0, "")


def test_the_sequences_of_an_episode_are_one_thread(run_folder, tmp_path):
    first = read_rollouts(run_folder / "node/collections/demo-i0001.jsonl")[0]
    whole = replace(first, segments=2)
    shorter = replace(whole, rollout_id=f"{first.rollout_id}/1", segment=1, extra={"compaction": "drop"})
    log = tmp_path / "own.jsonl"
    log.write_text("".join(f"{rollout.to_json()}\n" for rollout in (whole, shorter, replace(first, index=1))))
    run = opened(log)
    thread = run.rollout("own", 2)["thread"]
    assert thread == run.rollout("own", 1)["thread"]
    assert [(each["cursor"], each["turns"]) for each in thread] == [(1, 0), (2, len(first.turns))]
    assert (thread[1]["shared"], thread[1]["begins"]) == (
        len(first.messages),
        "its history was too long (compaction: drop)",
    )
    assert run.rollout("own", 3)["thread"] == []
    assert [entry["episode"] for entry in run.summaries("own")] == [first.rollout_id] * 3


def test_a_record_that_names_sequences_without_end_is_shown(run_folder, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run_folder, folder)
    log = folder / "node/collections/demo-i0002.jsonl"
    first, *others = log.read_text().splitlines()
    log.write_text("\n".join([json.dumps({**json.loads(first), "segments": 10**15}), *others]) + "\n")
    assert len(opened(folder).rollout("demo-i0002", 1)["thread"]) == 24


def test_calls_of_tools_are_counted_whatever_the_environment_says(run_folder, tmp_path):
    rollout = read_rollouts(run_folder / "node/collections/demo-i0001.jsonl")[0]
    rollout.messages[2]["content"] = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    (tmp_path / "own.jsonl").write_text(rollout.to_json() + "\n")
    write_description(tmp_path, Description())
    assert opened(tmp_path / "own.jsonl").rollout("own", 1)["calls"] == ["add"]


def test_a_nodes_folder_alone_is_shown_as_text_or_says_why_not(run_folder, tmp_path):
    shown = opened(run_folder).rollout("demo-i0002", 1)["tokens"]["texts"]
    for path in (run_folder, run_folder / "node", run_folder / "node/collections/demo-i0002.jsonl"):
        run = opened(path)
        assert run.overview()["no_text"] == ""
        assert run.rollout("demo-i0002", 1)["tokens"]["texts"] == shown
    shutil.copytree(run_folder / "node", tmp_path / "run/node")
    alone = opened(tmp_path / "run/node")
    assert "no rollout_node.yaml here names the model; give --model" in alone.overview()["no_text"]
    (tmp_path / "run/rollout_node.yaml").write_text("model: {path: /gone}\n")
    alone = opened(tmp_path / "run/node")
    assert "/gone holds no tokenizer.json any more; give --model" in alone.overview()["no_text"]
    assert alone.rollout("demo-i0002", 1)["tokens"]["texts"][0].startswith("‹")


@pytest.fixture
async def client(run):
    async with TestClient(TestServer(build_app(run))) as client:
        yield client


async def test_pages_carry_a_policy_that_lets_nothing_foreign_run(client):
    page = await client.get("/")
    policy = page.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    text = await page.text()
    assert re.findall(r"<script(?! src=\"/static/[\w./-]+\"></script>)", text) == []
    for path in re.findall(r'(?:src|href)="(/static/[^"]+)"', text):
        assert (await client.get(path)).status == 200


async def test_api_gives_hostile_text_as_data(client):
    answer = await client.get("/api/collections/demo-i0003/rollouts/25")
    assert answer.content_type == "application/json"
    rollout = await answer.json()
    assert rollout["messages"][3]["content"] == HOSTILE
    assert rollout["requirements"][0]["text"] == SCRIPT


@pytest.mark.parametrize(
    "path",
    [
        "/api/collections/none",
        "/api/collections/..%2F..%2Fmetrics",
        "/api/collections/demo-i0001/rollouts/0",
        "/api/collections/demo-i0001/rollouts/99",
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        *(f"/api/collections/demo-i0001/rollouts/{cursor}" for cursor in ("9" * 5000, "\u0663", "-1", "1e3")),
    ],
)
async def test_what_is_not_there_is_404(client, path):
    assert (await client.get(path)).status == 404


NO_ROLLOUTS = {
    "no turns": lambda record: {key: value for key, value in record.items() if key != "turns"},
    "turns of another kind": lambda record: {**record, "turns": [1]},
    "a turn without its end": lambda record: {**record, "turns": [{"start": 0}]},
    "messages of another kind": lambda record: {**record, "messages": 7},
    "a reward of another kind": lambda record: {**record, "reward": [1.0]},
    "no id": lambda record: {key: value for key, value in record.items() if key != "episode_id"},
    "log-probs of another kind": lambda record: {**record, "sampler_logprobs": ["x"]},
    "tokens of another kind": lambda record: {**record, "token_ids": None},
    "an origin of another kind": lambda record: {**record, "branch_of": 3},
    "a list": lambda record: [record],
    "a text that no browser can show, and no reward": lambda record: {
        **{key: value for key, value in record.items() if key != "reward"},
        "messages": [{"role": "user", "content": "\ud83d"}],
    },
}


@pytest.mark.parametrize("how", NO_ROLLOUTS)
def test_a_line_that_is_no_rollout_is_named_in_one_line(run_folder, tmp_path, capsys, how):
    log = next(run_folder.glob("**/collections/demo-i0001.jsonl"))
    lines = log.read_text().splitlines()
    lines[1] = json.dumps(NO_ROLLOUTS[how](json.loads(lines[1])))
    (tmp_path / "demo-i0001.jsonl").write_text("\n".join(lines) + "\n")
    assert main([str(tmp_path / "demo-i0001.jsonl"), "--export", str(tmp_path / "x.html")]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    assert "line 2, is not a rollout" in said or ":2 is not a JSON object" in said
    assert "make the line blank" in said
    assert not (tmp_path / "x.html").exists()
    log = tmp_path / "demo-i0001.jsonl"
    log.write_text("\n".join([lines[0], "", *lines[2:]]) + "\n")
    assert main([str(log), "--text"]) == 0


BAD_LINES = (b"{", b"[" * 100_000, b"\0" * 9, b"NaN", b"[7]", b'"text"', b'{"rollout_id": 3}', b"\xff")
FILES_OF_LINES = {
    "log": "node/collections/demo-i0001.jsonl",
    "facts": "node/collections/demo-i0001.meta.jsonl",
    "statistics": "token_statistics/demo-i0001.jsonl",
    "metrics": "metrics.jsonl",
}


@pytest.mark.fault("one bad line of a run's files made the whole run's page that error")
@pytest.mark.parametrize("which", FILES_OF_LINES)
async def test_a_bad_line_costs_one_line_and_is_named(run_folder, tmp_path, capsys, which):
    folder = shutil.copytree(run_folder, tmp_path / "demo")
    whole = opened(folder)
    listed, rows = whole.overview(), whole.summaries("demo-i0001")
    file = folder / FILES_OF_LINES[which]
    for line in BAD_LINES:
        before = file.read_bytes()
        file.write_bytes(line + b"\n" + before)
        damaged = opened(folder)
        entries = damaged.summaries("demo-i0001")
        assert [entry["id"] for entry in entries] == [entry["id"] for entry in rows]
        assert [entry["advantage"] for entry in entries] == [entry["advantage"] for entry in rows]
        assert damaged.search("demo-i0001", "step 2")
        assert damaged.rollout("demo-i0001", entries[-1]["cursor"])["rollout_id"] == rows[-1]["id"]
        overview = damaged.overview()
        assert [item["failures"] for item in overview["collections"]] == [
            item["failures"] for item in listed["collections"]
        ]
        assert overview["metrics"] == listed["metrics"]
        named = overview["damage"] + overview["collections"][0]["damage"]
        an_unknown_fact = which == "facts" and line == b'{"rollout_id": 3}'
        assert [f"{file}, line 1, is not a " in said for said in named] == [True] * (not an_unknown_fact), line
        if which in ("log", "metrics"):
            assert main([str(folder), "--text"]) == 1
            told = capsys.readouterr()
            assert (told.out.count(": 24 rollouts"), told.err.count("\n")) == (2, 1)
        file.write_bytes(before)


async def test_a_note_stays_beside_the_run_and_is_found(run_folder, tmp_path):
    folder = shutil.copytree(run_folder, tmp_path / "demo")
    path = "/api/collections/demo-i0001/rollouts/3/note"
    async with TestClient(TestServer(build_app(opened(folder)))) as client:
        assert (await client.post(path, json={"note": "gave up early #wrong <b>\ud83d"})).status == 200
        for refused in ('{"note": 3}', '["note"]', "{}", "null", "{", "", "[" * 100_000, "9" * 5000):
            answer = await client.post(path, data=refused, headers={"Content-Type": "application/json"})
            assert answer.status == 400, refused
        assert (await client.post(path, data='{"note": "x"}', headers={"Content-Type": "text/plain"})).status == 415
        assert (await client.post(path, json={"note": "x" * 10_001})).status == 500
        assert (await client.post(path.replace("/3/", "/99/"), json={"note": "x"})).status == 404
        packed = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        assert (await client.post(path, data="not gzipped", headers=packed)).status == 400
    run = opened(folder)
    noted = [entry for entry in run.summaries("demo-i0001") if entry["note"]]
    assert [(entry["cursor"], entry["note"]) for entry in noted] == [(3, "gave up early #wrong <b>\ud83d")]
    assert run.search("demo-i0001", "#WRONG") == [3]
    write_export(run, tmp_path / "run.html", ["1"])
    assert "gave up early #wrong" in (tmp_path / "run.html").read_text()
    run.write_note("demo-i0001", 3, " ")
    assert run.notes() == {}


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"a": 1}', "\x00", "null"])
def test_a_damaged_file_of_notes_holds_none(run_folder, tmp_path, text):
    log = shutil.copy(run_folder / "node/collections/demo-i0001.jsonl", tmp_path)
    (tmp_path / "demo-i0001.notes.json").write_text(text)
    assert opened(Path(log)).notes() == {}


async def test_other_host_names_are_refused(client):
    assert (await client.get("/api/run", headers={"Host": "evil.example"})).status == 403
    assert (await client.get("/api/run", headers={"Host": "localhost:8750"})).status == 200


def test_export_is_one_page_with_nothing_that_runs_but_ours(run, tmp_path):
    file = tmp_path / "run.html"
    size = write_export(run, file, ["demo-i0003"])
    page = file.read_text()
    assert size == len(page)
    assert SCRIPT not in page
    assert "http://" not in page.split("<script>")[0]
    hashes = set(re.findall(r"'sha256-([^']+)'", page))
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert len(scripts) == (STATIC / "index.html").read_text().count("<script src=")
    for script in scripts:
        assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in hashes
    data = dict(re.findall(r'<script type="application/json" data-name="([^"]+)">(.*?)</script>', page, re.DOTALL))
    assert json.loads(data["rollout/demo-i0003/25"])["messages"][3]["content"] == HOSTILE
    assert len(json.loads(data["rollout/demo-i0003/26"])["mask"]) == LONG_TOKENS
    assert [item["id"] for item in json.loads(data["run"])["collections"]] == ["demo-i0003"]


def test_export_refuses_what_is_too_large_and_leaves_nothing(run_folder, tmp_path, capsys):
    file = tmp_path / "run.html"
    assert main([str(run_folder), "--export", str(file), "--max-mb", "0.5"]) == 1
    assert "choose with --collection" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert main([str(run_folder), "--export", str(file), "--collection", "none"]) == 1
    assert "no collection 'none'; there are iteration 1, iteration 2, " in capsys.readouterr().err
    assert main([str(run_folder), "--export", str(file), "--collection", "demo-i0001"]) == 0
    assert file.exists()


@pytest.mark.parametrize(("wanted", "chosen"), TABLES["an_export_takes_what_the_page_calls_a_collection"])
def test_an_export_takes_what_the_page_calls_a_collection(run_folder, tmp_path, wanted, chosen):
    logs = tmp_path / "node/collections"
    logs.mkdir(parents=True)
    line = (run_folder / "node/collections/demo-i0001.jsonl").read_text().splitlines(keepends=True)[0]
    for name in ("demo-i0001", "demo-i0002", "demo-i0003", "demo-i0002-dev-0123456789", "eval-base-t0.5-0123456789"):
        (logs / f"{name}.jsonl").write_text(line)
    write_export(opened(tmp_path), tmp_path / "run.html", wanted)
    page = (tmp_path / "run.html").read_text()
    data = dict(re.findall(r'<script type="application/json" data-name="([^"]+)">(.*?)</script>', page, re.DOTALL))
    assert [item["id"] for item in json.loads(data["run"])["collections"]] == chosen
    assert {name for name in data if name.startswith("collection/")} == {f"collection/{name}" for name in chosen}


@pytest.mark.parametrize(
    ("path", "message"),
    [("none", "does not exist"), ("empty", "holds no run"), ("log.jsonl", "is not a log of rollouts")],
)
def test_what_is_no_run_is_one_clear_line(tmp_path, capsys, path, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "log.jsonl").write_text('{"a": 1}\n')
    assert main([str(tmp_path / path)]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_what_cannot_be_used_is_one_clear_line(run_folder, tmp_path, capsys):
    assert main([str(run_folder), "--model", str(tmp_path), "--export", str(tmp_path / "page.html")]) == 1
    assert capsys.readouterr().err.startswith(f"loop view: no tokenizer.json in {tmp_path}: copy it there")
    assert main([str(run_folder), "--export", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith(f"loop view: {tmp_path}")
    shutil.copytree(run_folder, tmp_path / "run")
    (tmp_path / "run/rollout_node.yaml").write_text("")
    assert main([str(tmp_path / "run"), "--export", str(tmp_path / "page.html")]) == 1
    assert "rollout_node.yaml is damaged; remove it, and give --model" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(run_folder), "--port", "99999"])
    assert "--port is 99999; it must be 0 to 65535" in capsys.readouterr().err


def test_a_port_in_use_is_one_clear_line(run_folder):
    taken = Listener()
    command = [sys.executable, "-m", "loop_recipes.cli", "view", str(run_folder), "--port", str(taken.port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S)
    assert done.returncode == 1
    assert "choose another --port" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("messages", "asks"),
    [
        ([], ""),
        ([("assistant", "x")], ""),
        ([("system", "rules"), ("user", "Add 2\nand 3"), ("assistant", "5")], "Add 2 and 3"),
        ([("user", "rules " * 100 + "\nTask: who sings?")], "Task: who sings?"),
        ([("user", "word " * 100)], ("word " * 32)[:-1] + "…"),
    ],
)
def test_a_list_says_what_a_task_asks(messages, asks):
    assert question_of([ListedMessage(role, content) for role, content in messages]) == asks


@pytest.mark.fault("the text of a rollout says that it earned 0, and not why")
def test_the_reason_of_a_reward_is_in_the_text(run_folder, tmp_path, capsys):
    first, *_ = read_rollouts(run_folder / "node/collections/demo-i0002.jsonl")
    why = {"ungradable": "it was cut", "broke": {"where": "grade", "what": "a bug"}}
    missed = [{"text": text, "passed": text == "sent", "no_op_pass": False} for text in ("sent", "paid")]
    log = tmp_path / "zero.jsonl"
    log.write_text(replace(first, reward=0.0, success=False, requirements=missed, **why).to_json() + "\n")
    assert main([str(log), "--text", first.task_id]) == 0
    shown = capsys.readouterr().out
    assert "could not be graded: it was cut\nits environment broke in grade: a bug\nmissed: paid\n" in shown
    assert "sent" not in shown.partition("---")[0]


def test_a_run_is_read_without_a_browser(run_folder, capsys):
    assert main([str(run_folder), "--text"]) == 0
    listed = capsys.readouterr().out
    assert main(["--text", str(run_folder)]) == 0
    assert capsys.readouterr().out == listed
    assert main(["--text", str(run_folder), str(run_folder)]) == 0
    assert main(["--text", "task0_1", str(run_folder)]) == 0
    assert "## demo-i" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([])
    assert "loop view: error: which RUN" in capsys.readouterr().err
    assert main([str(run_folder.with_name("dmeo"))]) == 1
    assert capsys.readouterr().err.endswith(f"did you mean {run_folder}?\n")
    entries = opened(run_folder).summaries("demo-i0001")
    solved = sum(entry["success"] for entry in entries)
    assert f"# iteration 1: 24 rollouts, {solved} solved, mean reward " in listed
    assert "task0_1: 6 rollouts, " in listed
    assert main([str(run_folder), "--text", "task0_1"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("\n## demo-i") == 18
    line = json.loads((run_folder / "node/collections/demo-i0001.jsonl").read_text().splitlines()[0])
    for message in line["messages"]:
        assert message["content"] in shown
    assert "--- assistant (" in shown
    assert main([str(run_folder), "--text", "nosuch"]) == 1
    assert "holds no rollout of task 'nosuch'; --text alone lists the tasks" in capsys.readouterr().err
