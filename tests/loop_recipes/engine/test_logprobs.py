"""Heads against a float64 log-softmax, and the decoder that feeds them only the rows that count."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode

from loop_recipes.engine import logprobs as logprobs_module
from loop_recipes.engine.batching import collate_step
from loop_recipes.engine.cut_cross_entropy import CutCrossEntropyLogProbs
from loop_recipes.engine.decoder import attach_head
from loop_recipes.engine.logprobs import AutoLogProbs, FullLogProbs, TensorCoreLogProbs, TiledLogProbs
from loop_recipes.engine.token_outputs import TokenOutputs
from support.learner_cases import VOCAB, adapter_gradient, make_samples, tiny_lora_model


def case(n, d, v, scale, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    hidden = (torch.randn(n, d, generator=generator) * scale).to(dtype)
    weight = torch.randn(v, d, generator=generator).to(dtype)
    return hidden, weight, torch.randint(0, v, (n,), generator=generator), torch.randn(n, generator=generator)


def plain_logits(hidden, weight, scale, cap):
    logits = scale * hidden @ weight.T
    return logits if cap is None else cap * torch.tanh(logits / cap)


def by_hand(hidden, weight, targets, upstream, scale=1.0, cap=None):
    """Log-probs, entropy and gradient by hidden state, in float64, by plain autograd."""
    hidden = hidden.double().requires_grad_()
    every = plain_logits(hidden, weight.double(), scale, cap).log_softmax(-1)
    logprobs = every.gather(1, targets[:, None]).squeeze(1)
    logprobs.backward(upstream.double())
    entropy = -(every.exp() * every).sum(-1)
    return logprobs.detach(), entropy.detach(), hidden.grad


@pytest.mark.parametrize("head", [FullLogProbs(), AutoLogProbs(), "tiled"])
@given(
    shape=st.tuples(st.integers(0, 40), st.integers(1, 24), st.integers(1, 90)),
    tiles=st.tuples(st.integers(1, 50), st.integers(1, 100)),
    factor=st.sampled_from([0.0625, 1.0, 1.7]),
    cap=st.sampled_from([None, 1.0, 30.0]),
    scale=st.sampled_from([0.1, 1.0, 20.0]),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=60)
def test_heads_equal_the_formula(head, shape, tiles, factor, cap, scale, seed):
    head = TiledLogProbs(*tiles) if head == "tiled" else head
    hidden, weight, targets, upstream = case(*shape, scale, seed)
    hidden.requires_grad_()
    logprobs = head(hidden, weight, targets, factor, cap)
    logprobs.backward(upstream)
    expected, entropy, gradient = by_hand(hidden.detach(), weight, targets, upstream, factor, cap)
    assert logprobs.dtype == torch.float32
    tolerance = {"rtol": 1e-4, "atol": 2e-5 * max(1.0, factor * scale)}
    torch.testing.assert_close(logprobs.double(), expected, **tolerance)
    torch.testing.assert_close(head.entropy(hidden, weight, factor, cap).double(), entropy, **tolerance)
    torch.testing.assert_close(hidden.grad.double(), gradient, rtol=1e-3, atol=1e-4 * max(1.0, scale))


@pytest.mark.parametrize("head", [FullLogProbs(), TiledLogProbs(4, 16)])
def test_where_all_logits_are_at_the_cap_the_gradient_is_zero(head):
    hidden, weight, targets, upstream = case(9, 4, 50, 1e6, 1)
    hidden.requires_grad_()
    logprobs = head(hidden, weight, targets, cap=1.0)
    logprobs.backward(upstream)
    assert logprobs.isfinite().all()
    assert hidden.grad.abs().max() < 1e-6


def test_bf16_inputs_lose_nothing_beyond_their_own_rounding():
    """Logits, sums and log-probs are fp32 whatever the inputs are; only the gradient goes back in the input's type."""
    hidden, weight, targets, upstream = case(33, 48, 500, 0.5, 7, torch.bfloat16)
    hidden.requires_grad_()
    logprobs = TiledLogProbs(8, 64)(hidden, weight, targets)
    logprobs.backward(upstream)
    expected, _, gradient = by_hand(hidden.detach(), weight, targets, upstream)
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    assert hidden.grad.dtype == torch.bfloat16
    torch.testing.assert_close(hidden.grad.double(), gradient, rtol=1e-2, atol=1e-3)


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any operation's result had."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            # Views of the weight are as large as the weight, but are no memory.
            if isinstance(tensor, torch.Tensor) and tensor._base is None:
                self.largest = max(self.largest, tensor.numel())
        return result


