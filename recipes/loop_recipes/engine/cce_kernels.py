"""Cut Cross-Entropy's kernels (arXiv 2411.09009, package cut-cross-entropy 25.1.1) put together for log-probs.

Both kernels of the package release a lock without a barrier before it. One thread releases, while stores of the
program's other warps may still be on their way, so the next holder may read old values: updates of the log-sum-exp and
of the gradient get lost, and which ones differs from run to run. Here

- the forward kernel is our own and has no lock: each program writes the log-sum-exp of its block of words, and torch
  joins them;
- the package's backward kernel gets a ``tl_lock_add`` that waits for all of the program's stores before it releases.
  That mends the package's own ``linear_cross_entropy`` of this process too, in its backward pass. It runs with 8 warps:
  with the package's 4, ten times as many bytes do not fit into the registers of an H100.

The package's ``linear_cross_entropy`` also rounds to the half precision of its operands in two places. The mean
loss of a corpus hardly changes, but single tokens' ratios and their gradient do:

- The target's logit is summed from products that were rounded one by one. In bf16 and a width of 5,120 that is off by
  0.002 (root mean square) where logits are around 1.5, by 0.02 where they are around 14. Here it is computed in fp32,
  outside the kernels.
- The gradient by hidden state is rounded each time a block of 128 words is added to it, 1,187 times for a vocabulary of
  151,936, so the part that all words' weights share does not cancel any more. The kernel adds in the precision of the
  tensor it is given, so here it is given one in fp32.

Programs add to the gradient in whatever order they get the lock, so its last bits differ from run to run.

Importing this needs triton. ``tests/integration/test_cce_kernels.py`` runs the kernels in Triton's interpreter, and
looks for the barrier in the code that they compile to for an H100.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from cut_cross_entropy import cce_backward
from cut_cross_entropy.tl_utils import b_bin_fn, tl_softcapping
from torch import Tensor
from torch.autograd.function import once_differentiable

TOKEN_TILE = 4096
TOKEN_MULTIPLE = 64
"""Triton compiles a kernel anew for an integer that is 1, one divisible by 16 and any other. So tokens are padded."""

BLOCKS = {"TOKENS": 128, "WORDS": 128, "COLUMNS": 64}
BACKWARD = {"BLOCK_B": 128, "BLOCK_V": 128, "BLOCK_D": 32, "num_warps": 8, "num_stages": 4}


@triton.jit
def add_under_lock(pointers, values, mask, lock):
    """Add to memory to which other programs add, too; ``lock`` is 0 while none of them does."""
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    before = tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_last")
    tl.store(pointers, before + values, mask=mask, eviction_policy="evict_last")
    tl.debug_barrier()  # one thread releases the lock, after the stores of all of them
    tl.atomic_xchg(lock, 0)


cce_backward.tl_lock_add = add_under_lock  # looked up when the package's kernel is compiled


@triton.jit
def block_log_sum_exp(
    hidden,
    weight,
    partial,
    n,
    v,
    d,
    hidden_stride,
    weight_stride,
    CAP: tl.constexpr,
    TOKENS: tl.constexpr,
    WORDS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write ``partial[block, token]``: the log-sum-exp over the block's words of ``hidden [n, d] @ weight [v, d].T``,
    capped by ``CAP`` unless it is None.

    Programs for the same words run one after the other, so that the weight is read from memory about once.
    """
    token_blocks = tl.cdiv(n, TOKENS)
    tokens = tl.program_id(0) % token_blocks * TOKENS + tl.arange(0, TOKENS)
    block = tl.program_id(0) // token_blocks
    words = block * WORDS + tl.arange(0, WORDS)
    columns = tl.arange(0, COLUMNS)
    token_pointers = hidden + (tokens % n).to(tl.int64)[:, None] * hidden_stride + columns[None, :]
    word_pointers = weight + (words % v).to(tl.int64)[None, :] * weight_stride + columns[:, None]
    logits = tl.zeros((TOKENS, WORDS), dtype=tl.float32)
    for start in range(0, d, COLUMNS):
        inside = columns < d - start
        left = tl.load(token_pointers, mask=inside[None, :], other=0.0)
        right = tl.load(word_pointers, mask=inside[:, None], other=0.0)
        logits = tl.dot(left, right, logits)
        token_pointers += COLUMNS
        word_pointers += COLUMNS
    if CAP is not None:
        logits = tl_softcapping(logits, CAP)
    logits = tl.where((words < v)[None, :], logits, -float("inf"))
    top = tl.max(logits, axis=1)
    total = tl.sum(tl.exp(logits - top[:, None]), axis=1)
    tl.store(partial + block.to(tl.int64) * n + tokens, top + tl.log(total), mask=tokens < n)


