"""Checks a training job before it waits in a queue (paths, config, dataset, memory, disk), and says what it would do.

The checks read this machine's file system, which a cluster with shared folders has on all nodes, and need no GPU.
"""

from __future__ import annotations

import os
import shutil
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from agent_environments.protocol import PoolWithSplits, UnknownTask, create_pool
from loop_formats.schema import ConfigError
from loop_plumbing.breakage import error_line, raised_as
from loop_recipes.algorithm.method import check_method
from loop_recipes.config.loop_config import LoopConfig, read_config
from loop_recipes.config.preflight import Checks, check_served, node_checks, tasks_ahead
from loop_recipes.engine.checkpoint import latest_checkpoint
from loop_recipes.plan.memory_plan import GIB
from loop_recipes.plan.report import Finding, GpuDivision, Machines, Problem, ReportRow, Unopened, problems
from loop_recipes.run.tracker import named_tracker
from model_families.base_model import BaseModel
from model_families.families.family import check_lora
from model_families.stored_weights import check_finite
from rollout_server.config import ModelConfig, NodeConfig
from rollout_server.inference.command import check_serves, compile_cache

if TYPE_CHECKING:
    from loop_recipes.plan.job_memory import Unloaded


def check_job(cfg: DictConfig, node: NodeConfig, machines: Machines) -> Iterator[Finding]:
    """Check a training job and its rollout node against the machines that will run them.

    Args:
        cfg: the training config, composed.
        node: the config's ``node``.
    """
    cuda = str(cfg.get("device", "cpu")).startswith("cuda")
    yield from _placement(cfg, node, machines, cuda)
    yield from _compiling(node)
    try:
        config = read_config(cfg, LoopConfig)
    except ConfigError as error:  # nothing further can be checked
        yield Problem("config", str(error))
        return
    unsound = _run(config)
    yield from unsound
    yield from _trackers(config)
    yield from _dataset(config, node)
    if not unsound:
        folder = Path(config.output_dir).resolve()
        checkpoint = latest_checkpoint(folder / "checkpoints")
        begin = f"goes on from {checkpoint.name}" if checkpoint is not None else "starts from the beginning"
        yield ReportRow("run", f"{folder}, {begin}, to iteration {config.max_iterations}")
    try:
        shape = BaseModel.read(node.model.path)
    except ValueError as error:
        if not unsound:
            yield Problem("folder", f"model: {error}")
        if cuda:
            from loop_recipes.plan.job_memory import needs_of_published  # as below

            yield from needs_of_published(config, node, machines)
        return
    model = None
    if cuda or shape.family is None or config.checkpointer is not None:
        from loop_recipes.plan.job_memory import needs, unloaded  # torchtune, which takes seconds

        model = unloaded(config)
    yield from _served(node.model, shape, cuda)
    if not unsound:
        yield from _sizes(config, shape, model)
    yield from _disk(config, shape.adapter_parameters(config.model.get("lora_rank", 16)))
    if cuda:
        yield from needs(config, node, machines, shape, model)


def _trackers(config: LoopConfig) -> Iterator[Finding]:
    """Yield for each tracker the place to which it writes, and whether this machine can reach the place."""
    for name in config.tracker:
        tracker = named_tracker(name)
        try:
            url = tracker.check()
        except ConfigError as error:
            yield Problem(f"tracker {name}", str(error))
            continue
        away = None if url is None else _unreachable(url)
        place = "on this machine" if url is None else url
        yield ReportRow(
            "tracker", f"{name}: {place}" + (f" cannot be reached: {away}; {tracker.offline}" if away else "")
        )


def _unreachable(url: str) -> str | None:
    """Return the reason why ``url`` does not answer, through the environment's proxies; None if it answers."""
    try:
        urllib.request.urlopen(url, timeout=5.0).close()
    except urllib.error.HTTPError:  # also an answer
        return None
    except (OSError, ValueError) as error:
        return error_line(error)
    return None


