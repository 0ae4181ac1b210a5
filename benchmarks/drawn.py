"""Models of published shapes with random weights, the recipe's learner on them, and what must be refused.

Shared by the benchmarks. Weights are normal with a standard deviation of 0.02, norms are 1: vLLM's own random weights
are so small that all log-probs are -ln V, whatever it computes with. Everything else is the config's own.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

# The root and recipes/ too, because folders of tests/ are called like packages and hide those that are installed.
sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "recipes", "tests"))

from omegaconf import DictConfig

from loop_recipes.algorithm.learner import Learner
from loop_recipes.algorithm.method import build_method
from loop_recipes.config.files import compose
from loop_recipes.config.loop_config import LoopConfig
from loop_recipes.engine.cuda_layers import RotatedHeads
from loop_recipes.engine.general_decoder import GeneralDecoder, general_decoder
from loop_recipes.engine.model import DTYPES, load_base, vocabulary
from loop_recipes.engine.process_group import destroy_process_group, init_process_group
from loop_recipes.engine.samples import Sample
from loop_recipes.engine.samples import made_up as all_sampled
from loop_recipes.engine.sharding import local_part
from loop_recipes.plan.published_folder import stored_shapes, write_header
from model_families.base_model import BaseModel
from model_families.weights.published import published_config
from rollout_server.policies.canary import Canary
from support.small_runs import random_adapter

STD = 0.02
SCALE_BYTE = 120
"""The exponent of MXFP4 whose numbers have about that standard deviation."""
TOLERANCE = 0.1
"""Nats between two ways to compute the same in half precision; without the adapter log-probs are further away."""
MAX_WRITTEN_BYTES = 16 << 30
"""Bytes of the weights of a model that no server needs; larger ones are drawn on the device alone."""
LENGTHS = (300, 120, 61)
"""Tokens of the sequences that are proven; all fit into one micro-batch."""
TINY: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 400,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 128,
}
"""Keys of a config.json that are smaller on a CPU."""
ON_A_CPU = (
    "device=cpu",
    "node.model.dtype=float32",
    "node.servers.gpus=null",
    "node.servers.gpu_memory_utilization=null",
    "node.servers.kv_cache_bytes=134217728",
    "node.servers.max_num_seqs=8",
)
"""Words that have a config for GPUs run on a CPU, with a tiny model."""
# Both rollouts at once, which a number says: by null their one step would need no old log-probs.
FOR_UPDATES = (
    "node.servers.share=null",
    "metric_logger=[]",
    "tracker=[]",
    "update.token_statistics=False",
    "update.epochs=1",
    "update.minibatch_rollouts=2",
    f"output_dir={tempfile.gettempdir()}/loop-drawn-{os.getuid()}/run",
)
"""Words of a learner that no node serves, one of whose steps takes both rollouts of :func:`made_up`."""


def refused(what: str, objection: str | None) -> None:
    """Check that a wrong case was objected to.

    Raises:
        SystemExit: it was not, so that the right case proves nothing.
    """
    if objection is None:
        raise SystemExit(f"control: {what} was not refused, so that nothing is proven")
    print(f"control: {what}: refused, {objection}", file=sys.stderr, flush=True)


@torch.no_grad()
def draw(name: str, values: Tensor) -> None:
    """Fill a weight of this name with random numbers; of MXFP4 each byte is two."""
    if name.endswith("_blocks"):
        values.random_(0, 256)
    elif name.endswith("_scales"):
        values.fill_(SCALE_BYTE)
    elif "norm" in name:
        values.fill_(1.0)
    else:
        values.normal_(std=STD)


def shape_of(path: str, layers: int | None, tiny: bool) -> dict[str, Any]:
    """Read the config.json of a model, published or there, of its first ``layers`` if given, perhaps tiny."""
    file = Path(path) / "config.json"
    if not file.is_file() and published_config(path) is None:
        raise SystemExit(f"{path} is not there, and no published model of that name is known here")
    config = json.loads(file.read_text() if file.is_file() else json.dumps(published_config(path)))
    for section in [config, *(value for value in config.values() if isinstance(value, dict))]:
        changes = {key: value for key, value in TINY.items() if tiny and key in section}
        if layers is not None and "num_hidden_layers" in section:
            changes["num_hidden_layers"] = layers
        section.update(changes)
        if "layer_types" in section:
            section["layer_types"] = section["layer_types"][: section["num_hidden_layers"]]
    return config


def drawn_folder(path: str, layers: int | None, tiny: bool, served: bool) -> str:
    """Return a model's folder: ``path`` if it is there whole, else one of its shape, kept for the next time.

    Args:
        served: it has weights, however large they are.
    """
    if (Path(path) / "config.json").is_file() and layers is None:
        return path
    config = json.dumps(shape_of(path, layers, tiny))
    home = Path(tempfile.gettempdir()) / f"loop-drawn-{os.getuid()}"
    place = home / f"{Path(path).name}-{layers or 'all'}{'-tiny' * tiny}{'-served' * served}"
    if not (place / "config.json").is_file() or (place / "config.json").read_text() != config:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as name:
            (Path(name) / "config.json").write_text(config)
            shapes = stored_shapes(Path(name))
        file = place / "model.safetensors"
        write_header(file, shapes)
        if served or file.stat().st_size <= MAX_WRITTEN_BYTES:
            _fill(file, shapes)
        (place / "config.json").write_text(config)  # last: a whole folder has it
    return str(place)


def _fill(file: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Write all weights behind the header, in its order."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with file.open("r+b") as target:
        target.seek(8 + int.from_bytes(target.read(8), "little"))
        for name, shape in shapes.items():
            packed = name.endswith(("_blocks", "_scales"))
            values = torch.empty(shape, dtype=torch.uint8 if packed else torch.bfloat16, device=device)
            draw(name, values)
            values.cpu().view(torch.uint8).numpy().tofile(target)
    if device == "cuda":
        torch.cuda.empty_cache()  # a server wants it free


def composed(
    config: str, words: Sequence[str], layers: int | None = None, tiny: bool = False, served: bool = False
) -> DictConfig:
    """Compose a config with ``words``, whose model is drawn where it is not there; tiny, it is for a CPU."""
    words = [*(ON_A_CPU if tiny else ()), *words]
    path = compose(config, words).model["path"]
    return compose(config, [*words, f"model.path={drawn_folder(path, layers, tiny, served)}"])


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Open a process group of this process alone."""
    init_process_group(device, 600.0)
    try:
        yield
    finally:
        destroy_process_group()


