"""Names of a decoder's weights in torchtune, in Hugging Face's files, and in PEFT's adapters."""

from __future__ import annotations

import re

# torchtune's module inside `layers.{i}.` -> Hugging Face's inside `model.layers.{i}.`
_MODULES = {
    "attn.q_proj": "self_attn.q_proj",
    "attn.k_proj": "self_attn.k_proj",
    "attn.v_proj": "self_attn.v_proj",
    "attn.output_proj": "self_attn.o_proj",
    "mlp.w1": "mlp.gate_proj",
    "mlp.w2": "mlp.down_proj",
    "mlp.w3": "mlp.up_proj",
}
_NORMS = {
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "sa_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_OUTER = {EMBEDDING: "tok_embeddings.weight", "model.norm.weight": "norm.scale", HEAD: "output.weight"}
PACKED, SCALE, ZERO_POINT, SHAPE = "weight_packed", "weight_scale", "weight_zero_point", "weight_shape"
"""Names of the tensors that store a weight of four bits."""
PACKED_TYPES = {PACKED: "I32", ZERO_POINT: "I32", SHAPE: "I64"}
NUMBERS_IN = {PACKED: 8, SCALE: 0, ZERO_POINT: 0}
"""Numbers of the weight in each number of the tensor."""
_KINDS = ("weight", "bias", PACKED, SCALE, ZERO_POINT)
_IN_LAYER = {f"{theirs}.{kind}": f"{ours}.{kind}" for ours, theirs in _MODULES.items() for kind in _KINDS}
_IN_LAYER |= {f"{theirs}.weight": f"{ours}.scale" for ours, theirs in _NORMS.items()}
_LORA = {
    f"{ours}.lora_{matrix}.weight": f"{theirs}.lora_{matrix.upper()}.weight"
    for ours, theirs in _MODULES.items()
    for matrix in "ab"
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


def tune_name(name: str) -> str:
    """Rename ``model.layers.0.self_attn.q_norm.weight`` to ``layers.0.attn.q_norm.scale``."""
    return _OUTER.get(name) or _renamed(name, "model.", _IN_LAYER, "weight of a decoder")


def peft_name(name: str) -> str:
    """``layers.0.attn.q_proj.lora_a.weight`` -> ``base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight``."""
    return "base_model.model.model." + _renamed(name, "", _LORA, "LoRA weight of a decoder layer")


def _renamed(name: str, prefix: str, names: dict[str, str], kind: str) -> str:
    """Return ``name`` without its leading ``prefix``, and with the part inside a layer renamed.

    Raises:
        ValueError: the name is not one of ``names``.
    """
    match = _LAYER.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
    if match is None or match[2] not in names:
        raise ValueError(f"{name} is not a {kind}")
    return f"layers.{match[1]}.{names[match[2]]}"