def _placement(cfg: DictConfig, node: NodeConfig, machines: Machines, cuda: bool) -> Iterator[Finding]:
    servers, place = node.servers, GpuDivision.of(machines, node.servers)
    if servers.share is not None and machines.nodes > 1:
        one = "node.servers.share: trainer is for one node, whose GPUs both have: give --nodes 1"
        yield Problem("node.servers.share", one)
    count, per_server = len(servers.urls or []) or servers.count, servers.tensor_parallel_size
    episodes, dtype = f"{node.max_concurrent_episodes} episodes at a time", cfg.get("dtype", "fp32")
    if not cuda:
        yield ReportRow("rollout node", f"{_several(count, 'vLLM server')} on CPU, {episodes}")
        yield ReportRow("trainer", f"1 rank on CPU, {dtype}")
        return
    nodes = "" if machines.nodes == 1 else f"{_several(machines.nodes - 1, 'node')} of "
    takes = f"{_several(count, 'vLLM server')} on {_several(per_server, 'GPU')}{' each' if count > 1 else ''}"
    yield ReportRow("rollout node", f"{nodes}{takes}, {episodes}")
    last = place.trainer_gpus - 1
    where = "the last node" if machines.nodes > 1 else f"GPUs 0 to {last}" if last else "GPU 0"
    if place.shared:
        where += ", which it shares with vLLM" if servers.share is None else ", in turns with vLLM"
    elif machines.nodes == 1:
        where += " of the same node"
    yield ReportRow("trainer", f"{_several(place.trainer_gpus, 'rank')} on {where}, {dtype}")
    if servers.urls is not None:
        return
    allowed = place.rollout_gpus
    if place.shared and (servers.gpu_memory_utilization is None or servers.kv_cache_bytes is None):
        yield Problem(
            "shared GPU",
            "on a GPU that vLLM shares with the trainer, node.servers needs both gpu_memory_utilization "
            "(checked when it starts) and kv_cache_bytes (else it counts the trainer's memory as its own)",
        )
    if count * per_server > len(allowed):
        yield Problem(
            "number of GPUs",
            f"the servers need {count * per_server} GPUs, a rollout node has {len(allowed)}: lower "
            "node.servers.count or tensor_parallel_size",
        )
    uses = Counter(gpu for gpus in servers.gpus or [] for gpu in gpus)
    named = sorted(uses)
    if repeated := [gpu for gpu in named if uses[gpu] > 1]:
        yield Problem(
            "GPUs of several servers",
            f"node.servers.gpus names {repeated} more than once, and a server is planned as the only one on its GPUs: "
            "give each GPUs of its own",
        )
    if any(gpu not in allowed for gpu in named):
        yield Problem(
            "GPUs that are not vLLM's",
            f"node.servers.gpus names {named}, but on {machines.nodes} node(s) of {machines.gpus} "
            f"vLLM may use {allowed.start} to {allowed.stop - 1}",
        )
    if servers.gpus is None and (count > 1 or allowed.start > 0):
        yield Problem("GPUs", "node.servers.gpus must say which GPUs each server takes")


