"""Commands that sample outside of a training run: what is wrong with their options is said before the node starts."""

import pytest

from loop_recipes.launch import collect_solved, rank_turns, search_trees, served_policy

RANKED = ("--logs", "/nowhere", "--critic", "/nowhere")


@pytest.mark.parametrize(
    ("program", "words", "message"),
    [
        (collect_solved, ["--temperatures", "0"], "temperatures [0.0] must differ by 0.01 at least, be above 0"),
        (collect_solved, ["--temperatures", "11"], "temperatures [11.0] must .* at most 10"),
        (collect_solved, ["--temperatures", "nan"], "temperatures [nan] must"),
        (collect_solved, ["--attempts", "0"], "temperatures and attempts must be at least one"),
        (collect_solved, ["--rollouts", "-1"], "rollouts must be at least one"),
        (collect_solved, ["initial_adapter=/nowhere"], "initial_adapter /nowhere is no PEFT adapter"),
        (search_trees, ["--iterations", "0"], "iterations is 0; it must be at least 1"),
        (search_trees, ["--threshold", "-1"], "threshold is -1.0; it must not be negative"),
        (search_trees, ["initial_adapter=/nowhere"], "initial_adapter /nowhere is no PEFT adapter"),
        (rank_turns, [*RANKED, "--most", "0"], "--most is 0; it must be at least 1"),
    ],
)
def test_what_is_wrong_is_one_line_before_the_node_starts(tmp_path, monkeypatch, capsys, program, words, message):
    def started(*_: object) -> None:
        raise AssertionError("a node was started")

    monkeypatch.setattr(served_policy, "open_nodes", started)
    command = ["--config", "loop_appworld/tiny_cpu", f"output_dir={tmp_path / 'run'}", *words]
    assert program.main(command) == 1
    error = capsys.readouterr().err
    for part in message.split(" .* "):
        assert part in error
    assert error.count("\n") == 1
