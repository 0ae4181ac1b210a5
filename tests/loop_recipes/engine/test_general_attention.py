"""Attention and delta rules of transformers' models by kernels, against their definitions."""

import math
from unittest import mock

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5

from loop_recipes.engine import cuda_layers, delta_rule, general_attention
from loop_recipes.engine.batching import Documents
from loop_recipes.engine.delta_rule import CHUNK_TOKENS, in_segments
from support.on_cuda import as_on_cuda

HEADS, SHARED, WIDTH = 6, 2, 16


def weighed(out):
    return (out * torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape).sin()).sum()


def by_definition(q, k, v, scale, window, sinks):
    """Output [heads, s, d] of queries that are the last of the keys' positions, and ``lse`` without the sinks."""
    places, keys = torch.arange(k.shape[1] - q.shape[1], k.shape[1]), torch.arange(k.shape[1])
    distance = places[:, None] - keys
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], dim=0) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill((distance < 0) | (distance >= (window or math.inf)), -torch.inf)
    lse = scores.logsumexp(-1)
    whole = lse if sinks is None else torch.logaddexp(lse, sinks[:, None])
    return (scores - whole[..., None]).exp() @ v, lse


def random(*shape):
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("window", [None, 20, 100])
@pytest.mark.parametrize(("own", "tokens"), [(700, 700), (300, 700), (1, 5), (1, 1)])
@pytest.mark.parametrize(
    "sinks", [random(HEADS), torch.full((HEADS,), 9.0).double(), torch.full((HEADS,), -90.0).double()]
)
def test_sinks_are_exact_in_outputs_and_gradients(window, own, tokens, sinks):
    torch.manual_seed(0)
    given = [random(1, heads, length, WIDTH) for heads, length in ((HEADS, own), (SHARED, tokens), (SHARED, tokens))]
    found = []
    for ours in (True, False):
        q, k, v = (x.clone().requires_grad_() for x in given)
        if ours:
            out = general_attention._attend(q, k, v, 0.3, window, None, sinks)
        else:
            out = by_definition(q[0], k[0], v[0], 0.3, window, sinks)[0][None]
        weighed(out).backward()
        found.append([out.detach(), q.grad, k.grad, v.grad])
    for mine, right in zip(*found, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)


