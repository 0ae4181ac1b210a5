"""Requests as plain data; settings of sampling that vLLM would refuse, or change without a word, are refused."""

import dataclasses
import json

import pytest

from agent_environments.protocol import Message
from loop_formats.branch import Branch, BranchPoint, Exchange
from loop_formats.collection_request import CollectionRequest, Sampling
from loop_formats.schema import ConfigError, from_mapping
from loop_recipes.config.loop_config import DevEvaluationConfig
from loop_recipes.evaluation.config import SamplingConfig


@pytest.mark.fault("a temperature that vLLM does not take is taken")
@pytest.mark.parametrize("section", [Sampling, SamplingConfig, DevEvaluationConfig])
def test_temperatures_are_those_that_vllm_takes_as_they_are(section):
    for taken in (0.0, 0.01, 0.7, 1.0, 2.0):
        assert from_mapping(section, {"temperature": taken}).temperature == taken
    for refused in (-0.1, 0.001, 0.0099, 2.01, 3.0, 10.0):
        with pytest.raises(ConfigError, match=r"temperature must be 0.* 0\.01 to 2, as vLLM takes it"):
            from_mapping(section, {"temperature": refused})


@pytest.mark.parametrize("section", [Sampling, SamplingConfig])
@pytest.mark.parametrize(
    ("key", "value"), [("top_p", 0.0), ("top_p", 1.5), ("top_k", 0.5), ("top_k", -2), ("top_k", False)]
)
def test_what_else_vllm_bounds(section, key, value):
    with pytest.raises(ConfigError, match=key):
        from_mapping(section, {key: value})


@pytest.mark.fault("a spelling of no limit that other samplers take")
@pytest.mark.parametrize("section", [Sampling, SamplingConfig])
@pytest.mark.parametrize(("written", "read"), [(0, -1), (-1, -1), (0.0, -1), (40.0, 40)])
def test_top_k_may_be_written_as_others_write_it(section, written, read):
    assert from_mapping(section, {"top_k": written}).top_k == read


def test_plain_data_of_branches_is_that_of_asdict_but_no_token_is_copied():
    """Copying token by token holds up every other episode of a node, for seconds where branches are long."""
    branch = Branch(
        "c/t_1/0.0", "t_1", "d", [Message("user", "Do it.")], [Exchange("a", "b")], [5, 7], [BranchPoint(1, 2)]
    )
    for branches in ([], [branch]):
        request = CollectionRequest(
            "c1", ["t_2"], 2, 0, branches=branches, only={"t_2": [0]}, environment_turns={"t": 3}
        )
        plain = request.to_dict()
        assert json.dumps(plain) == json.dumps(dataclasses.asdict(request))
        assert CollectionRequest.from_dict(plain) == request
        assert all(
            mine["token_ids"] is theirs.token_ids for mine, theirs in zip(plain["branches"], branches, strict=True)
        )
