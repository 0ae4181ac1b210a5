"""Log-probs of sampled tokens: how the language-model head is computed.

A head maps ``(hidden [n, d], weight [v, d], targets [n], scale, cap)`` to fp32 log-probs [n] of the targets under the
softmax of the logits ``scale * hidden @ weight.T``, or of ``cap * tanh(that / cap)`` where there is a cap: Gemma's
final_logit_softcapping. Granite's logits_scaling is a divisor, one over ``scale``; Cohere's logit_scale is ``scale``.
They are equal to rounding:

- :class:`TiledLogProbs`: any device, in fp32; never holds [n, v], one pass, no gradient for the frozen head.
- :class:`TensorCoreLogProbs`: the same for bf16 or fp16 on CUDA, with products of half precision that add in fp32.
- :class:`~loop_recipes.engine.cut_cross_entropy.CutCrossEntropyLogProbs`: Apple's kernels, for the same tensors.
- :class:`FullLogProbs`: all logits at once; the plain formula, and the one that trains the head too.

:class:`AutoLogProbs` picks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

HALF = (torch.bfloat16, torch.float16)


class Head(Protocol):
    """A way to compute log-probs of tokens from the last hidden states and the output matrix."""

    def __call__(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, scale: float = 1.0, cap: float | None = None
    ) -> Tensor:
        """Return log-probs [n] of ``targets`` [n], from hidden states [n, d] and weights [v, d]."""

    def entropy(self, hidden: Tensor, weight: Tensor, scale: float = 1.0, cap: float | None = None) -> Tensor:
        """Return the entropy [n] in nats of each row's distribution, without gradient."""


@dataclass(frozen=True)
class FullLogProbs:
    """All logits, fp32 log-softmax. Memory [n, v] several times over; gradients for hidden states and head."""

    def __call__(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, scale: float = 1.0, cap: float | None = None
    ) -> Tensor:
        return self._logprobs(hidden, weight, scale, cap).gather(1, targets[:, None]).squeeze(1)

    def entropy(self, hidden: Tensor, weight: Tensor, scale: float = 1.0, cap: float | None = None) -> Tensor:
        """Return the entropy [n] in nats of each row's distribution, as float32 without gradient."""
        with torch.no_grad():
            logprobs = self._logprobs(hidden, weight, scale, cap)
            return -(logprobs.exp() * logprobs).sum(-1)

    def _logprobs(self, hidden: Tensor, weight: Tensor, scale: float, cap: float | None) -> Tensor:
        logits = hidden.float() @ weight.float().T * scale
        return (logits if cap is None else cap * torch.tanh(logits / cap)).log_softmax(-1)


@dataclass(frozen=True)
class TiledLogProbs:
    """Log-probs by tiles over tokens and vocabulary, with a running log-sum-exp in fp32.

    The gradient with respect to a row of ``hidden`` is one scalar from above times
    ``scale * (weight[target] - softmax @ weight)``. The forward pass sums ``softmax @ weight`` [n, d] beside the
    log-sum-exp, and rescales it as the running maximum moves (as in flash attention, with the head as keys and values).
    So the backward pass is one multiplication, without the weight. Both take two matrix products, as full logits with a
    frozen head do, no recomputation, and one [token_tile, vocab_tile] buffer. A cap multiplies each word's weight by
    the cap's slope, ``1 - tanh(...)**2``, which takes a second buffer of that shape.

    Args:
        token_tile, vocab_tile: shape of the largest logits buffer.

    Raises:
        ValueError: (on call) the head's weight wants a gradient, which this path does not compute.
    """

    token_tile: int = 1024
    vocab_tile: int = 2048

    def __call__(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, scale: float = 1.0, cap: float | None = None
    ) -> Tensor:
        refuse_trained_head(weight, type(self).__name__)
        want_gradient = torch.is_grad_enabled() and hidden.requires_grad
        return _TiledFunction.apply(hidden, weight, targets, scale, cap, self, want_gradient)

    def tile(self, weight: Tensor, vocab: int) -> Tensor:
        """Return the weights [vocab_tile or fewer, d] of the words from ``vocab`` on, in the products' precision."""
        return weight[vocab : vocab + self.vocab_tile].float()

    def logits(self, hidden: Tensor, tile: Tensor, scale: float) -> Tensor:
        """Return the logits of some tokens and words, fp32, without the cap."""
        return (hidden.float() * scale) @ tile.T

    def operand(self, probs: Tensor, tile: Tensor) -> Tensor:
        """Return ``probs`` (at most 1) in the precision of ``tile``, multiplied by any constant."""
        return probs

    def add_weights(self, sums: Tensor, probs: Tensor, tile: Tensor) -> None:
        """Add ``probs @ tile`` to ``sums``, fp32, in place."""
        sums.addmm_(probs, tile)

    @torch.no_grad()
    def entropy(self, hidden: Tensor, weight: Tensor, scale: float = 1.0, cap: float | None = None) -> Tensor:
        """Return the exact entropy [n] in nats of each row's distribution, as float32 without gradient."""
        top, total = _running_start(hidden)
        weighted = torch.zeros_like(total)  # sum of exp(z - top) * (z - top)
        for vocab in range(0, len(weight), self.vocab_tile):
            tile = self.tile(weight, vocab)
            for rows in _slices(len(hidden), self.token_tile):
                logits = self.logits(hidden[rows], tile, scale)
                shifted, moved = _shifted(logits if cap is None else _capped(logits, cap), top[rows])
                decay, probs = moved.exp(), shifted.exp()
                weighted[rows] = decay * (weighted[rows] + total[rows] * moved) + (probs * shifted).sum(-1)
                total[rows] = decay * total[rows] + probs.sum(-1)
        return total.log() - weighted / total