def test_tiles_never_hold_all_logits_nor_a_gradient_of_the_head():
    n, d, v = 64, 8, 1000
    hidden, weight, targets, upstream = case(n, d, v, 1.0, 3)
    hidden.requires_grad_()
    with LargestTensor() as seen:
        TiledLogProbs(16, 40)(hidden, weight, targets).backward(upstream)
    assert 16 * 40 <= seen.largest <= n * 40  # tiles and [n, d]; far from n * v = 64,000 and v * d = 8,000
    with LargestTensor() as seen:
        FullLogProbs()(hidden, weight, targets).backward(upstream)
    assert seen.largest == n * v
    assert weight.grad is None


def test_without_gradient_nothing_is_kept_for_backward():
    hidden, weight, targets, _ = case(9, 4, 30, 1.0, 1)
    hidden.requires_grad_()
    with torch.no_grad():
        assert not TiledLogProbs()(hidden, weight, targets).requires_grad


def test_a_head_that_wants_training_is_refused():
    hidden, weight, targets, _ = case(3, 4, 10, 1.0, 1)
    with pytest.raises(ValueError, match="use FullLogProbs"):
        TiledLogProbs()(hidden, weight.requires_grad_(), targets)


@pytest.mark.parametrize("head", [CutCrossEntropyLogProbs(), TensorCoreLogProbs()])
def test_a_head_for_cuda_elsewhere_says_what_to_use(head):
    hidden, weight, targets, _ = case(3, 4, 10, 1.0, 1)
    with pytest.raises(ValueError, match=r"needs bf16 or fp16 hidden states on CUDA.*use TiledLogProbs"):
        head(hidden, weight, targets)


@pytest.fixture
def tensor_cores(monkeypatch):
    """What ``torch.mm(..., out_dtype=torch.float32)`` computes on CUDA, and on no CPU: exact products, sums in fp32."""
    real = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, *, out_dtype: real(a.to(out_dtype), b.to(out_dtype)))
    monkeypatch.setattr(logprobs_module, "require_half_on_cuda", lambda *_: None)


# The largest relative error of rounding once; the gradient is rounded in two places.
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
@pytest.mark.parametrize(("factor", "cap"), [(1.0, None), (1.4, None), (1.0, 5.0), (0.5, 30.0)])
@pytest.mark.parametrize("common", [0.0, 10.0])
@pytest.mark.parametrize("scale", [0.05, 1.0])
def test_tensor_cores_round_probabilities_and_nothing_else(tensor_cores, dtype, rounding, factor, cap, common, scale):
    """``common`` is what the words' weights have in common, ``scale`` makes tokens uncertain or nearly certain."""
    hidden, weight, _, upstream = case(70, 48, 900, scale, 11, dtype)
    weight = (weight.float() + common).to(dtype)
    targets = (hidden.double() @ weight.double().T).argmax(-1)
    hidden.requires_grad_()
    logprobs = TensorCoreLogProbs(32, 128)(hidden, weight, targets, factor, cap)
    logprobs.backward(upstream)
    expected, entropy, gradient = by_hand(hidden.detach(), weight, targets, upstream, factor, cap)
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-4)
    found = TensorCoreLogProbs(32, 128).entropy(hidden, weight, factor, cap)
    torch.testing.assert_close(found.double(), entropy, rtol=1e-4, atol=1e-4)
    assert hidden.grad.dtype == dtype
    error = (hidden.grad.double() - gradient).norm(dim=-1)
    sums_in_fp32 = 2**-21 * weight.double().norm(dim=-1).max() * upstream.abs() * factor
    assert (error < 2 * rounding * gradient.norm(dim=-1) + sums_in_fp32).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="on a CPU see test_cce_kernels.py and the tests above")
