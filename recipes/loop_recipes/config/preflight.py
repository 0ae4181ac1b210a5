"""Checks the names in a training config on this machine before any work begins: components, files, folders.

The checks create nothing, so that `loop check` can run the same ones as the recipe.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias

from agent_environments.protocol import PoolWithLeastContext, PoolWithPreflight, UnknownTask, create_pool, pool_class
from loop_formats.places import METRICS_FILE
from loop_formats.run_files import ADAPTER_FILES, find_logs, is_adapter, newest_adapter, only_logs
from loop_formats.schema import ConfigError, require
from loop_plumbing.breakage import raised_as
from loop_plumbing.start import launched
from loop_recipes.config.components import build_checked, check_component
from loop_recipes.config.loop_config import FROM_ITS_FOLDER, LearnerConfig, LoopConfig
from loop_recipes.config.rollout_node import check_token
from model_families.base_model import BaseModel, model_digest
from model_families.opening import check_served_as, open_model_chat, open_weights
from rollout_server.config import MAX_LORA_RANK, ModelConfig, NodeConfig
from rollout_server.inference.command import ServerStartError, check_divided, check_serves
from rollout_server.policies.adapter_check import check_adapter, other_base

Checks: TypeAlias = dict[str, Callable[[], object]]


def check_learner(config: LearnerConfig, *, starts_now: bool = True) -> None:
    """Check the keys that all training recipes share: components can be imported, and files exist.

    Raises:
        ConfigError: one line that names the key and the cure.
    """
    require(
        not config.keep_attention or (config.enable_activation_checkpointing and not config.compile),
        "keep_attention needs enable_activation_checkpointing: True, and compile: False: tensors to keep are "
        "chosen operation by operation, and a compiled layer is one",
    )
    require(
        not config.enable_activation_offloading or config.enable_activation_checkpointing,
        "enable_activation_offloading needs enable_activation_checkpointing: True, whose inputs of layers it moves",
    )
    require(
        config.attention != "fa4" or config.update.packed,
        "attention is fa4, which is checked for packed rows alone: give update.packed: True, or attention: fa2",
    )
    _check_components(config)
    check_folders(config, starts_now=starts_now)
    _check_shared_rows(config, launched("WORLD_SIZE", 1) if starts_now else None)


def check_folders(config: LearnerConfig, *, starts_now: bool = True) -> None:
    """Check the folders of :func:`check_learner`; torch is not imported."""
    _check_checkpoint_files(config)
    if starts_now:
        _check_new_or_resumed(config)
    check_can_write(Path(config.output_dir))
    check_adapter_folder("initial_adapter", config.initial_adapter, config)


def _check_shared_rows(config: LearnerConfig, ranks: int | None) -> None:
    """Check that ``ranks`` ranks can share rows as ``sequence_parallel`` says; None means not known yet."""
    sharers = config.sequence_parallel
    if sharers == 1:
        return
    shared = f"sequence_parallel is {sharers}, and ranks share packed rows alone: give update.packed: True"
    require(config.update.packed, shared)
    base = BaseModel.read(config.base_model)
    heads = f"{base.heads} heads and {base.kv_heads} key heads"
    require(
        base.divides(sharers),
        f"sequence_parallel is {sharers}, by which the model's {heads} cannot be divided; give another",
    )
    check_sharers(sharers, sharers if ranks is None else ranks)


def check_sharers(sharers: int, ranks: int) -> None:
    """Raise ConfigError unless ``ranks`` is a multiple of ``sharers``, the size of a group."""
    require(ranks % sharers == 0, f"sequence_parallel is {sharers}; it must divide the {ranks} ranks of the trainer")


def check_adapter_folder(key: str, name: str | None, config: LearnerConfig) -> None:
    """Check that the folder ``name``, the value of ``key`` if given, holds an adapter of the base model of ``config``.

    Raises:
        ConfigError: it does not, or the adapter has other base weights and ``accept_changes`` is off.
    """
    if not name:
        return
    folder, files = Path(name), " and ".join(ADAPTER_FILES)
    near = "" if (newest := newest_adapter(folder)) is None else f"; did you mean {newest}?"
    require(is_adapter(folder), f"{key} {folder} is not a PEFT adapter: it must hold {files}{near}")
    with raised_as(ConfigError, f"{key} {folder}: ", OSError, ValueError):
        check_adapter(folder, BaseModel.read(config.base_model), MAX_LORA_RANK)
    check_trained_on(key, folder, config)


def check_trained_on(key: str, adapter: Path, config: LearnerConfig) -> None:
    """Check that the adapter of ``key`` was trained on the base weights of ``config``, if the adapter records them.

    Raises:
        ConfigError: the adapter was trained on others, and ``accept_changes`` is off.
    """
    with raised_as(ConfigError, f"{key}: "):
        other = other_base(adapter, config.base_model)
    if other is None:
        return
    cure = "give the base model that it was trained on, or go on knowingly with accept_changes=True"
    require(config.accept_changes, f"{key} {adapter} {other}; {cure}")
    from torchtune import utils  # takes seconds

    utils.log_rank_zero(utils.get_logger("INFO"), f"going on though {key} {adapter} {other}")


def check_can_write(output_dir: Path, key: str = "output_dir") -> None:
    """Raise ConfigError unless the folder of ``key`` exists or can be made, and can be written to."""
    tilde = str(output_dir).startswith("~")
    require(not tilde, f"{key} {output_dir} begins with ~, which only a shell takes for your home; write the path out")
    folder = output_dir.absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    require(existing.is_dir(), f"{key} {output_dir} cannot be created: {existing} is a file")
    why = "is not writable" if existing == folder else f"cannot be created: {existing} is not writable"
    require(os.access(existing, os.W_OK | os.X_OK), f"{key} {output_dir} {why}")


def _check_components(config: LearnerConfig) -> None:
    check_component("model", config.model)
    builder = config.model["_component_"]
    if config.checkpointer is not None:
        require(
            builder != FROM_ITS_FOLDER,
            "checkpointer must be left out: model.path says where the model is, in place of "
            "checkpointer.checkpoint_dir",
        )
        check_component("checkpointer", config.checkpointer)
    else:
        require(
            builder == FROM_ITS_FOLDER,
            f"checkpointer must say where the weights for {builder} are; or give model.path in place of both",
        )
    log_probs = build_checked("log_probs", config.log_probs, object)  # cheap, and it checks its own arguments
    half_on_cuda = config.dtype in ("bf16", "fp16") and config.device.startswith("cuda")
    require(
        half_on_cuda or not getattr(log_probs, "needs_half_on_cuda", False),
        f"log_probs: {config.log_probs['_component_']} computes in half precision on CUDA alone, and this is "
        f"{config.dtype} on {config.device}; give log_probs=loop_recipes.engine.logprobs.AutoLogProbs",
    )
    _check_optimizer(config)
    for number, logger in enumerate(config.metric_logger):
        check_component(f"metric_logger[{number}]", logger)


def _check_optimizer(config: LearnerConfig) -> None:
    """Take a trial step to check that the optimizer and its schedule accept their options, and that checkpoints can
    hold the optimizer's state."""
    import torch  # takes seconds
    from torch import Tensor, nn

    weight = nn.Parameter(torch.zeros(64, 64))
    weight.grad = torch.zeros_like(weight)
    optimizer = build_checked("optimizer", config.optimizer, torch.optim.Optimizer, [weight])
    steps = config.max_iterations
    build_checked("lr_scheduler", config.lr_scheduler, object, optimizer, num_training_steps=steps, last_epoch=-1)
    try:
        with torch.compiler.set_stance("force_eager"):  # some compile their step: half a minute for one weight
            optimizer.step()
    except (TypeError, RuntimeError) as error:
        raise ConfigError(f"optimizer: {error}") from error
    except AssertionError:  # capturable: it takes steps on a GPU only
        return
    for name, state in optimizer.state[weight].items():
        require(
            type(state) is Tensor and (state.shape == weight.shape or state.numel() == 1),
            f"optimizer: checkpoints cannot hold {name} of {config.optimizer['_component_']}, which is neither a "
            "number nor of its parameter's shape; take another, such as torch.optim.AdamW",
        )


