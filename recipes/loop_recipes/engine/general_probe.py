"""Checks that a model which transformers builds is exact here, at the start of a run and in `loop check`.

The first layers, one of each kind at least, are compared in fp32, by their own weights and a random adapter:
transformers with eager attention and the adapter merged, one sequence at a time; this project's decoder one sequence at
a time; and the same in a packed row, in which some sequences go on from another's beginning. Windows, and whatever else
changes at a length, are made so short that sequences end inside and behind them. An error in any of these would
train nonsense in silence.

A run in half precision is then compared in that, on the device that trains, where other kernels may pack rows. The
limit is the model's own rounding: packed rows are at most as far from one sequence at a time as that is from fp32.
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
from loop_recipes.engine.general_attention import ATTENTION_NAME
from loop_recipes.engine.general_decoder import GeneralDecoder, add_lora, built, load_buffers
from loop_recipes.engine.logprobs import TiledLogProbs
from loop_recipes.engine.samples import Sample, made_up
from model_families.base_model import BaseModel

LARGEST_ERROR_NATS = 1e-3
"""Nats; kinds that tests compare have some 1e-6 to 1e-5, and a leak or a wrong mask makes 0.1 and more."""
WINDOW_TOKENS, LORA_RANK = 16, 4
SEQUENCE_TOKENS = (43, 12, 29)
BEGINNING_TOKENS, OWN_TOKENS = 20, (9, 14)
"""Tokens that sequences of one episode have in common, and the tokens of each after them."""


@dataclass(frozen=True)
class Probe:
    """The result of a comparison: the number of layers compared and the largest error of a log-prob in nats.

    In half precision it has two mean differences, too. ``packed`` is between packed rows and one sequence at a time,
    ``rounding`` between one sequence at a time and fp32.
    """

    layers: int
    error: float
    packed: float | None = None
    rounding: float | None = None

    def __str__(self) -> str:
        exactness = (
            f"the model's first {self.layers} layers give log-probs within {self.error:.1e} nats of transformers' own, "
            "packed, with shared beginnings and LoRA"
        )
        if self.packed is None:
            return exactness
        means = f"rounding to half precision moves them by {self.rounding:.1e}, packing by {self.packed:.1e}"
        return f"{exactness}; on average {means}"


def probe(path: str, base: BaseModel, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> Probe:
    """Compare this project's model of ``path`` with transformers': in fp32 on the CPU, in half precision on ``device``.

    Args:
        weights: by the decoder's names, with the buffers that no file has, as :func:`read_weights` gives them.
        dtype, device: the dtype and device of the training.

    Raises:
        ValueError: the model's error is too large (the message names its size), or the model cannot be computed.
    """
    try:
        layers = max(GeneralDecoder(_small(path, base, ATTENTION_NAME), base).kinds()) + 1
        ours = _adapted(path, base, layers)
        filled = _filled(ours, weights)
        merged = {name: tensor for name, tensor in filled.items() if ".lora_" not in name}
        for name in [name for name in filled if name.endswith(".lora_a.weight")]:
            module = name.removesuffix(".lora_a.weight")
            merged[f"{module}.weight"] = (
                merged[f"{module}.weight"] + 2.0 * filled[f"{module}.lora_b.weight"] @ filled[name]
            )
        theirs = _small(path, base, "eager", layers)
        _load(ours, filled, weights)
        head = theirs.get_output_embeddings()
        _load(theirs.get_decoder(), {name.removeprefix("text."): t for name, t in merged.items()}, weights, "text.")
        tied = weights.get("output.weight")
        own = theirs.get_input_embeddings().weight if tied is None else tied
        head.weight = nn.Parameter(cast(Tensor, own).float())
        samples = _samples(base.vocabulary)
        with torch.no_grad():
            expected = _by_transformers(theirs.eval(), samples)
            errors = {
                where: _apart(values, expected) for where, values in _ways(ours, samples, torch.device("cpu")).items()
            }
            for where, error in errors.items():
                if not error.max() <= LARGEST_ERROR_NATS:
                    raise ValueError(
                        f"{path}: log-probs {where} differ from transformers' own by {error.max():.2g} nats, so that "
                        "training would be of another model than is served; models of the kind "
                        f"{base.model_type} cannot be trained here"
                    )
            result = Probe(layers, max(float(error.max()) for error in errors.values()))
            if dtype == torch.float32:
                return result
            rounded = _adapted(path, base, layers)
            _load(rounded, filled, weights, device=device, dtype=dtype)
            packed, rounding = _in_half(path, _ways(rounded, samples, device), expected, dtype)
            return replace(result, packed=packed, rounding=rounding)
    except (ValueError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # an untried architecture may raise any error
        cause = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise ValueError(f"{path}: models of the kind {base.model_type} cannot be computed here ({cause})") from error


def _in_half(path: str, ways: Mapping[str, Tensor], expected: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """Return two mean differences: of packed rows from one sequence at a time, and of the latter from fp32."""
    apart, *packed = ways
    rounding, furthest = _apart(ways[apart], expected), 0.0
    for where in packed:
        moved = float(_apart(ways[where], ways[apart]).mean())
        limit = float(rounding[: len(ways[where])].mean()) + LARGEST_ERROR_NATS
        if not moved <= limit:
            raise ValueError(
                f"{path}: in {str(dtype).removeprefix('torch.')} log-probs {where} are {moved:.2g} nats from those "
                f"{apart} on average, further than these from fp32, {limit:.2g}: packed rows are not to be relied on "
                "here; train in fp32, or with update.packed=False"
            )
        furthest = max(furthest, moved)
    return furthest, float(rounding.mean())


def _by_transformers(theirs: PreTrainedModel, samples: Sequence[Sample]) -> Tensor:
    """Return transformers' log-probs [n] of all tokens but the first of each sequence."""
    logprobs = []
    for sample in samples:
        logits = theirs(input_ids=sample.token_ids[None], use_cache=False).logits[0].float()
        logprobs.append(logits[:-1].log_softmax(-1).gather(1, sample.token_ids[1:, None]).squeeze(1))
    return torch.cat(logprobs)


