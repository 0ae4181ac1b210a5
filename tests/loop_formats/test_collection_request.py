"""Settings of sampling: what vLLM would refuse, or change without a word, is refused wherever it can be given."""

import pytest

from loop_formats.collection_request import Sampling
from loop_formats.schema import ConfigError, from_mapping
from loop_recipes.config.loop_config import DevEvaluationConfig
from loop_recipes.evaluation.config import SamplingConfig


@pytest.mark.fault("a temperature that vLLM does not take is taken")
@pytest.mark.parametrize("section", [Sampling, SamplingConfig, DevEvaluationConfig])
def test_temperatures_are_those_that_vllm_takes_as_they_are(section):
    for taken in (0.0, 0.01, 0.7, 1.0, 2.0):
        assert from_mapping(section, {"temperature": taken}).temperature == taken
    for refused in (-0.1, 0.001, 0.0099, 2.01, 3.0, 10.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=r"temperature must be 0.* 0\.01 to 2, as vLLM takes it"):
            from_mapping(section, {"temperature": refused})


@pytest.mark.parametrize("section", [Sampling, SamplingConfig])
@pytest.mark.parametrize(("key", "value"), [("top_p", 0.0), ("top_p", 1.5), ("top_k", 0), ("top_k", -2)])
def test_what_else_vllm_bounds(section, key, value):
    with pytest.raises(ConfigError, match=key):
        from_mapping(section, {key: value})
