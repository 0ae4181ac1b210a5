"""What a training job would do, and whether it can, before it waits in a queue: paths, config, dataset, memory, disk.

Looks at this machine's file system, which is the nodes' too on a cluster with shared folders, and needs no GPU.
"""

from __future__ import annotations

import inspect
import os
import shutil
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from omegaconf import DictConfig

from agent_environments.protocol import PoolWithSplits, UnknownTask, create_pool
from loop_formats.schema import ConfigError
from loop_plumbing.breakage import error_line
from loop_recipes.algorithm.method import check_method
from loop_recipes.config.components import check_component
from loop_recipes.config.files import compose
from loop_recipes.config.loop_config import LoopConfig, read_config
from loop_recipes.config.preflight import Checks, check_served, check_sharers, node_checks, port_problem, tasks_ahead
from loop_recipes.config.rollout_node import described_node
from loop_recipes.engine.checkpoint import latest_checkpoint
from loop_recipes.engine.general_decoder import read_weights
from loop_recipes.engine.general_probe import probe
from loop_recipes.engine.model import DTYPES, AnyDecoder, check_built, check_context, meta_model
from loop_recipes.plan.host_memory import available, check_host, host_line
from loop_recipes.plan.layer_memory import LayerBytes, layer_bytes
from loop_recipes.plan.memory_plan import (
    BUS_GB_S,
    GIB,
    USABLE,
    MemoryPlan,
    plan_host,
    plan_rank,
    plan_rollout_server,
    plan_turns,
)
from loop_recipes.plan.published_folder import folder_to_plan
from loop_recipes.plan.time_plan import H100, card_of, rollout_flops, sampled_tokens_per_s, update_work
from loop_recipes.run.tracker import named_tracker
from model_families.base_model import BaseModel
from model_families.stored_weights import check_finite
from rollout_server.config import ModelConfig, NodeConfig, ServersConfig
from rollout_server.inference.command import ServerStartError, check_divided, check_serves, compile_cache


class Planned(NamedTuple):
    """A server and a trainer's rank, each by itself, and what layers take of a model that transformers builds."""

    server: MemoryPlan
    trainer: MemoryPlan
    counted: LayerBytes | None


Unloaded: TypeAlias = "AnyDecoder | ConfigError"
"""A model without storage, or why it cannot be built."""
IN_TURNS = ("node.servers.share=trainer", "collection.max_policy_lag=0")


@dataclass(frozen=True)
class Machines:
    """``nodes`` of ``gpus`` GPUs with ``gpu_gib`` GiB each.

    Raises:
        ConfigError: there is no node, no GPU, or no memory.
    """

    nodes: int
    gpus: int
    gpu_gib: float

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.gpus < 1:
            raise ConfigError(f"--nodes and --gpus must be at least 1, not {self.nodes} and {self.gpus}")
        if not self.gpu_gib > 0:
            raise ConfigError(f"--gpu-memory must be above 0, not {self.gpu_gib:g}")


def usual_machines(servers: ServersConfig) -> tuple[int, int]:
    """The nodes, and GPUs of each, that a config is meant for, by the GPUs that its servers take: one node where these
    are the trainer's too, one GPU where the only server is on GPU 0, one node where the first GPUs are left to the
    trainer, else two nodes."""
    if servers.share is not None:
        return 1, servers.count * servers.tensor_parallel_size
    if servers.gpus == [[0]]:
        return 1, 1
    return (1 if servers.gpus and min(map(min, servers.gpus)) > 0 else 2), 8