def _several(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"


def _compiling(node: NodeConfig) -> Iterator[Problem]:
    if node.servers.urls is None:
        check = partial(compile_cache, node.servers, Path(node.root))
        yield from problems("compile cache", check, "node.servers: ")


def _run(config: LoopConfig) -> list[Problem]:
    """Return the first problems among the things that the config names. The run may exist already."""
    method: Checks = {"method": partial(check_method, config, starts_now=False)}
    for about, check in (method | node_checks(config, starts_now=False)).items():
        if missing := [*problems(about, check)]:
            return missing
    return []


def _dataset(config: LoopConfig, node: NodeConfig) -> Iterator[Finding]:
    try:
        ahead = tasks_ahead(config, node)
    except ConfigError as error:
        yield Problem("tasks", str(error))
        return
    if ahead is None:
        ahead = yield from _environment(config, node)
    if ahead is None:
        return
    (dataset, tasks), collection = ahead, config.collection
    yield ReportRow(
        "dataset",
        f"{dataset}, {len(tasks)} tasks of {collection.split}, {collection.tasks_per_iteration} x "
        f"{collection.rollouts_per_task} rollouts an iteration",
    )
    if len(tasks) < collection.tasks_per_iteration:
        few = f"collection.tasks_per_iteration is {collection.tasks_per_iteration}, but the split has {len(tasks)}"
        yield Problem("collection.tasks_per_iteration", few)


def _environment(config: LoopConfig, node: NodeConfig) -> Generator[Finding, None, tuple[str, list[str]] | None]:
    """Build the node's pool, without opening it, to check its options.

    Returns:
        Its dataset and the tasks to train on, if it knows its splits before it opens.
    """
    settings, task_ids = node.environment, config.collection.tasks
    ahead = None
    yield ReportRow("environment", settings.name)
    try:
        pool = create_pool(settings.name, settings.options, lambda text: [])
        if isinstance(pool, PoolWithSplits):
            pool.check_tasks(task_ids or [])
            ahead = (pool.dataset, task_ids or pool.tasks(config.collection.split))
        else:
            yield Unopened(settings.name)
    except UnknownTask as error:
        yield Problem("tasks", f"collection.{'tasks' if task_ids else 'split'}: {error}")
    except Exception as error:
        reason = str(error) if isinstance(error, ValueError | OSError) else error_line(error)
        yield Problem("node.environment", f"node.environment: {reason}")
        return None
    python = settings.options.get("python")
    if isinstance(python, str) and os.sep in python and not os.access(python, os.X_OK):
        yield Problem("node.environment.python", f"node.environment.python: there is no interpreter at {python}")
    return ahead


def _served(model: ModelConfig, shape: BaseModel, cuda: bool) -> Iterator[Finding]:
    """Check the node's model, which a problem of the run left unchecked; on a CPU, also check that vLLM serves it."""

    def check() -> None:
        check_served(model)
        if not cuda:
            check_serves(model.path, shape)

    yield from problems("served", check)


def _sizes(config: LoopConfig, shape: BaseModel, model: Unloaded | None) -> Iterator[Finding]:
    """Compare the model with config.json, which describes the weights. If ``model`` is None, check only the LoRA keys:
    the model would be built as config.json says, except for LoRA."""
    try:
        if model is None:
            with raised_as(ConfigError, f"model: {config.base_model} cannot be built: "):
                return check_lora(**config.model)
        if isinstance(model, ConfigError):
            raise model
        from loop_recipes.engine.model import check_built, check_context

        check_built(model, shape, config)
        check_context(model, config.collection.limits.max_context, "collection.limits.max_context")
    except ConfigError as error:
        yield Problem("model", str(error))


def probe_model(path: str, max_context: int) -> Finding:
    """Compare the trainer's computation of the model in the folder ``path`` with transformers', for servers of
    ``max_context`` tokens."""
    import torch

    from loop_recipes.engine.general_decoder import read_weights  # transformers, which takes seconds
    from loop_recipes.engine.general_probe import probe

    try:
        base = replace(BaseModel.read(path), context=max_context)
        check_finite(path)
        if base.family is not None:
            return ReportRow("exact", f"a {base.model_type} is built by torchtune's modules, which tests compare")
        weights, buffers = read_weights(path, base, torch.float32)
        return ReportRow("exact", str(probe(path, base, weights | buffers, torch.float32, torch.device("cpu"))))
    except (OSError, ValueError) as error:
        return Problem("exact", f"model: {error}")


def _disk(config: LoopConfig, adapter_parameters: int) -> Iterator[Finding]:
    """Yield the disk space that the run needs: every version's adapter, and some checkpoints (adapter, two moments)."""
    each = adapter_parameters * (2 if config.adapter_dtype in ("bf16", "fp16") else 4)
    checkpoints = (config.keep_last_checkpoints + 1) * adapter_parameters * 12
    need = each * config.max_iterations + checkpoints
    folder = Path(config.output_dir).resolve()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    text = f"about {need / GIB:.1f} GiB of adapters and checkpoints, {free / GIB:.0f} GiB free in {folder}"
    yield ReportRow("disk", text)
    if need > free:
        yield Problem("disk", f"disk: {folder} has {free / GIB:.0f} GiB free, the run needs {need / GIB:.0f}")
