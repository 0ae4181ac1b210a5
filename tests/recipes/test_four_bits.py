"""A run over a base in four bits is the run over its weights written out; it resumes, and its policy is an adapter."""

import json

import pytest
from omegaconf import OmegaConf

from loop_formats.run_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from loop_formats.schema import ConfigError
from loop_recipes.export.policy import ExportConfig, export
from support.families import section
from support.four_bits import write_four_bits
from support.small_runs import replay_config, train

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_run_resumes_and_is_that_of_the_weights_written_out(tmp_path, symmetric):
    cfg = OmegaConf.load(replay_config(tmp_path, iterations=2))
    cfg.pop("checkpointer")
    packed, whole = write_four_bits(tmp_path / "base", symmetric=symmetric)
    cfg.dtype, cfg.adapter_dtype, cfg.model = "bf16", "fp32", section(packed)
    cfg.sampler_gap = {"ok": 1e-3, "broken": 100.0}  # the rollouts are made up
    train(OmegaConf.merge(cfg, {"max_iterations": 1}))
    train(OmegaConf.merge(cfg, {"resume_from_checkpoint": True}))
    train(OmegaConf.merge(cfg, {"output_dir": str(tmp_path / "at_once")}))
    train(OmegaConf.merge(cfg, {"output_dir": str(tmp_path / "written_out"), "model": {"path": str(whole)}}))
    runs = [tmp_path / name / "policies" for name in ("run", "at_once", "written_out")]
    for version in ("policy-v0001", "policy-v0002"):
        resumed, at_once, written_out = ((run / version / ADAPTER_WEIGHTS).read_bytes() for run in runs)
        assert resumed == at_once
        begin, other = (8 + int.from_bytes(each[:8], "little") for each in (resumed, written_out))
        assert resumed[begin:] == written_out[other:], "but for the base's digest"
    with pytest.raises(ConfigError, match=r"^merge: the weights of \S+-w4a16 are of four bits, .* without merge$"):
        export(tmp_path / "run", ExportConfig(merge="bf16"))
    done = export(tmp_path / "run", ExportConfig())
    assert json.loads((done.folder / ADAPTER_CONFIG).read_text())["base_model_name_or_path"] == packed.name
    assert str(packed) in done.serve[0]
