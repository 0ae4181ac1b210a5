"""Time arithmetic for a job before it runs: FLOPs and bytes of an iteration, and bytes that decoding reads, on a card.

Estimates from shapes and data sheets, no measurement: they say which of two configs is faster, and about how much.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from loop_recipes.config.loop_config import LoopConfig
from loop_recipes.plan.layer_memory import LayerBytes
from loop_recipes.plan.memory_plan import CACHE, GIB, MemoryPlan
from model_families.base_model import BaseModel
from rollout_server.config import NodeConfig


class Gpu(NamedTuple):
    """A GPU by its data sheet: GiB, dense FLOPs in bf16 summed in fp32 a second, and bytes of its memory a second."""

    name: str
    gib: float
    flops: float
    bytes: float


H100 = Gpu("H100", 80, 989e12, 3.35e12)
CARDS = (
    Gpu("RTX 4090", 24, 165e12, 1.01e12),
    Gpu("RTX 5090", 32, 210e12, 1.79e12),
    Gpu("A100 of 40 GB", 40, 312e12, 1.56e12),
    Gpu("L40S", 48, 362e12, 0.86e12),
    H100,
    Gpu("H200", 141, 989e12, 4.8e12),
    Gpu("B200", 180, 2250e12, 8.0e12),
)
USED = 0.28
"""Share of an H100's FLOPs that an update uses, without recomputation: measured 20 to 31% (benchmarks/results)."""


def card_of(gpu_gib: float) -> Gpu:
    """Return the card whose memory is nearest to ``gpu_gib``. It is a guess, as several cards have equal memory."""
    return min(CARDS, key=lambda card: abs(math.log(card.gib / gpu_gib)))


class UpdateWork(NamedTuple):
    """The work of all ranks in an update: ``flops`` and, if layers run transformers' code, ``moved``, the sum of the
    bytes that each operator reads and writes."""

    flops: float
    moved: float

    def seconds(self, card: Gpu, ranks: int) -> float:
        """Return the seconds for the FLOPs or for the moved bytes, whichever take longer."""
        return max(self.flops / USED / card.flops, self.moved / card.bytes) / ranks


def update_work(config: LoopConfig, flops: float, counted: LayerBytes | None) -> UpdateWork:
    """Return the work of an update in which all rollouts have the largest length: for each epoch a forward pass and a
    backward pass, which computes layers again, and one forward pass for the old log-probs.

    Args:
        flops: the FLOPs of both passes over the longest rollout.
        counted: None for a model of torchtune's modules, whose share of FLOPs was measured.
    """
    rollouts = config.collection.tasks_per_iteration * config.collection.rollouts_per_task
    epochs, again = config.update.epochs, config.enable_activation_checkpointing / 3
    moved = 0.0 if counted is None else counted.moved * config.longest_rollout
    return UpdateWork(rollouts * (epochs + 1 / 3) * flops, rollouts * (epochs * (1 + again) + 1 / 3) * moved)


def sampled_tokens_per_s(shape: BaseModel, node: NodeConfig, server: MemoryPlan, card: Gpu) -> float:
    """Return the most tokens that all servers sample a second, if only reading weights and cache takes time.

    It assumes that each episode fills half of its context, and that there are as many episodes as the cache then holds.

    Args:
        server: one GPU of a server, as :func:`~loop_recipes.plan.memory_plan.plan_rollout_server` plans it.
    """
    gpus = node.servers.tensor_parallel_size
    episode = node.model.max_context / 2 * shape.kv_bytes_per_token / min(gpus, shape.kv_heads) / GIB
    most = min(node.servers.max_num_seqs, node.max_concurrent_episodes / node.servers.count)
    episodes = min(most, server.parts[CACHE] / episode)
    return node.servers.count * episodes * card.bytes / GIB / (server.weights + episodes * episode)