def _check_checkpoint_files(config: LearnerConfig) -> None:
    key = "model.path" if config.checkpointer is None else "checkpointer.checkpoint_dir"
    folder = Path(config.base_model)
    with raised_as(ConfigError, f"{key}: "):
        if config.checkpointer is None:
            open_weights(folder)
            return
        BaseModel.read(folder)
    files = config.checkpointer["checkpoint_files"]
    if not isinstance(files, list):
        from torchtune.training import FormattedCheckpointFiles  # as above

        with raised_as(ConfigError, "checkpointer.checkpoint_files: ", TypeError, ValueError):
            files = FormattedCheckpointFiles.from_dict(files).build_checkpoint_filenames()
    for name in files:
        require(
            (folder / name).is_file(),
            f"checkpointer.checkpoint_files: {folder / name} does not exist; download all of the model there "
            "(tune download), or name the files that it has",
        )


def _check_new_or_resumed(config: LearnerConfig) -> None:
    folder = Path(config.output_dir)
    metrics = folder / METRICS_FILE
    begun = (metrics.exists() and metrics.stat().st_size > 0) or any((folder / "checkpoints").glob("iteration_*"))
    require(
        config.resume_from_checkpoint or not begun,
        f"output_dir {folder} already holds a run; give resume_from_checkpoint=True to go on with it, or another "
        "output_dir",
    )


