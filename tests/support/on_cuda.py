"""The layers that compute as CUDA wants it, on any device."""

from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from loop_recipes.engine import cuda_layers


def as_on_cuda(**others: Any) -> Any:
    """A context in which they do, in float32 too; ``others`` takes the place of what the module has."""
    half = (*cuda_layers.HALF, torch.float32)
    return mock.patch.multiple(cuda_layers, on_cuda=lambda x: True, HALF=half, **others)


def norms_of_one_kernel() -> Any:
    """A context in which ``F.rms_norm`` of tensors without values is one operator, as only CUDA's is."""
    return mock.patch.object(F, "rms_norm", lambda x, shape, weight, eps: rms_norm(x, weight, eps)[0])


@torch.library.custom_op("tests::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Normalised rows, and a number of each that the backward pass reads."""
    raise NotImplementedError


@torch.library.custom_op("tests::rms_norm_backward", mutates_args=())
def rms_norm_backward(gradient: Tensor, x: Tensor, of_rows: Tensor, weight: Tensor) -> Tensor:
    """The gradient of x; the weight is frozen."""
    raise NotImplementedError


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(inputs[0], output[1], inputs[1])


def _gradient(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor, None, None]:
    return rms_norm_backward(gradient, *ctx.saved_tensors), None, None


rms_norm.register_fake(lambda x, weight, eps: (torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)))
rms_norm_backward.register_fake(lambda gradient, x, of_rows, weight: torch.empty_like(x))
rms_norm.register_autograd(_gradient, setup_context=_keep)


class CountedCalls(TorchDispatchMode):
    """How often these operators were called."""

    def __init__(self, *operators):
        super().__init__()
        self.operators, self.calls = operators, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func in self.operators
        return func(*args, **(kwargs or {}))