def learner(conf: LoopConfig) -> Learner:
    """Build the recipe's learner as it begins a run of a config that was composed with :data:`FOR_UPDATES`; weights
    that are zeros, as no file has them, are drawn on the device."""
    own = Learner(
        conf, *load_base(conf, DTYPES[conf.dtype]), torch.device(conf.device), None, method=build_method(conf)
    )
    torch.manual_seed(conf.seed)
    for name, parameter in own.model.named_parameters():
        values = local_part(parameter.detach())
        if not parameter.requires_grad and not values.any():
            draw(name, values)
    return own


def made_up(tokens: int, known: int) -> list[Sample]:
    """Make two rollouts of ``tokens``, every fourth token sampled, one of them solved."""
    generator = torch.Generator().manual_seed(tokens)
    mask = torch.arange(tokens) % 4 == 3
    sampled = int(mask.sum())
    return [
        Sample(
            rollout_id=f"rollout-{number}",
            task_id="task",
            token_ids=torch.randint(known, (tokens,), generator=generator),
            mask=mask,
            turn_ids=torch.where(mask, torch.arange(tokens) // 400, -1),
            sampler_logprobs=torch.zeros(sampled),
            policy_versions=torch.zeros(sampled, dtype=torch.long),
            reward=float(number),
        )
        for number in range(2)
    ]


def judge_of(logprobs: list[float], tolerance: float, mean_tolerance: float | None = None) -> Canary:
    """Return a canary of these log-probs; the tokens that they are of are made up, and nobody is asked for them."""
    made_up_ids = list(range(len(logprobs) + 1))
    return Canary(made_up_ids, made_up_ids[1:], logprobs, tolerance, mean_tolerance)


def packing_gap(own: Learner) -> float:
    """Mean difference in nats between sequences in one row and one at a time, under a random adapter.

    It must be small, and the same row without the adapter must be refused.

    Raises:
        SystemExit: one of them is not so.
    """
    generator, known = torch.Generator().manual_seed(0), vocabulary(own.model)
    samples = [all_sampled(f"of {length} tokens", length, known, generator) for length in LENGTHS]
    own.versions.put(1, random_adapter(own.versions.full(0), seed=1))

    def flat(rows: Sequence[Sequence[Sample]], version: int) -> list[float]:
        logprobs = [own.update.scorer.logprobs(row, version) for row in rows]
        return torch.cat(
            [of_row[sample.rollout_id] for of_row, row in zip(logprobs, rows, strict=True) for sample in row]
        ).tolist()

    alone, packed, without = flat([[s] for s in samples], 1), flat([samples], 1), flat([samples], 0)
    own.versions.forget(1)
    judge = judge_of(alone, TOLERANCE)
    if objection := judge.objection(packed):
        raise SystemExit(f"a packed row {objection.replace('trainer', 'same model')}, one sequence at a time")
    refused("the row without its adapter", judge.objection(without))
    return float((torch.tensor(packed) - torch.tensor(alone)).abs().mean())


def general_model(
    path: str,
    lora_rank: int,
    lora_alpha: float,
    lora_attn_modules: Sequence[str] = (),
    apply_lora_to_mlp: bool = True,
) -> GeneralDecoder:
    """Build by transformers' modules what torchtune's build of the folder ``path``, with :func:`fused` steps; a
    builder for ``model._component_``."""
    return fused(general_decoder(path, BaseModel.read(path, general=True), lora_rank, lora_alpha))


def fused(model: GeneralDecoder) -> GeneralDecoder:
    """Give transformers' modules of a Qwen2 or Qwen3 the norms and rotary steps of ``cuda_layers``."""
    for module in model.text.modules():
        kind = type(module).__name__
        if kind in ("Qwen2RMSNorm", "Qwen3RMSNorm"):
            module.forward = MethodType(_norm, module)
        elif kind in ("Qwen2Attention", "Qwen3Attention"):
            own = cast(FunctionType, type(module).forward)
            known = {**own.__globals__, "apply_rotary_pos_emb": _rotated}
            module.forward = MethodType(FunctionType(own.__code__, known, argdefs=own.__defaults__), module)
    return model


def _norm(module: Any, hidden: Tensor) -> Tensor:
    return F.rms_norm(hidden, module.weight.shape, module.weight, module.variance_epsilon)


def _rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate heads [b, heads, s, width], by ``cos`` and ``sin`` [b, s, width]."""
    first, second = sin.chunk(2, dim=-1)
    turns = cos.unsqueeze(1), torch.cat((-first, second), dim=-1).unsqueeze(1)
    return cast(Tensor, RotatedHeads.apply(q, *turns)), cast(Tensor, RotatedHeads.apply(k, *turns))
