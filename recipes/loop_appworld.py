r"""LOOP on AppWorld: reinforcement learning of an LLM agent with leave-one-out advantages and a clipped objective.

tune run loop_appworld --config loop_appworld/tiny_cpu
tune run --nproc_per_node 8 loop_appworld --config loop_appworld/qwen2_5_32b \
    rollout_node.launch=False rollout_node.url=http://node:8700
"""

from __future__ import annotations

import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torchtune import training, utils
from torchtune.recipe_interfaces import FTRecipeInterface

from loop_recipes.collecting.open import open_source
from loop_recipes.collecting.plan import CollectionPlan, run_name
from loop_recipes.collecting.source import (
    SOURCE_ERRORS,
    Collected,
    CollectionSource,
    StopRequested,
    check_versions,
    collect,
)
from loop_recipes.config.command_line import parse
from loop_recipes.config.components import build
from loop_recipes.config.files import extended
from loop_recipes.config.loop_config import LoopConfig, read_loop_config
from loop_recipes.config.preflight import check_run, make_output_dir
from loop_recipes.learner.adapter_versions import AdapterVersions
from loop_recipes.learner.batching import Sample
from loop_recipes.learner.checkpoint import (
    TrainingState,
    generator_states,
    latest_checkpoint,
    load_training_state,
    optimizer_groups,
    optimizer_tensors,
    prune_checkpoints,
    restore_generators,
    restore_optimizer,
    save_training_state,
)
from loop_recipes.learner.diagnostics import canary, gap_metrics, model_flops_utilization, stress
from loop_recipes.learner.logprobs import attach_head
from loop_recipes.learner.model import (
    DTYPES,
    adapter_parameters,
    check_adapter,
    check_shapes,
    meta_model,
    new_adapter,
    trained_parameters,
)
from loop_recipes.learner.peft_export import export_adapter, read_adapter
from loop_recipes.learner.policy_update import NonFiniteLoss, PolicyUpdate
from loop_recipes.learner.process_group import (
    RemoteError,
    any_rank,
    destroy_process_group,
    gather_bytes,
    init_process_group,
    leave,
    on_main_rank,
)
from loop_recipes.learner.run_metrics import RunMetrics, rollout_metrics, summary_line
from loop_recipes.learner.sharding import full_tensor, place_critic, place_model
from loop_recipes.learner.token_statistics import TOKEN_STATISTICS, TokenStatistics
from loop_recipes.paths import METRICS_FILE
from rollout_server.collection_request import CollectionRequest
from rollout_server.rollout import Rollout
from rollout_server.schema import ConfigError


