"""Cut Cross-Entropy's kernels (arXiv 2411.09009, package cut-cross-entropy 25.1.1) put together for log-probs.

The package's own ``linear_cross_entropy`` rounds to the half precision of its operands in two places. A corpus's mean
loss does not mind, single tokens' ratios and their gradient do:

- The target's logit is summed from products that were rounded one by one. In bf16 and a width of 5,120 that is off by
  0.002 (root mean square) where logits are around 1.5, by 0.02 where they are around 14. Here it is computed in fp32,
  outside the kernels.
- The gradient by hidden state is rounded each time a block of 128 words is added to it, 1,187 times for a vocabulary of
  151,936, and what the words' weights have in common no longer cancels. The kernel adds in the precision of the tensor
  it is given, so here it is given one in fp32.

Importing this needs triton. ``tests/integration/test_cce_kernels.py`` shows both, and that the result is exact.
"""

from __future__ import annotations

import torch
import triton
from cut_cross_entropy.cce_backward import _cce_backward_kernel
from cut_cross_entropy.cce_lse_forward import cce_lse_forward_kernel
from cut_cross_entropy.tl_utils import b_bin_fn
from torch import Tensor
from torch.autograd.function import once_differentiable

TOKEN_TILE = 4096


class CutCrossEntropyFunction(torch.autograd.Function):
    """``(hidden [n, d], weight [v, d], targets [n])``, n above 0, to log-probs [n] in fp32.

    ``hidden`` (contiguous) and ``weight`` are bf16 or fp16, both the same. Only ``hidden`` gets a gradient; no block is
    left out of it for being small.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        log_sum_exp = cce_lse_forward_kernel(hidden, weight)
        ctx.save_for_backward(hidden, weight, targets, log_sum_exp)
        logits = [
            (rows.float() * weight[words].float()).sum(-1)
            for rows, words in zip(hidden.split(TOKEN_TILE), targets.split(TOKEN_TILE), strict=True)
        ]
        return torch.cat(logits) - log_sum_exp

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor) -> tuple[Tensor, None, None]:
        hidden, weight, targets, log_sum_exp = ctx.saved_tensors
        n, d = hidden.shape
        gradient = torch.zeros(n, d, dtype=torch.float32, device=hidden.device)
        # One lock for each block of the gradient that programs of several vocabulary blocks add to; blocks are at
        # least this large.
        locks = torch.zeros(triton.cdiv(n, 64), triton.cdiv(d, 64), dtype=torch.int32, device=hidden.device)
        _cce_backward_kernel[
            lambda meta: (triton.cdiv(n, meta["BLOCK_B"]) * triton.cdiv(len(weight), meta["BLOCK_V"]),)
        ](
            E=hidden,
            C=weight,
            LSE=log_sum_exp,
            dOut=-upstream.float().contiguous(),  # the kernel is that of the loss, which is minus the log-prob
            grad_scale=1.0,
            Valids=None,
            VocabOrdering=None,
            softcap=None,
            Targets=targets,
            dE=gradient,
            dELocks=locks,
            dC=gradient,  # never touched without REQUIRES_GRAD, which is the head's
            dCLocks=locks,
            B=n,
            D=d,
            V=len(weight),
            n_de_locks_0=locks.shape[0],
            n_de_locks_1=locks.shape[1],
            n_dc_locks_0=locks.shape[0],
            n_dc_locks_1=locks.shape[1],
            stride_eb=hidden.stride(0),
            stride_ed=hidden.stride(1),
            stride_cv=weight.stride(0),
            stride_cd=weight.stride(1),
            stride_vb=1,
            filter_eps=None,
            B_BIN=b_bin_fn(n),
            SHIFT=False,
            REQUIRES_GRAD=False,
        )
        return gradient.to(hidden.dtype), None, None
