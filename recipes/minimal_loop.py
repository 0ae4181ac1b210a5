r"""LOOP on one page: from tasks to rollouts, advantages, steps and the next adapter, on this machine.

python recipes/minimal_loop.py runs/minimal

This is what ``tune run loop_appworld --config loop_appworld/tiny_cpu`` does, without its options, its resume and its
ranks. The rollout node, the rollout's record, the LoRA model and its log-prob head are the recipe's own; the algorithm
(LOOP, arXiv 2502.01600, algorithm 1) is written out below and reads from top to bottom. A test holds its update equal
to the recipe's.
"""

from __future__ import annotations

import itertools
import random
import secrets
import sys
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor, nn

from loop_formats.collection_request import CollectionRequest, Limits
from loop_formats.ids import training_id
from loop_formats.rollout import Rollout
from loop_recipes.config.files import compose
from loop_recipes.config.loop_config import LoopConfig, read_config
from loop_recipes.engine.decoder import attach_head
from loop_recipes.engine.logprobs import TiledLogProbs
from loop_recipes.engine.model import adapter_parameters, load_base, new_adapter
from loop_recipes.engine.peft_export import export_adapter
from loop_recipes.engine.sharding import place_model
from model_families.stored_weights import weights_digest
from rollout_server.client import RolloutClient
from rollout_server.node_process import NodeProcess

SEED = 0
ITERATIONS = 20
TASKS = 10  # in an iteration
ROLLOUTS = 6  # of each task: K in the paper
EPOCHS = 2  # over the rollouts of an iteration
MINIBATCH = 6  # rollouts in an optimizer step
CLIP = 0.2  # half the width of the trust region: ratios count from 0.8 to 1.2
SIGNAL = 0.01  # advantages that are smaller teach nothing worth a forward pass
LEARNING_RATE, BETAS, MAX_GRAD_NORM = 6e-4, (0.9, 0.99), 1.0


def main(output_dir: Path) -> None:
    """Train the tiny policy; leaves an adapter for each iteration in ``output_dir``/policies."""
    conf = read_config(compose("tiny_cpu", [f"output_dir={output_dir}"]), LoopConfig)
    policy = load_policy(conf)
    parameters = list(adapter_parameters(policy).values())
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0)
    draw = random.Random(SEED)

    # The node is a program of its own: it starts vLLM and AppWorld, plays episodes and keeps them on disk.
    token = secrets.token_hex(16)
    with NodeProcess(conf.child, output_dir, token) as node:
        client = RolloutClient(node.url, token, alive=node.check)
        client.wait_ready(deadline_s=conf.rollout_node.start_deadline_s)
        tasks = client.tasks("train:1,2").tasks
        publish(client, policy, 0, output_dir, conf)
        for iteration in range(1, ITERATIONS + 1):
            version = iteration - 1
            rollouts = collect(client, draw.sample(tasks, TASKS), version, conf.collection.limits)
            steps = improve(policy, optimizer, rollouts, iteration)
            publish(client, policy, version + 1, output_dir, conf)
            reward = sum(rollout.reward for rollout in rollouts) / len(rollouts)
            solved = sum(rollout.success for rollout in rollouts)
            print(f"iteration {iteration:2}  reward {reward:.3f}  solved {solved}/{len(rollouts)}  steps {steps}")


def load_policy(conf: LoopConfig) -> nn.Module:
    """Load the base model, frozen in float32, with a new adapter and a head for log-probs of sampled tokens."""
    model, base = load_base(conf, torch.float32)
    adapter = new_adapter(model, SEED)
    return place_model(attach_head(model, TiledLogProbs()), base, adapter, torch.device("cpu"), torch.float32)


def publish(client: RolloutClient, policy: nn.Module, version: int, output_dir: Path, conf: LoopConfig) -> None:
    """Write the adapter in PEFT's format and have the node serve it under a new name."""
    folder = export_adapter(
        {name: parameter.detach() for name, parameter in adapter_parameters(policy).items()},
        policy,
        output_dir / "policies" / f"policy-v{version:04d}",
        base_model=conf.base_model,
        base_digest=weights_digest(conf.base_model),
        dtype=torch.float32,
    )
    client.publish_policy(version, folder)