class LoopAppWorldRecipe(FTRecipeInterface):
    """Trains a policy with LOOP (leave-one-out PPO, arXiv 2502.01600): collect rollouts, update, publish, again.

    Features:
        - **Rollouts from a node.** ``rollout_node.launch: true`` starts a rollout node (vLLM servers and environment)
          as a child of rank 0 and stops it with the run; ``rollout_node.url`` uses one on another machine;
          ``rollout_node.replay`` trains on stored logs.
        - **Algorithm as components.** ``advantage``, ``loss``, ``critic``, ``log_probs``, ``optimizer`` and
          ``lr_scheduler`` are ``_component_``s of the YAML; ``extends`` puts one config over another. Old log-probs are
          recomputed by the learner under the version that sampled.
        - **LoRA.** Base weights in ``dtype``, adapter masters and gradients in float32; each policy version is exported
          in PEFT's format under ``<output_dir>/policies``.
        - **FSDP2.** From two ranks on, and always in bf16, with a mixed-precision policy; CPU (gloo) and CUDA (nccl).
        - **Memory.** Activation checkpointing, one shared RoPE cache, a head that only sees the sampled tokens and
          never holds [tokens, vocabulary], micro-batches by a token budget.
        - **Overlap.** ``collection.max_policy_lag: 1`` collects the next iteration while this one is trained on.
        - **Checkpoints.** One after every iteration, atomic, safetensors and JSON. ``resume_from_checkpoint=True`` with
          the same command line goes on exactly (bit for bit on a CPU). SIGTERM, Ctrl-C or a file ``<output_dir>/stop``
          end the run after the update in hand, or at once while it waits for rollouts, which are not lost.
        - **Numbers.** ``<output_dir>/metrics.jsonl`` (keys: ``run_metrics.METRICS``) and torchtune's loggers.

    Args:
        cfg (DictConfig): the recipe's YAML merged with the command line; the keys are those of
            :class:`~loop_recipes.config.loop_config.LoopConfig`.

    Raises:
        ConfigError: anything wrong with the config or what it names, before any work begins.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self._config: LoopConfig = read_loop_config(cfg)
        check_run(self._config)
        self._plain_config = OmegaConf.to_container(cfg, resolve=True)
        try:
            self._device = utils.get_device(self._config.device)
        except (RuntimeError, AssertionError) as error:
            raise ConfigError(f"device {self._config.device!r} cannot be used: {error}") from error
        if self._device.type != torch.device(self._config.device).type:
            raise ConfigError(
                f"device {self._config.device!r} cannot be used: torch sees only a {self._device.type} here"
            )
        self._dtype = DTYPES[self._config.dtype]
        self._output_dir = Path(self._config.output_dir).resolve()
        make_output_dir(self._output_dir)
        self._iteration = 0
        self._policy_version = 0
        self._idle_iterations = 0
        self._best: dict[str, Any] | None = None
        self._pending: CollectionRequest | None = None
        self._canary: dict[str, Any] | None = None
        self._stop_signal = False
        self._source: CollectionSource | None = None
        self._metrics: RunMetrics | None = None

    def setup(self, cfg: DictConfig) -> None:
        """Model, optimizer, rollout source and run state, in that order but for a node, which starts up meanwhile."""
        conf = self._config
        init_process_group(self._device, conf.collection.deadline_s + 1800.0, always=self._dtype != torch.float32)
        self._world_size, self._rank = utils.get_world_size_and_rank()
        torch.manual_seed(conf.seed)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

        checkpoint = self._load_checkpoint()
        checkpointer = build(conf.checkpointer)
        base = checkpointer.load_checkpoint()[training.MODEL_KEY]
        model = meta_model(conf.model, self._dtype)
        check_shapes(model, base, conf.checkpointer["checkpoint_dir"])
        if conf.collection.limits.max_context > model.max_seq_len:
            raise ConfigError(
                f"collection.limits.max_context is {conf.collection.limits.max_context}, more than the model's "
                f"max_seq_len {model.max_seq_len}"
            )
        self._run_name = on_main_rank(lambda: run_name(conf, self._output_dir))
        on_main_rank(self._open_source)
        self._setup_model(model, base, checkpoint, shard=self._world_size > 1 or self._dtype != torch.float32)
        self._setup_update(checkpoint)
        if conf.stress_test:
            vocab_size = self._model.tok_embeddings.weight.shape[0]
            seconds = stress(self._update.rehearse, vocab_size, conf.collection.limits.max_context, conf.seed)
            self._say(
                f"stress test: {conf.collection.limits.max_context} tokens forward and backward in {seconds:.1f} s, "
                f"peak memory {self._peak_memory_gib():.1f} GiB"
            )
        self._setup_run(cfg, checkpoint)

    def _open_source(self) -> None:
        conf = self._config
        deadline_s = conf.collection.deadline_s
        self._source = open_source(conf.rollout_node, self._output_dir, deadline_s, self._stop_requested)

    def _await_source(self) -> tuple[list[int], str, list[str], list[str]]:
        self._say("waiting for the rollout node to be ready")
        dev = self._config.dev_evaluation
        served = self._source.wait_ready()
        dataset, tasks = self._source.tasks(self._config.collection.split)
        return served, dataset, tasks, self._source.tasks(dev.split)[1] if dev.every else []

    def _load_checkpoint(self) -> TrainingState | None:
        """The newest checkpoint when resuming; none if the run was requeued before its first and so starts anew."""
        if not self._config.resume_from_checkpoint:
            return None
        folder = latest_checkpoint(self._output_dir / "checkpoints")
        if folder is None:
            self._say(f"no checkpoint in {self._output_dir}: starting from the beginning")
            return None
        checkpoint = load_training_state(folder)
        if bool(checkpoint.critic) != (self._config.critic is not None):
            kind = "with" if checkpoint.critic else "without"
            raise ConfigError(f"checkpoint {folder} is of a run {kind} a critic; give critic as in that run")
        return checkpoint

    def _setup_model(self, model: Any, base: dict[str, Tensor], checkpoint: TrainingState | None, shard: bool) -> None:
        conf = self._config
        if checkpoint is not None:
            adapter = checkpoint.adapters[checkpoint.state["policy_version"]]
        elif conf.initial_adapter is not None:
            adapter, _, _ = read_adapter(Path(conf.initial_adapter))
        else:
            adapter = new_adapter(model, conf.seed)
        check_adapter(model, adapter)
        self._model = place_model(
            attach_head(model, build(conf.log_probs)),
            base,
            adapter,
            self._device,
            self._dtype,
            activation_checkpointing=conf.enable_activation_checkpointing,
            shard=shard,
        )
        self._critic = None
        if conf.critic is not None:
            width = self._model.tok_embeddings.weight.shape[1]
            weights = None if checkpoint is None else checkpoint.critic
            self._critic = place_critic(conf.critic, width, weights, self._device, shard)
        self._parameters = trained_parameters(self._model, self._critic)
        self._versions = AdapterVersions(self._model)
        for version, tensors in (checkpoint.adapters if checkpoint is not None else {0: adapter}).items():
            self._versions.put(version, tensors)

    def _setup_update(self, checkpoint: TrainingState | None) -> None:
        conf = self._config
        groups = [{"params": list(adapter_parameters(self._model).values())}]
        if self._critic is not None:
            groups.append({"params": list(self._critic.parameters())})
            if conf.critic_lr is not None:
                groups[-1]["lr"] = conf.critic_lr
        self._optimizer = build(conf.optimizer, groups)
        iterations_done = 0
        if checkpoint is not None:
            iterations_done = checkpoint.state["iteration"]
            restore_optimizer(
                self._optimizer, self._parameters, checkpoint.optimizer, checkpoint.state["optimizer_groups"]
            )
        self._lr_scheduler = build(
            conf.lr_scheduler,
            self._optimizer,
            num_training_steps=conf.max_iterations,
            last_epoch=iterations_done - 1,
        )
        self._update = PolicyUpdate(
            model=self._model,
            optimizer=self._optimizer,
            loss=build(conf.loss),
            advantage=build(conf.advantage),
            versions=self._versions,
            config=conf.update,
            device=self._device,
            seed=conf.seed,
            critic=self._critic,
            token_statistics=TokenStatistics(self._output_dir / TOKEN_STATISTICS, self._rank)
            if conf.update.token_statistics
            else None,
        )

    def _setup_run(self, cfg: DictConfig, checkpoint: TrainingState | None) -> None:
        """Tasks, counters, metrics, and the policy the next collection is sampled with."""
        conf = self._config
        served, self._dataset, tasks, dev_tasks = on_main_rank(self._await_source)
        self._plan = CollectionPlan(conf, self._run_name, tasks, dev_tasks)
        if checkpoint is not None:
            self._restore(checkpoint)
        if self._rank == 0:
            OmegaConf.save(cfg, self._output_dir / "config.yaml", resolve=True)
            loggers = [build(logger) for logger in conf.metric_logger]
            for logger in loggers:
                logger.log_config(cfg)
            self._metrics = RunMetrics(self._output_dir / METRICS_FILE, loggers, self._iteration)
        if self._source is not None:
            # Published by a run that died before it saved; the same number may soon mean other weights.
            for version in [version for version in served if version > self._policy_version]:
                self._source.retire(version)
        for version in self._versions.versions:
            self._publish(version)

    def _restore(self, checkpoint: TrainingState) -> None:
        state = checkpoint.state
        self._iteration = state["iteration"]
        self._policy_version = state["policy_version"]
        self._idle_iterations = state["idle_iterations"]
        self._pending = None if state["pending"] is None else CollectionRequest.from_dict(state["pending"])
        self._plan.load_state_dict(state["sampler"])
        if "update" in state:  # older checkpoints begin with the usual loss scale
            self._update.load_state_dict(state["update"])
        self._best = state["best"]
        generators = checkpoint.rng.get(f"rank{self._rank}")
        if generators is not None:  # else the run had fewer ranks
            restore_generators(generators)

    def train(self) -> None:
        """Collect, update, publish, log and save until ``max_iterations`` or a reason to stop."""
        while self._iteration < self._config.max_iterations:
            started = time.perf_counter()
            request = self._pending or self._plan.training(self._iteration + 1, self._policy_version)
            self._pending = None
            collected: Collected | None = on_main_rank(
                lambda request=request: collect(self._source, request), Collected.pack, Collected.unpack
            )
            if collected is None:
                return self._end(f"stopped while waiting for {request.id}; resume_from_checkpoint=True goes on with it")
            # The servers rest while the trainer updates, so the policy that stood before is scored meanwhile.
            evaluation = self._plan.evaluation(self._iteration, self._policy_version)
            if evaluation is not None:
                self._start(evaluation)
            if self._config.collection.max_policy_lag and self._iteration + 1 < self._config.max_iterations:
                self._pending = self._plan.training(self._iteration + 2, self._policy_version)
                self._start(self._pending)
            metrics = self.update(collected.rollouts)
            metrics |= collected.metrics() | self._scores(self._iteration - 1, evaluation)
            published = time.perf_counter()
            if metrics["steps"]:
                self._publish(self._policy_version, self._canary)
            metrics["seconds_publishing"] = time.perf_counter() - published
            if self._iteration == self._config.max_iterations:
                last = self._plan.evaluation(self._iteration, self._policy_version)
                metrics |= self._scores(self._iteration, last)
            metrics["seconds"] = time.perf_counter() - started
            self._log(metrics)
            self.save_checkpoint()
            reason = on_main_rank(lambda metrics=metrics: self._reason_to_stop(metrics))
            if any_rank(self._stop_signal) or reason:
                return self._end(f"stopped after iteration {self._iteration}: {reason or 'asked to'}")

    def update(self, rollouts: list[Rollout]) -> dict[str, Any]:
        """Train on one collection (the same list on every rank) and count it as an iteration; returns metrics.

        Raises:
            NoRollouts: a rollout was sampled by a version further back than ``collection.max_policy_lag``.
            NonFiniteLoss: the loss or gradient is not finite; neither step nor checkpoint is made.
        """
        oldest = self._policy_version - self._config.collection.max_policy_lag
        check_versions(rollouts, oldest, self._policy_version)
        conf = self._config
        samples = [Sample.from_rollout(rollout) for rollout in rollouts]
        trained, metrics = self._update.run(samples, self._policy_version, self._iteration + 1)
        metrics |= gap_metrics(trained, conf.sampler_gap)
        if conf.device_peak_tflops is not None:
            metrics["model_flops_utilization"] = model_flops_utilization(
                self._model,
                [sample.tokens for sample in trained] * conf.update.epochs,
                metrics["seconds_updating"],
                conf.device_peak_tflops * self._world_size,
            )
        self._iteration += 1
        with warnings.catch_warnings():
            # An iteration without signal takes no optimizer step; the schedule goes by iterations all the same.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            self._lr_scheduler.step()
        if metrics["steps"]:
            self._policy_version += 1
            self._versions.keep(self._policy_version)
            self._canary = canary(self._update.logprobs, samples, conf.sampler_gap)
            self._forget_versions()
        self._idle_iterations = 0 if metrics["steps"] else self._idle_iterations + 1
        return rollout_metrics(rollouts) | metrics

    def save_checkpoint(self) -> None:
        """Write the state after the iteration in hand; see training_state.py."""
        adapters = {version: self._versions.full(version) for version in self._versions.versions}
        optimizer = optimizer_tensors(self._optimizer, self._parameters)
        critic = {} if self._critic is None else {n: full_tensor(p) for n, p in self._critic.named_parameters()}
        generators = gather_bytes(generator_states())
        state = {
            "iteration": self._iteration,
            "policy_version": self._policy_version,
            "idle_iterations": self._idle_iterations,
            "pending": None if self._pending is None else self._pending.to_dict(),
            "sampler": self._plan.state_dict(),
            "update": self._update.state_dict(),
            "best": self._best,
            "optimizer_groups": optimizer_groups(self._optimizer),
            "run_name": self._run_name,
            "dataset": self._dataset,
            "config": self._plain_config,
        }
        rng = {
            f"rank{rank}": torch.frombuffer(bytearray(raw), dtype=torch.uint8) for rank, raw in enumerate(generators)
        }

        def write() -> None:
            root = self._output_dir / "checkpoints"
            save_training_state(root, self._iteration, TrainingState(state, adapters, optimizer, rng, critic))
            best = set() if self._best is None else {self._best["iteration"]}
            prune_checkpoints(root, self._config.keep_last_checkpoints, best)

        on_main_rank(write)

    def cleanup(self) -> None:
        """Stop a launched node, close files, leave the process group; safe to call at any point, and twice."""
        if self._source is not None:
            self._source.close()
            self._source = None
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        destroy_process_group()

    def _start(self, request: CollectionRequest) -> None:
        on_main_rank(lambda: self._source.start(request))

    def _scores(self, iteration: int, evaluation: CollectionRequest | None) -> dict[str, float]:
        """Wait for the scores of the policy that stood after ``iteration``, and remember it if it is the best."""
        if evaluation is None:
            return {}

        def read() -> dict[str, float]:
            collected = collect(self._source, evaluation)
            if collected is None:  # asked to stop
                return {}
            means = rollout_metrics(collected.rollouts)
            return {"dev_iteration": iteration, "dev_reward": means["reward"], "dev_success": means["success"]}

        scores = on_main_rank(read)
        if scores and (self._best is None or scores["dev_success"] > self._best["dev_success"]):
            self._best = {"iteration": iteration, "dev_success": scores["dev_success"]}
        return scores

    def _publish(self, version: int, canary: dict[str, Any] | None = None) -> None:
        """Export a version in PEFT's format and have the rollout node serve it, once it has proved that it has it."""
        tensors = self._versions.full(version)

        def publish() -> None:
            folder = export_adapter(
                tensors,
                self._output_dir / "policies" / f"policy-v{version:04d}",
                rank=self._config.model["lora_rank"],
                alpha=self._config.model["lora_alpha"],
                base_model=self._config.checkpointer["checkpoint_dir"],
                dtype=DTYPES[self._config.adapter_dtype],
            )
            self._source.publish(version, folder, canary)

        on_main_rank(publish)

    def _forget_versions(self) -> None:
        """Drop what no rollout can need any more, here and on the node."""
        oldest = self._policy_version - self._config.collection.max_policy_lag
        for version in [version for version in self._versions.versions if version < oldest]:
            if self._source is not None:
                self._source.retire(version)
        self._versions.forget_before(oldest)

    def _reason_to_stop(self, metrics: dict[str, Any]) -> str | None:
        """On rank 0."""
        if self._stop_requested():
            return "asked to"
        return self._config.stop.reason(self._idle_iterations, metrics.get("approx_kl", 0.0))

    def _log(self, metrics: dict[str, Any]) -> None:
        metrics = {
            "iteration": self._iteration,
            "policy_version": self._policy_version,
            "dataset": self._dataset,
            **metrics,
            "peak_memory_gib": self._peak_memory_gib(),
        }
        if self._metrics is not None:
            self._metrics.log(metrics)
        self._say(summary_line(metrics, self._config.max_iterations))

    def _peak_memory_gib(self) -> float:
        return torch.cuda.max_memory_allocated() / 2**30 if self._device.type == "cuda" else 0.0

    def _say(self, line: str) -> None:
        if self._rank == 0:
            print(line, flush=True)

    def _end(self, line: str) -> None:
        """Say why the run ends before its time; a stop file has then done its work."""
        self._say(line)
        if self._rank == 0:
            (self._output_dir / "stop").unlink(missing_ok=True)

    def _stop_requested(self) -> bool:
        return self._stop_signal or (self._output_dir / "stop").exists()

    def _on_signal(self, number: int, frame: Any) -> None:
        """First signal: stop at the next safe point. Second: at once."""
        self._stop_signal = True
        signal.signal(number, signal.SIG_DFL)


@parse
def recipe_main(cfg: DictConfig) -> int | str:
    """Entry point of `tune run loop_appworld`.

    Parameters come from the file given by ``--config`` and ``key=value`` on the command line.
    """
    recipe: LoopAppWorldRecipe | None = None
    try:
        cfg = extended(cfg)
        recipe = LoopAppWorldRecipe(cfg)
        recipe.setup(cfg)
        recipe.train()
    except (ConfigError, NonFiniteLoss, *SOURCE_ERRORS) as error:
        return f"loop_appworld: {error}"
    except StopRequested:
        print("loop_appworld: stopped before the first collection", file=sys.stderr)
    except RemoteError:
        return 1
    finally:
        if recipe is not None:
            recipe.cleanup()
    return 0


if __name__ == "__main__":
    leave(recipe_main())
