"""The model a recipe trains, before it has storage: frozen base in its own dtype, LoRA in float32, and their shapes.

torchtune's builders make one RoPE cache per layer (2.15 GB for Qwen2.5-32B), and its LoRA initialisation depends on the
number of ranks; both steps are done here instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchtune import training
from torchtune.modules import TransformerDecoder
from torchtune.modules.attention import MultiHeadAttention
from torchtune.modules.peft import LoRALinear, get_adapter_params, set_trainable_params

from loop_formats.schema import ConfigError
from loop_recipes.config.components import build
from loop_recipes.config.loop_config import LearnerConfig
from loop_recipes.engine.peft_export import read_adapter

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_WRAPPER = "_checkpoint_wrapped_module."


def meta_model(component: Mapping[str, Any], dtype: torch.dtype) -> TransformerDecoder:
    """The config's model without storage: base weights in ``dtype`` and frozen, LoRA weights in float32 and trainable.

    Raises:
        ConfigError: the component is not a decoder with LoRA.
    """
    try:
        with training.set_default_dtype(dtype), torch.device("meta"):
            model = build(component)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"model: {component['_component_']} cannot be built: {str(error).splitlines()[0]}") from error
    lora = [module for module in model.modules() if isinstance(module, LoRALinear)]
    if not lora:
        raise ConfigError(f"model: {component['_component_']} has no LoRA layers; name a lora_* builder of torchtune")
    for module in lora:
        module.lora_a.float()
        module.lora_b.float()
    set_trainable_params(model, get_adapter_params(model))
    return model


def load_base(config: LearnerConfig, dtype: torch.dtype) -> tuple[TransformerDecoder, dict[str, Tensor]]:
    """The config's model without storage, and the base weights it will be given, full CPU tensors.

    Raises:
        ConfigError: they do not fit each other.
    """
    model = meta_model(config.model, dtype)
    base = build(config.checkpointer).load_checkpoint()[training.MODEL_KEY]
    check_shapes(model, base, config.checkpointer["checkpoint_dir"])
    return model, base


def check_context(model: TransformerDecoder, tokens: int, key: str) -> None:
    """Check that the model takes rollouts of ``tokens`` tokens.

    Raises:
        ConfigError: the model takes fewer tokens than a rollout may have; ``key`` says so.
    """
    if tokens > model.max_seq_len:
        raise ConfigError(f"{key} is {tokens}, more than the model's max_seq_len {model.max_seq_len}")


def vocabulary(model: TransformerDecoder) -> int:
    """Return the number of token ids that the model knows."""
    return model.tok_embeddings.weight.shape[0]


def check_shapes(model: nn.Module, base: Mapping[str, Tensor], where: str) -> None:
    """Compare the base checkpoint's tensors with the model's.

    Raises:
        ConfigError: names the first tensor that is missing, too many or of another shape.
    """
    expected = {name: tensor for name, tensor in model.state_dict().items() if ".lora_" not in name}
    for name, tensor in expected.items():
        if name not in base:
            raise ConfigError(f"checkpoint {where} lacks {name}; is the config's model the one it was saved from?")
        if base[name].shape != tensor.shape:
            raise ConfigError(
                f"checkpoint {where}: {name} is {list(base[name].shape)}, the config's model wants "
                f"{list(tensor.shape)}; make the sizes under `model` those of its config.json"
            )
    for name in base:
        if name not in expected:
            raise ConfigError(f"checkpoint {where} has {name}, the config's model has not; wrong number of layers?")


def lora_scale(model: nn.Module) -> tuple[int, float]:
    """Rank and alpha of the model's LoRA layers, which are the same in all of them."""
    layer = next(module for module in model.modules() if isinstance(module, LoRALinear))
    return layer.rank, float(layer.alpha)


def load_adapter(folder: Path, model: nn.Module) -> dict[str, Tensor]:
    """A stored PEFT adapter that acts in ``model`` as it acts where it is served: full CPU tensors.

    Raises:
        ConfigError: there is none, or it does not fit the model's LoRA layers; names the first difference.
    """
    try:
        adapter, _, alpha = read_adapter(folder)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    check_adapter(model, adapter, alpha, f"adapter {folder}")
    return adapter


def check_adapter(model: nn.Module, adapter: Mapping[str, Tensor], alpha: float, what: str) -> None:
    """Compare an adapter's tensors and its scale with the model's LoRA layers.

    Raises:
        ConfigError: names ``what`` and the first tensor that is missing, too many or of another shape, or ``alpha``.
    """
    expected = adapter_parameters(model)
    for name in [*expected, *adapter]:
        found, wanted = ("missing" if name not in of else list(of[name].shape) for of in (adapter, expected))
        if found != wanted:
            raise ConfigError(
                f"{what}: {name} is {found}, in the config's model {wanted}; "
                "make lora_rank, lora_attn_modules and apply_lora_to_mlp those it was made with"
            )
    own = lora_scale(model)[1]
    if alpha != own:
        raise ConfigError(f"{what} has lora_alpha {alpha:g}; make model.lora_alpha {alpha:g}, it is {own:g}")


def share_rope_cache(model: nn.Module) -> None:
    """Let all attention layers of the same head size use one RoPE module, and so one cache."""
    shared: dict[tuple[Any, ...], nn.Module] = {}
    for attention in [module for module in model.modules() if isinstance(module, MultiHeadAttention)]:
        rope = attention.pos_embeddings
        key = (type(rope), rope.dim, rope.max_seq_len, rope.base)
        attention.pos_embeddings = shared.setdefault(key, rope)


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The LoRA weights by their torchtune names, in the model's order, the same on every rank."""
    return {name.replace(_WRAPPER, ""): parameter for name, parameter in get_adapter_params(model).items()}


def trained_parameters(model: nn.Module, critic: nn.Module | None = None) -> dict[str, nn.Parameter]:
    """Everything an optimizer updates: the adapter's weights and, under ``critic.*``, the critic's."""
    named = {} if critic is None else {f"critic.{name}": p for name, p in critic.named_parameters()}
    return adapter_parameters(model) | named


def new_adapter(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Fresh LoRA weights as full float32 CPU tensors: A uniform in +-1/sqrt(in), B zero.

    The same for every rank and any number of ranks.
    """
    generator = torch.Generator().manual_seed(seed)
    fresh = {}
    for name, parameter in adapter_parameters(model).items():
        fresh[name] = torch.zeros(parameter.shape)
        if name.endswith("lora_a.weight"):
            bound = 1.0 / math.sqrt(parameter.shape[1])
            fresh[name].uniform_(-bound, bound, generator=generator)
    return fresh
