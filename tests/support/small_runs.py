"""Small runs of the LOOP recipe for tests: a random policy, its model section, stored rollouts, a whole config."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file
from torch import Tensor

from loop_formats.ids import segment_id
from loop_formats.rollout import Rollout, Turn
from loop_formats.schema import fields_of
from loop_recipes.config.sft_config import SftConfig
from support import random_policy
from support.rollouts import rollout as made_up
from support.rollouts import turn as turn_of

if TYPE_CHECKING:
    from loop_recipes.engine.samples import ScoredSample


def model_section(folder: Path, tied: bool = True) -> dict[str, Any]:
    """The recipe's ``model`` section for :func:`random_policy.write_model`'s policy."""
    return {
        "_component_": "torchtune.models.qwen2.lora_qwen2",
        "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
        "apply_lora_to_mlp": True,
        "vocab_size": base_weights(folder, tied)["tok_embeddings.weight"].shape[0],
        "num_layers": random_policy.LAYERS,
        "num_heads": random_policy.HEADS,
        "num_kv_heads": random_policy.KV_HEADS,
        "embed_dim": random_policy.WIDTH,
        "intermediate_dim": random_policy.FEED_FORWARD,
        "max_seq_len": 4096,
        "norm_eps": 1e-6,
        "rope_base": 10_000.0,
        "tie_word_embeddings": tied,
        "lora_rank": 8,
        "lora_alpha": 16,
    }


def base_weights(folder: Path, tied: bool = True) -> dict[str, Tensor]:
    """The policy's weights by their torchtune names."""
    from torchtune.models.qwen2._convert_weights import qwen2_hf_to_tune  # takes seconds, and most callers run nothing

    weights = load_file(folder / "model.safetensors")
    return qwen2_hf_to_tune(weights, num_heads=4, num_kv_heads=2, dim=64, tie_word_embeddings=tied)


def random_adapter(shapes: dict[str, Tensor], seed: int, scale: float = 0.05) -> dict[str, Tensor]:
    """Normal noise of these shapes, so that B is not zero."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(tensor.shape, generator=generator) * scale for name, tensor in shapes.items()}


def stored_rollout(
    collection: str, task: str, index: int, version: int, reward: float, vocab_size: int, seed: int
) -> Rollout:
    """A made-up episode of two or three turns: random ids, plausible sampler log-probs."""
    draw = random.Random(seed)
    turns: list[Turn] = []
    token_ids = [draw.randrange(3, vocab_size) for _ in range(draw.randint(12, 24))]
    logprobs = [0.0] * len(token_ids)
    for number in range(draw.randint(2, 3)):
        start = len(token_ids)
        token_ids += [draw.randrange(3, vocab_size) for _ in range(draw.randint(4, 12))]
        turns.append(turn_of(start, len(token_ids), version, number))
        logprobs += [-draw.uniform(2.0, 8.0) for _ in range(len(token_ids) - start)]
        token_ids += [draw.randrange(3, vocab_size) for _ in range(draw.randint(3, 9))]
        logprobs += [0.0] * (len(token_ids) - len(logprobs))
    own = {"collection_id": collection, "task_id": task, "index": index, "seed": seed, "sampler_logprobs": logprobs}
    return made_up(token_ids, turns, **own, reward=reward, success=reward == 1.0).validate()


def in_sequences(rollout: Rollout) -> list[Rollout]:
    """The same episode as if each turn had been sampled in a conversation of its own that begins like those before."""
    count = len(rollout.turns)
    sequences = []
    for number, turn in enumerate(rollout.turns):
        own = [turn.start <= place < turn.end for place in range(turn.end)]
        logprobs = [value if mine else 0.0 for value, mine in zip(rollout.sampler_logprobs, own, strict=False)]
        cut = {"token_ids": rollout.token_ids[: turn.end], "mask": own, "sampler_logprobs": logprobs, "turns": [turn]}
        place = {"episode_id": rollout.rollout_id, "segment": number, "segments": count}
        identity = {"rollout_id": segment_id(rollout.rollout_id, number), **place}
        sequences.append(replace(rollout, **cut, **identity).validate())
    return sequences


def write_logs(folder: Path, iterations: int, vocab_size: int, stale_by: int = 0) -> Path:
    """Logs of ``iterations`` collections of 3 tasks x 4 rollouts for ``rollout_node.replay``.

    Iteration i is sampled by version i - 1, less ``stale_by``, but not below 0.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for iteration in range(1, iterations + 1):
        collection = f"made-up-i{iteration:04d}"
        rollouts = [
            stored_rollout(
                collection,
                f"task_{task}",
                index,
                max(0, iteration - 1 - stale_by),
                ((index + task) % 3) / 2,
                vocab_size,
                (iteration * 100 + task) * 100 + index,
            )
            for task in range(1, 4)
            for index in range(4)
        ]
        (folder / f"{collection}.jsonl").write_text("".join(f"{rollout.to_json()}\n" for rollout in rollouts))
    return folder


def launched_node(environment: dict[str, Any], max_num_seqs: int) -> dict[str, Any]:
    """The sections of a small node of the run's own over ``environment``, with an episode for each slot."""
    node = {
        "port": 0,
        "root": "${output_dir}/node",
        "model": {
            "path": "${checkpointer.checkpoint_dir}",
            "dtype": "float32",
            "max_context": 512,
            "lora_rank": "${model.lora_rank}",
        },
        "servers": {
            "count": 1,
            "max_num_seqs": max_num_seqs,
            "kv_cache_bytes": 128 << 20,
            "max_loras": 2,
            "max_cpu_loras": 4,
        },
        "environment": environment,
        "max_concurrent_episodes": max_num_seqs,
    }
    return {"rollout_node": {"launch": True}, "node": node}


