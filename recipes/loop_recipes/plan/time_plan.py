"""Time arithmetic for a job before it runs: what an iteration computes, and what decoding reads, at an H100's speed.

Estimates from shapes and a data sheet, no measurement: they say which of two configs is faster, and about how much.
"""

from __future__ import annotations

from loop_recipes.config.loop_config import LoopConfig
from loop_recipes.engine.diagnostics import training_flops
from loop_recipes.engine.model import AnyDecoder
from loop_recipes.plan.memory_plan import CACHE, GIB, MemoryPlan
from model_families.base_model import BaseModel
from rollout_server.config import NodeConfig

MODEL_FLOPS = 0.28 * 989e12
"""A second, of an H100 in bf16, recomputation not counted: updates had 20 to 31% of its peak (benchmarks/results)."""
MEMORY_BYTES = 3.35e12
"""That an H100 reads of its memory in a second."""


def update_seconds(config: LoopConfig, model: AnyDecoder, ranks: int) -> float:
    """Seconds of an update in which all rollouts are as long as they may be: for each epoch a pass forward and one
    backward, and one forward for the old log-probs.

    Args:
        model: without storage.
    """
    rollouts = config.collection.tasks_per_iteration * config.collection.rollouts_per_task
    passes = config.update.epochs + 1 / 3
    return rollouts * passes * training_flops(model, config.longest_rollout, 0) / ranks / MODEL_FLOPS


def sampled_tokens_per_s(shape: BaseModel, node: NodeConfig, server: MemoryPlan) -> float:
    """Tokens that all servers sample a second at most, where reading weights and cache is all that takes time.

    Episodes are taken to be at half of their context, and to be as many as the cache holds then.

    Args:
        server: one of its GPUs, as :func:`~loop_recipes.plan.memory_plan.plan_rollout_server` plans it.
    """
    gpus = node.servers.tensor_parallel_size
    episode = node.model.max_context / 2 * shape.kv_bytes_per_token / min(gpus, shape.kv_heads) / GIB
    most = min(node.servers.max_num_seqs, node.max_concurrent_episodes / node.servers.count)
    episodes = min(most, server.parts[CACHE] / episode)
    return node.servers.count * episodes * MEMORY_BYTES / GIB / (server.weights + episodes * episode)
