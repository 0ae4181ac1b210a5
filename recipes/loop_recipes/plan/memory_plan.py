"""Memory arithmetic for a job before it runs: the memory of a trainer rank and of a vLLM server, by use.

Estimates from shapes, no measurement; the recipe's own stress test measures. All sizes are in GiB (2**30 bytes) unless
stated otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from loop_recipes.config.loop_config import LoopConfig
from model_families.base_model import BaseModel
from rollout_server.config import NodeConfig

if TYPE_CHECKING:  # transformers comes with it
    from loop_recipes.plan.layer_memory import LayerBytes

GIB = 2**30
USABLE = 0.92
"""Share of a GPU's memory that a plan may fill: the rest goes to the CUDA context, NCCL and allocator fragments."""
CACHE = "KV cache"
CONTEXT = "CUDA context, activations and graphs (allowance)"
BUS_GB_S = 25.0
"""10**9 bytes a second between a GPU and pinned memory; about that for PCIe 4.0 x16."""
TRAINER_CONTEXT = 1.0
"""GiB that a trainer's CUDA context and communicators hold of a GPU while its weights are on the host (allowance)."""


@dataclass(frozen=True)
class MemoryPlan:
    """The memory that one GPU needs, by use. ``over`` is the line to print if the memory does not suffice.

    Of ``parts``, ``weights`` GiB are for the model and ``adapters`` GiB for LoRA with its training state.
    ``offloaded`` GiB are in the host's memory.
    """

    title: str
    available: float
    parts: dict[str, float] = field(default_factory=dict)
    over: str | None = None
    notes: tuple[str, ...] = ()
    weights: float = 0.0
    adapters: float = 0.0
    offloaded: float = 0.0

    @property
    def sum(self) -> float:
        return sum(self.parts.values())

    def __str__(self) -> str:
        rows = [f"{self.title} ({self.available:.1f} GiB available)"]
        rows += [f"  {name:<48}{size:8.2f} GiB" for name, size in self.parts.items()]
        rows += [f"  {'sum':<48}{self.sum:8.2f} GiB", *(f"  {note}" for note in self.notes)]
        return "\n".join(rows)


def plan_trainer(
    shape: BaseModel,
    lora_rank: int,
    tokens: int,
    ranks: int,
    gpu_gib: float,
    keep_attention: bool = False,
    sharers: int = 1,
    offloads: bool = False,
    counted: LayerBytes | None = None,
    versions: int = 2,
) -> MemoryPlan:
    """Plan one rank of the trainer at its peak, in the backward pass through a layer, of ``tokens`` at once.

    A single rank holds the bf16 base whole. FSDP2 shards the base of several ranks; it keeps the embedding and the head
    gathered for the whole pass, and the next layer beside the layer at work. An adapter's weight takes four bytes
    (fp32) for itself, its gradient, each of two Adam moments and each of its ``versions``. While servers sample, it
    holds no gradient, but a copy of the weights while another version is read. Activation checkpointing saves each
    layer's input. The layer at work is differentiated with its activations recomputed: at the peak six tensors of the
    feed-forward width (four activations of the MLP and two gradients on their way), six of the model's width and four
    of the keys' width. ``keep_attention`` keeps attention's output and fp32 normalisers, in each layer with attention.
    If several ranks are ``sharers`` of each row, attention exchanges one more tensor of the queries' width. A rank that
    ``offloads`` has two of the layers' inputs on its GPU, one in use and one on its way. ``counted`` is the layer at
    work of a model that transformers builds, in place of these tensors.

    A test compares this with a count on the recipe's own code (tests/support/memory_count.py).
    """
    queries, keys = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    inputs = tokens * shape.width * 2 / GIB  # of one layer
    layer = tokens * (6 * shape.width + 6 * shape.feed_forward + 4 * keys) * 2.0
    if counted is not None:
        layer = tokens * counted.token + counted.block
    if sharers > 1:
        layer += tokens * queries * 2
    base = shape.held_bytes / ranks / GIB
    adapters = shape.adapter_parameters(lora_rank) * 4 * (4 + versions) / ranks / GIB
    gathered = {
        "embedding and head gathered, bf16": shape.outer_parameters * 2 / GIB,
        "layers gathered, bf16": 2 * shape.layer_parameters * 2 / GIB,
    }
    whole = {"a layer's weights made whole, bf16": shape.layer_parameters * 2 / GIB}
    parts = {
        f"base weights, {_stored(shape)}": base,
        f"adapter, gradient, moments, {versions} versions, fp32": adapters,
        **(gathered if ranks > 1 else {}),
        **(whole if ranks == 1 and shape.four_bits is not None else {}),
        "checkpointed inputs of the layers, bf16": inputs * (2 if offloads else shape.layers),
        "one layer recomputed and differentiated, bf16": layer / GIB,
    }
    if keep_attention:
        attention_bytes = shape.heads * (shape.head_width * 2 + 4)
        parts["attention of the layers, bf16"] = len(shape.attention_layers) * tokens * attention_bytes / GIB
    need = sum(parts.values())
    over = None
    if need > gpu_gib * USABLE:
        cures = ["keep_attention: False"] * keep_attention + ["enable_activation_offloading: True"] * (not offloads)
        cure = ", ".join([*cures, "more GPUs"])
        over = (
            f"a trainer rank needs about {need:.0f} GiB of {gpu_gib:.0f}: use {cure}, or a lower "
            "update.micro_batch_tokens or collection.limits.max_context, whose rows sequence_parallel divides"
        )
    title = f"trainer{f', one of {ranks} ranks' if ranks > 1 else ''}, micro-batches of {tokens} tokens"
    title += "" if sharers == 1 else f" a rank, rows of {sharers} ranks"
    notes = () if counted is None else ("the layer is transformers' own PyTorch code; kernels that it finds take less",)
    return MemoryPlan(title, gpu_gib, parts, over, notes, base, adapters, shape.layers * inputs * offloads)