def log_sum_exp(hidden: Tensor, weight: Tensor, cap: float | None = None) -> Tensor:
    """Return the log-sum-exp over words of ``hidden [n, d] @ weight [v, d].T``, fp32 [n], the same in each run."""
    (n, d), v = hidden.shape, len(weight)
    blocks = triton.cdiv(v, BLOCKS["WORDS"])
    partial = torch.empty(blocks, n, dtype=torch.float32, device=hidden.device)
    grid = (triton.cdiv(n, BLOCKS["TOKENS"]) * blocks,)
    strides = hidden.stride(0), weight.stride(0)
    block_log_sum_exp[grid](hidden, weight, partial, n, v, d, *strides, CAP=cap, **BLOCKS, num_warps=8, num_stages=3)
    return partial.logsumexp(0)


def padded(tensor: Tensor) -> Tensor:
    """Return ``tensor`` [n, ...] with zeros up to a multiple of :data:`TOKEN_MULTIPLE`."""
    more = -len(tensor) % TOKEN_MULTIPLE
    return torch.cat([tensor, tensor.new_zeros(more, *tensor.shape[1:])]) if more else tensor


class CutCrossEntropyFunction(torch.autograd.Function):
    """Maps ``(hidden [n, d], weight [v, d], targets [n], cap or None)``, n above 0, to log-probs [n] in fp32.

    ``hidden`` (contiguous) and ``weight`` are both bf16 or both fp16. Only ``hidden`` gets a gradient. The gradient
    includes even the smallest blocks.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, cap: float | None) -> Tensor:
        ctx.tokens, ctx.cap = len(hidden), cap
        hidden, targets = padded(hidden), padded(targets)
        sums, logits = [], []
        for rows, words in zip(hidden.split(TOKEN_TILE), targets.split(TOKEN_TILE), strict=True):
            sums.append(log_sum_exp(rows, weight, cap))
            chosen = (rows.float() * weight[words].float()).sum(-1)
            logits.append(chosen if cap is None else cap * torch.tanh(chosen / cap))
        total = torch.cat(sums)
        ctx.save_for_backward(hidden, weight, targets, total)
        return (torch.cat(logits) - total)[: ctx.tokens]

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        hidden, weight, targets, total = ctx.saved_tensors
        n, d = hidden.shape
        gradient = torch.zeros(n, d, dtype=torch.float32, device=hidden.device)
        # Each block of the gradient, to which programs of several vocabulary blocks add, has a lock; blocks are at
        # least this large. Their number is a multiple of 16, for the same reason that n is one.
        locks = torch.zeros(16 * triton.cdiv(n, 16 * 64), triton.cdiv(d, 64), dtype=torch.int32, device=hidden.device)
        cce_backward._cce_backward_kernel.fn[  # without the package's own choice of blocks and warps
            (triton.cdiv(n, BACKWARD["BLOCK_B"]) * triton.cdiv(len(weight), BACKWARD["BLOCK_V"]),)
        ](
            E=hidden,
            C=weight,
            LSE=total,
            dOut=-padded(upstream.float()).contiguous(),  # the kernel is that of the loss, which is minus the log-prob
            grad_scale=1.0,
            Valids=None,
            VocabOrdering=None,
            softcap=ctx.cap,
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
            **BACKWARD,
        )
        return gradient[: ctx.tokens].to(hidden.dtype), None, None, None