@dataclass(frozen=True)
class GpuDivision:
    """The division of a node's GPUs: those that train, and those (by index) that vLLM may use on a rollout node.

    Of several nodes the last trains. On one whose GPUs both have in turns, each has all of them. Another one is divided
    in halves, the trainer's first, unless it has only one GPU or the config's only server is on GPU 0: then the trainer
    has one rank, on that GPU, and shares it.
    """

    trainer_gpus: int
    rollout_gpus: range
    shared: bool

    @classmethod
    def of(cls, machines: Machines, servers: ServersConfig) -> GpuDivision:
        if servers.share is not None and machines.nodes == 1:
            return cls(machines.gpus, range(machines.gpus), shared=True)
        if machines.nodes > 1:
            return cls(machines.gpus, range(machines.gpus), shared=False)
        if machines.gpus == 1 or servers.gpus == [[0]]:
            return cls(1, range(machines.gpus), shared=True)
        half = machines.gpus // 2
        return cls(half, range(half, machines.gpus), shared=False)


class ReportRow(NamedTuple):
    """What would happen: a line about ``name``."""

    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.name:<15}{self.text}"


class Problem(NamedTuple):
    """What would stop the job, in one line; ``about`` is what was looked at, and looking twice finds one problem."""

    about: str
    text: str


class Unopened(NamedTuple):
    """The environment knows what it needs when it is opened only, which nobody did here."""

    environment: str


Finding: TypeAlias = ReportRow | MemoryPlan | Problem | Unopened


@dataclass(frozen=True)
class Report:
    """``lines`` say what would happen, ``problems`` what would stop the job, one line each; ``unopened``: the
    environment is :class:`Unopened`."""

    lines: tuple[str, ...]
    problems: tuple[str, ...]
    unopened: bool

    @classmethod
    def of(cls, findings: Iterable[Finding]) -> Report:
        found = [*findings]
        problems = {each.about: each.text for each in found if isinstance(each, Problem)}
        lines = tuple(str(each) for each in found if isinstance(each, ReportRow | MemoryPlan))
        return cls(lines, tuple(problems.values()), any(isinstance(each, Unopened) for each in found))


def check_job(cfg: DictConfig, node: NodeConfig, machines: Machines) -> Iterator[Finding]:
    """Check a training job and its node against the machines that are to run them.

    Args:
        cfg: the training config, composed.
        node: its ``node``.
    """
    cuda = str(cfg.get("device", "cpu")).startswith("cuda")
    yield from _placement(cfg, node, machines, cuda)
    yield from _port(node)
    yield from _compiling(node)
    try:
        config = read_config(cfg, LoopConfig)
    except ConfigError as error:  # with no more to go by than that
        yield Problem("config", str(error))
        return
    unsound = [*_run(config)]
    yield from unsound
    yield from _head(config)
    yield from _trackers(config)
    yield from _dataset(config, node)
    if not unsound:
        yield _run_state(config)
    try:
        shape = BaseModel.read(node.model.path)
    except ValueError as error:
        if not unsound:
            yield Problem("folder", f"model: {error}")
        if cuda:
            yield from _published(config, node, machines)
        return
    model = _unloaded(config)
    yield from _served(node.model, shape, cuda)
    if not unsound:
        yield from _sizes(config, shape, model)
    yield from _disk(config, shape.adapter_parameters(config.model.get("lora_rank", 16)))
    if cuda:
        yield from _needs(config, node, machines, shape, model)


def _trackers(config: LoopConfig) -> Iterator[Finding]:
    """Where the trackers write, and whether that can be reached from here."""
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
    """Why nothing answers at ``url``, by the proxies of the environment; None where something does."""
    try:
        urllib.request.urlopen(url, timeout=5.0).close()
    except urllib.error.HTTPError:  # an answer too
        return None
    except (OSError, ValueError) as error:
        return error_line(error)
    return None


def what_fits(names: Iterable[str], gpu_gib: float) -> list[str]:
    """Say in a line for each config for GPUs whether it fits with ``gpu_gib`` GiB each, by arithmetic: divided, and in
    turns. A model that is not on this machine is planned by its published sizes, if they are known."""
    lines = [f"{'GiB a GPU (arithmetic)':<24}{'trainer, server':<20}sampling, training in turns"]
    for name in names:
        if not str(compose(name).get("device", "cpu")).startswith("cuda"):
            continue
        model = described_node(compose(name)).model.path
        with folder_to_plan(model) as folder:
            try:
                if folder is None:
                    raise ConfigError(f"there is no model at {model}")
                cells = [*_fits(name, folder, gpu_gib)]
            except ValueError as error:  # ConfigError too
                cells = [f"not planned: {error}"]
        lines.append(f"{name:<24}" + "".join(f"{cell:<20}" for cell in cells).rstrip())
    return [
        *lines,
        f"no: it does not fit GPUs of {gpu_gib:g} GiB, of which a config has as many as `loop check NAME` says.",
        "Where trainer and server divide one GPU, both figures are of it.",
    ]


