import pytest

from model_families.weights.weight_names import peft_name, tune_name


def test_names_are_mapped_and_strangers_are_refused():
    name = "layers.11.attn.output_proj.lora_a.weight"
    assert peft_name(name) == "base_model.model.model.layers.11.self_attn.o_proj.lora_A.weight"
    for stranger in ("output.lora_a.weight", "layers.1.attn.q_norm.lora_a.weight", "layers.1.attn.q_proj.weight"):
        with pytest.raises(ValueError, match=rf"{stranger} is not a LoRA weight of a decoder layer"):
            peft_name(stranger)
    for name, theirs in {
        "layers.3.attn.q_norm.scale": "model.layers.3.self_attn.q_norm.weight",
        "layers.3.attn.k_proj.bias": "model.layers.3.self_attn.k_proj.bias",
        "layers.3.mlp.w2.weight": "model.layers.3.mlp.down_proj.weight",
        "layers.3.sa_norm.scale": "model.layers.3.input_layernorm.weight",
        "tok_embeddings.weight": "model.embed_tokens.weight",
        "output.weight": "lm_head.weight",
    }.items():
        assert tune_name(theirs) == name
    for stranger in ("model.layers.1.mlp.experts.0.up_proj.weight", "visual.patch.weight"):
        with pytest.raises(ValueError, match=rf"{stranger} is not a weight of a decoder"):
            tune_name(stranger)
