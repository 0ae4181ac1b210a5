"""What a run's page says of its settings, starts and result."""

import json

import pytest

from loop_viewer.export import write_export
from loop_viewer.run_record import result_of, setting_of
from support.viewer_run import opened, write_run

CONFIG = """
seed: {seed}
output_dir: /runs/{seed}
max_iterations: 9
optimizer: {{lr: {rate}}}
collection: {{tasks_per_iteration: 4, rollouts_per_task: 8, limits: {{max_turns: 6, max_tokens_per_turn: 99,
  max_context: 1024}}}}
"""
START = {
    "at": "2026-11-29T16:49:17+00:00",
    "command": ["/x/python", "/x/bin/tune", "run", "loop_appworld", "a b=1"],
    "folder": "/home/ada",
    "commit": "53725ac+changes",
    "packages": {"torch": "2.13.0"},
}
INTERVAL = {"estimate": 50.0, "low": 25.0, "high": 75.0}
REPORT = {
    "split": "dev",
    "tasks": ["a", "b"],
    "scores": [
        {"policy": name, "sampling": {"label": "T=0"}, "reward": 0.5, "success": {"mean": 50.0, "interval": INTERVAL}}
        for name in ("before", "after")
    ],
    "comparisons": [
        {"first": "before", "second": "after", "sampling": "T=0", "success": {"interval": INTERVAL}}
        | {"gained": ["a"], "lost": []}
    ],
}


@pytest.fixture
def folder(tmp_path):
    folder = write_run(tmp_path / "demo", iterations=1, tasks=1, per_task=2)
    (folder / "config.yaml").write_text(CONFIG.format(seed=7, rate=5e-4))
    (folder / "starts.jsonl").write_text(json.dumps(START) + "\n" + json.dumps({**START, "at": "2026-11-30"}) + "\n")
    (folder / "evaluation").mkdir()
    (folder / "evaluation/report.json").write_text(json.dumps(REPORT))
    return folder


@pytest.mark.fault(
    "a run's page had neither its start, seed, limits, command and commit nor the result of its evaluation"
)
def test_a_run_shows_how_it_was_made_and_what_came_of_it(folder):
    page = opened(folder).overview()
    assert page["settings"] == {
        "an iteration": "4 tasks, 8 rollouts of each",
        "an episode": "at most 6 turns, 99 tokens a turn, 1024 tokens in all",
        "learning rate": "0.0005",
        "seed": "7",
    }
    starts = page["starts"]
    assert starts.pop("config").endswith("max_context: 1024}}\n")
    assert starts == {
        "started": START["at"],
        "last start": "2026-11-30, start 2",
        "command": "tune run loop_appworld 'a b=1'",
        "folder": "/home/ada",
        "commit": "53725ac+changes",
        "versions": "torch 2.13.0",
    }
    figures = {"mean": 50.0, "low": 25.0, "high": 75.0}
    assert page["result"]["scores"][1] == {"policy": "after", "sampling": "T=0", "reward": 0.5, **figures}
    assert page["result"]["comparisons"] == [
        {"first": "before", "second": "after", "sampling": "T=0", **figures, "gained": 1, "lost": 0}
    ]


def test_an_exported_page_has_no_folders_and_commands_of_the_machine(folder, tmp_path):
    write_export(opened(folder), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "/home/ada" not in page
    assert "rollouts of each" in page


@pytest.mark.parametrize("text", ["", "[]", "{", '{"scores": [{"success": 1}]}', '{"scores": [1], "tasks": 3}', "\0"])
def test_a_damaged_report_or_start_leaves_the_page_without_them(folder, text):
    for name in ("evaluation/report.json", "starts.jsonl", "config.yaml"):
        (folder / name).write_text(text + "\n")
    page = opened(folder).overview()
    assert (page["result"], page["settings"]) == ({}, {})
    assert result_of(folder) == {}


@pytest.mark.parametrize(
    ("other", "same"), [({"seed": 8, "rate": 5e-4}, True), ({"seed": 7, "rate": 1e-4}, False)], ids=["seed", "rate"]
)
def test_runs_that_differ_in_their_seed_alone_are_of_one_setting(folder, tmp_path, other, same):
    (tmp_path / "config.yaml").write_text(CONFIG.format(**other))
    assert (setting_of(folder) == setting_of(tmp_path)) is same
