"""The model a recipe trains, before it has storage: frozen base in its own dtype, LoRA in float32, and their shapes.

torchtune's builders make one RoPE cache per layer (2.15 GB for Qwen2.5-32B), and its LoRA initialisation depends on the
number of ranks; both steps are done here instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torchtune import training, utils
from torchtune.modules import TiedLinear, TransformerDecoder
from torchtune.modules.attention import MultiHeadAttention
from torchtune.modules.peft import LoRALinear, get_adapter_params, set_trainable_params

from loop_formats.schema import ConfigError, require
from loop_plumbing.breakage import raised_as
from loop_recipes.config.components import build
from loop_recipes.config.loop_config import LearnerConfig
from loop_recipes.engine.process_group import FromMainRank, on_main_rank
from loop_recipes.engine.token_outputs import CHECKPOINT_WRAPPER
from model_families.base_model import BaseModel
from model_families.decoder.rope import frequencies, turns_neighbours
from model_families.decoder.weights import load_weights
from model_families.stored_weights import check_finite

if TYPE_CHECKING:  # it loads transformers
    from loop_recipes.engine.general_decoder import GeneralDecoder

AnyDecoder: TypeAlias = "TransformerDecoder | GeneralDecoder"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
log = utils.get_logger("INFO")


def meta_model(component: Mapping[str, Any], dtype: torch.dtype) -> AnyDecoder:
    """Build the config's model without storage: base weights frozen in ``dtype``, LoRA weights trained in float32.

    Raises:
        ConfigError: the component is not a decoder with LoRA.
    """
    try:
        with training.set_default_dtype(dtype), torch.device("meta"):
            model = build(component)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"model: {_called(component)} cannot be built: {str(error).splitlines()[0]}") from error
    lora = [module for module in model.modules() if isinstance(module, LoRALinear)]
    if not lora:
        raise ConfigError(f"model: {_called(component)} has no LoRA layers; name a lora_* builder of torchtune")
    for module in lora:
        module.lora_a.float()
        module.lora_b.float()
    set_trainable_params(model, get_adapter_params(model))
    return model


def load_base(config: LearnerConfig, dtype: torch.dtype) -> tuple[AnyDecoder, Mapping[str, Tensor]]:
    """Build the config's model without storage, and return it with its base weights, full CPU tensors.

    Every rank must call this function. Weights of torchtune's modules stay in the files' pages, and each rank reads its
    own part. For other models rank 0 has transformers read all weights at the first access, and sends them.

    Raises:
        ConfigError: model and weights do not fit each other.
    """
    model = meta_model(config.model, dtype)
    try:
        if config.checkpointer is None:
            on_main_rank(lambda: check_finite(config.base_model))
        described = BaseModel.read(config.base_model) if isinstance(model, TransformerDecoder) else model.base
        check_built(model, described, config)
        if not isinstance(model, TransformerDecoder):
            device = utils.get_device(config.device)
            return model, _of_main_rank(model, config.base_model, described, dtype, device)
        if config.checkpointer is None:
            base: dict[str, Tensor] = load_weights(config.base_model, described)
        else:
            base = build(config.checkpointer).load_checkpoint()[training.MODEL_KEY]
    except ValueError as error:
        raise error if isinstance(error, ConfigError) else ConfigError(f"model: {error}") from error
    check_shapes(model, base, config.base_model)
    return model, base


def _of_main_rank(
    model: GeneralDecoder, path: str, described: BaseModel, dtype: torch.dtype, device: torch.device
) -> Mapping[str, Tensor]:
    """Return the weights of a model that transformers reads, and its buffers that no file has."""
    from loop_recipes.engine.general_decoder import read_weights  # as above
    from loop_recipes.engine.general_probe import probe

    def read() -> dict[str, Tensor]:
        with raised_as(ConfigError, "model: "):
            weights, buffers = read_weights(path, described, dtype)
        check_shapes(model, weights, path)
        whole = weights | buffers
        with raised_as(ConfigError, "model: "):
            utils.log_rank_zero(log, f"model: {probe(path, described, whole, dtype, device)}")
        return whole

    return FromMainRank(read)


def check_built(model: AnyDecoder, described: BaseModel, config: LearnerConfig) -> None:
    """Compare the model with config.json, which describes the weights and configures the servers.

    Raises:
        ConfigError: something differs. The message names all differences; shapes alone would show few.
    """
    if not isinstance(model, TransformerDecoder):  # transformers built it from that config.json
        keeps = described.attention_layers and model.attention_cap is None
        require(
            keeps or not config.keep_attention,
            f"keep_attention keeps nothing of a {described.model_type}, whose attention goes by blocks of scores for "
            "its cap, or is not there: give keep_attention=False",
        )
        return
    attention, mlp = model.layers[0].attn, model.layers[0].mlp
    built = {
        "layers": len(model.layers),
        "width": attention.embed_dim,
        "feed_forward": mlp.w1.weight.shape[0],
        "heads": attention.num_heads,
        "kv_heads": attention.num_kv_heads,
        "head_width": attention.head_dim,
        "vocabulary": vocabulary(model),
        "tied": isinstance(model.output, TiedLinear),
        "norm_eps": model.layers[0].sa_norm.eps,
    }
    differ = [
        f"{key} {value} ({getattr(described, key)})" for key, value in built.items() if value != getattr(described, key)
    ]
    if not differ and not torch.allclose(
        _turns(attention.pos_embeddings), frequencies(described.rope, attention.head_dim)
    ):
        rope = described.rope
        differ = [f"other rotary positions (base {rope.base:g}, scaling {rope.kind} {dict(rope.scaling)})"]
    if differ:
        raise ConfigError(
            f"model: {_called(config.model)} has {', '.join(differ)} where the config.json in {config.base_model} has "
            "what stands in brackets; make them the same, or give model.path alone"
        )


def _called(component: Mapping[str, Any]) -> str:
    return component.get("path") or component["_component_"]


def _turns(rope: Any) -> Tensor:
    """Return the frequencies of a module of rotary positions, also if the module has no storage."""
    small = deepcopy(rope)
    small.max_seq_len = 1
    with torch.device("cpu"):
        small.rope_init()
    return small.theta


def neighbour_heads(model: AnyDecoder) -> int | None:
    """Return the heads' width if rotary positions pair neighbouring channels; None if halves, as in Hugging Face.

    Raises:
        ConfigError: this model's rotary positions are not known.
    """
    if not isinstance(model, TransformerDecoder):
        return None
    attention = model.layers[0].attn
    with raised_as(ConfigError, "model: "):
        return attention.head_dim if turns_neighbours(attention.pos_embeddings) else None


def check_context(model: AnyDecoder, tokens: int, key: str) -> None:
    """Raise ConfigError if the model takes fewer than ``tokens`` tokens, which ``key`` allows a rollout."""
    if tokens > model.max_seq_len:
        raise ConfigError(f"{key} is {tokens}, more than the model's max_seq_len {model.max_seq_len}")


def check_shared(model: AnyDecoder, sharers: int) -> None:
    """Raise ConfigError if ranks share rows of a model whose layers have a state along the row."""
    if sharers > 1 and not isinstance(model, TransformerDecoder) and model.mixers:
        raise ConfigError(
            f"sequence_parallel is {sharers}, and the layers of a {model.base.model_type} have a state along the row, "
            "which ranks do not hand on: give 1"
        )


def vocabulary(model: AnyDecoder) -> int:
    """Return the number of token ids that the model knows."""
    return model.tok_embeddings.weight.shape[0]


def check_shapes(model: nn.Module, base: Mapping[str, Tensor], where: str) -> None:
    """Compare the base checkpoint's tensors with the model's.

    Raises:
        ConfigError: a tensor is missing, too many or of another shape; the message names the first.
    """
    expected = {name: tensor for name, tensor in model.state_dict().items() if ".lora_" not in name}
    for name, tensor in expected.items():
        if name not in base:
            raise ConfigError(f"checkpoint {where} lacks {name}; are its config.json and its weights of one model?")
        if base[name].shape != tensor.shape:
            raise ConfigError(
                f"checkpoint {where}: {name} is {list(base[name].shape)}, but its config.json says "
                f"{list(tensor.shape)}; are they of one model?"
            )
    for name in base:
        if name not in expected:
            raise ConfigError(f"checkpoint {where} has {name}, which its config.json has no place for")


def lora_scale(model: nn.Module) -> tuple[int, float]:
    """Return rank and alpha of the model's LoRA layers, which are the same in all of them."""
    layer = next(module for module in model.modules() if isinstance(module, LoRALinear))
    return layer.rank, float(layer.alpha)


