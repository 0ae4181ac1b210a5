"""The keys of ``loop_appworld``'s YAML, and everything that can be refused before any work begins."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from loop_recipes.config.schema import ConfigError, build, check_component, read_config
from rollout_server.collection_request import Limits, Sampling
from rollout_server.config import NodeConfig, from_mapping
from rollout_server.run_files import ADAPTER_FILES, is_adapter, only_logs

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class RolloutNodeConfig:
    """Where rollouts come from; exactly one of ``launch``, ``url`` and ``replay``.

    ``launch`` starts a rollout node with ``config`` as a child of rank 0; ``url`` uses one that runs elsewhere;
    ``replay`` is a folder with one ``*.jsonl`` log per iteration, taken in the order of their names.
    """

    launch: bool = False
    url: str | None = None
    replay: str | None = None
    token_env: str = "ROLLOUT_SERVER_TOKEN"
    start_deadline_s: float = 600.0
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        chosen = [self.launch, self.url is not None, self.replay is not None]
        if sum(chosen) != 1:
            raise ConfigError("rollout_node needs exactly one of launch: true, url and replay")


@dataclass(frozen=True)
class HorizonStage:
    """From this iteration on, episodes may take this many turns."""

    from_iteration: int
    max_turns: int


@dataclass(frozen=True)
class CollectionConfig:
    """What one iteration asks of the rollout node. ``tasks`` replaces the tasks of ``split``; ``horizons`` replaces
    ``limits.max_turns`` from the first stage's iteration on."""

    tasks_per_iteration: int
    rollouts_per_task: int
    min_rollouts_per_task: int
    limits: Limits
    min_rollouts_fraction: float = 1.0
    split: str = "train"
    tasks: list[str] | None = None
    sampling: Sampling = field(default_factory=Sampling)
    horizons: list[HorizonStage] = field(default_factory=list)
    max_policy_lag: int = 0
    policy_mode: str = "pinned"
    deadline_s: float = 7200.0

    def __post_init__(self) -> None:
        most, least = self.rollouts_per_task, self.min_rollouts_per_task
        _require(most >= 2, f"collection.rollouts_per_task is {most}; leave-one-out needs at least 2")
        _require(2 <= least <= most, f"collection.min_rollouts_per_task is {least}; it must be 2 to {most}")
        _require(self.tasks_per_iteration >= 1, "collection.tasks_per_iteration must be at least 1")
        _require(0 < self.min_rollouts_fraction <= 1, "collection.min_rollouts_fraction must be above 0 and at most 1")
        _require(
            self.sampling == Sampling(),
            "collection.sampling must be temperature 1.0, top_p 1.0, top_k -1: otherwise the sampled log-probs are not "
            "the policy's, and the ratios are biased (evaluation may sample as it likes)",
        )
        _require(self.max_policy_lag in (0, 1), "collection.max_policy_lag must be 0 or 1")


@dataclass(frozen=True)
class UpdateConfig:
    """One iteration's update. ``minibatch_rollouts`` null takes one step per epoch on all rollouts with signal.

    ``loss_divisor`` is "mean" (over the rollouts of the minibatch, as the paper) or a constant (the authors' code: 32,
    whatever the filter leaves). ``exact_entropy`` gives the metric ``entropy``, for one more pass of the head where old
    log-probs are recomputed. ``token_statistics`` keeps each token's log-prob, ratio and clip of every update for
    rollout-viewer, about 25 bytes a sampled token.
    """

    epochs: int = 1
    minibatch_rollouts: int | None = 32
    micro_batch_tokens: int = 32768
    packed: bool = False
    min_abs_advantage: float = 0.01
    loss_divisor: str | float = "mean"
    clip_grad_norm: float | None = 1.0
    exact_entropy: bool = False
    token_statistics: bool = False

    def __post_init__(self) -> None:
        _require(self.epochs >= 1, "update.epochs must be at least 1")
        _require(
            self.minibatch_rollouts is None or self.minibatch_rollouts >= 1, "update.minibatch_rollouts must be 1+"
        )
        _require(self.micro_batch_tokens >= 1, "update.micro_batch_tokens must be at least 1")
        constant = isinstance(self.loss_divisor, int | float) and self.loss_divisor > 0
        _require(self.loss_divisor == "mean" or constant, "update.loss_divisor must be 'mean' or a number above 0")
        _require(
            self.clip_grad_norm is None or self.clip_grad_norm > 0, "update.clip_grad_norm must be above 0 or null"
        )


