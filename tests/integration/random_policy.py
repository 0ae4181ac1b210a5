"""A random Qwen2 of a few thousand parameters, PEFT adapters of it, and the reference forward, for tests on real vLLM."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
VOCABULARY = 320


def write_model(folder: Path) -> Path:
    """A Qwen2 of width 64, two layers, two heads of 32 (the least vLLM can do on CPU), fp32, with weights large enough to tell apart."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.15,
        bos_token_id=0,
        eos_token_id=1,
        dtype="float32",
    )
    Qwen2ForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


def write_adapter(model: Path, folder: Path, seed: int, *, rank: int = 8, scale: float = 0.2) -> Path:
    """An adapter with random A and B as peft itself saves it; another ``seed`` gives clearly other log-probs."""
    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS, task_type="CAUSAL_LM")
    wrapped = get_peft_model(Qwen2ForCausalLM.from_pretrained(model), config)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=scale)
    wrapped.save_pretrained(folder)
    return folder


def reference_logprobs(model: Path, adapter: Path | None, token_ids: list[int]) -> list[float]:
    """Log-prob of each of ``token_ids[1:]`` given those before it, by transformers and peft; [s - 1]."""
    policy = Qwen2ForCausalLM.from_pretrained(model)
    if adapter is not None:
        policy = PeftModel.from_pretrained(policy, adapter)
    with torch.no_grad():
        logits = policy(torch.tensor([token_ids])).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist()
