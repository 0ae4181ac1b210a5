"""The gated delta rule of transformers' models in a backward pass that grows with the tokens, not with their square.

transformers' reference takes chunk by chunk out of the whole row by an index, and the gradient of each index is as
large as the row. Called for a few chunks at a time, each call from the state that the one before ends with, it computes
the same. Its kernel (flash-linear-attention) is chosen where transformers is imported, for every device; here the
tensors' device decides. Where the kernel takes the documents' bounds, a packed row goes through a mixer in one call.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from loop_recipes.engine.batching import Documents
from loop_recipes.engine.cuda_layers import on_cuda
from loop_recipes.engine.general_attention import Row
from loop_recipes.engine.shared_prefixes import Keys

CHUNK_TOKENS = 64  # of transformers' reference
SEGMENT_TOKENS = 4 * CHUNK_TOKENS
"""Tokens of a call: more are quadratic, fewer are calls of operators too small for a GPU."""
whole_row = Row[Documents | Keys]()
"""Holds the documents of a packed row that a mixer takes as a whole; None where it takes one of them."""


@functools.cache
def kernel() -> Callable[..., Any] | None:
    """Return flash-linear-attention's delta rule; None if the package is not available."""
    try:
        rule: Callable[..., Any] = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    except Exception:  # it is not installed, or finds no Triton
        return None
    return rule


def takes_segments(mixer: nn.Module) -> None:
    """Make the modules of a mixer's architecture compute the delta rule by :func:`in_segments`, and the convolution
    before it by :func:`by_document`. A mixer without a delta rule stays unchanged."""
    module = sys.modules[type(mixer).__module__]
    if hasattr(module, "torch_chunk_gated_delta_rule"):
        for name, replacement in _REPLACEMENTS.items():
            chosen = getattr(module, name, None)
            if chosen is not None and not hasattr(chosen, "reference"):
                setattr(module, name, replacement(chosen))


def takes_bounds(mixer: nn.Module, x: Tensor) -> bool:
    """Return whether the mixer computes each document of the :data:`whole_row` ``x`` by itself."""
    functions = (getattr(sys.modules[type(mixer).__module__], name, None) for name in _REPLACEMENTS)
    if not (on_cuda(x) and all(hasattr(function, "reference") for function in functions)):
        return False
    rule = kernel()
    return rule is not None and "cu_seqlens" in inspect.signature(rule).parameters


def by_document(chosen: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap ``chosen``, transformers' causal convolution of [1, channels, s], to run on each document of a whole row."""

    @functools.wraps(chosen)
    def convolution(x: Tensor, *args: Any, **options: Any) -> Tensor:
        if whole_row.documents is None:
            return chosen(x, *args, **options)
        return torch.cat([chosen(own, *args, **options) for own in x.split(list(whole_row.documents.lengths), 2)], 2)

    convolution.reference = chosen  # type: ignore[attr-defined]
    return convolution


def in_segments(chosen: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``chosen``, transformers' delta rule: on CUDA call the kernel if it is installed, else call the reference of
    ``chosen`` on one segment at a time."""
    reference = inspect.unwrap(chosen)

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
        rule = kernel() if on_cuda(query) else None
        if rule is not None:
            options |= {"initial_state": initial_state, "output_final_state": output_final_state}
            if whole_row.documents is not None:
                options["cu_seqlens"] = whole_row.documents.borders
            taken = inspect.signature(rule).parameters
            arguments = {name: option for name, option in options.items() if name in taken}
            result: tuple[Tensor, Tensor | None] = rule(query, key, value, g=g, beta=beta, **arguments)
            return result
        done, state_before = [], initial_state
        for q, k, v, decay, rate in zip(
            *(x.split(SEGMENT_TOKENS, 1) for x in (query, key, value, g, beta)), strict=True
        ):
            arguments = {"g": decay, "beta": rate, "initial_state": state_before, "output_final_state": True}
            out, state_before = reference(q, k, v, **arguments, **options)
            done.append(out)
        return torch.cat(done, 1), state_before if output_final_state else None

    delta_rule.reference = reference  # type: ignore[attr-defined]
    return delta_rule


_REPLACEMENTS = {"torch_chunk_gated_delta_rule": in_segments, "causal_conv1d_fn": by_document}
"""Replacements for transformers' functions, by their names in the module of an architecture."""
