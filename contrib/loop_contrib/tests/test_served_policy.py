"""Commands that sample outside of a training run: what is wrong with their options is said before the node starts."""

import pytest

from loop_contrib import served_policy
from loop_contrib.dpo_mcts import search_trees
from loop_contrib.rft import collect_solved
from loop_contrib.sweet_rl import rank_turns
from support.small_runs import stored_rollout

RANKED = ("--logs", "/nowhere", "--critic", "/nowhere")


@pytest.mark.parametrize(
    ("program", "words", "message"),
    [
        (collect_solved, ["--temperatures", "0"], "temperatures [0.0] must differ by 0.01 at least and be above 0"),
        (
            collect_solved,
            ["--temperatures", "3"],
            "temperature must be 0, which is greedy, or from 0.01 to 2, as vLLM takes it, not 3",
        ),
        (collect_solved, ["--temperatures", "nan"], "as vLLM takes it, not nan"),
        (collect_solved, ["--attempts", "0"], "temperatures and attempts must be at least one"),
        (collect_solved, ["--rollouts", "-1"], "rollouts must be at least one"),
        (collect_solved, ["initial_adapter=/nowhere"], "initial_adapter /nowhere is not a PEFT adapter"),
        (search_trees, ["--iterations", "0"], "iterations is 0; it must be at least 1"),
        (search_trees, ["--threshold", "-1"], "threshold is -1.0; it must not be negative"),
        (search_trees, ["initial_adapter=/nowhere"], "initial_adapter /nowhere is not a PEFT adapter"),
        (search_trees, ["collection.limits.compaction=drop"], "limits.compaction must be null where episodes"),
        (rank_turns, [*RANKED, "--most", "0"], "--most is 0; it must be at least 1"),
    ],
)
def test_what_is_wrong_is_one_line_before_the_node_starts(tmp_path, monkeypatch, capsys, program, words, message):
    def started(*_: object) -> None:
        raise AssertionError("a node was started")

    monkeypatch.setattr(served_policy, "open_nodes", started)
    command = ["tiny_cpu", f"output_dir={tmp_path / 'run'}", *words]
    assert program.main(command) == 1
    said_once(capsys, message)


def test_a_run_that_trained_no_critic_is_named_before_the_node_starts(tmp_path, monkeypatch, capsys):
    log = tmp_path / "log.jsonl"
    log.write_text(stored_rollout("demo", "task_1", 0, 0, 1.0, 50, 1).to_json() + "\n")
    (tmp_path / "config.yaml").write_text("collection: {}\n")
    monkeypatch.setattr(served_policy, "open_nodes", None)
    command = ["tiny_cpu", f"output_dir={tmp_path / 'run'}", "--logs", str(log)]
    assert rank_turns.main([*command, "--critic", str(tmp_path)]) == 1
    said_once(capsys, "config.yaml is not a config of sft_appworld: missing key 'output_dir'")


def said_once(capsys, message):
    error = capsys.readouterr().err
    for part in message.split(" .* "):
        assert part in error
    assert error.count("\n") == 1
