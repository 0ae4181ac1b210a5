"""The architecture of the tiny policy, its look-back start, and its files in Hugging Face's layout.

A Qwen2 model of about one million parameters. With random initialisation alone it does not learn to copy within a few
minutes of training. So its heads start with a rough pattern: layer 0 looks a fixed number of tokens back, through the
query and key biases that Qwen2 has anyway, and layer 1 looks for the same token earlier in the text. Only the initial
numbers are unusual, and training changes all of them.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torchtune.models.qwen2 import qwen2
from torchtune.models.qwen2._convert_weights import qwen2_tune_to_hf
from torchtune.modules import TransformerDecoder

from loop_recipes.warm_start.config import TinyModelConfig


def build(config: TinyModelConfig, vocab_size: int) -> TransformerDecoder:
    """Build a torchtune Qwen2 decoder with tied embeddings; its weights are torchtune's initial ones."""
    numbers = {name: value for name, value in asdict(config).items() if name != "sharpness"}
    return qwen2(vocab_size=vocab_size, **numbers, tie_word_embeddings=True)


EMBEDDING_STD = 0.1
MATCH_GAIN = 2.5
SLOW_FREQUENCY = 1.5e-3


@torch.no_grad()
def initialise(model: TransformerDecoder, config: TinyModelConfig, seed: int) -> None:
    """Draw random weights (0.02; embeddings 0.1, which outlast AdamW's first steps), then set the look-back start."""
    generator = torch.Generator().manual_seed(seed)
    residual_std = 0.02 / math.sqrt(2 * config.num_layers)
    for name, parameter in model.named_parameters():
        if name.startswith("tok_embeddings"):
            parameter.normal_(0.0, EMBEDDING_STD, generator=generator)
        elif parameter.ndim == 2:
            residual = name.endswith(("attn.output_proj.weight", "mlp.w2.weight"))
            parameter.normal_(0.0, residual_std if residual else 0.02, generator=generator)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            parameter.fill_(1.0)
    look_back(model, config, generator)
    match_and_copy(model, config, generator)


@torch.no_grad()
def look_back(model: TransformerDecoder, config: TinyModelConfig, generator: torch.Generator) -> None:
    """Make head ``h`` of layer 0 attend ``h + 1`` tokens back, whatever the tokens are, and write down that token.

    RoPE turns dimension pair ``f`` of a query at position i and a key at position j by i*w_f and j*w_f. With a key bias
    of length a at angle 0 and a query bias of length a at angle -g*w_f, their product is
    ``sum_f a^2 cos(w_f (i - j - g))``, which is largest at i - j = g. ``sharpness`` is a^2 / sqrt(head_dim): one token
    off the gap costs about 0.6 * sharpness in the attention logit. Each head adds its token to the residual stream in a
    subspace of its own, half as long as the token's embedding.
    """
    head_dim = config.head_dim
    half = head_dim // 2
    frequencies = model.layers[0].attn.pos_embeddings.theta
    length = math.sqrt(config.sharpness * math.sqrt(head_dim))
    attention = model.layers[0].attn
    key = attention.k_proj.bias.view(config.num_kv_heads, head_dim)
    query = attention.q_proj.bias.view(config.num_heads, head_dim)
    key[:, :half] = length
    for head in range(config.num_heads):
        angle = -(head + 1) * frequencies
        query[head, :half] = length * angle.cos()
        query[head, half:] = length * angle.sin()
    for weight in (attention.q_proj.weight, attention.k_proj.weight):
        weight.mul_(0.1)
    nn.init.orthogonal_(attention.v_proj.weight, generator=generator)
    nn.init.orthogonal_(attention.output_proj.weight, gain=EMBEDDING_STD, generator=generator)


@torch.no_grad()
def match_and_copy(model: TransformerDecoder, config: TinyModelConfig, generator: torch.Generator) -> None:
    """Make every layer above the first copy the token it attends to, and attend by the tokens before.

    Keys are the outputs of layer 0's heads 0 and 1 (the token one back, the token two back), one of them for each half
    of the heads. The value path is a projection and its transpose, so the attended token is predicted. In layer 1 the
    queries are the present token and the token one back: it finds their last earlier position, and copies the token
    that followed. In the layers above the queries are left random: they learn which words announce a value (``$`` an
    ``amount=``), and with keys and values in place each wrong guess says directly where to look. Only the slow
    dimension pairs of RoPE are used, those that turn little over an episode.
    """
    head_dim, heads, groups = config.head_dim, config.num_heads, config.num_kv_heads
    below = model.layers[0].attn
    slow = (below.pos_embeddings.theta < SLOW_FREQUENCY).nonzero().flatten()
    rows = torch.cat([slow, slow + head_dim // 2])
    outputs = below.output_proj.weight.view(-1, heads, head_dim).permute(1, 2, 0) / EMBEDDING_STD
    present = below.v_proj.weight[: len(rows)]
    one_back, two_back = outputs[0, : len(rows)], outputs[1, : len(rows)]
    for layer in model.layers[1:]:
        attention = layer.attn
        keys = attention.k_proj.weight.view(groups, head_dim, -1)
        values = attention.v_proj.weight.view(groups, head_dim, -1)
        for group, key in enumerate(keys):
            key[rows] = MATCH_GAIN * (one_back if group < groups / 2 else two_back)
        nn.init.orthogonal_(attention.v_proj.weight, generator=generator)
        copied = values.repeat_interleave(heads // groups, dim=0).flatten(0, 1)
        attention.output_proj.weight.copy_(copied.T)
    queries = model.layers[1].attn.q_proj.weight.view(heads, head_dim, -1)
    for head, query in enumerate(queries):
        query[rows] = MATCH_GAIN * (present if head < heads / 2 else one_back)


def hf_config(config: TinyModelConfig, vocab_size: int, pad_id: int, stop_id: int) -> dict[str, object]:
    """Return the content of config.json that transformers and vLLM need to build the same model."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.intermediate_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_base,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_sliding_window": False,
        "use_cache": True,
        "bos_token_id": pad_id,
        "eos_token_id": stop_id,
        "pad_token_id": pad_id,
        "torch_dtype": "bfloat16",
    }


def save(model: TransformerDecoder, config: TinyModelConfig, folder: Path, pad_id: int, stop_id: int) -> None:
    """Write config.json, generation_config.json and model.safetensors (bf16, tied head left out) into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: weight for name, weight in model.state_dict().items() if not name.startswith("output.")}
    weights = {
        name: weight.detach().to(torch.bfloat16).contiguous() for name, weight in qwen2_tune_to_hf(state).items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    generation = {"bos_token_id": pad_id, "eos_token_id": [stop_id, pad_id], "pad_token_id": pad_id, "do_sample": True}
    for name, content in (
        ("config.json", hf_config(config, model.tok_embeddings.num_embeddings, pad_id, stop_id)),
        ("generation_config.json", generation),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
