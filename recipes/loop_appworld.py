r"""LOOP on AppWorld: reinforcement learning of an LLM agent with leave-one-out advantages and a clipped objective.

tune run loop_appworld --config loop_appworld/tiny_cpu
tune run --nproc_per_node 8 loop_appworld --config loop_appworld/qwen2_5_32b \
    rollout_node.launch=False rollout_node.url=http://node:8700
"""

from __future__ import annotations

import sys
import time
import traceback
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torchtune import utils

from loop_contrib.distillation.distillation import Distillation, NoTeacher, distillation
from loop_contrib.sweet_rl.stored_critic import adapter_from_the_start, critic_over
from loop_contrib.turn_credit.branch_credit import credits_in_parts, with_unequal_returns
from loop_contrib.turn_credit.spread import spreader
from loop_formats.collection_request import CollectionRequest, Sampling
from loop_formats.folder_lock import lock_run
from loop_formats.ids import parse_collection_id
from loop_formats.rollout import Rollout, by_episode
from loop_formats.run_files import WriteFailed, writing
from loop_formats.schema import ConfigError, made_folder
from loop_recipes.algorithm.learner import Learner
from loop_recipes.algorithm.policy_update import NonFiniteLoss
from loop_recipes.algorithm.token_statistics import TOKEN_STATISTICS, TokenStatistics
from loop_recipes.config.command_line import parse
from loop_recipes.config.loop_config import LoopConfig, read_loop_config
from loop_recipes.config.preflight import check_run
from loop_recipes.engine.checkpoint import TrainingState, load_latest, restore_generators
from loop_recipes.engine.device_check import training_device
from loop_recipes.engine.diagnostics import (
    BROKEN_GAP,
    canary,
    flops_metrics,
    gap_metrics,
    out_of_memory,
    peak_memory_gib,
    stress,
    tolerances,
)
from loop_recipes.engine.model import DTYPES, check_context, load_base, vocabulary
from loop_recipes.engine.process_group import (
    RemoteError,
    any_rank,
    destroy_process_group,
    init_process_group,
    launched_rank,
    leave,
    on_main_rank,
    single_process,
)
from loop_recipes.engine.samples import check_token_ids, episodes, training_samples
from loop_recipes.evaluation.dev_scores import dev_scores
from loop_recipes.rollouts.branching import HowToSample
from loop_recipes.rollouts.broken import check_broken
from loop_recipes.rollouts.open import open_source
from loop_recipes.rollouts.plan import CollectionPlan, run_name
from loop_recipes.rollouts.shared_source import SharedSource
from loop_recipes.rollouts.source import SOURCE_ERRORS, Collected, NoRollouts, check_versions, in_groups
from loop_recipes.run.environment_file import ENVIRONMENT_FILE, write_description
from loop_recipes.run.metrics import behavior_metrics, environment_metrics, rollout_metrics, summary_line
from loop_recipes.run.rests_on import compare, differing, environment_identity, model_identity
from loop_recipes.run.stop_request import StopRequest, StopRequested
from rollout_server.config import as_keys

log = utils.get_logger("INFO")


