"""rollout_server/inference/cpu_lora.py against vLLM's own operators, and against the formula."""

import pytest
import torch

from rollout_server.inference.command import installed_vllm

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not installed_vllm().cpu, reason="vLLM's CPU build only"),
]

SLOTS = [71, 72, None]
"""The adapter in each slot, by vLLM's number; 0 stands for the base model."""
WIDTHS, RANK, WIDTH = (12, 20), 4, 16


@pytest.fixture
def ours():
    from rollout_server.inference.cpu_lora import GroupedLora  # imports vLLM: seconds for whoever only collects

    return GroupedLora


@pytest.fixture
def vllms_own():
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    return PunicaWrapperCPU


def wrapper(kind, adapters, prefill):
    from vllm.lora.layers import LoRAMapping

    made = kind(256, 16, "cpu")
    prompts = list(dict.fromkeys(adapters)) if prefill else adapters
    made.update_metadata(LoRAMapping(tuple(adapters), tuple(prompts), is_prefill=prefill), SLOTS, len(SLOTS), 100)
    return made


@pytest.fixture
def weights():
    generator = torch.Generator().manual_seed(0)
    lora_a = tuple(torch.randn(len(SLOTS), 1, RANK, WIDTH, generator=generator) for _ in WIDTHS)
    lora_b = tuple(torch.randn(len(SLOTS), 1, width, RANK, generator=generator) for width in WIDTHS)
    return lora_a, lora_b


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prefill", [True, False])
@pytest.mark.parametrize("adapters", [[71] * 9, [72], [71] * 3 + [72] * 5], ids=["one", "one token", "two"])
def test_the_same_as_vllms_own_operators(ours, vllms_own, weights, adapters, prefill, dtype):
    x = torch.randn(len(adapters), WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = torch.ones(len(adapters), sum(WIDTHS), dtype=dtype)
    both = []
    for kind in (ours, vllms_own):
        both.append(before.clone())
        lora_a, lora_b = ([w.to(dtype) for w in matrices] for matrices in weights)
        wrapper(kind, adapters, prefill).add_lora_linear(both[-1], x, tuple(lora_a), tuple(lora_b), 0.5, WIDTHS)
    assert not torch.equal(both[0], before)
    torch.testing.assert_close(*both)


def test_each_token_gets_its_own_adapter_and_the_base_model_none(ours, weights):
    adapters = [72, 0, 71, 0, 72]
    x = torch.randn(len(adapters), WIDTH, generator=torch.Generator().manual_seed(1))
    y = torch.zeros(len(adapters), sum(WIDTHS))
    wrapper(ours, adapters, prefill=False).add_lora_linear(y, x, *weights, 2.0, WIDTHS)
    for row, adapter in enumerate(adapters):
        slot = SLOTS.index(adapter) if adapter else None
        parts = [
            torch.zeros(width) if slot is None else 2.0 * b[slot, 0] @ (a[slot, 0] @ x[row])
            for a, b, width in zip(*weights, WIDTHS, strict=True)
        ]
        torch.testing.assert_close(y[row], torch.cat(parts))


def test_vllm_builds_it_instead_of_its_own(ours):
    from vllm.platforms import current_platform

    assert current_platform.get_punica_wrapper() == f"{ours.__module__}.{ours.__qualname__}"