class _TiledFunction(torch.autograd.Function):
    """Forward: log-probs and, if wanted, their gradient by hidden state. Backward: that times the upstream gradient."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, scale, cap, tiles, want_gradient):
        top, total = _running_start(hidden)
        chosen, divisor, slope_sum, chosen_slope = (torch.zeros_like(top) for _ in range(4))
        shape = hidden.shape if want_gradient else (0,)
        mean_weight = torch.zeros(shape, dtype=torch.float32, device=hidden.device)
        for vocab in range(0, len(weight), tiles.vocab_tile):
            tile = tiles.tile(weight, vocab)
            for rows in _slices(len(hidden), tiles.token_tile):
                logits = tiles.logits(hidden[rows], tile, scale)
                column = targets[rows] - vocab
                here = (column >= 0) & (column < len(tile))
                column = column.clamp(0, len(tile) - 1)[:, None]
                slopes = None
                if cap is not None:
                    logits = _capped(logits, cap)
                    slopes = 1 - (logits / cap).square_() if want_gradient else None
                shifted, moved = _shifted(logits, top[rows])
                value = shifted.gather(1, column).squeeze(1)
                chosen[rows] = torch.where(here, value, chosen[rows] + moved)
                decay, probs = moved.exp(), shifted.exp_()
                sums = probs.sum(-1)
                total[rows] = decay * total[rows] + sums
                if want_gradient:
                    if slopes is not None:
                        slope = slopes.gather(1, column).squeeze(1)
                        chosen_slope[rows] = torch.where(here, slope, chosen_slope[rows])
                        sums = probs.mul_(slopes).sum(-1)
                        slope_sum[rows] = decay * slope_sum[rows] + sums
                    rounded = tiles.operand(probs, tile)
                    sums = sums if rounded is probs else rounded.sum(-1, dtype=torch.float32)
                    divisor[rows] = decay * divisor[rows] + sums
                    tiles.add_weights(mean_weight[rows].mul_(decay[:, None]), rounded, tile)
        if want_gradient:
            if cap is not None:  # the mean of the weights by rounded slopes, times the exact mean slope
                divisor = torch.where(divisor > 0, divisor * total / slope_sum, 1.0)
            gradient = mean_weight.div_(-divisor[:, None])
            for rows in _slices(len(hidden), tiles.token_tile):
                words = weight[targets[rows]]
                gradient[rows] += words if cap is None else words * chosen_slope[rows, None]
            ctx.save_for_backward(gradient.mul_(scale))
        ctx.hidden_dtype = hidden.dtype
        return chosen - total.log()

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        (gradient,) = ctx.saved_tensors
        return (gradient * upstream[:, None]).to(ctx.hidden_dtype), None, None, None, None, None, None


@dataclass(frozen=True)
class TensorCoreLogProbs(TiledLogProbs):
    """:class:`TiledLogProbs` with both matrix products on tensor cores: operands in half precision, sums in fp32.

    Products of two bf16 or fp16 numbers are exact in fp32, so log-probs lose nothing but the order of a sum. For the
    gradient the probabilities of a tile are rounded to half precision, and the mean weight is divided by the sum of the
    rounded probabilities. So the common part of the words' weights still cancels, and the gradient of a nearly certain
    token keeps its relative precision. There are no locks or atomics: every run gives the same.

    Raises:
        ValueError: (on call) tensors not on CUDA, of different or full precision, or a head that wants a gradient.
    """

    needs_half_on_cuda: ClassVar[bool] = True
    token_tile: int = 4096
    vocab_tile: int = 8192

    def __call__(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, scale: float = 1.0, cap: float | None = None
    ) -> Tensor:
        require_half_on_cuda(hidden, weight, type(self).__name__)
        return super().__call__(hidden, weight, targets, scale, cap)

    def tile(self, weight: Tensor, vocab: int) -> Tensor:
        return weight[vocab : vocab + self.vocab_tile]

    def logits(self, hidden: Tensor, tile: Tensor, scale: float) -> Tensor:
        logits = torch.mm(hidden, tile.T, out_dtype=torch.float32)
        return logits if scale == 1.0 else logits.mul_(scale)

    def operand(self, probs: Tensor, tile: Tensor) -> Tensor:
        # fp16 keeps full precision down to 6e-5 only, but up to 65,504.
        return (probs.mul_(2.0**15) if tile.dtype == torch.float16 else probs).to(tile.dtype)

    def add_weights(self, sums: Tensor, probs: Tensor, tile: Tensor) -> None:
        sums.add_(torch.mm(probs, tile, out_dtype=torch.float32))


@dataclass(frozen=True)
class AutoLogProbs:
    """Tiles: on tensor cores for bf16 or fp16 on CUDA, in fp32 for everything else."""

    def __call__(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, scale: float = 1.0, cap: float | None = None
    ) -> Tensor:
        return self._head(hidden)(hidden, weight, targets, scale, cap)

    def entropy(self, hidden: Tensor, weight: Tensor, scale: float = 1.0, cap: float | None = None) -> Tensor:
        """Return the entropy of :meth:`TiledLogProbs.entropy`."""
        return self._head(hidden).entropy(hidden, weight, scale, cap)

    def _head(self, hidden: Tensor) -> TiledLogProbs:
        return TensorCoreLogProbs() if hidden.is_cuda and hidden.dtype in HALF else TiledLogProbs()


def refuse_trained_head(weight: Tensor, name: str) -> None:
    """Raise ValueError if the head called ``name`` would have to give a gradient for its weight."""
    if torch.is_grad_enabled() and weight.requires_grad:
        raise ValueError(f"{name} computes no gradient for the head, but its weight wants one; use FullLogProbs")


def require_half_on_cuda(hidden: Tensor, weight: Tensor, name: str) -> None:
    """Raise ValueError unless the tensors for the head called ``name`` are of one half precision on CUDA."""
    if not hidden.is_cuda or hidden.dtype not in HALF:
        raise ValueError(
            f"{name} needs bf16 or fp16 hidden states on CUDA, not {hidden.dtype} on {hidden.device.type}; use "
            "TiledLogProbs"
        )
    if weight.dtype != hidden.dtype:
        raise ValueError(f"{name} needs a head in the hidden states' {hidden.dtype}, not {weight.dtype}")


def _running_start(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return a running maximum (lowest finite, so differences are finite) and sum of exponentials, both [n] fp32."""
    top = torch.full(hidden.shape[:1], torch.finfo(torch.float32).min, device=hidden.device)
    return top, torch.zeros_like(top)


def _capped(logits: Tensor, cap: float) -> Tensor:
    """Return ``cap * tanh(logits / cap)``, in place."""
    return logits.div_(cap).tanh_().mul_(cap)


def _shifted(logits: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    """Raise the running maximum [m] in place. Return the logits [m, words] less it, and old less new maximum (<= 0)."""
    raised = torch.maximum(top, logits.amax(-1))
    moved = top - raised
    top.copy_(raised)
    return logits.sub_(raised[:, None]), moved


def _slices(size: int, tile: int) -> list[slice]:
    return [slice(start, min(start + tile, size)) for start in range(0, size, tile)]