@dataclass(frozen=True)
class DevEvaluationConfig:
    """One rollout of every task of ``split`` before the first iteration and after each ``every`` (0: never), while the
    next iteration updates; the checkpoint with the best success is kept. A score made on the way, for choosing a
    checkpoint; `eval_appworld` makes those to report."""

    every: int = 0
    split: str = "dev"
    temperature: float = 0.0
    max_turns: int = 50


@dataclass(frozen=True)
class StopConfig:
    """When to stop by itself, saying why: too many iterations in a row without signal, the KL estimate too large."""

    iterations_without_signal: int | None = 10
    max_approx_kl: float | None = None

    def reason(self, idle_iterations: int, approx_kl: float) -> str | None:
        """Why to stop now, or None."""
        if self.iterations_without_signal is not None and idle_iterations >= self.iterations_without_signal:
            return f"{idle_iterations} iterations without signal (stop.iterations_without_signal)"
        if self.max_approx_kl is not None and approx_kl > self.max_approx_kl:
            return f"approximate KL {approx_kl:.3g} is over stop.max_approx_kl {self.max_approx_kl}"
        return None


@dataclass(frozen=True)
class GapConfig:
    """Thresholds on the 99th percentile of abs(sampler log-prob - learner log-prob): ok up to ``ok``, then "drift",
    and "broken" above ``broken``."""

    ok: float = 1e-3
    broken: float = 0.1


@dataclass(frozen=True)
class LoopConfig:
    """All keys of the recipe; see docs/training.md and the header of each YAML.

    ``extends`` is resolved before (see config_files.py). ``critic_lr`` null gives the critic the policy's.
    """

    output_dir: str
    model: dict[str, Any]
    checkpointer: dict[str, Any]
    rollout_node: RolloutNodeConfig
    collection: CollectionConfig
    advantage: dict[str, Any]
    loss: dict[str, Any]
    log_probs: dict[str, Any]
    optimizer: dict[str, Any]
    lr_scheduler: dict[str, Any]
    max_iterations: int
    extends: str | None = None
    critic: dict[str, Any] | None = None
    critic_lr: float | None = None
    update: UpdateConfig = field(default_factory=UpdateConfig)
    stop: StopConfig = field(default_factory=StopConfig)
    dev_evaluation: DevEvaluationConfig = field(default_factory=DevEvaluationConfig)
    sampler_gap: GapConfig = field(default_factory=GapConfig)
    run_name: str | None = None
    seed: int = 0
    device: str = "cpu"
    dtype: str = "fp32"
    adapter_dtype: str = "fp32"
    enable_activation_checkpointing: bool = False
    initial_adapter: str | None = None
    resume_from_checkpoint: bool = False
    keep_last_checkpoints: int = 2
    stress_test: bool = False
    device_peak_tflops: float | None = None
    metric_logger: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        _require(self.max_iterations >= 1, "max_iterations must be at least 1")
        _require(self.dtype in DTYPES, f"dtype is {self.dtype!r}; fp32, bf16 and fp16 can be trained")
        _require(self.adapter_dtype in DTYPES, "adapter_dtype (of what is served) must be fp32, bf16 or fp16")
        _require(self.keep_last_checkpoints >= 1, "keep_last_checkpoints must be at least 1")


