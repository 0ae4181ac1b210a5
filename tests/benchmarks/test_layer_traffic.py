"""benchmarks/layer_traffic.py counts what a reader can count by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from support.experiment_scripts import load_script
from support.families import small

TOKENS, WIDTH, RANK = 40, 8, 3
BF16 = 2


@pytest.fixture(scope="module")
def benchmark():
    return load_script("benchmarks/layer_traffic.py")


def rows(width=WIDTH):
    return torch.empty(TOKENS, width, dtype=torch.bfloat16)


def weight(outputs=6, inputs=WIDTH):
    return torch.empty(outputs, inputs, dtype=torch.bfloat16)


ONE = "elementwise", 1
COUNTED = {
    "an addition reads two and writes one": (lambda: rows() + rows(), *ONE, 3 * WIDTH * BF16),
    "the same tensor is read once": (lambda: (lambda x: x * x)(rows()), *ONE, 2 * WIDTH * BF16),
    "what is expanded is read once": (lambda: rows() * rows(1), *ONE, (2 * WIDTH + 1) * BF16),
    "of a half a half": (lambda: rows()[:, :4].neg(), *ONE, WIDTH * BF16),
    "in place it is read and written": (lambda: rows().mul_(2), *ONE, 2 * WIDTH * BF16),
    "a copy does not read where it goes": (lambda: rows().copy_(rows()), *ONE, 2 * WIDTH * BF16),
    "fp32 is twice as long": (lambda: rows().float(), *ONE, 3 * WIDTH * BF16),
    "a view moves nothing": (lambda: rows().unflatten(1, (2, 4)).transpose(0, 1), "elementwise", 0, 0),
    "a weight is no token's": (lambda: weight() + weight(), *ONE, 0),
    "a table gives the rows that are asked for": (
        lambda: torch.empty(TOKENS, 4)[torch.empty(9, TOKENS, dtype=torch.long)],
        *ONE,
        9 * (4 + 4) * 4 + 9 * 8,
    ),
    "a slice's gradient is zeros and a copy": (
        lambda: torch.ops.aten.slice_backward(rows(4), [TOKENS, WIDTH], 1, 0, 4, 1),
        "elementwise",
        2,
        (WIDTH + 4 + 4) * BF16,
    ),
    "a product reads x and writes the result": (lambda: F.linear(rows(), weight()), "base", 1, (WIDTH + 6) * BF16),
    "with a bias too": (lambda: F.linear(rows(), weight(), weight(1)[0, :6]), "base", 1, (WIDTH + 6) * BF16),
    "one with a side as long as the rank is LoRA's": (
        lambda: F.linear(rows(), weight(RANK)),
        "lora",
        1,
        (WIDTH + RANK) * BF16,
    ),
    "one that is added in place reads what it changes": (
        lambda: rows(6).addmm_(rows(), weight(WIDTH, 6)),
        "base",
        1,
        (WIDTH + 6 + 6) * BF16,
    ),
    "else it is copied first": (
        lambda: torch.addmm(rows(6), rows(), weight(WIDTH, 6)),
        "base",
        2,
        (6 + 6 + WIDTH + 6 + 6) * BF16,
    ),
    "that of the layers is in place": (
        lambda: torch.ops.loop_recipes.add_product(rows(6), rows(RANK), weight(RANK, 6)),
        "lora",
        1,
        (RANK + 6 + 6) * BF16,
    ),
}


@pytest.mark.parametrize("called", COUNTED)
def test_an_operator(benchmark, called):
    run, kind, kernels, size = COUNTED[called]
    traffic = benchmark.Traffic(TOKENS, RANK)
    with FakeTensorMode(), benchmark.EagerTraffic(traffic):
        run()
    assert traffic.kernels == ({kind: kernels} if kernels else {})
    assert traffic.per_token(kind) == size


def test_a_layer(benchmark):
    """Of a small model: elements that a token has in each kernel."""
    config = small("Qwen2.5-1.5B")
    found = benchmark.layer_traffic(config, tokens=TOKENS, compiled=False, rank=RANK)
    width, inner, heads, keys, head = config["hidden_size"], config["intermediate_size"], 12, 2, 8
    scaled = 7 * 2 * RANK  # what lora_a gives
    rotated = 7 * (heads + keys) * head + 2 * 2 * head  # times cosines, rolled, added times sines; for q and for k
    residuals = 2 * 3 * width
    signed = 2 * (2 * head // 2 + 2 * head)  # half of the sines negated, both put together
    table = 2 * (8 + 2 * 4 * 2 * head + (4 + BF16) * 2 * head)  # for positions in int64; to bf16
    elements = scaled + rotated + residuals + signed + 2 * 2 * width + (2 + 3) * inner
    assert found["forward"].per_token("elementwise") == elements * BF16 + table + 2 * 4, "and fp32 from two norms"
    # Of x, of what q, k and v, and of what gate and up are given: two gradients are added to the first.
    elements = scaled + rotated + residuals + (1 + 2) * 3 * width + 2 * 3 * width + 9 * inner
    zeros = 4 * heads  # the gradient of attention's normalisers
    assert found["backward"].per_token("elementwise") == elements * BF16 + zeros + 2 * 4

    sizes = [(width, width), (width, keys * head), (width, keys * head), (width, width)]
    sizes += [(width, inner), (width, inner), (inner, width)]
    for name in ("forward", "backward"):
        assert found[name].per_token("base") == sum(a + b for a, b in sizes) * BF16
    # x and narrow; narrow and twice out. Backward out, narrow; narrow, twice x; narrow and x; out and narrow.
    assert found["forward"].per_token("lora") == sum(a + 2 * RANK + 2 * b for a, b in sizes) * BF16
    assert found["backward"].per_token("lora") == sum(2 * b + 4 * RANK + 3 * a for a, b in sizes) * BF16
    assert found["forward"].kernels == {"elementwise": 27, "base": 7, "lora": 14, "attention": 1}
    assert found["backward"].kernels == {"elementwise": 25, "base": 7, "lora": 28, "attention": 1}


def test_tokens_that_are_a_width_are_refused(benchmark):
    with pytest.raises(ValueError, match="a side of 96 too"):
        benchmark.layer_traffic(small("Qwen2.5-1.5B"), tokens=96, compiled=False, rank=RANK)


class Gated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(weight(WIDTH, 6), requires_grad=False)

    def forward(self, gate, up):
        return F.linear((F.silu(gate) * up).add(1), self.weight.T)


def test_what_a_compiler_fuses_is_one_kernel(benchmark):
    traffics = {name: benchmark.Traffic(TOKENS, RANK) for name in benchmark.PASSES}
    with FakeTensorMode():
        gate, up = rows().requires_grad_(), rows().requires_grad_()
        module = Gated()
        module.compile(backend=benchmark.counting_backend(traffics), dynamic=True)
        module(gate, up).backward(rows(6))
    forward, backward = traffics["forward"], traffics["backward"]
    assert forward.kernels == backward.kernels == {"elementwise": 1, "base": 1}
    assert forward.per_token("elementwise") == 3 * WIDTH * BF16
    assert backward.per_token("elementwise") == (3 + 2) * WIDTH * BF16, "the gradient, gate and up; of gate and of up"
    assert forward.per_token("base") == backward.per_token("base") == (WIDTH + 6) * BF16