class Kernels:
    """``varlen_attn``'s two operators as CUDA has them, by the definition: the backward pass makes the weights of
    the ``lse`` that it is given."""

    def _pieces(self, borders, seen, *tensors):
        ends = [(borders, tensors[0]), *((seen, x) for x in tensors[1:])]
        return zip(*(x.split((b[1:] - b[:-1]).tolist()) for b, x in ends), strict=True)

    def _varlen_attn(self, q, k, v, borders, seen, longest_q, longest_k, causal, scale, reach, shared):
        assert (shared, causal) == (True, reach == [-1, 0])
        done = [
            by_definition(*(x.transpose(0, 1) for x in piece), scale, reach[0] + 1 or None, None)
            for piece in self._pieces(borders, seen, q, k, v)
        ]
        return torch.cat([out.transpose(0, 1) for out, _ in done]), torch.cat([lse for _, lse in done], 1), None

    def _varlen_attn_backward(self, grad, q, k, v, out, lse, borders, seen, lq, lk, causal, random, scale, reach):
        grads = []
        for number, (q_, k_, v_) in enumerate(self._pieces(borders, seen, q, k, v)):
            begin, end = borders[number], borders[number + 1]
            places, keys = torch.arange(len(k_) - len(q_), len(k_)), torch.arange(len(k_))
            distance = places[:, None] - keys
            kk, vv = (x.repeat_interleave(HEADS // SHARED, dim=1).transpose(0, 1) for x in (k_, v_))
            scores = (q_.transpose(0, 1) @ kk.mT * scale).masked_fill(
                (distance < 0) | (distance > (reach[0] if reach[0] >= 0 else math.inf)), -torch.inf
            )
            weights = (scores - lse[:, begin:end, None]).exp()
            above, result = grad[begin:end].transpose(0, 1), out[begin:end].transpose(0, 1)
            inner = weights * (above @ vv.mT - (above * result).sum(-1, keepdim=True)) * scale
            per_head = inner @ kk, inner.mT @ q_.transpose(0, 1), weights.mT @ above
            shared = [x.unflatten(0, (SHARED, -1)).sum(1) for x in per_head[1:]]
            grads.append([x.transpose(0, 1) for x in (per_head[0], *shared)])
        return tuple(torch.cat(parts) for parts in zip(*grads, strict=True))


@pytest.mark.parametrize("window", [None, 4])
def test_a_packed_row_with_sinks_is_one_call_on_cuda(window):
    torch.manual_seed(0)
    documents, sinks = Documents.of([7, 1, 12]), random(HEADS)
    given = [random(20, heads, WIDTH) for heads in (HEADS, SHARED, SHARED)]
    found = []
    for cuda in (True, False):
        q, k, v = (x.clone().requires_grad_() for x in given)
        if cuda:
            operators = mock.patch.object(torch.ops, "torch_attn", Kernels())
            with operators, as_on_cuda(VARLEN=True), mock.patch.object(cuda_layers, "HALF", (torch.float64,)):
                out = general_attention._packed(q, k, v, documents, 0.3, window, None, sinks)
                weighed(out).backward()
        else:
            out = general_attention._packed(q, k, v, documents, 0.3, window, None, sinks)
            weighed(out).backward()
        found.append([out.detach(), q.grad, k.grad, v.grad])
    for mine, right in zip(*found, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)


def delta_rule_of(function, tokens, dtype):
    torch.manual_seed(tokens)
    q, k, v = (torch.randn(1, tokens, 4, 32).to(dtype).requires_grad_() for _ in range(3))
    g, beta = (-torch.rand(1, tokens, 4)).requires_grad_(), torch.rand(1, tokens, 4).to(dtype).requires_grad_()
    out, state = function(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True, output_final_state=True)
    weighed(out).backward()
    return [out.detach(), state.detach(), *(x.grad for x in (q, k, v, g, beta))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "tokens", [1, CHUNK_TOKENS, CHUNK_TOKENS + 1, delta_rule.SEGMENT_TOKENS, delta_rule.SEGMENT_TOKENS + 1, 1500]
)
def test_the_delta_rule_in_segments_has_the_same_bits_forward(tokens, dtype):
    chosen = modeling_qwen3_5.torch_chunk_gated_delta_rule
    reference = getattr(chosen, "reference", chosen)
    ours, theirs = (delta_rule_of(each, tokens, dtype) for each in (in_segments(chosen), reference))
    assert all(torch.equal(a, b) for a, b in zip(ours[:2], theirs[:2], strict=True))
    for mine, right in zip(ours[2:], theirs[2:], strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-6, atol=1e-6)


@pytest.mark.fault("a kernel for GPUs that is installed broke the first look at a model on the CPU")
def test_the_kernel_of_the_delta_rule_is_chosen_by_the_device(monkeypatch):
    called = []

    def kernel(q, k, v, g, beta, initial_state, output_final_state, cu_seqlens=None, use_qk_l2norm_in_kernel=False):
        called.append((initial_state, output_final_state, cu_seqlens))
        raise RuntimeError("0 active drivers")

    monkeypatch.setattr(delta_rule, "kernel", lambda: kernel)
    ours = in_segments(modeling_qwen3_5.torch_chunk_gated_delta_rule)
    delta_rule_of(ours, 100, torch.float32)
    assert not called
    monkeypatch.setattr(delta_rule, "on_cuda", lambda x: True)
    with pytest.raises(RuntimeError, match="active drivers"):
        delta_rule_of(ours, 100, torch.float32)
    assert called == [(None, True, None)]
