"""What a layer takes at work, counted on shapes: of layers that transformers builds."""

import pytest
import torch

from loop_recipes.engine import general_attention
from loop_recipes.engine.general_attention import attention, packed_row
from loop_recipes.engine.model import meta_model
from loop_recipes.plan.layer_memory import LiveBytes, layer_bytes
from support import tiny_models
from support.families import section
from support.tiny_models import KINDS, SEVERAL, write_random

WIDTH, HEADS = tiny_models.PLAIN["hidden_size"], tiny_models.PLAIN["num_attention_heads"]


def counted(kind, folder):
    return layer_bytes(meta_model(section(write_random(kind, folder)), torch.bfloat16))


@pytest.mark.parametrize("kind", ["phi3", "gemma4", "lfm2", "qwen3_5_text", "gpt_oss"])
def test_a_layer_of_any_kind_is_counted(kind, tmp_path):
    """A token's input and its gradient are the least, and blocks of scores what caps alone need."""
    assert kind in KINDS or kind in SEVERAL
    found = counted(kind, tmp_path)
    assert found.token > 4 * 2 * WIDTH
    assert found.block / general_attention.MOST_SCORES < 4


def test_each_expert_that_a_token_goes_to_takes_a_copy_of_it(tmp_path, monkeypatch):
    few = counted("qwen3_moe", tmp_path / "few").token
    monkeypatch.setitem(KINDS["qwen3_moe"], "num_experts_per_tok", 4)
    inner = KINDS["qwen3_moe"]["moe_intermediate_size"]
    assert counted("qwen3_moe", tmp_path / "many").token - few > 2 * 2 * (2 * WIDTH + 4 * inner)


def test_a_block_of_scores_is_counted_beside_the_tokens(tmp_path):
    """In bf16 and fp32, forward and backward."""
    assert 8 < counted("gemma2", tmp_path).block / general_attention.MOST_SCORES < 64


def test_scores_of_one_block_are_kept_at_a_time(monkeypatch):
    """Of a long row those of all blocks would be hundreds of gigabytes."""
    monkeypatch.setattr(general_attention, "MOST_SCORES", 1 << 16)

    def peak(tokens):
        q, k, v = (torch.randn(1, heads, tokens, 8, requires_grad=True) for heads in (HEADS, 2, 2))
        with LiveBytes() as found, packed_row(None):
            attention(torch.nn.Identity(), q, k, v, None, softcap=2.0)[0].sum().backward()
        return found.peak, q.grad

    long, short = peak(2048)[0], peak(1024)[0]
    assert long < 2.5 * short, "four times as many scores"


def test_blocks_are_computed_again_as_they_were(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(1, heads, 50, 8, generator=generator) for heads in (HEADS, 2, 2)]
    sinks, found = torch.randn(HEADS, generator=generator), []
    for scores in (general_attention.MOST_SCORES, 7 * HEADS * 50):
        monkeypatch.setattr(general_attention, "MOST_SCORES", scores)
        q, k, v = (x.clone().requires_grad_() for x in given)
        out = attention(torch.nn.Identity(), q, k, v, None, sliding_window=20, softcap=2.0, s_aux=sinks)[0]
        out.square().sum().backward()
        found.append([out.detach(), q.grad, k.grad, v.grad])
    for whole, blocks in zip(*found, strict=True):
        torch.testing.assert_close(blocks, whole, rtol=1e-5, atol=1e-5)


def test_what_all_layers_move_grows_with_the_layers_and_the_experts_chosen(tmp_path, monkeypatch):
    """Not with the experts that are there."""

    def moved(name, **changes):
        with monkeypatch.context() as patched:
            for key, value in changes.items():
                patched.setitem(KINDS["qwen3_moe"], key, value)
            return counted("qwen3_moe", tmp_path / name).moved

    plain, more, chosen = moved("plain"), moved("more", num_experts=8), moved("chosen", num_experts_per_tok=4)
    assert more == pytest.approx(plain, rel=0.05)
    assert chosen > 1.1 * plain


def test_a_delta_net_moves_more_than_the_attention_beside_it(tmp_path):
    hybrid, dense = counted("qwen3_5_text", tmp_path / "hybrid").moved, counted("phi3", tmp_path / "dense").moved
    assert hybrid > 2 * dense
