"""Small rollouts and models that several learner tests share."""

from dataclasses import replace
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from loop_recipes.algorithm.credit import TrainingRun, pair_names
from loop_recipes.engine.samples import ScoredSample, episodes

VOCAB = 97


def make_sample(number: int, length: int, generator: torch.Generator, group: int = 3) -> ScoredSample:
    """A rollout of ``length`` tokens in turns of one to four sampled tokens with observations between them."""
    mask = torch.zeros(length, dtype=torch.bool)
    turn_ids = torch.full((length,), -1)
    position, turn = int(torch.randint(1, max(2, length // 3), (), generator=generator)), 0
    while position < length:
        end = min(length, position + int(torch.randint(1, 5, (), generator=generator)))
        mask[position:end] = True
        turn_ids[position:end] = turn
        turn += 1
        position = end + int(torch.randint(1, 4, (), generator=generator))
    sampled = int(mask.sum())
    return ScoredSample(
        rollout_id=f"rollout-{number}",
        task_id=f"task-{number // group}",
        token_ids=torch.randint(0, VOCAB, (length,), generator=generator),
        mask=mask,
        turn_ids=turn_ids,
        sampler_logprobs=-torch.rand(sampled, generator=generator),
        policy_versions=torch.zeros(sampled, dtype=torch.long),
        reward=float(torch.rand((), generator=generator)),
        advantage=float(torch.randn((), generator=generator)),
        episode_tokens=sampled,
        episode_turns=turn,
        old_logprobs=-5.0 + 0.3 * torch.randn(sampled, generator=generator),
    )


def make_samples(lengths: list[int], seed: int = 0) -> list[ScoredSample]:
    generator = torch.Generator().manual_seed(seed)
    return [make_sample(number, length, generator) for number, length in enumerate(lengths)]


def make_episodes(turns: list[int], seed: int = 0) -> list[ScoredSample]:
    """Episodes of so many turns, each of which is a sequence: what later ones leave out is the first half of a turn's
    own tokens. One episode of a single sequence is among them."""
    generator = torch.Generator().manual_seed(seed)
    found = make_samples([17], seed)
    for number, count in enumerate(turns, start=1):
        kept = torch.randint(0, VOCAB, (6,), generator=generator)
        for segment in range(count):
            own = torch.randint(0, VOCAB, (8,), generator=generator)
            ids = torch.cat([kept, own])
            sampled = torch.arange(len(ids)) >= len(kept)
            sample = make_sample(0, len(ids), generator)
            found.append(
                replace(
                    sample,
                    rollout_id=f"episode-{number}.{segment}",
                    episode_id=f"episode-{number}",
                    segment=segment,
                    token_ids=ids,
                    mask=sampled,
                    turn_ids=torch.where(sampled, 0, -1),
                    sampler_logprobs=-torch.rand(8, generator=generator),
                    policy_versions=torch.zeros(8, dtype=torch.long),
                    old_logprobs=-5.0 + 0.3 * torch.randn(8, generator=generator),
                    episode_tokens=8 * count,
                    episode_turns=count,
                )
            )
            kept = torch.cat([kept, own[4:], torch.randint(0, VOCAB, (3,), generator=generator)])
    return found


def as_pairs(samples: list[ScoredSample], pairs: list[tuple[int, int]]) -> list[ScoredSample]:
    """The samples, those of the chosen and the rejected episode of each pair marked as such."""
    every = episodes(samples)
    names = pair_names([members[0].episode for members in every], pairs)
    signs = {chosen: 1.0 for chosen, _ in pairs} | {rejected: -1.0 for _, rejected in pairs}
    return [
        replace(sample, pair=names[number], advantage=signs.get(number, sample.advantage))
        for number, members in enumerate(every)
        for sample in members
    ]


def tiny_lora_model(tied: bool, seed: int = 0, max_seq_len: int = 64, kv_heads: int = 2):
    """A two-layer Qwen2 with LoRA whose B matrices are not zero, so that every adapter tensor has a gradient."""
    from torchtune.models.qwen2 import lora_qwen2  # takes seconds, and most learner tests need no model

    torch.manual_seed(seed)
    model = lora_qwen2(
        ["q_proj", "k_proj", "v_proj", "output_proj"],
        apply_lora_to_mlp=True,
        vocab_size=VOCAB,
        num_layers=2,
        num_heads=4,
        num_kv_heads=kv_heads,
        embed_dim=32,
        intermediate_dim=48,
        max_seq_len=max_seq_len,
        tie_word_embeddings=tied,
        lora_rank=4,
        lora_alpha=8,
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.15)
    return model


def tiny_decoder(tied: bool = True, **tiles: int):
    """:func:`tiny_lora_model` with a tiled head."""
    from loop_recipes.engine.decoder import attach_head  # as above
    from loop_recipes.engine.logprobs import TiledLogProbs

    return attach_head(tiny_lora_model(tied), TiledLogProbs(**tiles))


def adapter_gradient(model) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])


def flash_attention(q, k, v, borders, seen, longest, __, window_size, enable_gqa, scale=None):
    """What varlen_attn computes, [s, h, d] each: the queries of a document are the last of its keys; groups of query
    heads share keys."""
    before, after = window_size
    assert after == 0
    assert enable_gqa
    assert borders.dtype == seen.dtype == torch.int32
    assert longest == seen.diff().max()
    cut = zip((q, k, v), (borders, seen, seen), strict=True)
    pieces = zip(*(x.transpose(0, 1).split(at.diff().tolist(), dim=1) for x, at in cut), strict=True)
    done = []
    for q, k, v in pieces:
        own, keys = q.shape[1], k.shape[1]
        last = {"is_causal": True} if own == keys else {"attn_mask": torch.ones(own, keys).tril(keys - own) > 0}
        if before >= 0:
            last = {"attn_mask": torch.ones(own, keys).tril(keys - own).triu(keys - own - before) > 0}
        with sdpa_kernel(SDPBackend.MATH):  # the CPU's flash kernel, which torch 2.15 takes here, rounds more
            done.append(F.scaled_dot_product_attention(q, k, v, **last, scale=scale, enable_gqa=True))
    return torch.cat(done, dim=1).transpose(0, 1)


def a_run(deadline_s=60.0, stop_requested=lambda: False, scorer=None) -> TrainingRun:
    """What a credit is told of a run, as far as one that asks no node needs it."""
    config = SimpleNamespace(collection=SimpleNamespace(deadline_s=deadline_s))
    return TrainingRun(config, scorer, lambda work: None, lambda iteration: 1, stop_requested)
