"""The first look at a model that transformers builds: is it exact here? At the start of a run, and by `loop check`.

The first layers, one of each kind at least, are compared in fp32, by their own weights and a random adapter:
transformers with eager attention and the adapter merged, one sequence at a time; this project's decoder one sequence at
a time; and the same in a packed row, in which some sequences go on from another's beginning. Windows are made so short
that sequences end inside and behind them. What is wrong in any of these would train nonsense without a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn
from torchtune import training
from transformers import PreTrainedModel

from loop_recipes.engine.batching import collate
from loop_recipes.engine.general_attention import NAME
from loop_recipes.engine.general_decoder import GeneralDecoder, add_lora, built, load_buffers
from loop_recipes.engine.logprobs import TiledLogProbs
from loop_recipes.engine.samples import Sample, made_up
from model_families.base_model import BaseModel

LARGEST_ERROR = 1e-3
"""Nats; of the kinds that tests compare it is some 1e-6 to 1e-5, and a leak or a wrong mask is 0.1 and more."""
WINDOW, RANK = 16, 4
LENGTHS = (43, 12, 29)
BEGINNING, OWN = 20, (9, 14)
"""Tokens that sequences of one episode have in common, and those that each has after them."""


@dataclass(frozen=True)
class Probe:
    """What was found: the layers that were compared and the largest error of a log-prob in nats."""

    layers: int
    error: float

    def __str__(self) -> str:
        return (
            f"the model's first {self.layers} layers give log-probs within {self.error:.1e} nats of transformers' own, "
            "packed, with shared beginnings and LoRA"
        )


def probe(path: str, base: BaseModel, weights: Mapping[str, Tensor], device: torch.device) -> Probe:
    """Compare the model in the folder ``path``.

    Args:
        weights: by the decoder's names, its buffers of no file among them, as :func:`read_weights` gives them.

    Raises:
        ValueError: names what is not exact, and by how much.
    """
    layers = GeneralDecoder(_small(path, NAME), base).first_of_each_kind()[-1] + 1
    ours = GeneralDecoder(_small(path, NAME, layers), base)
    with torch.device("meta"):
        add_lora(ours, RANK, 2.0 * RANK)
    filled = _filled(ours, weights)
    merged = {name: tensor for name, tensor in filled.items() if ".lora_" not in name}
    for name in [name for name in filled if name.endswith(".lora_a.weight")]:
        module = name.removesuffix(".lora_a.weight")
        merged[f"{module}.weight"] = merged[f"{module}.weight"] + 2.0 * filled[f"{module}.lora_b.weight"] @ filled[name]
    theirs = _small(path, "eager", layers)
    _load(ours, filled, weights, device)
    head = theirs.get_output_embeddings()
    _load(theirs.get_decoder(), {name.removeprefix("text."): t for name, t in merged.items()}, weights, device, "text.")
    tied = weights.get("output.weight")
    own = theirs.get_input_embeddings().weight if tied is None else tied.to(device)
    head.weight = nn.Parameter(cast(Tensor, own).float())
    ours.head = TiledLogProbs()
    with torch.no_grad():
        return Probe(layers, _compared(path, ours, theirs.eval(), base, device))


def _compared(path: str, ours: GeneralDecoder, theirs: PreTrainedModel, base: BaseModel, device: torch.device) -> float:
    samples = _samples(base.vocabulary)
    reference = []
    for sample in samples:
        logits = theirs(input_ids=sample.token_ids[None].to(device), use_cache=False).logits[0].float()
        reference.append(logits[:-1].log_softmax(-1).gather(1, sample.token_ids[1:, None].to(device)).squeeze(1))

    def by(rows: Sequence[Sequence[Sample]], packed: bool) -> Tensor:
        batches = (collate(row, 0, packed).to(device) for row in rows)
        return torch.cat([ours(**batch.inputs()).logprobs for batch in batches])

    expected = torch.cat(reference)
    apart = [[sample] for sample in samples]
    errors = {
        "one sequence at a time": _error(by(apart, False), expected),
        "in a packed row": _error(by([samples[: len(LENGTHS)]], True), expected[: sum(LENGTHS) - len(LENGTHS)]),
        "with shared beginnings": _error(by([samples], True), expected),
    }
    for where, error in errors.items():
        if not error <= LARGEST_ERROR:
            raise ValueError(
                f"{path}: log-probs {where} differ from transformers' own by {error:.2g} nats, so that training would "
                f"be of another model than is served; models of the kind {base.model_type} cannot be trained here"
            )
    return max(errors.values())


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max())


def _samples(words: int) -> list[Sample]:
    """Sequences of their own, then those of an episode that begin alike."""
    generator = torch.Generator().manual_seed(0)
    lengths = [*LENGTHS, *(BEGINNING + own for own in OWN)]
    samples = [made_up(f"probe-{n}", length, words, generator) for n, length in enumerate(lengths)]
    first = samples[len(LENGTHS)]
    for number in range(len(LENGTHS), len(samples)):
        ids = torch.cat([first.token_ids[:BEGINNING], samples[number].token_ids[BEGINNING:]])
        samples[number] = replace(samples[number], token_ids=ids, episode_id="probe", segment=number)
    return list(samples)


def _small(path: str, attention: str, layers: int | None = None) -> PreTrainedModel:
    """transformers' model without storage, in fp32, with short windows and its first ``layers``."""
    with training.set_default_dtype(torch.float32), torch.device("meta"):
        model = built(path, attention, {"sliding_window": WINDOW})
    if layers is not None:
        decoder = model.get_decoder()
        decoder.layers = decoder.layers[:layers]
    return model


def _filled(model: GeneralDecoder, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of the layers that are left, in fp32, and a random adapter of which B is not zero."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, parameter in model.state_dict().items():
        if ".lora_" in name:
            found[name] = torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5 * 0.5
        else:
            found[name] = weights[name].float() if weights[name].is_floating_point() else weights[name]
    return found


def _load(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    device: torch.device,
    prefix: str = "",
) -> None:
    """Give a model of no storage these weights, and the buffers that are in no file."""
    own = {name: tensors[name].to(device) for name in model.state_dict()}
    model.load_state_dict(own, assign=True)
    load_buffers(model, own, lambda name: weights[f"{prefix}{name}"].to(device))
