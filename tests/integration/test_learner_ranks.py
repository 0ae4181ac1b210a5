"""Two and four ranks under FSDP2 load their own parts, and give the loss, gradient and statistics of one process.

Two ranks on each of two machines hold two copies of the model (HSDP).
"""

import pytest

from support.learner_ranks import differences, differences_where_rows_are_shared
from support.loading_ranks import load_and_gather
from support.ranks import on_ranks

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(("ranks", "machines"), [(2, 1), (4, 1), (4, 2)])
def test_ranks_equal_one_process(ranks, machines):
    """Tied and untied heads, padded and packed, with and without activation checkpointing; some ranks idle once."""
    worst = on_ranks(ranks, differences, machines=machines)
    assert worst["loss"] < 1e-5
    assert worst["gradient"] < 1e-5
    assert worst["statistics"] < 1e-5
    assert worst["idle_calls"] > 0


@pytest.mark.parametrize(("ranks", "sharers"), [(2, 2), (4, 2), (4, 4)])
def test_ranks_that_share_rows_equal_one_process(ranks, sharers):
    """Losses of every level, on a CPU and as for CUDA, with and without activation checkpointing."""
    worst = on_ranks(ranks, differences_where_rows_are_shared, sharers)
    assert worst["loss"] < 1e-5
    assert worst["gradient"] < 1e-5
    assert worst["outputs"] < 1e-5
    assert (worst["idle_calls"] > 0) == (ranks > sharers)


@pytest.mark.parametrize(("ranks", "machines"), [(1, 1), (2, 1), (4, 1), (4, 2)])
def test_each_rank_reads_its_own_part_and_one_collective_gathers_all(tmp_path, ranks, machines):
    said = on_ranks(ranks, load_and_gather, tmp_path / "model.safetensors", machines=machines)
    assert said["equal"]
    assert said["placed_again"]
    assert said["read"] < machines / ranks + 0.15, "the kernel maps a file by up to 2 MiB at a time"
    assert said["collectives"] == (ranks > 1)


@pytest.mark.parametrize(
    ("sharers", "kinds"),
    [
        (1, ["gemma3_text", "gpt_oss", "qwen3_5_text", "granitemoehybrid", "deepseek_v3"]),
        (2, ["gemma2", "gpt_oss", "smollm3"]),
    ],
)
def test_models_that_rank_0_reads_are_the_same_on_two_ranks(tmp_path, sharers, kinds):
    from support.general_ranks import general_differences
    from support.tiny_models import write_random

    found = on_ranks(2, general_differences, [write_random(kind, tmp_path / kind) for kind in kinds], sharers)
    assert list(found) == kinds
    assert max(found.values()) < 1e-5


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_base_in_four_bits_is_sharded_as_it_is_packed(tmp_path, symmetric):
    from support.four_bits import random_four_bits
    from support.packed_ranks import packed_and_whole

    found = on_ranks(2, packed_and_whole, list(random_four_bits(tmp_path / "model", symmetric=symmetric)))
    assert found["equal"]
    assert found["gradient"] > 1e-3
    assert found["held"] < 0.6