def read_loop_config(cfg: DictConfig) -> LoopConfig:
    """Check the whole config and what it names on this machine.

    Raises:
        ConfigError: one line that names the key and the cure.
    """
    config = read_config(cfg, LoopConfig)
    check_component("model", config.model)
    check_component("checkpointer", config.checkpointer)
    for path in ("advantage", "loss", "log_probs"):
        check_component(path, getattr(config, path))
        try:
            build(getattr(config, path))  # cheap, and they check their own arguments
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from error
    if config.critic is not None:
        check_component("critic", config.critic, positional=1)
        _require(
            config.loss.get("level", "token") == "token",
            f"loss.level is {config.loss.get('level')!r}; a critic gives each token its own advantage: choose token",
        )
    check_component("optimizer", config.optimizer, positional=1)
    check_component("lr_scheduler", config.lr_scheduler, 1, ("num_training_steps", "last_epoch"))
    for number, logger in enumerate(config.metric_logger):
        check_component(f"metric_logger[{number}]", logger)
    _check_checkpoint_files(config.checkpointer)
    _check_output_dir(config)
    _check_rollout_node(config)
    if config.initial_adapter and not is_adapter(Path(config.initial_adapter)):
        raise ConfigError(
            f"initial_adapter {config.initial_adapter} is no PEFT adapter: it must hold {' and '.join(ADAPTER_FILES)}"
        )
    return config


def holds_run(output_dir: Path) -> bool:
    """Whether a run has written its metrics or checkpoints here."""
    metrics = output_dir / "metrics.jsonl"
    return (metrics.exists() and metrics.stat().st_size > 0) or any((output_dir / "checkpoints").glob("iteration_*"))


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


def _check_checkpoint_files(checkpointer: dict[str, Any]) -> None:
    folder = Path(checkpointer["checkpoint_dir"])
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"checkpointer.checkpoint_dir {folder} holds no config.json; download the model there (tune download) or, "
            "for the tiny policy, run `make warm-start`"
        )
    files = checkpointer["checkpoint_files"]
    for name in files if isinstance(files, list) else []:
        if not (folder / name).is_file():
            raise ConfigError(f"checkpointer.checkpoint_files: {folder / name} does not exist")


def _check_output_dir(config: LoopConfig) -> None:
    folder = Path(config.output_dir)
    if holds_run(folder) and not config.resume_from_checkpoint:
        raise ConfigError(
            f"output_dir {folder} already holds a run; give resume_from_checkpoint=True to go on with it, or another "
            "output_dir"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output_dir {folder} cannot be created: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"output_dir {folder} is not writable")


def _check_rollout_node(config: LoopConfig) -> None:
    node = config.rollout_node
    if node.replay is not None:
        _require(config.dev_evaluation.every == 0, "dev_evaluation.every must be 0 with rollout_node.replay")
        if not only_logs(Path(node.replay).glob("*")):
            raise ConfigError(f"rollout_node.replay {node.replay} holds no *.jsonl log")
    elif node.launch:
        _check_child_node(config, from_mapping(NodeConfig, node.config, "rollout_node.config"))
    elif not os.environ.get(node.token_env):
        raise ConfigError(f"the environment variable {node.token_env} must hold the rollout node's bearer token")


def _check_child_node(config: LoopConfig, node: NodeConfig) -> None:
    served, trained = Path(node.model.path).resolve(), Path(config.checkpointer["checkpoint_dir"]).resolve()
    if served != trained:
        raise ConfigError(
            f"rollout_node.config.model.path is {served}, but checkpointer.checkpoint_dir is {trained}; both must "
            "be the same base model"
        )
    if node.model.max_context < config.collection.limits.max_context:
        raise ConfigError(
            f"collection.limits.max_context is {config.collection.limits.max_context}, more than the node's "
            f"rollout_node.config.model.max_context, {node.model.max_context}"
        )
    rank = config.model.get("lora_rank")
    if rank is not None and rank > node.model.lora_rank:
        raise ConfigError(f"model.lora_rank is {rank}, but rollout_node.config.model.lora_rank {node.model.lora_rank}")
    if node.port and int(os.environ.get("RANK", 0)) == 0:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((node.host, node.port))
            except OSError as error:
                raise ConfigError(
                    f"rollout_node.config.port: {node.host}:{node.port} cannot be used ({error.strerror}); choose "
                    "another, or 0 for any free port"
                ) from error
