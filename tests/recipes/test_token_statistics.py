"""What an update leaves for the viewer: ratio and clip of each token, at every level of the loss."""

import json
from dataclasses import replace

import pytest
import torch
from learner_cases import make_samples

from loop_recipes.batching import micro_batches
from loop_recipes.losses import ClippedPolicyLoss
from loop_recipes.token_statistics import TokenStatistics

SHIFT = 0.05


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("level", ["token", "turn", "trajectory"])
def test_every_token_has_the_ratio_and_clip_of_its_level(tmp_path, level, packed):
    samples = [replace(s, rollout_id=f"run-i0001/{s.task_id}/{i}.0") for i, s in enumerate(make_samples([40, 25, 33]))]
    loss = ClippedPolicyLoss(level=level, eps=0.1)
    statistics = TokenStatistics(tmp_path, rank=0)
    for shift in (-SHIFT, SHIFT):  # a second epoch replaces the first
        for batch in micro_batches(samples, 64, 0, packed):
            statistics.add(batch, loss(batch.old_logprobs + shift, batch))
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
        assert line["learner_logprobs"] == pytest.approx(sample.old_logprobs.tolist(), abs=1e-5)
        clipped += sum(line["clipped"])
    assert (clipped > 0) == (level != "token")


def test_ranks_write_beside_one_another_and_a_new_call_forgets(tmp_path):
    samples = [replace(s, rollout_id=f"run-i000{i}/t/0.0") for i, s in enumerate(make_samples([30, 30]))]
    for rank, sample in enumerate(samples):
        statistics = TokenStatistics(tmp_path, rank)
        (batch,) = micro_batches([sample], 64, 0, False)
        statistics.add(batch, ClippedPolicyLoss()(batch.old_logprobs, batch))
        statistics.write(samples)
        statistics.write(samples)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run-i0000.jsonl", "run-i0001.rank1.jsonl"]
