"""What an update leaves for the viewer: ratio and clip of each token, at every level of the loss."""

import json
from dataclasses import replace

import pytest
import torch
from omegaconf import OmegaConf

from loop_recipes.algorithm.losses import ClippedPolicyLoss
from loop_recipes.algorithm.token_statistics import TokenStatistics
from loop_recipes.engine.batching import BatchLayout, step_batches
from support.learner_cases import make_samples
from support.small_runs import replay_config, train
from support.viewer_run import opened

SHIFT = 0.05


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("level", ["token", "turn", "trajectory"])
def test_every_token_has_the_ratio_and_clip_of_its_level(tmp_path, level, packed):
    samples = [
        replace(s, rollout_id=f"run-i0001/{s.task_id}/{i}.0", collection_id="run-i0001")
        for i, s in enumerate(make_samples([40, 25, 33]))
    ]
    loss = ClippedPolicyLoss(level=level, eps=0.1)
    statistics = TokenStatistics(tmp_path, rank=0)
    for shift in (-SHIFT, SHIFT):  # a second epoch replaces the first
        for batch in step_batches(samples, BatchLayout(64, packed)):
            statistics.add(batch, loss(batch.old_logprobs + shift, batch))
        statistics.keep()
    for batch in step_batches(samples, BatchLayout(64, packed)):  # a step that was not taken leaves nothing
        statistics.add(batch, loss(batch.old_logprobs + 9.0, batch))
    statistics.drop()
    statistics.write(samples)
    lines = [json.loads(line) for line in (tmp_path / "run-i0001.jsonl").read_text().splitlines()]
    assert [line["rollout_id"] for line in lines] == [sample.rollout_id for sample in samples]
    clipped = 0
    for sample, line in zip(samples, lines, strict=True):
        turns = sample.turn_ids[sample.mask]
        sizes = {"token": torch.ones(len(turns)), "turn": torch.bincount(turns)[turns].float()}
        factors = sizes.get(level, torch.full((len(turns),), float(len(turns))))
        expected = torch.exp(SHIFT * factors)
        assert line["ratios"] == pytest.approx(expected.tolist(), rel=1e-3)
        assert line["clipped"] == [int(sample.advantage > 0 and ratio > 1.1) for ratio in expected.tolist()]
        assert line["advantage"] == pytest.approx(sample.advantage, abs=1e-5)
        assert line["old_logprobs"] == pytest.approx(sample.old_logprobs.tolist(), abs=1e-5)
        clipped += sum(line["clipped"])
    assert (clipped > 0) == (level != "token")


def test_advantages_and_entropies_of_tokens_are_written_where_there_are_some(tmp_path):
    plain, rich = (
        replace(s, rollout_id=f"run-i0001/{s.task_id}/{i}.0", collection_id="run-i0001")
        for i, s in enumerate(make_samples([20, 20]))
    )
    ramp = torch.linspace(-1, 1, len(rich.old_logprobs))
    rich = replace(rich, token_advantages=ramp, entropies=ramp + 1)
    statistics = TokenStatistics(tmp_path, rank=0)
    for sample in (plain, rich):
        (batch,) = step_batches([sample], BatchLayout(64, False))
        statistics.add(batch, ClippedPolicyLoss()(batch.old_logprobs, batch))
    statistics.keep()
    statistics.write([plain, rich])
    first, second = (json.loads(line) for line in (tmp_path / "run-i0001.jsonl").read_text().splitlines())
    assert not {"advantages", "entropies"} & first.keys()
    assert second["advantages"] == pytest.approx(ramp.tolist(), abs=1e-5)
    assert second["entropies"] == pytest.approx((ramp + 1).tolist(), abs=1e-5)
    assert second["advantage"] == pytest.approx(0.0, abs=1e-5)


def test_ranks_write_beside_one_another_and_a_new_call_forgets(tmp_path):
    samples = [
        replace(s, rollout_id=f"run-i000{i}/t/0.0", collection_id=f"run-i000{i}")
        for i, s in enumerate(make_samples([30, 30]))
    ]
    for rank, sample in enumerate(samples):
        statistics = TokenStatistics(tmp_path, rank)
        (batch,) = step_batches([sample], BatchLayout(64, False))
        statistics.add(batch, ClippedPolicyLoss()(batch.old_logprobs, batch))
        statistics.keep()
        statistics.write(samples)
        statistics.write(samples)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run-i0000.jsonl", "run-i0001.rank1.jsonl"]


@pytest.mark.slow
def test_the_viewer_shows_what_a_run_kept(tmp_path):
    """Every rollout that was trained on, with one value per sampled token, that agrees with the metrics."""
    cfg = OmegaConf.load(replay_config(tmp_path, iterations=1))
    cfg["update"]["token_statistics"] = True
    train(cfg)
    (tmp_path / "run/node").mkdir()
    (tmp_path / "logs").rename(tmp_path / "run/node/collections")
    run = opened(tmp_path / "run", tmp_path / "base")
    (metrics,) = run.overview()["metrics"]
    (collection,) = run.overview()["collections"]
    entries = run.summaries(collection["id"])
    shown = [run.rollout(collection["id"], entry["cursor"]) for entry in entries if entry["gap"] is not None]
    assert len(shown) == round(metrics["kept_fraction"] * len(entries)) > 0
    for rollout in shown:
        assert len(rollout["ratios"]) == len(rollout["clipped"]) == sum(rollout["mask"])
        assert len(rollout["entropies"]) == len(rollout["advantages"]) == sum(rollout["mask"])
    entropies = [entropy for rollout in shown for entropy in rollout["entropies"]]
    assert sum(entropies) / len(entropies) == pytest.approx(metrics["entropy"], abs=1e-5)
    ratios = [ratio for rollout in shown for ratio in rollout["ratios"]]
    assert max(ratios) <= metrics["ratio_max"] + 1e-4  # the metrics are over all steps, these of the last
    assert len(set(ratios)) > 1
    gaps = [entry["gap"] for entry in entries if entry["gap"] is not None]
    assert max(gaps) == pytest.approx(metrics["gap_max"], abs=2e-5)