@pytest.mark.parametrize("head", [CutCrossEntropyLogProbs(), TensorCoreLogProbs()])
@pytest.mark.parametrize(("factor", "cap"), [(1.0, None), (0.5, None), (1.0, 5.0), (2.0, 30.0)])
def test_heads_for_cuda_equal_full_logits(head, factor, cap):
    hidden, weight, targets, upstream = case(700, 256, 5000, 0.2, 5, torch.bfloat16)
    leaf = hidden.cuda().requires_grad_()
    logprobs = head(leaf, weight.cuda(), targets.cuda(), factor, cap)
    logprobs.backward(upstream.cuda())
    expected, _, gradient = by_hand(hidden, weight, targets, upstream, factor, cap)
    torch.testing.assert_close(logprobs.double().cpu(), expected, rtol=0, atol=1e-4)
    error = leaf.grad.double().cpu() - gradient
    assert error.norm() < 1e-2 * gradient.norm()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="it is a GPU's programs that run in any order")
def test_tensor_cores_give_the_same_bits_every_time():
    hidden, weight, targets, upstream = (x.cuda() for x in case(700, 256, 20_000, 0.2, 5, torch.bfloat16))
    results = []
    for _ in range(5):
        leaf = hidden.clone().requires_grad_()
        logprobs = TensorCoreLogProbs()(leaf, weight, targets, 1.0)
        logprobs.backward(upstream)
        results.append((logprobs.detach(), leaf.grad))
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, results[0], strict=True))


@pytest.mark.parametrize("tied", [True, False])
def test_the_decoder_equals_log_softmax_of_the_plain_models_logits(tied):
    plain = tiny_lora_model(tied)
    batch = collate_step(make_samples([21, 40, 9]), 0, packed=False)
    logits = plain(batch.tokens, input_pos=batch.input_pos).flatten(0, 1)[batch.rows]
    logits = 2.0 * torch.tanh(0.8 * logits / 2.0)
    expected = logits.log_softmax(-1).gather(1, batch.targets[:, None]).squeeze(1)
    (expected * batch.old_logprobs).sum().backward()
    gradient = adapter_gradient(plain).clone()
    plain.zero_grad()

    decoder = attach_head(plain, TiledLogProbs(16, 32))
    decoder.scale, decoder.cap = 0.8, 2.0
    assert list(decoder.state_dict()) == list(plain.state_dict())
    details = decoder(**batch.inputs(), with_entropy=True, with_hidden=True)
    assert isinstance(details, TokenOutputs)
    (details.logprobs * batch.old_logprobs).sum().backward()
    torch.testing.assert_close(details.logprobs, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(adapter_gradient(decoder), gradient, rtol=1e-4, atol=1e-5)
    full = logits.log_softmax(-1)
    torch.testing.assert_close(details.entropy, -(full.exp() * full).sum(-1), rtol=1e-5, atol=1e-5)
    assert details.hidden.shape == (len(batch.rows), 32)
    assert not details.hidden.requires_grad


def test_only_rows_that_predict_sampled_tokens_reach_the_head():
    seen = []

    def head(hidden, weight, targets, scale, cap):
        seen.append(len(hidden))
        return TiledLogProbs()(hidden, weight, targets, scale, cap)

    batch = collate_step(make_samples([30, 30]), 0, packed=True)
    attach_head(tiny_lora_model(True), head)(**batch.inputs())
    assert seen == [len(batch.targets)]
    assert seen[0] < 60


@pytest.mark.parametrize("packed", [True, False])
def test_activation_checkpointing_changes_nothing(packed):
    batch = collate_step(make_samples([30, 12, 25]), 0, packed)
    gradients = []
    for wrap in (False, True):
        decoder = attach_head(tiny_lora_model(True), TiledLogProbs())
        if wrap:
            for number, layer in enumerate(decoder.layers):
                decoder.layers[number] = checkpoint_wrapper(layer)
        decoder(**batch.inputs()).logprobs.sum().backward()
        gradients.append(adapter_gradient(decoder))
    assert torch.equal(*gradients)


def test_an_all_ignored_micro_batch_gives_zero_gradients():
    decoder = attach_head(tiny_lora_model(True), TiledLogProbs())
    decoder(**collate_step([], 0, packed=False).inputs()).logprobs.sum().backward()
    assert adapter_gradient(decoder).abs().max() == 0


def test_errors_name_the_cause():
    batch = collate_step(make_samples([70]), 0, packed=True)
    with pytest.raises(ValueError, match="70 tokens is longer than the model's max_seq_len 64"):
        attach_head(tiny_lora_model(True), TiledLogProbs())(**batch.inputs())
    model = tiny_lora_model(False)
    model.output = torch.nn.Linear(32, VOCAB, bias=True)
    with pytest.raises(ValueError, match="linear head without bias"):
        attach_head(model, TiledLogProbs())
