#!/usr/bin/env bash
# One would guess: a delta net is linear in the tokens, forward and backward, also by transformers' reference in torch.
# So it is: forward it is; backward, each chunk's index has a gradient as large as the row, and twice the tokens write four times.
# See recipes/loop_recipes/engine/delta_rule.py. torch 2.13.0 and transformers 5.23.0, on shapes alone; 29 November 2026.
set -euo pipefail
. "$(dirname "$0")/alone.sh"

alone torch==2.13.0 transformers==5.23.0 << 'END'
import os
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule as rule
class Written(TorchDispatchMode):
    total = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.total += sum(x.nbytes for x in tree_leaves(found) if isinstance(x, torch.Tensor))
        return found
def written(tokens):
    with FakeTensorMode():
        q, k, v = (torch.empty(1, tokens, 4, 64, requires_grad=True) for _ in range(3))
        g, beta = (torch.empty(1, tokens, 4, requires_grad=True) for _ in range(2))
        with Written() as forward:
            out, _ = rule(q, k, v, g=g, beta=beta)
        with Written() as backward:
            out.sum().backward()
    return forward.total, backward.total
few, many = written(16384), written(32768)
times = {name: round(b / a, 1) for name, a, b in zip(("forward", "backward"), few, many)}
print("  times as much for twice the tokens:", times)
seen = {"forward is linear": times["forward"] < 2.2, "backward is linear": times["backward"] < 2.2}
expected = {"forward is linear": True, "backward is linear": False}
END