def replay_config(folder: Path, iterations: int = 6, stale_by: int = 0, **changes: Any) -> Path:
    """A whole config in ``folder``: a random policy, made-up logs to replay; ``changes`` replace top-level keys."""
    base = folder / "base"
    if not base.exists():
        random_policy.write_model(base)
    section = model_section(base)
    config = OmegaConf.load(Path(__file__).with_name("small_run.yaml"))
    own = {
        "output_dir": str(folder / "run"),
        "model": section,
        "rollout_node": {"replay": str(write_logs(folder / "logs", iterations, section["vocab_size"], stale_by))},
        "max_iterations": iterations,
    }
    config.checkpointer.checkpoint_dir = str(base)
    file = folder / "config.yaml"
    OmegaConf.save(OmegaConf.create({**config, **own, **changes}), file)
    return file


def sft_config(folder: Path, **changes: Any) -> DictConfig:
    """A whole config of sft_appworld: made-up logs of two collections, otherwise as :func:`replay_config`."""
    loop = OmegaConf.load(replay_config(folder, iterations=2))
    shared = {key: value for key, value in loop.items() if key in fields_of(SftConfig)}
    (folder / "logs").rename(folder / "collections")
    own = {
        "rollouts": {"logs": [str(folder)]},
        "advantage": {"_component_": "loop_recipes.algorithm.advantages.Solved"},
        "loss": {"_component_": "loop_recipes.algorithm.losses.LogLikelihood"},
        "update": {"minibatch_rollouts": 3, "micro_batch_tokens": 150, "loss_divisor": "tokens"},
        "max_iterations": 3,
    }
    return OmegaConf.create({**shared, **own, **changes})


def config_over(url: str, policy: Path, folder: Path, token_env: str, deadline_s: float) -> Path:
    """The same, whose counter node is at ``url``, with the policy in ``policy/model`` that it serves."""
    file = replay_config(folder, iterations=1)
    cfg = OmegaConf.load(file)
    cfg.model = model_section(policy / "model")
    cfg.checkpointer.checkpoint_dir = str(policy / "model")
    cfg.rollout_node = {"url": url, "token_env": token_env}
    cfg.collection.tasks = ["reach3_1", "reach5_1"]
    cfg.collection.tasks_per_iteration = 2
    limits = {"max_turns": 4, "max_tokens_per_turn": 64, "max_context": 1000, "episode_deadline_s": deadline_s}
    cfg.collection.limits = limits
    cfg["update"]["micro_batch_tokens"] = 2000
    OmegaConf.save(cfg, file)
    return file


def on_source(monkeypatch: Any, cfg: DictConfig, source: object) -> None:
    """Have the recipe take its rollouts from this source, as from a node elsewhere."""
    cfg.rollout_node = {"url": "http://127.0.0.1:1", "launch": False, "token_env": "LOOP_TEST_TOKEN"}
    monkeypatch.setenv("LOOP_TEST_TOKEN", "unused")
    monkeypatch.setattr("loop_appworld.open_source", lambda *_: source)


@contextmanager
def set_up(recipe: Any) -> Iterator[None]:
    """Within it, a recipe is set up; cleaned up at the end, however that comes."""
    try:
        recipe.setup()
        yield
    finally:
        recipe.cleanup()


def train(cfg: DictConfig) -> None:
    """The recipe from start to end, in this process, in any thread of it."""
    from loop_appworld import LoopAppWorldRecipe  # as above

    recipe = LoopAppWorldRecipe(cfg)
    if threading.current_thread() is not threading.main_thread():
        recipe._stop.listen = lambda: None  # signals are for the main thread
    with set_up(recipe):
        recipe.train()


def train_into(config: Path, output_dir: Path, resume: bool = False) -> None:
    """:func:`train` with the config of a file, into another folder; from its last checkpoint if so asked."""
    changes = {"output_dir": str(output_dir)} | ({"resume_from_checkpoint": True} if resume else {})
    train(OmegaConf.merge(OmegaConf.load(config), changes))


def train_sft_into(config: Path, output_dir: Path) -> None:
    """sft_appworld from start to end, in this process, with the config of a file, into another folder."""
    from sft_appworld import SftAppWorldRecipe  # as above

    recipe = SftAppWorldRecipe(OmegaConf.merge(OmegaConf.load(config), {"output_dir": str(output_dir)}))
    with set_up(recipe):
        recipe.train()


@dataclass(frozen=True)
class ByPosition:
    """Made-up advantages of both signs, whatever the rewards; for policies that never earn different rewards."""

    def __call__(self, rewards: Tensor, groups: Tensor) -> Tensor:
        return torch.arange(len(rewards), dtype=torch.float32) % 3 - 1.0


class ByTokenPosition(ByPosition):
    """Gives each sampled token its number within the rollout."""

    def token_advantages(self, samples: Sequence[ScoredSample]) -> list[Tensor]:
        return [torch.arange(int(sample.mask.sum()), dtype=torch.float32) for sample in samples]
