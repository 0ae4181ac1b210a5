"""One comparison of a model as the learner trains it with transformers and PEFT, sequence by sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from loop_recipes.engine.batching import collate_step
from loop_recipes.engine.decoder import attach_head
from loop_recipes.engine.general_decoder import GeneralDecoder, general_decoder, read_weights
from loop_recipes.engine.logprobs import TiledLogProbs
from loop_recipes.engine.model import new_adapter
from loop_recipes.engine.peft_export import export_adapter
from loop_recipes.engine.samples import ScoredSample
from loop_recipes.engine.sharding import place_model
from loop_recipes.engine.token_outputs import CHECKPOINT_WRAPPER
from model_families.base_model import BaseModel
from support.learner_cases import make_episodes, make_samples

LENGTHS = [90, 37, 2, 23, 26]
"""Tokens of sequences, some of them longer than the windows of the tiny models, some shorter."""


def adapted(folder: Path, seed: int = 1, context: int | None = None, **options: object) -> GeneralDecoder:
    """The model in ``folder`` with a random adapter, on the CPU, as with servers of ``context`` tokens."""
    base = replace(BaseModel.read(folder, general=True), context=context)
    with torch.device("meta"):
        model = general_decoder(str(folder), base, lora_rank=4, lora_alpha=8)
    return placed(model, folder, seed, **options)


def placed(model: GeneralDecoder, folder: Path, seed: int = 1, **options: object) -> GeneralDecoder:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    weights, buffers = read_weights(str(folder), model.base, torch.float32)
    decoder = attach_head(model, TiledLogProbs(16, 32))
    return place_model(
        decoder, weights | buffers, random_adapter(model, seed), torch.device("cpu"), torch.float32, **options
    )


def random_adapter(model: GeneralDecoder, seed: int) -> dict[str, Tensor]:
    """LoRA weights of which B is not zero."""
    generator = torch.Generator().manual_seed(seed)
    fresh = new_adapter(model, seed)
    return {
        name: tensor if ".lora_a." in name else torch.randn(tensor.shape, generator=generator) * 0.2
        for name, tensor in fresh.items()
    }


def samples_of(shared: bool = False) -> list[ScoredSample]:
    """Sequences that begin differently, or those of episodes that begin alike."""
    return make_episodes([3, 2]) if shared else make_samples(LENGTHS)


@dataclass(frozen=True)
class Answer:
    """Log-probs of the sampled tokens, and the gradient of their weighted sum by each weight of the adapter."""

    logprobs: Tensor
    gradients: dict[str, Tensor]

    def error(self, other: Answer) -> tuple[float, float]:
        """The largest difference of log-probs, and that of gradients in parts of the largest."""
        scale = max(float(g.abs().max()) for g in other.gradients.values())
        assert set(self.gradients) == set(other.gradients)
        worst = max(float((g - other.gradients[name]).abs().max()) for name, g in self.gradients.items())
        return float((self.logprobs - other.logprobs).abs().max()), worst / scale


def ours(model: GeneralDecoder, samples: list[ScoredSample], packed: bool) -> Answer:
    """By the learner's model, in one micro-batch."""
    model.zero_grad()
    batch = collate_step(samples, 0, packed)
    outputs = model(**batch.inputs())
    (outputs.logprobs * batch.old_logprobs).sum().backward()
    trained = {n.replace(CHECKPOINT_WRAPPER, ""): p.grad for n, p in model.named_parameters() if p.grad is not None}
    gradients = {model.peft_name(name): gradient.clone() for name, gradient in trained.items()}
    return Answer(outputs.logprobs.detach(), gradients)


def theirs(folder: Path, adapter: Path, samples: list[ScoredSample]) -> Answer:
    """By transformers' eager attention and PEFT, one sequence at a time."""
    config = AutoConfig.from_pretrained(folder)
    auto = AutoModelForImageTextToText if hasattr(config, "text_config") else AutoModelForCausalLM
    base = auto.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    model = PeftModel.from_pretrained(base, adapter, is_trainable=True).eval()
    found = []
    for sample in samples:
        logits = model(input_ids=sample.token_ids[None], use_cache=False).logits[0].float()
        places = sample.mask.nonzero().flatten()
        chosen = logits[places - 1].log_softmax(-1).gather(1, sample.token_ids[places][:, None]).squeeze(1)
        (chosen * sample.old_logprobs).sum().backward()
        found.append(chosen.detach())
    gradients = {n.replace(".default.", "."): p.grad for n, p in model.named_parameters() if p.grad is not None}
    return Answer(torch.cat(found), gradients)


def exported(model: GeneralDecoder, folder: Path, base: Path) -> Path:
    """The model's adapter as a node gets it."""
    adapter = {n: p.detach().clone() for n, p in model.named_parameters() if ".lora_" in n}
    return export_adapter(adapter, model, folder, base_model=str(base), base_digest=None, dtype=torch.float32)
