"""A folder, a log or an answer from elsewhere is data: looking at it imports nothing, runs nothing, tells nobody."""

import json
import os
import sys
from dataclasses import asdict

import pytest
import yaml

from agent_environments import description as described
from agent_environments.description import OWN_BEHAVIOR, Description, trust_environment
from agent_environments.protocol import ENVIRONMENTS, pool_class
from loop_formats.folder_lock import lock_folder
from loop_formats.run_files import NODE_ADDRESS, NODE_LOCK, node_address
from loop_formats.run_folder import ENVIRONMENT_FILE
from loop_formats.schema import ConfigError
from loop_plumbing import trusted
from loop_plumbing.plug_ins import plug_ins
from loop_recipes.config.components import check_component
from loop_recipes.config.loop_config import LearnerConfig
from loop_recipes.config.stored import check_stored, read_stored
from loop_recipes.paths import recipes_folder
from loop_recipes.plots.curves import main as plot
from loop_recipes.verbs.compare import main as compare
from loop_recipes.verbs.view import main as view
from loop_viewer.run_data import RunData
from support.texts import texts_beside
from support.viewer_run import write_run

TABLES = texts_beside(__file__)

pytestmark = pytest.mark.attack

HOSTILE = TABLES["hostile"]
NAMES = [
    "os:abort",
    "hostile_module:Counter",
    "hostile_module:function",
    "hostile_module:Counter.call",
    "agent_environments.tools.behavior:os",
    "agent_environments.tools.behavior:ToolBehavior.__init__",
    "agent_environments.counter:CounterPool",
    "appworld_adapter.behavior:importlib",
    "loop_recipes.cli:main",
    "",
    ":",
    "\x1b]0;mine\x07:x",
    "a" * 10_000 + ":b",
]


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """A folder on the import path with a module that says when it is imported."""
    folder = tmp_path / "path"
    folder.mkdir()
    (folder / "hostile_module.py").write_text(HOSTILE)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(trusted, "_named", set())
    described._behavior.cache_clear()
    yield folder
    sys.modules.pop("hostile_module", None)
    described._behavior.cache_clear()


@pytest.fixture
def run(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / ENVIRONMENT_FILE).write_text(json.dumps({**asdict(Description()), "behavior": NAMES}))
    return folder


def test_looking_at_a_strangers_run_imports_nothing_that_it_names(hostile, run, tmp_path, capsys, caplog):
    loaded = set(sys.modules)
    assert view([str(run), "--export", str(tmp_path / "x.html")]) == 0
    assert plot([str(run), "--out", str(tmp_path / "curves.png")]) == 0
    compare([str(run), str(run)])
    assert not {"hostile_module", "loop_recipes.cli"} & (set(sys.modules) - loaded)
    assert not (hostile / "imported").exists()
    assert "hostile_module:Counter are left out: only a file of the run names it; if you trust it" in caplog.text
    assert "\x1b" not in caplog.text


@pytest.mark.parametrize("name", NAMES)
def test_a_counter_that_only_a_file_names_is_left_out(hostile, name):
    description = Description.from_dict({"behavior": [name, *OWN_BEHAVIOR]})
    assert len(description.behaviors("a_1")) == len(OWN_BEHAVIOR)
    assert not (hostile / "imported").exists()


@pytest.mark.parametrize("how", ["the reader's variable", "the environment of the config", "its world", "a member"])
def test_a_counter_that_the_reader_names_is_built(hostile, monkeypatch, how):
    section = {"name": "hostile_module:Pool"}
    match how:
        case "the reader's variable":
            monkeypatch.setenv(trusted.VARIABLE, "other, hostile_module")
        case "the environment of the config":
            trust_environment(section)
        case "its world":
            trust_environment({"name": "harness", "world": section})
        case "a member":
            trust_environment({"name": "mixed", "environments": {"a": {"name": "counter"}, "b": section}})
    [counter] = Description(behavior=("hostile_module:Counter",)).behaviors("a_1")
    assert counter.name == "hostile"
    assert Description(behavior=("hostile_module:function_", "hostile_module:Path")).behaviors("a_1") == []


def test_all_counters_of_the_project_are_known():
    ours = {*OWN_BEHAVIOR, *plug_ins("behavior").values()}
    for name in (*ENVIRONMENTS, *plug_ins("environments")):
        found = getattr(pool_class(name), "description", Description())
        if isinstance(found, Description):
            assert set(found._all_behavior()) <= ours, name


COMPONENTS = TABLES["components"]