def _fits(name: str, folder: str, gpu_gib: float) -> Iterator[str]:
    shape = BaseModel.read(folder)
    for words in (("node.servers.share=null",), IN_TURNS):
        cfg = compose(name, words)
        config, node = _reading(read_config(cfg, LoopConfig), folder), described_node(cfg)
        machines = Machines(*usual_machines(node.servers), gpu_gib)
        found = [*_memory(config, node, machines, shape, partial(_unloaded, config))]
        sums = [f"{each.sum:.2f}" for each in found if isinstance(each, MemoryPlan)]
        yield ", ".join(sums) + (" no" if Report.of(found).problems else "")


def _reading(config: LoopConfig, folder: str) -> LoopConfig:
    """The config with the model in ``folder`` in place of one that is not here."""
    return replace(config, model={**config.model, "path": folder}) if "path" in config.model else config


def _unloaded(config: LoopConfig) -> Unloaded:
    try:
        return meta_model(config.model, DTYPES[config.dtype])
    except ConfigError as error:
        return error
    except (ImportError, AttributeError) as error:
        return ConfigError(f"model: {error}")


def _published(config: LoopConfig, node: NodeConfig, machines: Machines) -> Iterator[Finding]:
    """What a model whose folder is not here needs, by its published sizes; nothing where they are not known."""
    if (Path(node.model.path) / "config.json").is_file():
        return
    with folder_to_plan(node.model.path) as folder:
        if folder is not None:
            yield ReportRow("memory", f"of the published {Path(node.model.path).name}, whose folder is not here")
            config, shape = _reading(config, folder), BaseModel.read(folder)
            yield from _needs(config, node, machines, shape, _unloaded(config))


def _needs(
    config: LoopConfig, node: NodeConfig, machines: Machines, shape: BaseModel, model: Unloaded
) -> Iterator[Finding]:
    """What the job needs of its GPUs: memory, and what bounds an iteration, so that configs compare."""
    ranks = GpuDivision.of(machines, node.servers).trainer_gpus
    flops = None if isinstance(model, ConfigError) else rollout_flops(config, model)
    planned = yield from _memory(config, node, machines, shape, lambda: model)
    yield from _host(plan_host(shape, node, planned.trainer, ranks))
    if flops is None:
        return
    rollouts = config.collection.tasks_per_iteration * config.collection.rollouts_per_task
    card, work = card_of(machines.gpu_gib), update_work(config, flops, planned.counted)
    # What was measured are H100s and torchtune's modules.
    about = "" if card == H100 and planned.counted is None else "about "
    sampled = sampled_tokens_per_s(shape, node, planned.server, card)
    yield ReportRow(
        "sampling",
        f"at most {about}{sampled:,.0f} tokens a second, by what the {card.name} reads of its memory (arithmetic)",
    )
    yield ReportRow(
        "update",
        f"{about}{work.seconds(card, ranks) / 60:.1f} min, were each of {rollouts} rollouts {config.longest_rollout} "
        f"tokens long, at the speed of the {card.name} (arithmetic)",
    )


