"""The decoder of any architecture that transformers builds, with torchtune's LoRA layers and packed rows.

transformers' own modules run as they are and are given three things: an attention function that takes a packed row
document by document (general_attention.py), mixers with a state along the row (short convolutions, Mamba, gated delta
nets) that are called document by document, and how the last hidden state becomes logits. transformers' own packing, by
positions that begin again, leaks from document to document in every hybrid and in gpt-oss (5.19).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Collection
from typing import Any, Self, cast

import torch
import transformers
from torch import Tensor, nn
from torchtune.modules.peft import LoRALinear
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.utils import logging as transformers_logging
from transformers.utils.quantization_config import Mxfp4Config

from loop_recipes.engine.batching import Documents
from loop_recipes.engine.cuda_layers import FoldedLoRALinear
from loop_recipes.engine.delta_rule import takes_bounds, takes_segments, whole_row
from loop_recipes.engine.general_attention import ATTENTION_NAME, packed_row
from loop_recipes.engine.token_outputs import CHECKPOINT_WRAPPER, LogProbModule
from model_families.base_model import BaseModel
from model_families.families.general_model import COMPARED, is_expert

_STATES = ("linear_attention", "conv", "mamba")
"""Values in ``layer_types`` for layers with a state along the row in place of attention."""
_UNREAD_WEIGHTS = ("mtp.", "model.mtp", "rotary_emb.inv_freq")
"""Parts of the names of weights that a folder may hold beside those of the decoder."""
_SWITCH = "original_max_position_embeddings"
_LENGTHS = re.compile(rf".*(window|chunk|block|topk|top_k|floor_scale|{_SWITCH})(_size)?")
"""Names of numbers of tokens in config.json, from which on a sequence is computed otherwise."""


class GeneralDecoder(LogProbModule, nn.Module):
    """A transformers model that answers like :class:`~loop_recipes.engine.decoder.LogProbDecoder`.

    Parameters have the same names as in transformers, below ``text``. Everything but LoRA's dropout stays in evaluation
    mode: the trained policy must equal the served one, and Mamba's fused kernels for training take ``out_proj.weight``
    without its LoRA.

    Args:
        whole: transformers' model, of which the text's decoder and the head are kept.
        base: the description of the model's folder.

    Raises:
        ValueError: the decoder is not a list of layers below an embedding, or the head has a bias.
    """

    def __init__(self, whole: PreTrainedModel, base: BaseModel) -> None:
        super().__init__()
        self.text, self.base = whole.get_decoder(), base
        if not isinstance(getattr(self.text, "layers", None), nn.ModuleList):
            raise ValueError(f"{type(self.text).__name__} keeps its layers elsewhere than decoders that are known here")
        output, embedding = whole.get_output_embeddings(), whole.get_input_embeddings()
        if getattr(output, "bias", None) is not None:
            raise ValueError(f"the head of {type(whole).__name__} has a bias, which is not computed here")
        self.output: nn.Linear | None = None if output.weight is embedding.weight else output
        config = whole.config.get_text_config()
        self.scale = float(getattr(config, "logit_scale", None) or 1.0)  # Cohere
        self.scale /= float(getattr(config, "logits_scaling", None) or 1.0)  # Granite
        self.scale *= float(getattr(config, "lm_head_multiplier", None) or 1.0)  # Falcon-H1
        self.cap = getattr(config, "final_logit_softcapping", None)  # Gemma
        self.attention_cap: float | None = getattr(config, "attn_logit_softcapping", None)
        self.max_seq_len, self.num_heads, self.head_dim = base.positions, base.heads, base.head_width
        convolutions = [name for name, module in self.text.named_modules() if isinstance(module, nn.Conv1d)]
        self.mixers = tuple(dict.fromkeys(name.rpartition(".")[0] for name in convolutions))
        for name in self.mixers:
            takes_segments(self.text.get_submodule(name))
            _by_document(self.text.get_submodule(name))
        for layer in self.layers:
            _takes_documents(layer)
        self.train(False)

    @property
    def layers(self) -> nn.ModuleList:
        return self.text.layers

    @property
    def tok_embeddings(self) -> nn.Embedding:
        return cast(nn.Embedding, self.text.get_input_embeddings())

    @property
    def contexts(self) -> range:
        """The lengths of context at which a server has the same rotary positions; longrope has two sets of these."""
        ropes = _ropes(self.text.config)
        switch = max((rope[_SWITCH] for rope in ropes if rope.get("rope_type") == "longrope"), default=0)
        long = (self.base.context or self.base.positions) > switch
        return range(switch + 1, sys.maxsize) if long else range(1, switch + 1)

    def kinds(self) -> dict[int, int]:
        """Return the number of the first layer of each kind, in order, with the number of layers of that kind."""
        types = getattr(self.text.config, "layer_types", None) or [None] * len(self.layers)
        layers_of_kind: dict[Any, list[int]] = {}
        for number, (kind, layer) in enumerate(zip(types, self.layers, strict=True)):
            inside = frozenset((name, type(module).__name__) for name, module in layer.named_modules())
            layers_of_kind.setdefault((kind, inside), []).append(number)
        return {numbers[0]: len(numbers) for numbers in layers_of_kind.values()}

    def windows(self) -> list[int | None]:
        """Return each attention layer's window in tokens, the present token included; None where it has no window."""
        config = self.text.config
        window = getattr(config, "sliding_window", None)
        types = getattr(config, "layer_types", None)
        if not types:
            return [window] * len(self.layers)
        return [window if kind == "sliding_attention" else None for kind in types if kind not in _STATES]

    @property
    def chooses_experts(self) -> bool:
        """True if routers choose the weights that a token meets."""
        return any(is_expert(name, shape) for name, shape in self.base.weights.items())

    def parameters_of_a_token(self) -> float:
        """Return the number of the layers' weights that a token meets; of experts, only those chosen for it count."""
        config = self.text.config
        chosen = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None)
        met = 0.0
        for name, parameter in self.layers.named_parameters():
            share = chosen / parameter.shape[0] if chosen and is_expert(f"layers.{name}", parameter.shape) else 1.0
            met += parameter.numel() * share
        return met

    def train(self, mode: bool = True) -> Self:
        super().train(False)
        for module in self.modules():
            if isinstance(module, LoRALinear):
                module.train(mode)
        self.training = mode
        return self

    def last_hidden(self, tokens: Tensor, rows: Tensor, input_pos: Tensor | None, mask: Documents | None) -> Tensor:
        options = {} if mask is None else {"documents": mask}
        last = self.text(input_ids=tokens, position_ids=input_pos, use_cache=False, **options).last_hidden_state
        return cast(Tensor, last.flatten(0, 1).index_select(0, rows))

    def output_weight(self) -> Tensor:
        return self.tok_embeddings.weight if self.output is None else self.output.weight

    def peft_name(self, name: str) -> str:
        """Return the name in transformers and servers of, say, ``text.layers.0.mlp.up_proj.lora_a.weight``."""
        inside, _, factor = name.removeprefix("text.").partition(".lora_")
        (module,) = (each for each in self.base.linear_layers if _inside(each) == inside)
        return f"base_model.model.{module}.lora_{factor[0].upper()}.weight"


