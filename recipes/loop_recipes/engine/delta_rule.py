"""The gated delta rule of transformers' models in a backward pass that grows with the tokens, not with their square.

transformers' reference takes chunk by chunk out of the whole row by an index, and the gradient of each index is as
large as the row. Called for a few chunks at a time, each call from the state that the one before ends with, it computes
the same. Its kernel (flash-linear-attention) is chosen where transformers is imported, for every device; here the
tensors' device decides.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from loop_recipes.engine.cuda_layers import on_cuda

CHUNK = 64
"""Tokens of a chunk of transformers' reference."""
SEGMENT = 4 * CHUNK
"""Tokens of a call: more are quadratic, fewer are calls of operators too small for a GPU."""
_NAME = "torch_chunk_gated_delta_rule"


def takes_segments(mixer: nn.Module) -> None:
    """Have the modules of a mixer's architecture compute the delta rule as :func:`in_segments` does; a mixer without
    one is left as it is."""
    module = sys.modules[type(mixer).__module__]
    chosen = getattr(module, _NAME, None)
    if chosen is not None and not hasattr(chosen, "reference"):
        setattr(module, _NAME, in_segments(chosen))


def in_segments(chosen: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``chosen``, transformers' delta rule, on CUDA where its kernel is installed; else its reference, a segment
    at a time."""
    reference = inspect.unwrap(chosen)
    has_kernel = importlib.util.find_spec("fla") is not None

    @functools.wraps(chosen)
    def delta_rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if has_kernel and on_cuda(query):
            state = {"initial_state": initial_state, "output_final_state": output_final_state}
            result: tuple[Tensor, Tensor | None] = chosen(query, key, value, g=g, beta=beta, **state, **options)
            return result
        done, state_before = [], initial_state
        for q, k, v, decay, rate in zip(*(x.split(SEGMENT, 1) for x in (query, key, value, g, beta)), strict=True):
            given = {"g": decay, "beta": rate, "initial_state": state_before, "output_final_state": True}
            out, state_before = reference(q, k, v, **given, **options)
            done.append(out)
        return torch.cat(done, 1), state_before if output_final_state else None

    delta_rule.reference = reference  # type: ignore[attr-defined]
    return delta_rule