def _memory(
    config: LoopConfig, node: NodeConfig, machines: Machines, shape: BaseModel, model: Callable[[], Unloaded]
) -> Generator[Finding, None, Planned]:
    """Plan a GPU of a server and one of a trainer rank, or, in turns, both phases of one.

    Args:
        model: asked for where transformers builds it, and of no use afterwards.
    """
    place = GpuDivision.of(machines, node.servers)
    try:
        check_sharers(config.sequence_parallel, place.trainer_gpus)
    except ConfigError as error:
        yield Problem("sharers", str(error))
    try:
        check_divided(shape, node.servers.tensor_parallel_size)
    except ServerStartError as error:
        yield Problem("divided", f"node.{error}")
    counted = (yield from _counted(model())) if shape.family is None else None
    trainer = plan_rank(config, shape, place.trainer_gpus, machines.gpu_gib, counted)
    if node.servers.share is not None:
        turns = plan_turns(shape, node, trainer, machines.gpu_gib)
        yield from _planned(turns.sampling, turns.training)
        yield ReportRow(
            "turns", f"{turns.swap_s:.1f} s an iteration for moving weights at {BUS_GB_S:g} GB/s (arithmetic)"
        )
        return Planned(turns.server, trainer, counted)
    server = plan_rollout_server(shape, node, machines.gpu_gib)
    yield from _planned(trainer, server)
    together = trainer.sum + server.sum
    if place.shared and not (trainer.over or server.over) and together > machines.gpu_gib * USABLE:
        yield Problem(
            "shared memory",
            f"trainer and vLLM server need about {together:.0f} GiB of the {machines.gpu_gib:.0f} of the GPU that they "
            "share: lower servers.kv_cache_bytes, update.micro_batch_tokens or collection.limits.max_context, or have "
            "it in turns with node.servers.share=trainer",
        )
    return Planned(server, trainer, counted)


def _host(parts: dict[str, float]) -> Iterator[Finding]:
    """The host's memory beside what this machine has, which may be another than the one that has the GPUs."""
    if not parts:
        return
    free, gpus = available(), torch.cuda.device_count()
    here = f"{free.gib:.1f} GiB available here{'' if gpus else ', where torch finds no GPU'}"
    yield ReportRow("host's memory", f"{host_line(parts)} (arithmetic); {here}")
    try:
        if gpus:
            check_host(parts, free)
    except ConfigError as error:
        yield Problem("host's memory", str(error))


def _planned(*plans: MemoryPlan) -> Iterator[Finding]:
    for plan in plans:
        yield plan
        if plan.over is not None:
            yield Problem(plan.title, plan.over)


