r"""Training on a fixed set of rollouts: cross-entropy on the agent's tokens, preferences, or a critic of turns.

tune run sft_appworld --config sft_appworld/tiny_cpu rollouts.logs='[runs/demo]'
tune run --nproc_per_node 8 sft_appworld --config sft_appworld/qwen2_5_32b rollouts.logs='[runs/rft]'
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from omegaconf import DictConfig
from torchtune import utils

from loop_formats.run_files import COLLECTIONS, write_rollouts, writing
from loop_formats.schema import ConfigError, require
from loop_plumbing.breakage import raised_as
from loop_recipes.algorithm.learner import Learner
from loop_recipes.algorithm.losses import LogLikelihood
from loop_recipes.algorithm.method import build_method
from loop_recipes.algorithm.training_recipe import TrainingRecipe, run_recipe
from loop_recipes.config.command_line import parse
from loop_recipes.config.loop_config import keys_to_keep, read_config
from loop_recipes.config.preflight import check_learner
from loop_recipes.config.sft_config import SftConfig
from loop_recipes.engine.checkpoint import TrainingState, restore_generators
from loop_recipes.engine.model import check_context
from loop_recipes.engine.process_group import any_rank, leave, on_main_rank
from loop_recipes.engine.samples import CreditedSample, Sample, training_samples
from loop_recipes.rollouts.chats import ChatSet, read_chat_set
from loop_recipes.rollouts.fixed_set import FixedSet, read_fixed_set, sample_maker
from loop_recipes.run.metrics import rollout_metrics
from model_families.base_model import BaseModel
from model_families.opening import open_model_chat

log = utils.get_logger("INFO")

LONGEST_WAIT_S = 1800.0
"""Seconds to wait for another rank, outside an update."""


class SftAppWorldRecipe(TrainingRecipe):
    """Trains a policy on stored rollouts or demonstrations (LOOP's rows RFT and SFT-GT; DPO and DMPO offline).

    The set is conversations (``data``), which are written in the model's own chat format, or logs of rollouts: from any
    run, ``loop method solved`` or demonstrations. ``advantage`` decides which rollouts count: ``Solved`` keeps the
    successful ones, ``ReturnPairs`` makes pairs of a task's rollouts. Losses are ``LogLikelihood`` (cross-entropy with
    ``update.loss_divisor: tokens``), ``DPO`` and ``DMPO``; the reference of pairs is the policy that the run began
    with.

    The learner, its checkpoints and requests to stop are those of ``loop_appworld``. After every ``export_every``
    iterations there is an adapter under ``<output_dir>/policies``; ``preset=choose_on_dev`` of ``loop eval`` finds the
    best of them.

    Args:
        cfg (DictConfig): the recipe's YAML merged with the command line; the keys are those of
            :class:`~loop_recipes.config.sft_config.SftConfig`.

    Raises:
        ConfigError: anything wrong with the config or what it names, before any work begins.
    """

    name = "sft_appworld"
    length_key = "update.max_tokens_per_rollout"
    _config: SftConfig

    def __init__(self, cfg: DictConfig) -> None:
        config = read_config(cfg, SftConfig)
        self._method = build_method(config)
        check_learner(config)
        require(
            isinstance(self._method.loss, LogLikelihood),
            f"loss: {config.loss['_component_']} needs rollouts of the policy in training; a fixed set takes "
            "LogLikelihood, or a loss of pairs such as DPO",
        )
        self._maker = sample_maker(config.samples)
        self._maker.check(config, self._method.plan)
        super().__init__(config)
        self._samples: list[CreditedSample] = []
        self._held_out: list[Sample] = []
        self._chats = ChatSet()
        self._key = "data" if config.data_files else "rollouts.logs"

    def setup(self) -> None:
        """Load rollouts, model, optimizer and run state."""
        conf = self._config
        fixed_set = self._read_set()
        samples = fixed_set.samples(conf.update, conf.base_model)
        checkpoint = self._begin(LONGEST_WAIT_S)
        on_main_rank(self._write_chats)
        model, base = self._load_base()
        every = [*samples, *self._held_out]
        check_context(model, max(sample.tokens for sample in every), f"{self._key}: the longest")
        stop = self._stop.in_update
        self._learner = Learner(conf, model, base, self._device, checkpoint, method=self._method, stop_requested=stop)
        self._setup_set(fixed_set, samples)
        if checkpoint is not None:
            self._restore(checkpoint)
        on_main_rank(self._open_metrics)

    def _read_set(self) -> FixedSet:
        """Read the rollouts from the logs, or make rollouts of conversations with the model's chat format."""
        conf = self._config
        if not conf.data_files:
            return read_fixed_set(conf.rollouts, self._maker, BaseModel.read(conf.base_model).vocabulary)
        with raised_as(ConfigError, "data: "):
            base = BaseModel.read(conf.base_model)
            chat = open_model_chat(conf.base_model, base)
        most_tokens = base.positions if conf.update.max_tokens_per_rollout is None else math.inf  # longer ones are cut
        chats = read_chat_set(conf.data_files, chat, conf.turns, conf.held_out, most_tokens)
        for note in chats.notes:
            utils.log_rank_zero(log, f"data: {note}")
        self._held_out = training_samples(chats.held_out, conf.update) if chats.held_out else []
        self._chats = chats
        weighted = next((each.extra["place"] for each in chats.rollouts if "weights" in each.extra), None)
        require(
            weighted is None or not (self._method.plan.compares_pairs or self._config.samples),
            f"data: {weighted}: weights of its turns are for LogLikelihood without samples; leave them out, or 0",
        )
        self._maker.see(chats.rollouts)
        return FixedSet(chats.rollouts, self._maker)

    def _write_chats(self) -> None:
        """Write the rollouts made of conversations, for `loop view`. For rank 0."""
        folder = self._output_dir / COLLECTIONS
        with writing(folder):
            for rollouts in filter(None, (self._chats.rollouts, self._chats.held_out)):
                write_rollouts(folder, rollouts[0].collection_id, rollouts)

    def _setup_set(self, fixed_set: FixedSet, samples: list[Sample]) -> None:
        self._samples = fixed_set.weighted(self._learner.update.prepare(samples))
        read = len(fixed_set.rollouts)
        none = f"{self._key}: none of {read} rollouts counts under advantage {self._config.advantage['_component_']}"
        require(self._samples, f"{none}: Solved takes those that solve their task, pairs need rewards that differ")
        self._rollouts = fixed_set.used(self._samples)
        self._digest = fixed_set.digest
        tasks = len({rollout.task_id for rollout in self._rollouts})
        parts = f"{len(self._samples)} parts of " if len(self._samples) != len(self._rollouts) else ""
        utils.log_rank_zero(log, f"training on {parts}{len(self._rollouts)} of {read} rollouts, of {tasks} tasks")

    def _restore(self, checkpoint: TrainingState) -> None:
        state = checkpoint.state
        require(
            state.get("set") == self._digest or self._config.accept_changes,
            f"resume_from_checkpoint: {self._key} holds other rollouts than the run was started with; give those, or "
            "go on knowingly with accept_changes=True",
        )
        self._iterations_done = state["iteration"]
        restore_generators(checkpoint.rng, self._rank)

    def train(self) -> None:
        """Pass over the set, log, save and export until ``max_iterations`` or a request to stop."""
        conf = self._config
        for iteration in self._iterations_left():
            self._log(iteration, self.update(iteration))
            if iteration % conf.export_every == 0 or iteration == conf.max_iterations:
                self._export(iteration)  # before the checkpoint: a resumed run would not export it
            self.save_checkpoint()
            if any_rank(bool(self._stop)) and iteration < conf.max_iterations:
                return self._end(f"stopped after iteration {iteration}: asked to")
        self._end(None)

    def update(self, iteration: int) -> dict[str, Any]:
        """Pass ``update.epochs`` times over the set; the resulting policy has the iteration's number as version.

        Raises:
            NonFiniteLoss: the loss or gradient is not finite; neither step nor checkpoint is made.
        """
        started = time.perf_counter()
        step_tokens, metrics = self._learner.update.train(self._samples, iteration)
        seconds = time.perf_counter() - started
        self._learner.end_iteration()
        versions = self._learner.versions
        versions.keep(iteration)
        for version in versions.versions[:-1]:
            if version > 0 or not self._method.plan.compares_pairs:  # version 0 is the reference of pairs
                versions.forget(version)
        self._iterations_done = iteration
        tokens = sum(tokens - shared for tokens, shared in step_tokens)
        if self._held_out:
            logprobs = torch.cat([*self._learner.update.scorer.current_logprobs(self._held_out).values()])
            metrics["held_out_loss"] = -logprobs.double().mean().item()
        return metrics | {"seconds_updating": seconds, "tokens_per_second": tokens / seconds}

    def save_checkpoint(self) -> None:
        """Write the state after the last finished iteration; see checkpoint.py."""
        self._learner.save_checkpoint(
            {
                "iteration": self._iterations_done,
                "policy_version": self._iterations_done,
                "set": self._digest,
                "fingerprint": {"model": self._model_identity},
                "config": keys_to_keep(self._config),
            }
        )
        self._tell_trackers()

    def longest(self) -> int:
        return max((sample.tokens for sample in self._samples), default=0)

    def _export(self, version: int) -> None:
        adapter = self._learner.versions.full(version)
        on_main_rank(lambda: str(self._learner.export(version, adapter)))

    def _log(self, iteration: int, metrics: dict[str, Any]) -> None:
        head = {"iteration": iteration, "policy_version": iteration, "dataset": self._rollouts[0].dataset}
        line = {**head, **rollout_metrics(self._rollouts), **metrics}
        held_out = f"held-out loss {line['held_out_loss']:.4f}  " if self._held_out else ""
        self._write(
            line,
            f"iteration {iteration:3d}/{self._config.max_iterations}  loss {line['loss']:.4f}  {held_out}"
            f"steps {line['steps']}  "
            f"grad {line['grad_norm']:.3f}  updating {line['seconds_updating']:.1f}s",
        )


@parse(SftConfig)
def recipe_main(cfg: DictConfig) -> int | str:
    """Entry point of `tune run sft_appworld`: ``cfg`` is composed from --config and the words after it."""
    return run_recipe(SftAppWorldRecipe, cfg)


if __name__ == "__main__":
    leave(recipe_main())