def _stored(shape: BaseModel) -> str:
    return "bf16" if shape.four_bits is None else "bf16 and four bits"


def plan_rank(
    config: LoopConfig, shape: BaseModel, ranks: int, gpu_gib: float, counted: LayerBytes | None = None
) -> MemoryPlan:
    """Plan a rank of the trainer that ``config`` describes, as :func:`plan_trainer` does."""
    sharers = config.sequence_parallel
    tokens = max(-(-config.collection.limits.max_context // sharers), config.update.micro_batch_tokens)
    keeps, offloads = config.keep_attention, config.enable_activation_offloading
    rank = config.model.get("lora_rank", 16)
    versions = 1 + max(1, config.collection.max_policy_lag)  # a stress test holds one more than the newest
    return plan_trainer(shape, rank, tokens, ranks, gpu_gib, keeps, sharers, offloads, counted, versions)


def plan_host(shape: BaseModel, node: NodeConfig | None, trainer: MemoryPlan, ranks: int) -> dict[str, float]:
    """Plan the GiB of host memory that a machine's GPUs need, by use, at the peak of both sides.

    Pinned memory is counted without rounding: both sides tell torch not to round it up to powers of two. A server that
    has slept once keeps its pinned memory. Weights mapped from files are not counted, as their pages can be dropped.

    Args:
        node: the node whose servers are on this machine; None if there are no servers.
        trainer: one of the trainer's ``ranks`` ranks, as :func:`plan_trainer` plans it.
    """
    shares = node is not None and node.servers.share is not None
    later = {
        "the trainer's frozen weights": trainer.weights * ranks * shares,
        "inputs of its layers": trainer.offloaded * ranks,
    }
    if shape.family is None and shape.parameters * 2 / GIB > sum(later.values()):
        later = {"all weights, as transformers reads them": shape.parameters * 2 / GIB}
    if node is not None and shares:
        adapters = node.servers.max_loras * shape.adapter_parameters(node.model.lora_rank) * 2
        later["servers that sleep"] = node.servers.count * (shape.served_bytes + adapters) / GIB
    return {use: size for use, size in later.items() if size}


def plan_rollout_server(shape: BaseModel, node: NodeConfig, gpu_gib: float) -> MemoryPlan:
    """Plan one GPU of one vLLM server: weights as stored and adapter slots over the tensor-parallel GPUs, and the KV
    cache of ``servers.kv_cache_bytes``, else the rest of ``servers.gpu_memory_utilization``."""
    gpus = node.servers.tensor_parallel_size
    weights = shape.served_bytes / gpus / GIB
    adapters = node.servers.max_loras * shape.adapter_parameters(node.model.lora_rank) * 2 / gpus / GIB
    usable = gpu_gib * (node.servers.gpu_memory_utilization or 0.9)
    parts = {
        f"weights, {'bf16 and MXFP4' if shape.mxfp4 else _stored(shape)}": weights,
        "adapters loaded, bf16": adapters,
        CONTEXT: 3.0 if shape.width < 3000 else 4.0,
    }
    if node.servers.kv_cache_bytes is None:
        cache = max(usable - sum(parts.values()), 0.0)
    else:
        cache = node.servers.kv_cache_bytes / GIB
    tokens = int(cache * GIB / (shape.kv_bytes_per_token / min(gpus, shape.kv_heads)))
    over = None
    if tokens < node.model.max_context:
        key = "tensor_parallel_size" if node.servers.kv_cache_bytes is None else "kv_cache_bytes"
        over = (
            f"a vLLM server has room for {tokens} tokens of KV cache, less than one episode of "
            f"{node.model.max_context}: raise servers.{key} or lower model.max_context"
        )
    elif sum(parts.values()) + cache > gpu_gib * 0.97:
        over = (
            f"a vLLM server needs about {sum(parts.values()) + cache:.0f} GiB of {gpu_gib:.0f}: lower "
            "servers.kv_cache_bytes or raise servers.tensor_parallel_size"
        )
    episodes = tokens // node.model.max_context
    notes = (f"KV cache of the server: {tokens:,} tokens, {episodes} full episodes at a time",)
    title = f"vLLM server{f', one of {gpus} GPUs' if gpus > 1 else ''}"
    return MemoryPlan(title, usable, parts | {CACHE: cache}, over, notes, weights, adapters)


class Turns(NamedTuple):
    """Both phases of a GPU on which sampling and training take turns, the server alone, and the seconds for which
    weights travel in each iteration. All numbers are arithmetic."""

    sampling: MemoryPlan
    training: MemoryPlan
    server: MemoryPlan
    swap_s: float


def plan_turns(shape: BaseModel, node: NodeConfig, trainer: MemoryPlan, gpu_gib: float) -> Turns:
    """Plan a GPU that never holds the frozen base twice: it has vLLM's during sampling, the trainer's during training.

    A server that sleeps (level 1) has its weights and adapters in pinned host memory and drops its KV cache; its
    context and graphs stay. A waiting trainer keeps its context and all tensors of the adapter. The trainer's frozen
    weights never change and need no copy out: an iteration moves the server's weights out and in, and the trainer's
    weights only in.

    Args:
        trainer: one rank, as :func:`plan_trainer` plans it.
    """
    server = plan_rollout_server(shape, node, gpu_gib)
    stays = server.parts[CONTEXT]
    asleep, waits = server.weights + server.adapters, TRAINER_CONTEXT + trainer.adapters

    def phase(name: str, side: MemoryPlan, more: dict[str, float], to_lower: str, over: str | None) -> MemoryPlan:
        parts = {**side.parts, **more}
        need, usable = sum(parts.values()), gpu_gib * USABLE
        if over is None and need > usable:
            over = f"{name} needs about {need:.1f} GiB, and {usable:.1f} of {gpu_gib:.1f} GiB can be used: lower "
            over += f"{to_lower}, or take more GPUs"
        return MemoryPlan(f"{name}, in turns (arithmetic)", gpu_gib, parts, over, side.notes)

    sampling = phase("sampling", server, {"trainer that waits": waits}, "servers.kv_cache_bytes", server.over)
    rows = "update.micro_batch_tokens or collection.limits.max_context"
    training = phase("training", trainer, {"vLLM server that sleeps": stays}, rows, None)
    swap_s = (2 * asleep + trainer.weights) * GIB / BUS_GB_S / 1e9
    return Turns(sampling, training, server, swap_s)
