"""What does not fit a section is one line with the key's path, and nothing is converted silently."""

import json
from dataclasses import field
from typing import Annotated, Any, Literal

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from pydantic import Field, PositiveFloat
from pydantic.dataclasses import dataclass

from loop_formats.schema import STRICT, ConfigError, from_mapping, require
from rollout_server.config import NodeConfig, as_config, as_keys, load_node_config, write_node_config
from support.texts import texts_beside

TABLES = texts_beside(__file__)


@dataclass(frozen=True, config=STRICT)
class Inner:
    count: Annotated[int, Field(ge=1)] = 1
    share: float | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(self.count != 7, "count is 7; choose another")
        require(self.count != 8, "eight is too many")


@dataclass(frozen=True, config=STRICT)
class Outer:
    name: str
    inner: Inner
    on: bool = False
    way: Literal["up", "down"] = "up"
    divisor: Literal["mean"] | PositiveFloat = "mean"
    names: list[str] = field(default_factory=list)
    several: list[Inner] = field(default_factory=list)
    perhaps: Inner | None = None


@pytest.mark.parametrize(("changes", "message"), TABLES["one_line_names_the_key_and_the_cure"])
def test_one_line_names_the_key_and_the_cure(changes, message):
    with pytest.raises(ConfigError) as caught:
        from_mapping(Outer, {"name": "a", "inner": {}, **changes})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("kind", "data", "path", "message"),
    [
        (
            Outer,
            {"name": "a", "inner": {"cuont": 1}},
            "above[0]",
            r"^unknown key 'above\[0\].inner.cuont'; did you mean 'count'\?$",
        ),
        (Outer, [], "above", r"^above must be a mapping, not list$"),
        (Inner, {"count": 7}, "above", r"^above\.count is 7; choose another$"),
        (Inner, {"count": 8}, "above", r"^above: eight is too many$"),
        (Outer, {"nmae": "a", "inner": {}}, "", r"^unknown key 'nmae'"),  # before the one that is missing for it
        (Outer, {"name": "a"}, "", r"^missing key 'inner'$"),
    ],
)
def test_the_path_of_the_section_comes_first(kind, data, path, message):
    with pytest.raises(ConfigError, match=message):
        from_mapping(kind, data, path)


def test_an_int_is_a_float_and_floats_keep_every_bit():
    assert from_mapping(Inner, {"share": 2}).share == 2.0
    for value in (5e-5, 0.1 + 0.2, 1e-300, float("inf")):
        assert from_mapping(Inner, {"share": 0.5, "options": {"lr": value}}) == Inner(1, 0.5, {"lr": value})


def test_a_node_reads_what_its_parent_wrote(tmp_path):
    config = from_mapping(
        NodeConfig,
        {
            "root": str(tmp_path),
            "model": {"path": "/models/m"},
            "environment": {"name": "appworld", "prompt": "loop", "root": None},
            "servers": {"env": {"OMP_NUM_THREADS": "1"}, "gpus": [[0]], "kv_cache_bytes": 1 << 28},
        },
    )
    write_node_config(config, tmp_path / "node.yaml")
    assert load_node_config(tmp_path / "node.yaml") == config


@pytest.mark.attack
@pytest.mark.fault("a key of the environment is written into the files of a run")
@pytest.mark.parametrize("key", ["sk-0123456789", "1", "${oc.env:HOME}", "a'b\"c: #"])
@pytest.mark.parametrize(("given", "written"), TABLES["a_value_of_the_environment_is_written_by_its_name"])
def test_a_value_of_the_environment_is_written_by_its_name(tmp_path, monkeypatch, given, written, key):
    monkeypatch.setattr("rollout_server.config._from_environment", {})
    monkeypatch.setenv("MY_KEY", key)
    monkeypatch.setenv("OTHER_KEY", "sk-other")
    section = {"name": "counter", "said": "${oc.env:MY_KEY}", "mcp": {"search": {"env": {"API_KEY": given}}}}
    section |= {"command": ["python", given], "section": "${environment.mcp}"}
    node = {"root": "r", "model": {"path": "m"}, "servers": {"env": {"KEY": given}}, "environment": section}
    (tmp_path / "given.yaml").write_text(json.dumps(node))
    config = load_node_config(tmp_path / "given.yaml")
    write_node_config(config, tmp_path / "node.yaml")
    assert load_node_config(tmp_path / "node.yaml") == config
    kept = OmegaConf.to_container(OmegaConf.load(tmp_path / "node.yaml"))
    told = OmegaConf.to_container(as_config(as_keys(config)), resolve=True)  # as trackers have it
    for keys in (kept, told):
        options = keys["environment"]
        assert options["mcp"]["search"]["env"]["API_KEY"] == (written or given)
        assert options["command"][1] == keys["servers"]["env"]["KEY"] == (written or given)
        assert options["section"] == options["mcp"]
        assert (options["said"], keys["max_concurrent_episodes"]) == ("${oc.env:MY_KEY}", 32)
        assert key == "1" or key not in str(keys)


TEXT = st.text(st.characters(exclude_categories=["Cs"])) | st.lists(
    st.sampled_from(["${", "}", "\\", "$", "{", "???", "${oc.env:HOME}", "a", "'", '"', "#", "- ", "~", "\n", "\r"])
    | st.sampled_from(
        [":", "yes", "no", "null", "1e3", "0x10", "1_000", "12:30:45", "\u2028", "\x85", "\ufeff", " ", "\t"]
    )
).map("".join)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TEXT, st.dictionaries(TEXT, PLAIN, max_size=3))
@example("???", {"a": ["\\???", {"b": "???"}]})
def test_whatever_a_config_holds_is_read_back_as_it_was_written(tmp_path, text, options):
    environment = {"name": text, **{key: value for key, value in options.items() if key not in ("name", "config")}}
    node = {"root": text, "model": {"path": text}, "environment": environment, "servers": {"env": {text: text}}}
    config = from_mapping(NodeConfig, node)
    write_node_config(config, tmp_path / "node.yaml")
    assert load_node_config(tmp_path / "node.yaml") == config
