"""A run that goes back to an earlier checkpoint trains on what its own weights sampled, not those it gave up."""

import shutil

from omegaconf import OmegaConf

from loop_formats.ids import parse_collection_id
from loop_formats.run_files import find_logs
from loop_formats.run_folder import read_metrics
from support.counter_node import TOKEN, local_node
from support.small_runs import config_over, train
from support.waiting import DEADLINE_S

TOKEN_ENV = "LOOP_TEST_TOKEN"


async def test_rollouts_of_weights_that_were_given_up_are_sampled_anew(policy, tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN_ENV, TOKEN)
    async with local_node(policy, tmp_path / "node", publish=False) as local:
        cfg = OmegaConf.load(config_over(local.url, policy, tmp_path, TOKEN_ENV, DEADLINE_S))
        cfg.sampler_gap = {"ok": 1e6, "broken": 1e6}  # what the scripted servers claim is made up
        cfg.advantage = {"_component_": "support.small_runs.ByPosition"}
        cfg.max_iterations = cfg.keep_last_checkpoints = 3
        await local.call(train, cfg)
        assert [line["policy_version"] for line in read_metrics(tmp_path / "run")] == [1, 2, 3]

        for iteration in (2, 3):
            shutil.rmtree(tmp_path / f"run/checkpoints/iteration_000{iteration}")
        await local.call(train, OmegaConf.merge(cfg, {"resume_from_checkpoint": True, "optimizer": {"lr": 0.1}}))
        assert [line["policy_version"] for line in read_metrics(tmp_path / "run")] == [1, 2, 3]
        iterations = [parse_collection_id(log.stem).iteration for log in find_logs(tmp_path / "node")]
        assert iterations == [1, 2, 3, 3], "version 1 has its old weights, version 2 has not"

        # One more time, and with the learning rate of the first: version 2 is what it was.
        for iteration in (2, 3):
            shutil.rmtree(tmp_path / f"run/checkpoints/iteration_000{iteration}")
        before = len(local.vllm.requests)
        await local.call(train, OmegaConf.merge(cfg, {"resume_from_checkpoint": True}))
        assert len(local.vllm.requests) == before
