"""`loop node`: the node of a training config, that of a YAML, and talks with one that runs."""

import pytest

from loop_recipes.verbs.node import main
from rollout_server import cli
from rollout_server.config import load_node_config
from support.texts import texts_beside

TABLES = texts_beside(__file__)


@pytest.fixture
def node(monkeypatch):
    """The words that the node's own command was called with."""
    called = []
    monkeypatch.setattr(cli, "main", lambda words, program: called.append((program, words)))
    return called


def test_the_node_of_a_training_config_is_written_into_the_runs_folder(node, tmp_path):
    run = tmp_path / "run"
    main(["tiny_cpu", f"output_dir={run}", "node.port=8701", "--", "host=0.0.0.0"])
    file = run / "rollout_node.yaml"
    assert node == [("loop node", ["--config", str(file), "host=0.0.0.0"])]
    assert load_node_config(str(file), []).port == 8701


@pytest.mark.parametrize("words", [["--file", "node.yaml", "port=1"], ["port=1", "--file", "node.yaml"]])
def test_the_node_of_a_yaml(node, words):
    main(words)
    assert node == [("loop node", ["--config", "node.yaml", "port=1"])]


@pytest.mark.parametrize("words", [["status", "http://node:8700"], ["cancel", "http://node:8700", "ID"]])
def test_talks_with_a_node_are_handed_on(node, words):
    main(words)
    assert node == [("loop node", words)]


def test_errors_of_the_node_name_this_command(monkeypatch, tmp_path):
    monkeypatch.setenv("ROLLOUT_SERVER_TOKEN", "token")
    with pytest.raises(SystemExit, match=r"^loop node: .*none\.yaml"):
        main(["--file", str(tmp_path / "none.yaml")])


def test_neither_a_config_nor_a_file_is_refused(capsys):
    with pytest.raises(SystemExit):
        main([])
    assert "loop node: error: give a config of loop_appworld, or a node's YAML with --file" in capsys.readouterr().err


@pytest.mark.parametrize(("output_dir", "message"), TABLES["a_node_without_a_folder_is_one_line"])
def test_a_node_without_a_folder_is_one_line(capsys, output_dir, message):
    with pytest.raises(SystemExit) as ended:
        main(["tiny_cpu", f"output_dir={output_dir}"])
    assert message in str(ended.value)
