"""Computes log-probs from hidden states by Apple's Cut Cross-Entropy. The kernels (cce_kernels.py) need triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from loop_recipes.engine.logprobs import TensorCoreLogProbs, refuse_trained_head, require_half_on_cuda


@dataclass(frozen=True)
class CutCrossEntropyLogProbs:
    """Apple's Cut Cross-Entropy (arXiv 2411.09009): logits live in on-chip memory only. CUDA; bf16 or fp16 only.

    The kernels' gradient filter, which skips blocks where softmax - onehot is small, is off: it would bias the ratios'
    gradient. Unlike in the package's own function (see cce_kernels.py), the target's logit and the sums over the
    vocabulary are in fp32, and no update gets lost. A scale other than 1 multiplies the hidden state, and rounds it.
    The last bits of the gradient differ from run to run.

    Raises:
        ValueError: (on call) tensors not on CUDA, hidden states in fp32, or a head that wants a gradient.
        ImportError: (on call) cut-cross-entropy or triton is not installed.
    """

    needs_half_on_cuda: ClassVar[bool] = True

    def __call__(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, scale: float = 1.0, cap: float | None = None
    ) -> Tensor:
        refuse_trained_head(weight, type(self).__name__)
        require_half_on_cuda(hidden, weight, type(self).__name__)
        try:
            from loop_recipes.engine.cce_kernels import CutCrossEntropyFunction
        except ImportError as error:
            raise ImportError(
                f"CutCrossEntropyLogProbs: {error}; install cut-cross-entropy and triton, or use TiledLogProbs"
            ) from error
        if not len(hidden):
            return hidden.float().sum(-1)
        scaled = hidden if scale == 1.0 else hidden * scale
        return CutCrossEntropyFunction.apply(scaled.contiguous(), weight, targets, cap)

    def entropy(self, hidden: Tensor, weight: Tensor, scale: float = 1.0, cap: float | None = None) -> Tensor:
        """Return the entropy of :meth:`TiledLogProbs.entropy`, because the kernels give none."""
        return TensorCoreLogProbs().entropy(hidden, weight, scale, cap)