@pytest.mark.parametrize("name", COMPONENTS)
@pytest.mark.parametrize("place", ["loss", "metric_logger", "log_probs", "optimizer"])
def test_a_stored_config_chooses_no_component_but_the_projects(hostile, tmp_path, name, place):
    component = {"_component_": name, "command": f"touch {tmp_path / 'ran'}"}
    stored = {place: [component] if place == "metric_logger" else component}
    with pytest.raises(ConfigError, match=r"_component_ is .*, which only this file names"):
        check_stored(stored)
    assert not (tmp_path / "ran").exists()
    assert not (hostile / "imported").exists()


COMMAND = "{_component_: os.system, command: 'touch FILE'}"
DECODED = f'"${{oc.decode:\\"{COMMAND}\\"}}"'
RESOLVED = {
    "a whole part": f"log_probs: {DECODED}",
    "the name of a part": "log_probs: {_component_: '${oc.env:COMPONENT}', command: 'touch FILE'}",
    "a value of a part": f"loss: {{_component_: loop_recipes.algorithm.preferences.DPO, beta: {DECODED}}}",
    "through another key": f'other: {COMMAND}\nlog_probs: "${{other}}"',
    "through an anchor": "output_dir: &a x\nlog_probs: *a",
    "in a list": "metric_logger: ['${oc.create:{}}']",
    "a text of the environment": "output_dir: '${oc.env:HOME}'",
    "within a text": "output_dir: 'x/${oc.env:HOME}/y'",
    "another key's component": "log_probs: {_component_: torchtune.training.metric_logging.DiskLogger, log_dir: FILE}",
    "a part of a part": "optimizer: {_component_: torch.optim.AdamW, lr: {_component_: loop_recipes.run.metrics.Plot}}",
}


@pytest.mark.fault("the config in somebody else's run folder ran a command")
@pytest.mark.parametrize("how", RESOLVED)
def test_the_config_of_a_run_is_data(tmp_path, monkeypatch, how):
    made = tmp_path / "made"
    file = tmp_path / "config.yaml"
    file.write_text(RESOLVED[how].replace("FILE", str(made)))
    monkeypatch.setenv("COMPONENT", "os.system")
    monkeypatch.setattr(trusted, "_named", set())
    for ours in ("torch.optim.AdamW", "torchtune.training.metric_logging.DiskLogger", "loop_recipes.x"):
        trusted.trust_module(ours)  # as the reader's own config does
    with pytest.raises(ConfigError, match=r"holds values alone|which only this file names"):
        read_stored(file, LearnerConfig)
    assert not made.exists()


def test_a_component_of_the_readers_own_config_may_stand_in_a_stored_one(hostile):
    stored = {"loss": {"_component_": "hostile_module.Counter"}}
    with pytest.raises(ConfigError, match="LOOP_TRUST=hostile_module"):
        check_stored(stored)
    check_component("loss", stored["loss"])
    check_stored(stored)


def test_the_projects_own_configs_name_nothing_else():
    files = sorted((recipes_folder() / "configs").rglob("*.yaml"))
    assert files
    for file in files:
        names_alone = file.read_text().replace("${", "")  # what ours refer to is the reader's own
        check_stored(yaml.safe_load(names_alone) or {})


def test_the_readers_token_goes_to_no_address_that_a_folder_brings(tmp_path):
    """A copied folder may name any address; only a node that runs on it holds its lock."""
    (tmp_path / NODE_ADDRESS).write_text(json.dumps({"url": "http://203.0.113.1:80", "pid": os.getpid()}))
    for how in ("no lock", "a lock that nobody holds", "a link to a lock that somebody holds"):
        (tmp_path / NODE_LOCK).unlink(missing_ok=True)
        if how == "a lock that nobody holds":
            (tmp_path / NODE_LOCK).touch()
        elif how.startswith("a link"):
            (tmp_path / "other").mkdir()
            held = lock_folder(tmp_path / "other", NODE_LOCK, "node", "root")
            (tmp_path / NODE_LOCK).symlink_to(tmp_path / "other" / NODE_LOCK)
        assert node_address(tmp_path) is None, how
    (tmp_path / NODE_LOCK).unlink()
    held.close()
    with lock_folder(tmp_path, NODE_LOCK, "node", "root"):
        assert node_address(tmp_path) == "http://203.0.113.1:80"
        for damaged in ("", "\0\0\0", "[]", '{"url": 3, "pid": 1}'):
            (tmp_path / NODE_ADDRESS).write_text(damaged)
            assert node_address(tmp_path) is None


def test_a_path_in_a_run_shows_none_of_the_readers_variables(run, monkeypatch):
    monkeypatch.setenv("SECRET_OF_MINE", "hunter2")
    (run / "rollout_node.yaml").write_text("model: {path: '/x/${oc.env:SECRET_OF_MINE}'}\n")
    assert "hunter2" not in json.dumps(RunData(run).overview())