def _inside(name: str) -> str:
    """Return a module's name below the text's decoder: ``layers.0.mlp`` for ``model.language_model.layers.0.mlp``."""
    return name[name.index("layers.") :]


def _by_document(mixer: nn.Module) -> None:
    """Call a mixer once for each document of a packed row, or only once if the mixer itself separates documents.

    Only the mixer computes a shared beginning again for each document that continues it.
    """
    inner = mixer.forward

    @torch.compiler.disable
    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        documents = packed_row.documents
        if documents is None:
            return inner(hidden_states, *args, **kwargs)
        if documents.part.of > 1:
            raise ValueError(f"ranks cannot share rows of a model with {type(mixer).__name__}: sequence_parallel=1")
        with_beginnings, whole = documents.keys or documents, hidden_states
        if documents.keys is not None:
            whole = documents.keys.take(hidden_states.transpose(0, 1)).transpose(0, 1)
        if takes_bounds(mixer, whole):
            with whole_row(with_beginnings):
                done = inner(whole, *args, **kwargs)
        else:
            done = torch.cat([inner(x, *args, **kwargs) for x in whole.split(list(with_beginnings.lengths), 1)], 1)
        if documents.keys is None:
            return done
        pieces = zip(done.split(list(with_beginnings.lengths), 1), documents.lengths, strict=True)
        return torch.cat([x[:, -own:] for x, own in pieces], 1)

    mixer.forward = forward


def _takes_documents(layer: nn.Module) -> None:
    """Give a layer the documents as an argument, so that its recomputation uses the documents of the same row."""
    inner = layer.forward

    def forward(*args: Any, documents: Documents | None = None, **kwargs: Any) -> Any:
        with packed_row(documents):
            return inner(*args, **kwargs)

    layer.forward = forward


def general_decoder(
    path: str, base: BaseModel, lora_rank: int, lora_alpha: float, lora_dropout: float = 0.0, untried: bool = False
) -> GeneralDecoder:
    """Build the decoder of the model in the folder ``path``, with LoRA on all linear layers where servers take LoRA.

    Args:
        untried: build the model even if no test compares models of its kind.

    Raises:
        ValueError: no test compares models of its kind, or transformers does not know it.
    """
    if base.model_type not in COMPARED and not untried:
        raise ValueError(
            f"{path}: no test compares models of the kind {base.model_type} with transformers' own forward pass; "
            "model.untried=True takes it all the same, if it passes the comparison before the run begins"
        )
    model = GeneralDecoder(built(path, base), base)
    if lost := add_lora(model, lora_rank, lora_alpha, lora_dropout):
        raise ValueError(f"{path}: transformers has no linear layer {min(lost)}, of which the folder holds weights")
    return model


