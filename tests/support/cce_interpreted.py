"""Run with TRITON_INTERPRET=1: Cut Cross-Entropy's kernels on a CPU, ours and the package's own function, in fp16.

Prints one line of JSON: for each case, against float64, the largest error of a log-prob and the relative error (of
norms) of the gradient by hidden state; for the last case also those of the package and of full logits. The
interpreter runs the kernels' source program by program; it has no bf16 and no libdevice.
"""

import json

import torch
import triton
import triton.language as tl
from cut_cross_entropy import linear_cross_entropy, tl_utils

from loop_recipes.engine.cce_kernels import CutCrossEntropyFunction
from loop_recipes.engine.logprobs import FullLogProbs

# n, d, v, what the head's rows have in common, the cap. Blocks are of 128 or 256 tokens, 128 words and 32, 64 or 256
# columns.
CASES = {
    "whole blocks": (128, 64, 256, 0.0, None),
    "ragged blocks": (150, 90, 301, 0.0, None),
    "more than one block of everything": (260, 270, 300, 0.0, None),
    "one token": (1, 64, 257, 0.0, None),
    "capped logits": (150, 90, 301, 0.0, 3.0),
    "a head with a common direction": (16, 32, 6_000, 1.0, None),
}


@triton.jit
def log1p(x):
    return tl.log(1.0 + x)


def packages_own(hidden, weight, targets):
    return -linear_cross_entropy(hidden, weight, targets, reduction="none", filter_eps=None, impl="cce")


@triton.jit
def tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


def errors(function, hidden, weight, targets, upstream, cap=None):
    exact = hidden.double().requires_grad_()
    logits = exact @ weight.double().T
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    expected = logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    expected.backward(upstream.double())
    leaf = hidden.clone().requires_grad_()
    logprobs = function(leaf, weight, targets)
    logprobs.backward(upstream)
    assert logprobs.dtype == torch.float32
    assert leaf.grad.dtype == hidden.dtype
    return {
        "logprob": (logprobs.double() - expected).abs().max().item(),
        "gradient": ((leaf.grad.double() - exact.grad).norm() / exact.grad.norm()).item(),
    }


def main():
    tl_utils.tl_logaddexp.fn.__globals__["tl_log1p"] = log1p
    tl_utils.tl_softcapping.fn.__globals__["tl_tanh"] = tanh
    torch.set_num_threads(1)
    results = {}
    for name, (n, d, v, common, cap) in CASES.items():
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(n, d, generator=generator).half()
        weight = 0.2 * torch.randn(v, d, generator=generator) + common * torch.randn(1, d, generator=generator)
        weight = weight.half()
        targets, upstream = torch.randint(0, v, (n,), generator=generator), torch.randn(n, generator=generator)
        results[name] = errors(
            lambda *x, cap=cap: CutCrossEntropyFunction.apply(*x, cap), hidden, weight, targets, upstream, cap
        )
    results["the package's own"] = errors(packages_own, hidden, weight, targets, upstream)
    results["full logits"] = errors(FullLogProbs(), hidden, weight, targets, upstream)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
