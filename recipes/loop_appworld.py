r"""LOOP, on AppWorld or any other environment: an LLM agent learns by leave-one-out advantages and a clipped objective.

tune run loop_appworld --config loop_appworld/tiny_cpu
tune run --nproc_per_node 8 loop_appworld --config loop_appworld/qwen2_5_32b \
    rollout_node.launch=False rollout_node.url=http://node:8700
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig
from torchtune import utils

from loop_formats.collection_request import CollectionRequest
from loop_formats.ids import parse_collection_id
from loop_formats.rollout import Rollout, by_episode
from loop_formats.run_files import writing
from loop_formats.run_folder import ENVIRONMENT_FILE, nothing_learned, write_description
from loop_recipes.algorithm.credit import TrainingRun
from loop_recipes.algorithm.learner import Learner
from loop_recipes.algorithm.method import check_run
from loop_recipes.algorithm.training_recipe import TrainingRecipe, run_recipe
from loop_recipes.config.command_line import parse
from loop_recipes.config.loop_config import LoopConfig, keys_to_keep, read_config
from loop_recipes.engine.checkpoint import TrainingState, restore_generators
from loop_recipes.engine.diagnostics import (
    BROKEN_GAP,
    canary,
    flops_metrics,
    gap_metrics,
    judged_gap,
    stress,
    tolerances,
)
from loop_recipes.engine.model import check_context, vocabulary
from loop_recipes.engine.process_group import any_rank, leave, on_main_rank
from loop_recipes.engine.samples import episodes, training_samples
from loop_recipes.rollouts.broken import check_broken
from loop_recipes.rollouts.open import open_source
from loop_recipes.rollouts.plan import CollectionPlan, run_name
from loop_recipes.rollouts.shared_source import SharedSource
from loop_recipes.rollouts.source import SOURCE_ERRORS, Collected, NoRollouts, check_versions, in_groups
from loop_recipes.run.fingerprint import compare, differing, environment_identity
from loop_recipes.run.group_signal import groups_by_solved, signal_figures
from loop_recipes.run.metrics import SUMMARY_WORDS, behavior_metrics, environment_metrics, rollout_metrics, summary_line

if TYPE_CHECKING:
    from loop_recipes.engine.frozen_weights import FrozenWeights
    from loop_recipes.rollouts.stream import Stream

log = utils.get_logger("INFO")


class LoopAppWorldRecipe(TrainingRecipe):
    """Trains a policy with LOOP (leave-one-out PPO, arXiv 2502.01600): collect rollouts, update, publish, again.

    Rollouts come from a node (vLLM servers and environment) that rank 0 launches, from nodes that run elsewhere, or
    from stored logs. Advantage, loss, credit, log-prob head, optimizer and schedule are components of the YAML; the
    learner recomputes old log-probs under the version that sampled. From two ranks on the model is sharded by FSDP2;
    one rank holds it whole. Every policy version is a PEFT adapter under ``<output_dir>/policies``.

    After each iteration there is a checkpoint, from which the same command with ``resume_from_checkpoint=True`` goes on
    exactly (bit for bit on a CPU). A file ``<output_dir>/stop``, SIGTERM and Ctrl-C end the run after the update in
    hand; a second signal leaves it before its next step (docs/training.md).

    Args:
        cfg (DictConfig): the recipe's YAML merged with the command line; the keys are those of
            :class:`~loop_recipes.config.loop_config.LoopConfig`.

    Raises:
        ConfigError: anything wrong with the config or what it names, before any work begins.
    """

    name = "loop_appworld"
    errors = (*TrainingRecipe.errors, *SOURCE_ERRORS)
    length_key = "collection.limits.max_context"
    _config: LoopConfig
    _stream: Stream
    """The stream whose groups the iterations take; on rank 0 alone."""

    def __init__(self, cfg: DictConfig) -> None:
        config = read_config(cfg, LoopConfig)
        self._method = check_run(config)
        if config.device.startswith("cuda"):
            from loop_recipes.plan.host_memory import check_host_memory  # of no use on a CPU

            check_host_memory(config)
        super().__init__(config)
        # State that a checkpoint holds beside tensors.
        self._policy_version = 0
        self._idle_iterations = 0
        self._best: dict[str, Any] | None = None
        self._pending: CollectionRequest | None = None
        self._unscored: CollectionRequest | None = None
        self._canary: dict[str, Any] | None = None
        # Weights that leave the device while the servers use it; None where it is not shared.
        self._frozen: FrozenWeights | None = None
        # The sampler's gap before the first step, of a run in half precision, once it is known.
        self._base_gap: float | None = None
        # Digest of the newest version's adapter as it was published.
        self._adapter_digest = ""
        # Versions that the node may still serve, but this run has no use for.
        self._forgotten: list[int] = []
        # The newest version that the node samples from.
        self._served_version = 0
        # Digests of the tasks and the grader that the run trains with now.
        self._environment_identity: dict[str, str] = {}

    def setup(self) -> None:
        """Set up rollout source, model, optimizer and run state; a launched node starts up meanwhile."""
        conf = self._config
        # Rank 0 may wait for the node to come back before it asks, and once more before the answer's end.
        patience = conf.collection.deadline_s + 2 * conf.rollout_node.start_deadline_s + 1800.0
        checkpoint = self._begin(patience, self._method.trained.keys())
        self._run_name = on_main_rank(lambda: run_name(conf, self._output_dir))
        self._source = SharedSource(
            lambda: open_source(
                conf.rollout_node, conf.node, self._output_dir, conf.collection.deadline_s, self._stop.__bool__
            )
        )
        self._cleanup.callback(self._source.close)
        model, base = self._load_base()
        check_context(model, conf.collection.limits.max_context, "collection.limits.max_context")
        stop = self._stop.in_update
        self._learner = Learner(conf, model, base, self._device, checkpoint, method=self._method, stop_requested=stop)
        if conf.takes_turns:
            from loop_recipes.engine.frozen_weights import FrozenWeights  # which few runs need

            self._frozen = FrozenWeights(self._learner.model)
        self._setup_credit(checkpoint)
        if conf.stress_test:
            self._stress_test()
        self._end_turn()
        self._setup_run(checkpoint)

    def _begin_turn(self) -> None:
        """Take the GPUs for the trainer, if the node's servers share them."""
        if self._frozen is not None:
            self._source.call(lambda source: source.sleep())
            self._frozen.to_device()

    def _end_turn(self) -> None:
        """Give shared GPUs back to the node's servers; check their policy before they sample from it."""
        if self._frozen is not None:
            self._frozen.to_host()
            any_rank(False)  # all ranks have left the GPUs
            self._source.call(lambda source: source.wake())

    def _setup_credit(self, checkpoint: TrainingState | None) -> None:
        run = TrainingRun(
            self._config,
            self._learner.update.scorer,
            ask=self._source.ask,
            max_turns=lambda iteration: self._plan.horizon(iteration),
            stop_requested=self._stop.__bool__,
        )
        for name, credit in self._method.credit.items():
            if checkpoint is not None and name in checkpoint.state["credit"]:
                credit.restore(checkpoint.state["credit"][name])
            credit.setup(run)

    def _stress_test(self) -> None:
        conf, learner = self._config, self._learner
        vocab_size, length = vocabulary(learner.model), conf.longest_rollout
        tokens, rehearse = conf.update.micro_batch_tokens * conf.sequence_parallel, learner.update.rehearse
        utils.log_rank_zero(log, stress(rehearse, vocab_size, length, tokens, conf.seed, self._device))

    def _setup_run(self, checkpoint: TrainingState | None) -> None:
        """Set up tasks, counters and metrics; retire the node's versions that this run will publish anew."""
        conf = self._config
        utils.log_rank_zero(log, "waiting for the rollout node to be ready")
        served = self._source.call(lambda source: source.wait_ready())
        model = self._learner.model
        sizes = vocabulary(model), getattr(model, "contexts", range(sys.maxsize))
        self._source.call(lambda source: source.check_model(*sizes))
        self._environment = self._source.description()
        self._dataset, tasks = self._source.call(lambda source: source.tasks(conf.collection.split))
        dev, dev_tasks = conf.dev_evaluation, []
        if dev.every:
            dev_tasks = self._source.call(lambda source: source.tasks(dev.split))[1]
        self._environment_identity = environment_identity(self._dataset, self._environment)
        if checkpoint is not None:
            compare(checkpoint.state, "environment", self._environment_identity, conf.accept_changes)
        fingerprint = {**self._model_identity, **self._environment_identity}
        self._plan = CollectionPlan(conf, self._run_name, tasks, dev_tasks, self._environment, fingerprint)
        for credit in self._method.credit.values():
            credit.check_tasks(conf.collection.tasks or tasks)
        if checkpoint is not None:
            self._restore(checkpoint)
        if self._streams:
            on_main_rank(lambda: self._open_stream(checkpoint.state if checkpoint else None))
        on_main_rank(self._open_run_files)
        # Published by a run that died before it saved; the same number may soon mean other weights.
        self._source.retire([version for version in served if version > self._policy_version])

    @property
    def _streams(self) -> bool:
        """Return whether iterations take groups of a stream; a replay does not, since its logs hold groups already."""
        return self._config.collection.stream and self._config.rollout_node.replay is None

    def _open_stream(self, state: Mapping[str, Any] | None) -> None:
        from loop_recipes.rollouts.stream import Stream  # which few runs need

        before = state and state.get("stream")
        conf = self._config.collection
        changed = state is not None and state.get("fingerprint") != self._fingerprint
        self._stream = Stream(conf, self._plan, self._output_dir, self._iterations_done, before, changed)

    def _restore(self, checkpoint: TrainingState) -> None:
        state = checkpoint.state
        self._iterations_done = state["iteration"]
        self._policy_version = state["policy_version"]
        self._idle_iterations = state["idle_iterations"]
        pending = None if self._streams else state["pending"]
        self._pending = pending and CollectionRequest.from_dict(pending)
        self._unscored = None if state["unscored"] is None else CollectionRequest.from_dict(state["unscored"])
        self._plan.load_state_dict(state["sampler"], self._config.accept_changes)
        if state.get("fingerprint") != self._fingerprint:  # the requests were for another model or grader
            self._pending = self._pending and self._plan.anew(self._pending)
            self._unscored = self._unscored and self._plan.anew(self._unscored)
        self._pending = self._pending and self._plan.with_loss_limit(self._pending)
        self._best = state["best"]
        self._canary, self._base_gap = state["canary"], state["base_gap"]
        restore_generators(checkpoint.rng, self._rank)

    def _open_run_files(self) -> None:
        with writing(self._output_dir / ENVIRONMENT_FILE):
            write_description(self._output_dir, self._environment)
        self._open_metrics(self._environment.figures)

    def train(self) -> None:
        """Publish, collect, update, log and save until ``max_iterations`` or a reason to stop.

        Raises:
            NoRollouts: a rollout was sampled by a version further back than ``collection.max_policy_lag``.
            NoRollouts: the node's tasks or grader have changed.
            EnvironmentBroke: the environment broke in more episodes than ``collection.max_broken_share`` allows.
        """
        conf = self._config
        started = time.perf_counter()
        versions = self._learner.versions.versions
        if self._streams and conf.collection.mode == "latest":
            used = {self._policy_version, self._unscored and self._unscored.policy_version}
            versions = [version for version in versions if version in used]
        seconds_publishing = self._publish(versions)
        self._score()
        utils.log_rank_zero(log, SUMMARY_WORDS)
        for iteration in self._iterations_left():
            oldest = self._policy_version - conf.collection.max_policy_lag
            if self._streams:
                awaited = f"the groups of iteration {iteration}"
                collected, figures = self._take(iteration)
            else:
                request = self._pending or self._plan.training(iteration, self._policy_version, self._adapter_digest)
                self._pending, awaited = None, request.id
                collected, figures = self._collect(request, iteration)
                # A collection asked for ahead is taken even where a resumed run's config allows no lag any more.
                oldest = min(request.policy_version, oldest)
            if collected is None:
                return self._end(f"stopped while waiting for {awaited}")
            self._check_grader()
            check_versions(collected.rollouts, oldest, self._policy_version)
            check_broken(collected.rollouts, conf.collection.max_broken_share)
            for credit in self._method.credit.values():
                credit.collected(collected.rollouts, iteration)
            # The servers have nothing to do while the trainer updates, so the policy that stood before is scored
            # meanwhile; where both share GPUs, afterwards.
            self._unscored = self._plan.evaluation(iteration - 1, self._policy_version, self._adapter_digest)
            if self._unscored is not None and not conf.takes_turns:
                self._source.call(lambda source: source.start(self._unscored))
            if conf.collection.max_policy_lag and iteration < conf.max_iterations and not self._streams:
                self._pending = self._plan.training(iteration + 1, self._policy_version, self._adapter_digest)
                self._source.call(lambda source: source.start(self._pending))
            self._begin_turn()
            metrics = self.update(collected.rollouts, iteration)
            metrics |= {**collected.metrics(), **figures}
            metrics["seconds_publishing"] = seconds_publishing
            metrics["seconds"] = time.perf_counter() - started
            started = time.perf_counter()
            self._forget_versions()
            self._log(iteration, metrics)
            self.save_checkpoint()
            # The trainer asks the node only now: should it refuse, die or be away, a resumed run has the update.
            self._end_turn()
            self._score()
            self._source.retire(self._forgotten)
            self._forgotten = []
            seconds_publishing = self._publish([self._policy_version] if self._is_due(iteration) else [])
            asked = "asked to" if any_rank(bool(self._stop)) else None
            reason = asked or conf.stop.reason(self._idle_iterations, metrics.get("approx_kl", 0.0))
            if metrics["gap_verdict"] == "broken" and conf.rollout_node.replay is None:
                reason = reason or BROKEN_GAP
            if reason and iteration < conf.max_iterations:
                return self._end(f"stopped after iteration {iteration}: {reason}")
        if self._streams:
            self._source.ask(lambda source: self._stream.close(source))
        self._unscored = self._plan.evaluation(self._iterations_done, self._policy_version, self._adapter_digest)
        self._score()
        if self._unscored is not None:
            return self._end(f"stopped while waiting for {self._unscored.id}")
        self._end(None)

    def _take(self, iteration: int) -> tuple[Collected | None, Mapping[str, float]]:
        """Return the rollouts of the groups that an iteration takes from the stream, and the stream's figures; None if
        the run was asked to stop meanwhile."""
        arguments = iteration, self._policy_version, self._served_version, self._adapter_digest
        collected = self._source.collect_by(lambda source: self._stream.take(source, *arguments))
        if collected is None:
            return None, {}
        return collected, on_main_rank(lambda: self._stream.figures(collected, self._policy_version))

    def _is_due(self, iteration: int) -> bool:
        """Return whether the node must serve the newest version now, because the next rollouts or a score need it."""
        every = self._config.dev_evaluation.every
        scored = bool(every) and iteration % every == 0
        ahead = self._policy_version - self._served_version
        return ahead > 0 and (scored or ahead >= self._config.collection.publish_every)

    def _collect(self, request: CollectionRequest, iteration: int) -> tuple[Collected | None, Mapping[str, float]]:
        """Return the iteration's rollouts, also those that replace groups without signal, and the figures of the
        replacement; None if the run was asked to stop meanwhile. Why it is exact: :mod:`loop_recipes.rollouts.plan`."""
        conf, asked = self._config, [request]
        collected = self._source.collect(request)
        figures = {"refilled_groups": 0, "resting_tasks": 0}
        if not conf.collection.depends_on_signal:
            return collected, figures
        while collected is not None:
            samples = training_samples(in_groups(collected.rollouts), conf.update)
            signal, lost = self._learner.update.tasks_with_signal(samples), len(collected.end.lost)
            refill = self._plan.refill(asked, signal, lost, self._policy_version, self._adapter_digest)
            if refill is None:
                figures["resting_tasks"] = self._plan.rest(iteration, {sample.task_id for sample in samples} - signal)
                return collected, figures
            asked.append(refill)
            figures["refilled_groups"] += len(refill.tasks)
            refilled = self._source.collect(refill)
            collected = refilled and collected.joined(refilled)
        return None, figures

    def _check_grader(self) -> None:
        """Refuse rollouts of a node elsewhere that was started again on other tasks or another grader.

        Raises:
            NoRollouts: the node has other tasks or another grader.
        """
        if self._config.rollout_node.url is None:
            return
        now = environment_identity(self._dataset, self._source.description())
        if changed := differing(self._environment_identity, now):
            raise NoRollouts(
                f"the rollout node has another {', another '.join(changed)} than when the run began or was resumed; "
                "start the node on what it was, or go on knowingly with resume_from_checkpoint=True accept_changes=True"
            )

    def update(self, rollouts: list[Rollout], iteration: int) -> dict[str, Any]:
        """Train on one collection (the same list on every rank, texts on rank 0 only); returns metrics.

        Raises:
            ConfigError: ``update.max_tokens_per_rollout`` leaves nothing to learn from.
            NonFiniteLoss: the loss or gradient is not finite; neither step nor checkpoint is made.
            NoRollouts: no task has two rollouts.
            CreditFailed: a credit could not give tokens their advantages.
        """
        conf = self._config
        grouped = in_groups(rollouts)
        samples = training_samples(grouped, conf.update)
        learned, step_tokens, metrics = self._learner.update.run(samples, self._policy_version, iteration)
        judged = judged_gap(self._learner.model, conf.dtype != "fp32")
        metrics |= gap_metrics(learned, conf.sampler_gap, self._base_gap, judged)
        if conf.dtype != "fp32" and self._base_gap is None:  # no step was taken before these rollouts were sampled
            self._base_gap = metrics.get(judged)
        metrics |= flops_metrics(self._learner.model, step_tokens, metrics["seconds_updating"], conf.device_peak_tflops)
        if conf.update.max_tokens_per_rollout is not None:
            metrics["left_out_rollouts"] = len(by_episode(grouped)) - len(episodes(samples))
        self._learner.end_iteration()
        if metrics["steps"]:
            self._policy_version += 1
            self._learner.versions.keep(self._policy_version)
            self._canary = canary(self._learner.update.scorer.logprobs, samples, self._policy_version)
        self._idle_iterations = 0 if metrics["steps"] else self._idle_iterations + 1
        self._iterations_done = iteration
        environment = self._environment
        means = rollout_metrics(rollouts) | environment_metrics(rollouts, environment)
        groups = groups_by_solved((r.task_id, r.success, conf.update.return_of(r)) for r in grouped if r.segment == 0)
        return means | behavior_metrics(rollouts, environment) | metrics | signal_figures(groups)

    @property
    def _fingerprint(self) -> dict[str, dict[str, str]]:
        return {"model": self._model_identity, "environment": self._environment_identity}

    def save_checkpoint(self) -> None:
        """Write the state after the last iteration that was done; see checkpoint.py."""
        state = {
            "iteration": self._iterations_done,
            "policy_version": self._policy_version,
            "idle_iterations": self._idle_iterations,
            "pending": None if self._pending is None else self._pending.to_dict(),
            "unscored": None if self._unscored is None else self._unscored.to_dict(),
            "sampler": on_main_rank(self._plan.state_dict) if self._streams else self._plan.state_dict(),
            "stream": self._streams and on_main_rank(lambda: self._stream.state_dict()),
            "canary": self._canary,
            "base_gap": self._base_gap,
            "best": self._best,
            "credit": {name: credit.saved() for name, credit in self._method.credit.items()},
            "run_name": self._run_name,
            "dataset": self._dataset,
            "fingerprint": self._fingerprint,
            "config": keys_to_keep(self._config),
        }
        keep = set() if self._best is None else {self._best["iteration"]}
        if self._unscored is not None:
            keep.add(parse_collection_id(self._unscored.id).iteration)
        self._learner.save_checkpoint(state, keep)
        self._tell_trackers()

    def _score(self) -> None:
        """Wait for the due evaluation, if there is one, and add the scores to the last logged line.

        The checkpoint of the best policy so far is kept.
        """
        due = self._unscored
        if due is None:
            return
        from loop_recipes.evaluation.dev_scores import dev_scores  # only runs with scores need it

        scores = self._source.ask(lambda source: dev_scores(source, due, self._environment))
        if scores is None:  # asked to stop: a resumed run waits for it
            return
        self._unscored, iteration = None, parse_collection_id(due.id).iteration
        if scores:
            # A task whose rollouts were lost counts as unsolved here: fewer tasks must not make a policy the best.
            solved = scores["dev_success"] * scores["dev_tasks"]
            if self._best is None or solved > self._best["dev_solved"]:
                self._best = {"iteration": iteration, "dev_solved": solved}
            on_main_rank(lambda: self._metrics.amend({"dev_iteration": iteration, **scores}))
        self._forget_versions()
        self.save_checkpoint()

    def _publish(self, versions: list[int]) -> float:
        """Have the rollout node serve versions, and check that it has the newest; return the seconds taken."""
        started = time.perf_counter()
        # The tolerances are not in the checkpoint: a version that was refused may be served with larger ones.
        newest = self._canary and self._canary | tolerances(self._config.sampler_gap)
        for version in versions:
            proof = newest if version == self._policy_version else None
            adapter = self._learner.versions.full(version)
            digest = self._source.publish(version, partial(self._learner.export, version, adapter), proof)
            if version == self._policy_version:
                self._adapter_digest, self._served_version = digest, version
        return time.perf_counter() - started

    def _forget_versions(self) -> None:
        """Drop the versions that no rollout can need any more; the node retires them later."""
        asked_for = [request.policy_version for request in (self._pending, self._unscored) if request is not None]
        oldest = min([self._policy_version - self._config.collection.max_policy_lag, *asked_for])
        self._forgotten += [version for version in self._learner.versions.versions if version < oldest]
        self._learner.versions.forget_before(oldest)

    def _log(self, iteration: int, metrics: dict[str, Any]) -> None:
        head = {"iteration": iteration, "policy_version": self._policy_version, "dataset": self._dataset}
        line = {**head, **metrics}
        self._write(line, summary_line(line, self._config.max_iterations))

    def _end(self, line: str | None) -> None:
        if self._iterations_done and not self._policy_version:
            nothing = on_main_rank(lambda: nothing_learned(self._output_dir))
            line = "; ".join(sentence for sentence in (line, nothing) if sentence) or None
        super()._end(line)

    def longest(self) -> int:
        return self._config.longest_rollout


@parse(LoopConfig)
def recipe_main(cfg: DictConfig) -> int | str:
    """Run `tune run loop_appworld`; ``cfg`` is composed from --config and the words after it."""
    return run_recipe(LoopAppWorldRecipe, cfg)


if __name__ == "__main__":
    leave(recipe_main())