class LoopAppWorldRecipe:
    """Trains a policy with LOOP (leave-one-out PPO, arXiv 2502.01600): collect rollouts, update, publish, again.

    Features:
        - **Rollouts from a node.** ``rollout_node.launch: true`` starts a rollout node (vLLM servers and environment)
          as a child of rank 0 and stops it with the run; ``rollout_node.url`` uses one on another machine;
          ``rollout_node.replay`` trains on stored logs.
        - **Algorithm as components.** ``advantage``, ``loss``, ``critic``, ``log_probs``, ``optimizer`` and
          ``lr_scheduler`` are ``_component_``s of the YAML; old log-probs are recomputed by the
          learner under the version that sampled.
        - **LoRA.** Base weights in ``dtype``, adapter masters and gradients in float32; each policy version is exported
          in PEFT's format under ``<output_dir>/policies``.
        - **FSDP2.** From two ranks on, in half precision also on one, with a mixed-precision policy; gloo and NCCL.
        - **Memory.** Activation checkpointing, one shared RoPE cache, a head that only sees the sampled tokens and
          never holds [tokens, vocabulary], micro-batches by a token budget.
        - **Overlap.** ``collection.max_policy_lag: 1`` collects the next iteration while this one is trained on.
        - **Checkpoints.** One after every iteration, atomic, safetensors and JSON. ``resume_from_checkpoint=True`` with
          the same command line goes on exactly (bit for bit on a CPU). A file ``<output_dir>/stop`` ends the run after
          the update in hand, or at once while it waits for rollouts, which are not lost. SIGTERM and Ctrl-C do the same
          to a run of one process; several ranks are killed soon after by torchrun (docs/training.md).
        - **Numbers.** ``<output_dir>/metrics.jsonl`` (keys: ``loop_recipes.run.metrics.METRICS``) and torchtune's
          loggers.

    Args:
        cfg (DictConfig): the recipe's YAML merged with the command line; the keys are those of
            :class:`~loop_recipes.config.loop_config.LoopConfig`.

    Raises:
        ConfigError: anything wrong with the config or what it names, before any work begins.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self._config: LoopConfig = read_loop_config(cfg)
        check_run(self._config)
        self._dtype = DTYPES[self._config.dtype]
        self._device = training_device(self._config.device, self._dtype)
        self._output_dir = Path(self._config.output_dir).resolve()
        made_folder("output_dir", self._output_dir)
        self._stop = StopRequest(self._output_dir / "stop")
        self._cleanup = ExitStack()
        self._together = False
        # What a checkpoint holds beside tensors.
        self._iterations_done = 0
        self._policy_version = 0
        self._idle_iterations = 0
        self._best: dict[str, Any] | None = None
        self._pending: CollectionRequest | None = None
        self._unscored: CollectionRequest | None = None
        self._canary: dict[str, Any] | None = None
        # Of the newest version's adapter, as it was published.
        self._adapter_digest = ""
        # Versions that the node may still serve, but this run has no use for.
        self._forgotten: list[int] = []
        self._critic_adapter: str | None = None
        # What the run rests on, by digests, as it is now.
        self._model_identity: dict[str, str] = {}
        self._environment_identity: dict[str, str] = {}

    def setup(self) -> None:
        """Rollout source, model, optimizer and run state; a node that is launched starts up meanwhile."""
        conf = self._config
        if launched_rank() == 0:
            self._lock = self._cleanup.enter_context(lock_run(self._output_dir))
        # Rank 0 may wait for the node to come back before it asks, and once more before the answer's end.
        patience = conf.collection.deadline_s + 2 * conf.rollout_node.start_deadline_s + 1800.0
        init_process_group(self._device, patience, always=self._dtype != torch.float32)
        self._rank = utils.get_world_size_and_rank()[1]
        torch.manual_seed(conf.seed)
        self._stop.listen()
        checkpoint = None
        if conf.resume_from_checkpoint:
            checkpoint = load_latest(self._output_dir / "checkpoints", conf.critic is not None)
            if checkpoint is None:
                utils.log_rank_zero(log, f"no checkpoint in {self._output_dir}: starting from the beginning")
        self._model_identity = on_main_rank(lambda: model_identity(conf.base_model, conf.initial_adapter))
        if checkpoint is not None:
            compare(checkpoint.state, "model", self._model_identity, conf.accept_changes)
        model, base = load_base(conf, self._dtype)
        check_context(model, conf.collection.limits.max_context, "collection.limits.max_context")
        self._run_name = on_main_rank(lambda: run_name(conf, self._output_dir))
        self._source = SharedSource(
            lambda: open_source(
                conf.rollout_node, conf.node, self._output_dir, conf.collection.deadline_s, self._stop.__bool__
            )
        )
        self._cleanup.callback(self._source.close)
        statistics = TokenStatistics(self._output_dir / TOKEN_STATISTICS, self._rank)
        self._learner = Learner(
            conf,
            model,
            base,
            self._device,
            checkpoint,
            critic=conf.critic,
            critic_lr=conf.critic_lr,
            token_statistics=statistics if conf.update.token_statistics else None,
        )
        self._turn_critic = None
        if conf.turn_credit is not None and conf.turn_credit.critic is not None:
            run = Path(conf.turn_credit.critic)
            before = None if checkpoint is None else checkpoint.state["critic_adapter"]
            self._critic_adapter = str(adapter_from_the_start(run, before))
            self._turn_critic = critic_over(self._learner, run, Path(self._critic_adapter))
        self._distil: Distillation | None = None
        if conf.distillation is not None:
            deadline_s = conf.collection.deadline_s
            self._distil = distillation(conf.distillation, self._learner, deadline_s, self._stop.__bool__)
        if conf.stress_test:
            self._stress_test()
        self._setup_run(checkpoint)

    def _stress_test(self) -> None:
        conf, learner = self._config, self._learner
        vocab_size, length = vocabulary(learner.model), conf.longest_rollout
        tokens, rehearse = conf.update.micro_batch_tokens * conf.sequence_parallel, learner.update.rehearse
        utils.log_rank_zero(log, stress(rehearse, vocab_size, length, tokens, conf.seed, self._device))

    def _setup_run(self, checkpoint: TrainingState | None) -> None:
        """Tasks, counters, metrics, and a node that serves nothing that this run will publish anew."""
        conf = self._config
        utils.log_rank_zero(log, "waiting for the rollout node to be ready")
        served = self._source.wait_ready()
        self._source.check_vocabulary(vocabulary(self._learner.model))
        self._environment = self._source.description()
        self._dataset, tasks = self._source.tasks(conf.collection.split)
        dev_tasks = self._source.tasks(conf.dev_evaluation.split)[1] if conf.dev_evaluation.every else []
        self._environment_identity = environment_identity(self._dataset, self._environment)
        if checkpoint is not None:
            compare(checkpoint.state, "environment", self._environment_identity, conf.accept_changes)
        rests_on = {**self._model_identity, **self._environment_identity}
        self._plan = CollectionPlan(conf, self._run_name, tasks, dev_tasks, self._environment, rests_on)
        if self._turn_critic is not None:
            self._turn_critic.check_room(conf.collection.tasks or tasks, conf.longest_rollout)
        if checkpoint is not None:
            self._restore(checkpoint)
        on_main_rank(self._open_metrics)
        # Published by a run that died before it saved; the same number may soon mean other weights.
        for version in [version for version in served if version > self._policy_version]:
            self._source.retire(version)

    def _restore(self, checkpoint: TrainingState) -> None:
        state = checkpoint.state
        self._iterations_done = state["iteration"]
        self._policy_version = state["policy_version"]
        self._idle_iterations = state["idle_iterations"]
        self._pending = None if state["pending"] is None else CollectionRequest.from_dict(state["pending"])
        self._unscored = None if state["unscored"] is None else CollectionRequest.from_dict(state["unscored"])
        self._plan.load_state_dict(state["sampler"], self._config.accept_changes)
        if state.get("rests_on") != self._rests_on:  # what was asked for was to be graded and sampled by others
            self._pending = self._pending and self._plan.anew(self._pending)
            self._unscored = self._unscored and self._plan.anew(self._unscored)
        self._pending = self._pending and self._plan.with_loss_limit(self._pending)
        self._best = state["best"]
        self._canary = state["canary"]
        restore_generators(checkpoint.rng, self._rank)

    def _open_metrics(self) -> None:
        with writing(self._output_dir / ENVIRONMENT_FILE):
            write_description(self._output_dir, self._environment)
        self._metrics = self._learner.open_metrics(self._iterations_done, self._environment.figures)
        self._cleanup.callback(self._metrics.close)

    def train(self) -> None:
        """Publish, collect, update, log and save until ``max_iterations`` or a reason to stop.

        Raises:
            NoRollouts: a rollout was sampled by a version further back than ``collection.max_policy_lag``.
            NoRollouts: the node's tasks or grader have changed.
            EnvironmentBroke: the environment broke in more episodes than ``collection.max_broken_share`` allows.
        """
        conf = self._config
        started = time.perf_counter()
        seconds_publishing = self._publish(self._learner.versions.versions)
        self._score()
        for iteration in range(self._iterations_done + 1, conf.max_iterations + 1):
            request = self._pending or self._plan.training(iteration, self._policy_version, self._adapter_digest)
            self._pending = None
            collected, refilled = self._collect(request, iteration)
            if collected is None:
                return self._end(f"stopped while waiting for {request.id}; resume_from_checkpoint=True goes on with it")
            self._check_grader()
            # What was asked for ahead is taken even where a resumed run's config allows no lag any more.
            oldest = min(request.policy_version, self._policy_version - conf.collection.max_policy_lag)
            check_versions(collected.rollouts, oldest, self._policy_version)
            check_broken(collected.rollouts, conf.collection.max_broken_share)
            credits = self._branch_credits(collected.rollouts, iteration)
            if credits is None:
                return self._end(f"stopped while waiting for what goes on from {request.id}; a resumed run goes on")
            # The servers rest while the trainer updates, so the policy that stood before is scored meanwhile.
            self._unscored = self._plan.evaluation(iteration - 1, self._policy_version, self._adapter_digest)
            if self._unscored is not None:
                self._source.start(self._unscored)
            if conf.collection.max_policy_lag and iteration < conf.max_iterations:
                self._pending = self._plan.training(iteration + 1, self._policy_version, self._adapter_digest)
                self._source.start(self._pending)
            metrics = self.update(collected.rollouts, iteration, credits)
            metrics |= collected.metrics() | refilled
            metrics["seconds_publishing"] = seconds_publishing
            metrics["seconds"] = time.perf_counter() - started
            started = time.perf_counter()
            self._forget_versions()
            self._log(iteration, metrics)
            self.save_checkpoint()
            # The node is asked for anything only now: should it refuse, die or be away, a resumed run has the update.
            self._score()
            while self._forgotten:
                self._source.retire(self._forgotten.pop())
            seconds_publishing = self._publish([self._policy_version] if metrics["steps"] else [])
            asked = "asked to" if any_rank(bool(self._stop)) else None
            reason = asked or conf.stop.reason(self._idle_iterations, metrics.get("approx_kl", 0.0))
            if metrics["gap_verdict"] == "broken" and conf.rollout_node.replay is None:
                reason = reason or BROKEN_GAP
            if reason and iteration < conf.max_iterations:
                return self._end(f"stopped after iteration {iteration}: {reason}")
        self._unscored = self._plan.evaluation(conf.max_iterations, self._policy_version, self._adapter_digest)
        self._score()
        if self._unscored is not None:
            return self._end(f"stopped while waiting for {self._unscored.id}; resume_from_checkpoint=True waits for it")
        self._end(None)

    def _collect(self, request: CollectionRequest, iteration: int) -> tuple[Collected | None, dict[str, int]]:
        """The iteration's rollouts, those that replace groups without signal included, and what to tell of these; None
        when the run was asked to stop meanwhile. Why it is exact: :mod:`loop_recipes.rollouts.plan`."""
        conf, asked = self._config, [request]
        collected = self._source.collect(request)
        told = {"refilled_groups": 0, "resting_tasks": 0}
        if not conf.collection.minds_signal:
            return collected, told
        while collected is not None:
            samples = training_samples(in_groups(collected.rollouts), conf.update)
            signal, lost = self._learner.update.tasks_with_signal(samples), len(collected.end.lost)
            refill = self._plan.refill(asked, signal, lost, self._policy_version, self._adapter_digest)
            if refill is None:
                told["resting_tasks"] = self._plan.rest(iteration, {sample.task_id for sample in samples} - signal)
                return collected, told
            asked.append(refill)
            told["refilled_groups"] += len(refill.tasks)
            found = self._source.collect(refill)
            collected = found and collected.joined(found)
        return None, told

    def _check_grader(self) -> None:
        """Refuse rollouts of a node elsewhere that was started again on other tasks or another grader.

        Raises:
            NoRollouts: it was; nothing is trained on them.
        """
        if self._config.rollout_node.url is None:
            return
        now = environment_identity(self._dataset, self._source.description())
        if changed := differing(self._environment_identity, now):
            raise NoRollouts(
                f"the rollout node has another {', another '.join(changed)} than when the run began or was resumed; "
                "start the node on what it was, or go on knowingly with resume_from_checkpoint=True accept_changes=True"
            )

    def _branch_credits(self, rollouts: list[Rollout], iteration: int) -> dict[str, list[float]] | None:
        """Credits of turns by Monte-Carlo continuations, where the config asks for them; None if asked to stop."""
        conf = self._config
        if conf.turn_credit is None or conf.turn_credit.by != "branches":
            return {}
        limits = replace(conf.collection.limits, max_turns=self._plan.horizon(iteration))
        count = conf.turn_credit.continuations
        versions = {version for rollout in rollouts for version in rollout.policy_versions}
        how = {v: HowToSample(count, v, Sampling(), limits, conf.seed + iteration) for v in versions}
        unfinished = conf.update.unfinished_return
        deadline_s = conf.collection.deadline_s
        return credits_in_parts(
            self._source.ask, with_unequal_returns(rollouts, unfinished), how, unfinished, deadline_s
        )

    def update(
        self, rollouts: list[Rollout], iteration: int, credits: dict[str, list[float]] | None = None
    ) -> dict[str, Any]:
        """Train on one collection (the same list on every rank, texts on rank 0 only); returns metrics.

        Args:
            credits: of the rollouts' turns, where continuations gave some; by rollout id.

        Raises:
            ConfigError: ``update.max_tokens_per_rollout`` leaves nothing to learn from, or another model sampled ids
                that this one does not know.
            NonFiniteLoss: the loss or gradient is not finite; neither step nor checkpoint is made.
            NoRollouts: no task has two rollouts.
            NoTeacher: the teacher gives no log-probs.
        """
        conf = self._config
        grouped = in_groups(rollouts)
        samples = training_samples(grouped, conf.update)
        check_token_ids(samples, vocabulary(self._learner.model), "rollout_node")
        spread = spreader(conf.turn_credit, self._turn_critic, credits or {})
        trained, step_tokens, metrics = self._learner.update.run(
            samples, self._policy_version, iteration, spread, self._distil
        )
        metrics |= gap_metrics(trained, conf.sampler_gap)
        metrics |= flops_metrics(self._learner.model, step_tokens, metrics["seconds_updating"], conf.device_peak_tflops)
        if conf.update.max_tokens_per_rollout is not None:
            metrics["left_out_rollouts"] = len(by_episode(grouped)) - len(episodes(samples))
        self._learner.end_iteration()
        if metrics["steps"]:
            self._policy_version += 1
            self._learner.versions.keep(self._policy_version)
            self._canary = canary(self._learner.update.logprobs, samples, self._policy_version)
        self._idle_iterations = 0 if metrics["steps"] else self._idle_iterations + 1
        self._iterations_done = iteration
        environment = self._environment
        means = rollout_metrics(rollouts) | environment_metrics(rollouts, environment)
        return means | behavior_metrics(rollouts, environment) | metrics

    @property
    def _rests_on(self) -> dict[str, dict[str, str]]:
        return {"model": self._model_identity, "environment": self._environment_identity}

    def save_checkpoint(self) -> None:
        """Write the state after the last iteration that was done; see checkpoint.py."""
        state = {
            "iteration": self._iterations_done,
            "policy_version": self._policy_version,
            "idle_iterations": self._idle_iterations,
            "pending": None if self._pending is None else self._pending.to_dict(),
            "unscored": None if self._unscored is None else self._unscored.to_dict(),
            "sampler": self._plan.state_dict(),
            "canary": self._canary,
            "best": self._best,
            "critic_adapter": self._critic_adapter,
            "run_name": self._run_name,
            "dataset": self._dataset,
            "rests_on": self._rests_on,
            "config": as_keys(self._config),
        }
        keep = set() if self._best is None else {self._best["iteration"]}
        if self._unscored is not None:
            keep.add(parse_collection_id(self._unscored.id).iteration)
        self._learner.save_checkpoint(state, keep)

    def cleanup(self) -> None:
        """Stop a launched node and close files; safe to call at any point, and twice. Waits for no other rank."""
        self._cleanup.close()
        if self._together or single_process():
            destroy_process_group()

    def _score(self) -> None:
        """Wait for the evaluation that is due, if one is; its scores go into the last line that was logged.

        The checkpoint of the best policy so far is kept.
        """
        due = self._unscored
        if due is None:
            return
        scores = self._source.ask(lambda source: dev_scores(source, due, self._environment))
        if scores is None:  # asked to stop: a resumed run waits for it
            return
        self._unscored, iteration = None, parse_collection_id(due.id).iteration
        if scores:
            if self._best is None or scores["dev_success"] > self._best["dev_success"]:
                self._best = {"iteration": iteration, "dev_success": scores["dev_success"]}
            on_main_rank(lambda: self._metrics.amend({"dev_iteration": iteration, **scores}))
        self._forget_versions()
        self.save_checkpoint()

    def _publish(self, versions: list[int]) -> float:
        """Have the rollout node serve versions, the newest once it has proved that it has it; returns the seconds."""
        started = time.perf_counter()
        # The tolerances are not in the checkpoint: a version that was refused may be served with larger ones.
        newest = self._canary and self._canary | tolerances(self._config.sampler_gap)
        for version in versions:
            proof = newest if version == self._policy_version else None
            adapter = self._learner.versions.full(version)
            digest = self._source.publish(version, partial(self._learner.export, version, adapter), proof)
            if version == self._policy_version:
                self._adapter_digest = digest
        return time.perf_counter() - started

    def _forget_versions(self) -> None:
        """Drop the versions that no rollout can need any more; the node is told later."""
        asked_for = [request.policy_version for request in (self._pending, self._unscored) if request is not None]
        oldest = min([self._policy_version - self._config.collection.max_policy_lag, *asked_for])
        self._forgotten += [version for version in self._learner.versions.versions if version < oldest]
        self._learner.versions.forget_before(oldest)

    def _log(self, iteration: int, metrics: dict[str, Any]) -> None:
        line = {
            "iteration": iteration,
            "policy_version": self._policy_version,
            "dataset": self._dataset,
            **metrics,
            "peak_memory_gib": peak_memory_gib(self._device),
        }
        on_main_rank(lambda: self._metrics.log(line))
        utils.log_rank_zero(log, summary_line(line, self._config.max_iterations))

    def out_of_memory(self, error: torch.OutOfMemoryError) -> str:
        """The line to end with."""
        tokens = max(self._config.update.micro_batch_tokens, self._config.longest_rollout)
        return out_of_memory(error, tokens, self._device)

    def stopped(self, waiting_for: str) -> None:
        """Say that the run was asked to stop while it waited; every rank ends for that."""
        if self._rank == 0:
            print(f"loop_appworld: stopped while waiting for {waiting_for}; a resumed run goes on", file=sys.stderr)
            self._stop.done()
        self._together = True

    def _end(self, line: str | None) -> None:
        """Say why the run ends, if before its time; a stop file has then done its work."""
        if line is not None:
            utils.log_rank_zero(log, line)
        on_main_rank(self._stop.done)
        self._together = True


@parse(LoopConfig)
def recipe_main(cfg: DictConfig) -> int | str:
    """Entry point of `tune run loop_appworld`: ``cfg`` is what --config and the words after it compose."""
    recipe: LoopAppWorldRecipe | None = None
    try:
        recipe = LoopAppWorldRecipe(cfg)
        recipe.setup()
        recipe.train()
    except (ConfigError, NonFiniteLoss, NoTeacher, WriteFailed, *SOURCE_ERRORS) as error:
        return f"loop_appworld: {error}"
    except StopRequested as error:
        assert recipe is not None, "nothing is waited for before it is there"
        recipe.stopped(str(error) or "the rollout node")
    except RemoteError:
        return 1
    except torch.OutOfMemoryError as error:
        assert recipe is not None, "nothing is allocated before it is there"
        return f"loop_appworld: {recipe.out_of_memory(error)}"
    except Exception:  # perhaps on this rank alone: said before anything is waited for
        traceback.print_exc()
        return 1
    finally:
        if recipe is not None:
            recipe.cleanup()
    return 0


if __name__ == "__main__":
    leave(recipe_main())