def _ways(ours: GeneralDecoder, samples: Sequence[Sample], device: torch.device) -> dict[str, Tensor]:
    """Return this project's log-probs [n], computed in each way; a packed row has only the first samples."""

    def by(rows: Sequence[Sequence[Sample]], packed: bool) -> Tensor:
        batches = (collate(row, 0, packed).to(device) for row in rows)
        return torch.cat([ours(**batch.inputs()).logprobs for batch in batches]).float().cpu()

    return {
        "one sequence at a time": by([[sample] for sample in samples], False),
        "in a packed row": by([samples[: len(SEQUENCE_TOKENS)]], True),
        "with shared beginnings": by([samples], True),
    }


def _apart(logprobs: Tensor, expected: Tensor) -> Tensor:
    return (logprobs - expected[: len(logprobs)]).abs()


def _adapted(path: str, base: BaseModel, layers: int) -> GeneralDecoder:
    """Build this project's decoder of the first layers with LoRA and a head, without storage."""
    ours = GeneralDecoder(_small(path, base, ATTENTION_NAME, layers), base)
    with torch.device("meta"):
        add_lora(ours, LORA_RANK, 2.0 * LORA_RANK)
    ours.head = TiledLogProbs()
    return ours


def _samples(words: int) -> list[Sample]:
    """Make independent sequences, then sequences of one episode that begin alike."""
    generator = torch.Generator().manual_seed(0)
    lengths = [*SEQUENCE_TOKENS, *(BEGINNING_TOKENS + own for own in OWN_TOKENS)]
    samples = [made_up(f"probe-{n}", length, words, generator) for n, length in enumerate(lengths)]
    first = samples[len(SEQUENCE_TOKENS)]
    for number in range(len(SEQUENCE_TOKENS), len(samples)):
        ids = torch.cat([first.token_ids[:BEGINNING_TOKENS], samples[number].token_ids[BEGINNING_TOKENS:]])
        samples[number] = replace(samples[number], token_ids=ids, episode_id="probe", segment=number)
    return list(samples)


def _small(path: str, base: BaseModel, attention: str, layers: int | None = None) -> PreTrainedModel:
    """Build transformers' model without storage, in fp32, with short windows and its first ``layers``."""
    with training.set_default_dtype(torch.float32), torch.device("meta"):
        model = built(path, base, attention, WINDOW_TOKENS)
    if layers is not None:
        decoder = model.get_decoder()
        decoder.layers = decoder.layers[:layers]
    return model


def _filled(model: GeneralDecoder, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of the remaining layers, in fp32, and a random adapter whose B is not zero."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, parameter in model.state_dict().items():
        if ".lora_" in name:
            tensors[name] = torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5 * 0.5
        else:
            tensors[name] = _cast(weights[name], torch.float32)
    return tensors


def _load(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    prefix: str = "",
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Load the weights as ``dtype`` into a model without storage, and buffers that no file has without a change."""
    own = {name: _cast(tensors[name], dtype).to(device) for name in model.state_dict()}
    model.load_state_dict(own, assign=True)
    load_buffers(model, own, lambda name: weights[f"{prefix}{name}"].to(device))


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