def check_rollout_node(config: LoopConfig) -> None:
    """Check the source of rollouts; a ConfigError is one line that names the key and the cure."""
    for check in node_checks(config).values():
        check()


def node_checks(config: LoopConfig, starts_now: bool = True) -> Checks:
    """Return the checks of :func:`check_rollout_node`, in order, by subject; each raises ConfigError."""
    section = config.rollout_node
    if section.replay is not None:
        folder = Path(section.replay)
        logs = only_logs(folder.glob("*")) if not (folder / METRICS_FILE).exists() else []  # those of a run lie deeper
        near = f"; did you mean {within[0].parent}?" if (within := find_logs(folder)) else ""
        return {"replay": partial(require, logs, f"rollout_node.replay {folder} holds no *.jsonl log{near}")}
    if section.url is not None:
        return {"token": partial(check_token, section.token_env)}
    node = config.child
    checks: Checks = {
        "base": partial(_check_same_base, config, node),
        "served": partial(check_served, node.model),
        "servers": partial(_check_servers, node),
        "tasks": partial(tasks_ahead, config, node),
    }
    return {name: check for name, check in checks.items() if starts_now or name != "servers"}


def _check_same_base(config: LoopConfig, node: NodeConfig) -> None:
    served, trained = Path(node.model.path).resolve(), Path(config.base_model).resolve()
    copied = served.is_dir() and trained.is_dir() and model_digest(served) == model_digest(trained)
    require(
        served == trained or copied,
        f"node.model.path is {served}, but the model in training is {trained}; both must be the same base model",
    )


def _check_servers(node: NodeConfig) -> None:
    if node.servers.urls is not None:
        return
    base = BaseModel.read(node.model.path)
    with raised_as(ConfigError, "node.", ServerStartError):
        check_divided(base, node.servers.tensor_parallel_size)
    with raised_as(ConfigError, "node.model: ", ServerStartError):
        check_serves(node.model.path, base)


def check_served(model: ModelConfig) -> None:
    """Check a rollout node's model as the node itself would; a ConfigError is one line with the folder and the cure."""
    with raised_as(ConfigError, "node.model: "):
        base = BaseModel.read(model.path)
        check_served_as(model.path, base, model.max_context, model.dtype)
        if any(Path(model.path).glob("tokenizer*")):  # else the tokenizer of a checked job may still be on its way
            open_model_chat(model.path, base, model.thinking, model.observation_role)


def tasks_ahead(config: LoopConfig, node: NodeConfig) -> tuple[str, list[str]] | None:
    """Return the dataset's name and the ids of the tasks to train on, if the environment knows them before it opens.

    Raises:
        ConfigError: an option unknown to the environment, an unknown task, or something that this machine lacks.
    """
    environment = node.environment
    with raised_as(ConfigError, "node.environment.name: "):
        if not hasattr(pool_class(environment.name), "preflight"):
            return None
    try:
        pool = create_pool(environment.name, environment.options, lambda text: [])
        assert isinstance(pool, PoolWithPreflight), "its class has the method"
        tasks = pool.preflight(config.collection.tasks or config.collection.split)
    except UnknownTask as error:
        raise ConfigError(f"collection.{'tasks' if config.collection.tasks else 'split'}: {error}") from error
    except (ValueError, FileNotFoundError) as error:
        raise ConfigError(f"node.environment: {error}") from error
    least = pool.least_context if isinstance(pool, PoolWithLeastContext) else 0
    most = config.collection.limits.max_context
    require(
        least <= most,
        f"collection.limits.max_context is {most}, and the agent's own prompt and its work need at least {least}",
    )
    return None if tasks is None else (pool.dataset, tasks)