def check_adapter(model: nn.Module, adapter: Mapping[str, Tensor], alpha: float, what: str) -> None:
    """Compare an adapter's tensors and its scale with the model's LoRA layers.

    Raises:
        ConfigError: a tensor is missing, superfluous or of another shape, or ``alpha`` differs; names ``what``.
    """
    expected = adapter_parameters(model)
    for name in [*expected, *adapter]:
        present, wanted = ("missing" if name not in of else list(of[name].shape) for of in (adapter, expected))
        if present != wanted:
            raise ConfigError(
                f"{what}: {name} is {present}, in the config's model {wanted}; "
                "make lora_rank, lora_attn_modules and apply_lora_to_mlp those it was made with"
            )
    own = lora_scale(model)[1]
    if alpha != own:
        raise ConfigError(f"{what} has lora_alpha {alpha:g}; make model.lora_alpha {alpha:g}, it is {own:g}")


def drops_out(model: nn.Module) -> bool:
    """Return whether a training pass leaves something out at random."""
    return any(
        (isinstance(module, nn.Dropout) and module.p > 0)
        or (isinstance(module, MultiHeadAttention) and module.attn_dropout > 0)
        for module in model.modules()
    )


def share_rope_cache(model: nn.Module) -> None:
    """Make all attention layers of the same head size use one RoPE module, and so one cache."""
    shared: dict[tuple[Any, ...], nn.Module] = {}
    for attention in [module for module in model.modules() if isinstance(module, MultiHeadAttention)]:
        rope = attention.pos_embeddings
        key = (type(rope), rope.dim, rope.max_seq_len, rope.base)
        attention.pos_embeddings = shared.setdefault(key, rope)


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the LoRA weights by their torchtune names, in the model's order, the same on every rank."""
    return {name.replace(CHECKPOINT_WRAPPER, ""): parameter for name, parameter in get_adapter_params(model).items()}


def trained_parameters(model: nn.Module, further: Mapping[str, nn.Module] | None = None) -> dict[str, nn.Parameter]:
    """Return the weights that an optimizer updates: the adapter's and, under ``<name>.*``, those of further modules."""
    modules = (further or {}).items()
    named = {f"{name}.{inner}": p for name, module in modules for inner, p in module.named_parameters()}
    return adapter_parameters(model) | named


def new_adapter(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Make fresh LoRA weights as full float32 CPU tensors: A uniform in +-1/sqrt(in), B zero.

    They are the same on every rank, for any number of ranks.
    """
    generator = torch.Generator().manual_seed(seed)
    fresh = {}
    for name, parameter in adapter_parameters(model).items():
        fresh[name] = torch.zeros(parameter.shape)
        if name.endswith("lora_a.weight"):
            bound = 1.0 / math.sqrt(parameter.shape[1])
            fresh[name].uniform_(-bound, bound, generator=generator)
    return fresh
