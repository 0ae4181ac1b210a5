"""A package of somebody else adds verbs, environments, configs, demonstrators, dialects, counters and parts by its own
metadata alone."""

import sys
from pathlib import Path

import pytest

from agent_environments.counter import CounterPool
from agent_environments.description import Description
from agent_environments.protocol import create_pool, is_harness
from loop_formats.schema import ConfigError
from loop_plumbing import plug_ins
from loop_recipes import cli
from loop_recipes.config.files import compose
from loop_recipes.config.stored import check_stored
from loop_recipes.paths import config_files
from loop_recipes.warm_start.demonstrators import added_demonstrator
from rollout_server.config import EnvironmentConfig
from rollout_server.endpoint import dialects
from support.texts import texts_beside

TEXTS = texts_beside(__file__)
ENTRY_POINTS = TEXTS["entry_points"]
THINGS = TEXTS["things"]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What pip leaves of a package: its folder, and its metadata beside it."""
    package = tmp_path / "my_mazes"
    for folder in (package / "configs/worlds", package / "configs/machines", tmp_path / "my_mazes-1.0.dist-info"):
        folder.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "things.py").write_text(THINGS)
    (package / "configs/worlds/maze.yaml").write_text("node: {environment: {name: maze}}\ntrain: {seed: 7}\n")
    (package / "configs/machines/tiny_cpu.yaml").write_text("seed: 99\n")
    (tmp_path / "my_mazes-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: my_mazes\nVersion: 1.0\n")
    (tmp_path / "my_mazes-1.0.dist-info/entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    forget()
    yield package
    forget()


def forget() -> None:
    for cached in (plug_ins.plug_ins, plug_ins.packages, config_files, dialects.routes):
        cached.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_mazes"]:
        del sys.modules[name]


def test_a_verb_is_listed_and_called_and_takes_nobody_elses_place(installed, capsys, monkeypatch):
    assert cli.main(["draw", "maze", "a", "b"]) is None
    assert capsys.readouterr().out == "drawn: a b\n"
    assert "draw maze MAZE" in cli.help_text()
    assert "take a verb away" not in cli.help_text()
    monkeypatch.setattr("loop_recipes.verbs.recipes.train", lambda words: 5)
    assert cli.main(["train", "x"]) == 5


def test_a_package_that_does_not_import_costs_a_line_and_no_verb(installed, capsys):
    (installed / "things.py").write_text("import no_such_module\n")
    assert "train CONFIG|FILE.py" in cli.help_text()
    assert "loop: the verbs of mazes are left out" in capsys.readouterr().err


def test_an_environment_is_found_by_name_and_one_of_the_core_is_not_replaced(installed):
    assert type(create_pool("maze", {}, lambda text: [])).__module__ == "my_mazes.things"
    assert type(create_pool("counter", {}, lambda text: [])) is CounterPool
    assert [is_harness(name) for name in ("maze", "programs", "harness", "nobody")] == [False, True, True, False]
    with pytest.raises(ValueError, match=r"unknown environment 'labyrinth'; registered: .*counter, .*maze, "):
        create_pool("labyrinth", {}, lambda text: [])


def test_configs_are_chosen_by_name_and_one_of_the_core_is_not_replaced(installed):
    config = compose("tiny_cpu", ["world=maze"])
    assert (config.node.environment.name, config.seed) == ("maze", 7)
    assert config_files()["machine"]["tiny_cpu"].parent.parent.parent.name == "recipes"


def test_a_demonstrator_a_dialect_counters_and_a_part_are_found(installed):
    section = EnvironmentConfig("maze")
    assert added_demonstrator(section).environment is section
    with pytest.raises(
        ConfigError, match=r"'labyrinth' has no expert to learn from; there is one for appworld, .*maze"
    ):
        added_demonstrator(EnvironmentConfig("labyrinth"))
    assert "/v1/mine" in [route.path for route in dialects.routes()]
    (counter,) = Description(behavior=("my_mazes.things:Turns",)).behaviors("a_1")
    assert counter.name == "maze"
    assert plug_ins.load_part("oracle")().name == "maze"


def test_a_part_that_is_not_there_is_one_line(installed):
    with pytest.raises(ValueError, match="nothing: no installed package has this part"):
        plug_ins.load_part("nothing")
    with pytest.raises(ValueError, match=r"gone: my_mazes.nowhere:Turns cannot be imported: No module named"):
        plug_ins.load_part("gone")


def test_a_runs_own_file_may_name_a_component_of_an_installed_package(installed):
    check_stored({"advantage": {"_component_": "my_mazes.things.Turns"}})
    with pytest.raises(ConfigError, match="is not one of the project's"):
        check_stored({"advantage": {"_component_": "other_mazes.things.Turns"}})
