"""Frozen weights of four bits that stay so: a layer makes the whole one for its product, and again for its gradient.

The numbers are those of vLLM, to the last bit: ``(number - zero point) * scale``, rounded once, to the type of the
computation. Its kernels multiply with them, on a CPU by our tests, on GPUs (Marlin) by their source.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtune.modules import TransformerDecoder
from torchtune.modules.peft import LoRALinear

from loop_recipes.engine.cuda_layers import FoldedLoRALinear
from model_families.base_model import BaseModel
from model_families.weights.weight_names import SCALE, ZERO_POINT, tune_name


def whole(packed: Tensor, scale: Tensor, zero_point: Tensor | None = None) -> Tensor:
    """Return the weight [out, in] in the scales' dtype, from parts as in :mod:`model_families.weights.four_bits`."""
    weight = _numbers(packed).to(scale.dtype).unflatten(1, (scale.shape[1], -1))
    weight -= 8 if zero_point is None else _numbers(zero_point.T).T[..., None]
    return weight.mul_(scale[..., None]).flatten(1)


def _numbers(packed: Tensor) -> Tensor:
    """Unpack int32 [n, m] into uint8 [n, 8 m], eight numbers from each."""
    pairs = packed.contiguous().view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)


class FrozenProduct(torch.autograd.Function):
    """``x W' + bias``, where W is made from ``parts`` in the forward pass, and again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, whole: Any, *parts: Tensor | None) -> Tensor:
        ctx.save_for_backward(*parts)
        ctx.whole = whole
        return F.linear(x, whole(*parts), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        parts = ctx.saved_tensors
        return gradient @ ctx.whole(*parts), None, None, *[None for _ in parts]


class PackedLinear(nn.Linear):
    """A linear layer whose weight is frozen and packed."""

    weight_packed: Tensor
    weight_scale: Tensor

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The whole weight, made anew at each access."""
        made, *parts = self.frozen()
        return cast(Tensor, made(*parts))

    def frozen(self) -> tuple[Any, ...]:
        """Return the function that makes the weight, and the parts to call it with."""
        return whole, self.weight_packed, self.weight_scale, self._parameters.get(ZERO_POINT)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, FrozenProduct.apply(x, self.bias, *self.frozen()))


class PackedLoRALinear(FoldedLoRALinear):
    """A :class:`PackedLinear` with LoRA."""

    weight = PackedLinear.weight
    frozen = PackedLinear.frozen
    product = PackedLinear.forward


_PACKED_LAYERS = {nn.Linear: PackedLinear, LoRALinear: PackedLoRALinear}


def pack(model: TransformerDecoder, base: BaseModel) -> None:
    """Make layers keep their weights in four bits if the files of ``base`` store them in four bits.

    Raises:
        ValueError: the model is to compute in fp32.
    """
    assert base.four_bits is not None
    base.four_bits.check_computed_in(half=torch.get_default_dtype() != torch.float32)
    for module in base.four_bits.modules:
        layer = model.get_submodule(tune_name(f"{module}.weight").removesuffix(".weight"))
        for name, shape in base.four_bits.parts(*base.weights[f"{module}.weight"]).items():
            empty = torch.empty(shape, dtype=None if name == SCALE else torch.int32)
            layer.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        del layer.weight
        layer.__class__ = _PACKED_LAYERS[type(layer)]