def collect(client: RolloutClient, tasks: list[str], version: int, limits: Limits) -> list[Rollout]:
    """Collect K rollouts of each task with one version of the policy; drop the slowest stragglers."""
    request = CollectionRequest(
        id=training_id("minimal", version + 1, secrets.token_hex(8)),
        tasks=tasks,
        rollouts_per_task=ROLLOUTS,
        policy_version=version,
        min_rollouts_per_task=4,
        min_rollouts_fraction=0.9,
        seed=SEED + version + 1,
        limits=limits,
    )
    client.start_collection(request)
    return [event for event in client.rollouts(request.id) if isinstance(event, Rollout)]


def advantages(rollouts: list[Rollout]) -> dict[str, float]:
    """Return rollout id -> its reward minus the mean reward of the task's other rollouts (eq. 3)."""
    groups = defaultdict(list)
    for rollout in rollouts:
        groups[rollout.task_id].append(rollout)
    result = {}
    for group in groups.values():
        total = sum(rollout.reward for rollout in group)
        for rollout in group:
            others = len(group) - 1
            result[rollout.rollout_id] = rollout.reward - (total - rollout.reward) / others if others else 0.0
    return result


def logprobs(policy: nn.Module, rollout: Rollout) -> Tensor:
    """Return log-probs [n] of the sampled tokens only, without prompt and observations.

    The ids are those that the server returned. Nothing is encoded again.
    """
    token_ids = torch.tensor([rollout.token_ids])
    sampled = torch.tensor(rollout.mask).nonzero().flatten()
    return policy(tokens=token_ids, rows=sampled - 1, targets=token_ids[0, sampled]).logprobs


def improve(policy: nn.Module, optimizer: torch.optim.Optimizer, rollouts: list[Rollout], iteration: int) -> int:
    """Optimize PPO's clipped objective on each token (eq. 10) for a few epochs; returns the steps taken."""
    advantage = advantages(rollouts)
    with_signal = sorted((r for r in rollouts if abs(advantage[r.rollout_id]) >= SIGNAL), key=lambda r: r.rollout_id)
    # The learner scores them, not the sampler: the ratio shall measure what the steps change, not how two programs
    # round.
    with torch.no_grad():
        old = {rollout.rollout_id: logprobs(policy, rollout) for rollout in with_signal}
    steps = 0
    for epoch in range(EPOCHS):
        for minibatch in minibatches(with_signal, iteration, epoch):
            for rollout in minibatch:
                ratio = (logprobs(policy, rollout) - old[rollout.rollout_id]).exp()
                value = advantage[rollout.rollout_id]
                objective = torch.minimum(ratio * value, ratio.clamp(1 - CLIP, 1 + CLIP) * value).mean()
                (-objective / len(minibatch)).backward()
            nn.utils.clip_grad_norm_(list(adapter_parameters(policy).values()), MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    return steps


def minibatches(rollouts: list[Rollout], iteration: int, epoch: int) -> list[list[Rollout]]:
    """Shuffle and cut into minibatches of about ``MINIBATCH``; their sizes differ by at most one."""
    seed = (SEED * 1_000_003 + iteration) * 1_009 + epoch  # the recipe's, so that the two can be compared
    order = torch.randperm(len(rollouts), generator=torch.Generator().manual_seed(seed)).tolist()
    parts = min(len(rollouts), max(1, round(len(rollouts) / MINIBATCH)))
    bounds = [len(rollouts) * number // parts for number in range(parts + 1)] if parts else []
    return [[rollouts[i] for i in order[low:high]] for low, high in itertools.pairwise(bounds)]


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("minimal_loop: give the folder of the run: python recipes/minimal_loop.py runs/minimal")
    main(Path(sys.argv[1]).resolve())