def _counted(model: Unloaded) -> Generator[Finding, None, LayerBytes | None]:
    """What a layer takes of a model that transformers builds; None where it cannot be built or does not run."""
    if isinstance(model, ConfigError):
        yield Problem("model", str(model))
        return None
    try:
        return layer_bytes(model)
    except ValueError as error:
        yield ReportRow("memory", f"{error}; it is planned as a layer of a dense decoder is")
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
    if several := [gpu for gpu in named if uses[gpu] > 1]:
        yield Problem(
            "GPUs of several servers",
            f"node.servers.gpus names {several} more than once, and a server is planned as the only one on its GPUs: "
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


def _port(node: NodeConfig) -> Iterator[Finding]:
    if node.port != 0:
        problem = port_problem(node)
        state = "free" if problem is None else f"not to be had ({problem})"
        yield ReportRow("port", f"{node.port} is {state} on this machine; the job's preflight asks the nodes")


def _compiling(node: NodeConfig) -> Iterator[Finding]:
    if node.servers.urls is None:
        try:
            compile_cache(node.servers, Path(node.root))
        except ServerStartError as error:
            yield Problem("compile cache", f"node.servers: {error}")


def _run(config: LoopConfig) -> Iterator[Problem]:
    """The first thing that the config names and that is not there. Its run may exist already, and the port is not this
    machine's matter."""
    method: Checks = {"method": partial(check_method, config, starts_now=False)}
    for about, check in (method | node_checks(config, starts_now=False)).items():
        try:
            check()
        except ConfigError as error:
            yield Problem(about, str(error))
            return


def _head(config: LoopConfig) -> Iterator[Finding]:
    """Say which head gives the log-probs, in the words of its class."""
    with suppress(ConfigError):  # which is a problem of the run
        head = check_component("log_probs", config.log_probs)
        first = " ".join((inspect.getdoc(head) or "").split()).partition(". ")[0]
        yield ReportRow("log-probs", f"{head.__name__}{f', {first}' if first else ''}")


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
    """Build the node's pool, without opening it: options that it does not take.

    Returns:
        Its dataset and the tasks to train on, where it knows its splits by then.
    """
    settings, wanted = node.environment, config.collection.tasks
    ahead = None
    yield ReportRow("environment", settings.name)
    try:
        pool = create_pool(settings.name, settings.options, lambda text: [])
        if isinstance(pool, PoolWithSplits):
            pool.check_tasks(wanted or [])
            ahead = (pool.dataset, wanted or pool.tasks(config.collection.split))
        else:
            yield Unopened(settings.name)
    except UnknownTask as error:
        yield Problem("tasks", f"collection.{'tasks' if wanted else 'split'}: {error}")
    except Exception as error:
        said = str(error) if isinstance(error, ValueError | OSError) else error_line(error)
        yield Problem("node.environment", f"node.environment: {said}")
        return None
    python = settings.options.get("python")
    if isinstance(python, str) and os.sep in python and not os.access(python, os.X_OK):
        yield Problem("node.environment.python", f"node.environment.python: there is no interpreter at {python}")
    return ahead


def _served(model: ModelConfig, shape: BaseModel, cuda: bool) -> Iterator[Finding]:
    """Ask of the node's model what an earlier problem of the run left open; of a CPU's, whether vLLM serves it."""
    try:
        check_served(model)
        if not cuda:
            check_serves(model.path, shape)
    except (ConfigError, ServerStartError) as error:
        yield Problem("served", str(error))


def _sizes(config: LoopConfig, shape: BaseModel, model: Unloaded) -> Iterator[Finding]:
    """Compare what is built under `model` with config.json, of which the weights are."""
    try:
        if isinstance(model, ConfigError):
            raise model
        check_built(model, shape, config)
        check_context(model, config.collection.limits.max_context, "collection.limits.max_context")
    except ConfigError as error:
        yield Problem("model", str(error))


def probe_model(path: str, max_context: int) -> Finding:
    """Compare the model in the folder ``path`` as the trainer computes it with transformers' own, for servers of
    ``max_context`` tokens."""
    try:
        base = replace(BaseModel.read(path), context=max_context)
        check_finite(path)
        if base.family is not None:
            return ReportRow("exact", f"a {base.model_type} is built by torchtune's modules, which tests compare")
        weights, buffers = read_weights(path, base, torch.float32)
        return ReportRow("exact", str(probe(path, base, weights | buffers, torch.float32, torch.device("cpu"))))
    except (OSError, ValueError) as error:
        return Problem("exact", f"model: {error}")


def _run_state(config: LoopConfig) -> ReportRow:
    folder = Path(config.output_dir).resolve()
    checkpoint = latest_checkpoint(folder / "checkpoints")
    begin = f"goes on from {checkpoint.name}" if checkpoint is not None else "starts from the beginning"
    return ReportRow("run", f"{folder}, {begin}, to iteration {config.max_iterations}")


def _disk(config: LoopConfig, adapter_parameters: int) -> Iterator[Finding]:
    """Every version's adapter is kept; checkpoints (adapter, two moments) are few."""
    each = adapter_parameters * (2 if config.adapter_dtype in ("bf16", "fp16") else 4)
    checkpoints = (config.keep_last_checkpoints + 1) * adapter_parameters * 12
    need = each * config.max_iterations + checkpoints
    folder = Path(config.output_dir).resolve()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    said = f"about {need / GIB:.1f} GiB of adapters and checkpoints, {free / GIB:.0f} GiB free in {folder}"
    yield ReportRow("disk", said)
    if need > free:
        yield Problem("disk", f"disk: {folder} has {free / GIB:.0f} GiB free, the run needs {need / GIB:.0f}")
