"""The learner of a recipe: a policy with its optimizer, its update and its versions, in and out of checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torchtune.utils import get_world_size_and_rank

from agent_environments.description import BehaviorFigure
from loop_formats.places import METRICS_FILE
from loop_formats.run_files import write_whole, writing
from loop_formats.run_folder import TOKEN_STATISTICS
from loop_formats.schema import ConfigError
from loop_plumbing.breakage import raised_as
from loop_recipes.algorithm.credit import TrainedCredit
from loop_recipes.algorithm.losses import PolicyLoss
from loop_recipes.algorithm.method import Method
from loop_recipes.algorithm.policy_update import PolicyUpdate
from loop_recipes.config.components import build
from loop_recipes.config.loop_config import LearnerConfig, keys_to_keep
from loop_recipes.engine.adapter_versions import AdapterVersions
from loop_recipes.engine.checkpoint import TrainingState, all_generators, prune_checkpoints, save_training_state
from loop_recipes.engine.decoder import attach_head
from loop_recipes.engine.model import (
    DTYPES,
    AnyDecoder,
    check_adapter,
    check_shared,
    lora_scale,
    new_adapter,
    trained_parameters,
)
from loop_recipes.engine.optimizer import build_optimizer, optimizer_tensors
from loop_recipes.engine.peft_export import export_adapter, load_adapter
from loop_recipes.engine.process_group import on_main_rank, single_process
from loop_recipes.engine.rank_batches import RankBatches
from loop_recipes.engine.sequence_parallel import RowPart
from loop_recipes.engine.sharding import full_tensors, place_model, sharding_mesh
from loop_recipes.run.metrics import RunMetrics
from loop_recipes.run.starts import record_start
from model_families.stored_weights import weights_digest
from rollout_server.config import as_config


class Learner:
    """The trainer that the recipes share; every rank has one and calls the same methods.

    Args:
        conf: the recipe's config.
        model, base: the model without storage and its weights (:func:`~loop_recipes.engine.model.load_base`).
        checkpoint: the state to resume from; None begins with ``initial_adapter`` or a new adapter.
        method: the method of learning.
        stop_requested: called before each optimizer step; if true on any rank, the update stops there.

    Attributes:
        conf: the recipe's config.
        model: the decoder with its log-prob head, on the device, sharded where there are several ranks.
        parameters: everything that is trained, by name.
        versions: the adapters of the policy versions that may still be needed.
        update: trains on rollouts.

    Raises:
        ConfigError: the adapter or a credit's weights do not fit, or a tracker can never be opened.
    """

    def __init__(
        self,
        conf: LearnerConfig,
        model: AnyDecoder,
        base: Mapping[str, Tensor],
        device: torch.device,
        checkpoint: TrainingState | None,
        *,
        method: Method,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self.conf = conf
        self._output_dir = Path(conf.output_dir).resolve()
        self._base_digest = on_main_rank(lambda: weights_digest(conf.base_model))
        dtype = DTYPES[conf.dtype]
        rank = get_world_size_and_rank()[1]
        check_shared(model, conf.sequence_parallel)
        if checkpoint is not None:
            adapter = checkpoint.adapters[checkpoint.state["policy_version"]]
            check_adapter(model, adapter, checkpoint.state["lora_alpha"], "the checkpoint's adapter")
        elif conf.initial_adapter is not None:
            adapter = load_adapter(Path(conf.initial_adapter), model)
        else:
            adapter = new_adapter(model, conf.seed)
        self.model = place_model(
            attach_head(model, build(conf.log_probs)),
            base,
            adapter,
            device,
            dtype,
            activation_checkpointing=conf.enable_activation_checkpointing,
            keep_attention=conf.keep_attention,
            activation_offloading=conf.enable_activation_offloading,
            compile_layers=conf.compile,
            attention=conf.attention if conf.update.packed else "fa2",
        )
        self._credit, self._further = method.credit, method.trained
        width = self.model.tok_embeddings.weight.shape[1]
        for name, each in self._further.items():
            _place_weights(each, width, None if checkpoint is None else checkpoint.further[name], device)
        self.parameters = trained_parameters(self.model, self._further)
        self.versions = AdapterVersions(self.model)
        for version, tensors in (checkpoint.adapters if checkpoint is not None else {0: adapter}).items():
            self.versions.put(version, tensors)
        rates = {name: each.lr for name, each in self._further.items() if each.lr is not None}
        self.optimizer, self._lr_scheduler = build_optimizer(conf, self.model, self._further, rates, checkpoint)
        statistics = None
        if conf.update.token_statistics:
            from loop_recipes.algorithm.token_statistics import TokenStatistics  # most runs keep none

            statistics = TokenStatistics(self._output_dir / TOKEN_STATISTICS, rank)
        self.update = PolicyUpdate(
            model=self.model,
            optimizer=self.optimizer,
            method=method,
            versions=self.versions,
            config=conf.update,
            batches=RankBatches(conf.update, device, RowPart.of_this_rank(conf.sequence_parallel)),
            seed=conf.seed,
            token_statistics=statistics,
            stop_requested=stop_requested,
        )
        if checkpoint is not None:
            self.update.load_state_dict(checkpoint.state["update"])
        on_main_rank(lambda: self._open_trackers(0 if checkpoint is None else checkpoint.state["iteration"]))

    def _open_trackers(self, after_iteration: int) -> None:
        self._trackers = None
        if self.conf.tracker or self.conf.metric_logger:
            from loop_recipes.run.trackers import Trackers  # most runs have none

            self._trackers = Trackers(
                self.conf.tracker,
                self.conf.metric_logger,
                output_dir=self._output_dir,
                config=as_config(keys_to_keep(self.conf)),
                after_iteration=after_iteration,
            )

    def open_metrics(self, after_iteration: int, figures: Sequence[BehaviorFigure] = ()) -> RunMetrics:
        """Write the config to ``config.yaml`` and the facts of this start to ``starts.jsonl``. Return the run's metrics
        with the trackers that the config names. For rank 0.

        Args:
            figures: the environment's figures of behaviour.
        """
        keys = {figure.key for figure in figures} | {*PolicyLoss.figures, *self.update.method.loss.figures}
        keys.update(*(each.figures for each in self._credit.values()))
        values = keys_to_keep(self.conf)
        record_start(self._output_dir, after_iteration, values)
        config = as_config(values)
        if values.get("node"):  # another run may begin with it; the rest is read as data, in which nothing is resolved
            config.node = as_config(values["node"], to_read_again=True)
        if OmegaConf.select(config, "node.root") == str(Path(self.conf.output_dir, "node")):
            config.node.root = "${output_dir}/node"  # for a run elsewhere that is begun with this file
        with writing(self._output_dir / "config.yaml"):
            write_whole(self._output_dir / "config.yaml", OmegaConf.to_yaml(config))
        return RunMetrics(self._output_dir / METRICS_FILE, self._trackers, after_iteration, keys)

    def end_iteration(self) -> None:
        """Advance the learning rate's schedule by one iteration."""
        with warnings.catch_warnings():
            # An iteration without signal takes no optimizer step; the schedule goes by iterations all the same.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            self._lr_scheduler.step()

    def export(self, version: int, adapter: Mapping[str, Tensor]) -> Path:
        """Write a version's full tensors in PEFT's format under ``policies/`` and return the folder. For rank 0."""
        folder = self._output_dir / "policies" / f"policy-v{version:04d}"
        with writing(folder):
            return export_adapter(
                adapter,
                self.model,
                folder,
                base_model=self.conf.base_model,
                base_digest=self._base_digest,
                dtype=DTYPES[self.conf.adapter_dtype],
            )

    def save_checkpoint(self, state: Mapping[str, Any], keep: Collection[int] = ()) -> None:
        """Write the checkpoint of ``state["iteration"]`` and remove old ones; all ranks must call it.

        Args:
            state: the recipe's own state, JSON-able, with ``iteration`` and ``policy_version``.
            keep: iterations whose checkpoints are kept however old they are.
        """
        further = {name: full_tensors(dict(each.named_parameters())) for name, each in self._further.items()}
        own = {"update": self.update.state_dict(), "lora_alpha": lora_scale(self.model)[1]}
        adapters = {version: self.versions.full(version) for version in self.versions.versions}
        optimizer = optimizer_tensors(self.optimizer, self.parameters)
        saved = TrainingState({**state, **own}, adapters, optimizer, all_generators(), further)
        root, keep_last = self._output_dir / "checkpoints", self.conf.keep_last_checkpoints

        def save() -> None:
            with writing(root):
                save_training_state(root, state["iteration"], saved)
                prune_checkpoints(root, keep_last, keep)

        on_main_rank(save)


def _place_weights(
    further: TrainedCredit, width: int, weights: Mapping[str, Tensor] | None, device: torch.device
) -> None:
    """Make a credit's weights for hidden states [n, width], or load the full CPU tensors ``weights``.

    The weights are sharded like the policy's, so that the gradients of both can be clipped together.

    Raises:
        ConfigError: the weights cannot be made, or ``weights`` have other sizes.
    """
    with raised_as(ConfigError, f"{further.key}: ", TypeError, ValueError, RuntimeError):
        further.make_weights(width)
    if weights is not None:
        expected = {name: tensor.shape for name, tensor in further.state_dict().items()}
        if expected != {name: tensor.shape for name, tensor in weights.items()}:
            key = further.key
            raise ConfigError(f"{key}: the checkpoint's weights have other sizes; make {key} what it was in that run")
        further.load_state_dict(dict(weights))
    further.to(device)
    if not single_process():
        fully_shard(further, mesh=sharding_mesh(device))
