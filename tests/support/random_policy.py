"""Random small Qwen2 policies, LoRA adapters and reference log-probs, for tests and benchmarks that need real files."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from model_families.base_model import BaseModel
from model_families.families.family import FAMILIES

# Heads of 32: vLLM on CPU knows no smaller ones.
WIDTH, LAYERS, HEADS, KV_HEADS, FEED_FORWARD = 64, 2, 2, 1, 128
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHATML = (Path(__file__).parent / "chat_templates" / "chatml.jinja").read_text(encoding="utf-8")
MODEL_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": WIDTH,
    "intermediate_size": FEED_FORWARD,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": 300,
}
"""What :func:`write_model`'s config.json says of the shapes, for tests that need no weights."""
OURS = BaseModel.of_family(MODEL_CONFIG, FAMILIES["Qwen2ForCausalLM"])


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE with Qwen2's splitting and ChatML's special tokens, trained on a few lines."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(WORDS, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = ["system user assistant add the numbers counter done\n```python\nprint(apis.counter.add(3))\n```\n"] * 50
    tokenizer.train_from_iterator(corpus, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHATML,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 4096,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_model(folder: Path, seed: int = 0, tied: bool = True, positions: int = 4096) -> None:
    """A random Qwen2 of about 0.1M parameters in fp32, with its tokenizer, as a Hugging Face folder."""
    from transformers import Qwen2Config, Qwen2ForCausalLM  # seconds, which most tests that import this do without

    write_tokenizer(folder)
    torch.manual_seed(seed)
    vocab_size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size(with_added_tokens=True)
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=WIDTH,
        intermediate_size=FEED_FORWARD,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=positions,
        tie_word_embeddings=tied,
        initializer_range=0.1,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)


def write_adapter(
    folder: Path, seed: int, rank: int = 8, scale: float = 0.2, base: str = "base", model: Path | None = None
) -> None:
    """A random LoRA adapter in PEFT's format for the policy in ``model``; ``scale`` 0 gives B = 0."""
    generator = torch.Generator().manual_seed(seed)
    described = BaseModel.read(model) if model is not None else OURS
    shapes = described.adapter_shapes(described.lora_modules, rank)
    tensors = {
        name: torch.randn(shape, generator=generator) * (0.2 if ".lora_A." in name else scale)
        for name, shape in shapes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted(described.lora_modules),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


def reference_logprobs(model_folder: Path, adapter_folder: Path | None, token_ids: list[int]) -> list[float]:
    """Log-prob of each token given those before it, [s] (0.0 for the first), by transformers and plain matrix sums."""
    return token_logprobs(reference_model(model_folder, adapter_folder), token_ids)


def reference_model(model_folder: Path, adapter_folder: Path | None) -> torch.nn.Module:
    """transformers' model in fp32, with the adapter added to its weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    if adapter_folder is not None:
        from safetensors.torch import load_file

        config = json.loads((adapter_folder / "adapter_config.json").read_text())
        tensors = load_file(str(adapter_folder / "adapter_model.safetensors"))
        parameters = dict(model.named_parameters())
        for key in [name for name in tensors if name.endswith("lora_A.weight")]:
            target = parameters[key.removeprefix("base_model.model.").replace("lora_A.weight", "weight")]
            delta = tensors[key.replace("lora_A", "lora_B")].float() @ tensors[key].float()
            target.data += delta * (config["lora_alpha"] / config["r"])
    return model


def token_logprobs(model: torch.nn.Module, token_ids: list[int]) -> list[float]:
    """As :func:`reference_logprobs`, of a model that is loaded."""
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0].float()
    chosen = logits[:-1].log_softmax(-1).gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]
    return [0.0, *chosen.tolist()]