def add_lora(model: GeneralDecoder, rank: int, alpha: float, dropout: float = 0.0) -> set[str]:
    """Put LoRA on all linear layers that can take LoRA. Return the names of the layers that the model lacks."""
    wanted = {_inside(name) for name in model.base.linear_layers}
    for name, module in list(model.text.named_modules()):
        if type(module) is nn.Linear and name in wanted:
            wanted.remove(name)
            sizes = module.in_features, module.out_features
            lora = FoldedLoRALinear(*sizes, rank, alpha, dropout, use_bias=module.bias is not None)
            parent, _, last = name.rpartition(".")
            setattr(model.text.get_submodule(parent), last, lora)
    return wanted


def read_weights(path: str, base: BaseModel, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Read all weights, by the decoder's names, and the buffers that no file has, as CPU tensors.

    transformers reads them: it renames weights, joins those of experts, and turns MXFP4 into bf16, which is exact.

    Raises:
        ValueError: weights are missing, or there are others than the model's.
    """
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # the error raised here has the content of its table
    config = _config(path, base)
    threads = torch.get_num_threads()
    if base.mxfp4:  # the other ranks wait, and torchrun gives each rank one thread
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        options: dict[str, Any] = {"dtype": dtype, "attn_implementation": ATTENTION_NAME, "trust_remote_code": False}
        if base.mxfp4:
            options["quantization_config"] = Mxfp4Config(dequantize=True)
        whole, loading = _auto(config).from_pretrained(path, config=config, output_loading_info=True, **options)
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise ValueError(f"{path}: transformers cannot read the weights: {str(error).splitlines()[0]}") from error
    finally:
        transformers_logging.set_verbosity(before)
        torch.set_num_threads(threads)
    if base.mxfp4:  # transformers leaves these in bf16 whatever dtype it is given
        for parameter in whole.parameters():
            parameter.data = parameter.data.to(dtype)
    strange = [name for name in loading["unexpected_keys"] if not any(text in name for text in _UNREAD_WEIGHTS)]
    problems = {"lacks": loading["missing_keys"], "has no place for": strange, "misfits": loading["mismatched_keys"]}
    for problem, names in problems.items():
        if names:
            name = min(map(str, names))
            raise ValueError(f"{path} {problem} the weight {name}; are config.json and weights of one model?")
    model = GeneralDecoder(whole, base)
    weights = model.state_dict()
    return weights, {name: buffer for name, buffer in model.named_buffers() if name not in weights}


def load_buffers(model: nn.Module, saved: Collection[str], read: Callable[[str], Tensor]) -> None:
    """Load the model's buffers that no file has, that is, those not in ``saved``; ``read`` returns a buffer by name."""
    for name in [name for name, _ in model.named_buffers()]:
        bare = name.replace(CHECKPOINT_WRAPPER, "")
        if bare not in saved:
            parent, _, last = name.rpartition(".")
            model.get_submodule(parent).register_buffer(last, read(bare), persistent=False)


def _config(path: str, base: BaseModel) -> Any:
    try:
        # Else transformers asks at the terminal whether a folder's own code may run, which it may not.
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"transformers {transformers.__version__} does not know a model of this kind, and a folder's own code is "
            "not run; a later transformers may know it"
        ) from error
    for rope in _ropes(config.get_text_config()):
        if rope.get("rope_type") == "longrope":
            # vLLM takes one set of factors for all sequences, by the longest that it serves; transformers takes one
            # anew in each pass, by the longest sequence in it.
            long = (base.context or base.positions) > rope[_SWITCH]
            chosen, other = ("long", "short") if long else ("short", "long")
            rope |= {key.replace(chosen, other): value for key, value in rope.items() if key.startswith(chosen)}
    return config


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Return the modules of rotary positions: one for all layers, or one for each kind of layer."""
    whole = getattr(config, "rope_parameters", None) or {}
    return [rope for rope in (whole, *whole.values()) if isinstance(rope, dict)]


def _auto(config: Any) -> Any:
    return AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModelForImageTextToText


def built(path: str, base: BaseModel, attention: str = ATTENTION_NAME, shortest: int | None = None) -> PreTrainedModel:
    """Build transformers' model without weights, in torch's default precision and on its default device.

    Args:
        attention: the name of the attention in transformers.
        shortest: upper bound of windows, and of other numbers of tokens that change how a sequence is computed.
    """
    config = _config(path, base)
    text = config.get_text_config()
    for values in (vars(text), *_ropes(text)) if shortest is not None else ():
        for key in filter(_LENGTHS.fullmatch, values):
            values[key] = min(values[key], shortest) if type(values[key]) is int else values[key]
    return _auto(config).from_config(config, attn_implementation=attention, dtype=torch.get_default_dtype())
