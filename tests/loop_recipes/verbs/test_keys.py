"""`loop check --keys` says of every key what the schemas say."""

import functools

import pytest

from loop_formats.schema import ConfigError
from loop_recipes.config.files import compose
from loop_recipes.verbs.check import main
from loop_recipes.verbs.keys import RECIPES, key_lines, rows
from rollout_server.config import as_written
from support.texts import texts_beside

TABLES = texts_beside(__file__)


def test_every_key_has_its_sentence():
    silent = [key for section in RECIPES.values() for key, _, _, text in rows(section) if not text.endswith(".")]
    assert silent == []


def test_a_key_is_listed_again_only_where_it_means_something_else():
    heads = [line.partition(":")[0] for line in key_lines() if line and not line.startswith((" ", "#"))]
    assert len(heads) > 200
    twice = {key for key in heads if heads.count(key) > 1}
    assert twice == {"rollout_node", "output_dir", "model", "seed"}


def test_keys_are_listed_by_their_beginning(capsys):
    assert main(["--keys", "node.servers.max"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "# loop train"
    assert "node.servers.max_loras: int = `2`" in printed
    assert "    Policy versions that can be sampled from at the same time; at least 2." in printed
    assert key_lines("credit")[2].startswith("credit: components by name")
    assert all(line.startswith(("#", " ", "node.servers.max")) for line in printed if line)


@pytest.mark.parametrize(("prefix", "key"), TABLES["keys_of_a_component_are_those_that_a_config_sets"])
def test_keys_of_a_component_are_those_that_a_config_sets(prefix, key):
    lines = key_lines(prefix, 200)
    value = functools.reduce(lambda tree, part: tree[part], key.split("."), as_written(compose("tiny_cpu")))
    assert f"{key} = `{value}`" in lines
    assert any(line.endswith("as tiny_cpu sets them; `loop check CONFIG` checks any others.") for line in lines)


def test_a_misspelt_beginning_is_one_line():
    with pytest.raises(ConfigError, match="did you mean 'node"):
        key_lines("nod.servers.max_loras")
    with pytest.raises(SystemExit, match="loop check: no key begins with 'nosuch'"):
        main(["--keys", "nosuch"])
