"""What a training job would do, and whether it can, before it waits in a queue: paths, config, dataset, memory, disk.

Looks at this machine's file system, which is the nodes' too on a cluster with shared folders, and needs no GPU.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from omegaconf import DictConfig

from agent_environments.protocol import PoolWithSplits, UnknownTask, create_pool
from loop_formats.schema import ConfigError
from loop_plumbing.breakage import error_line
from loop_recipes.algorithm.method import check_run
from loop_recipes.config.components import check_component
from loop_recipes.config.files import compose
from loop_recipes.config.loop_config import LoopConfig, read_loop_config
from loop_recipes.config.preflight import check_served, check_sharers, port_problem, tasks_ahead
from loop_recipes.config.rollout_node import described_node
from loop_recipes.engine.checkpoint import latest_checkpoint
from loop_recipes.engine.general_decoder import read_weights
from loop_recipes.engine.general_probe import probe
from loop_recipes.engine.model import DTYPES, check_built, check_context, meta_model
from loop_recipes.plan.layer_memory import LayerBytes, layer_bytes
from loop_recipes.plan.memory_plan import (
    BUS_GB_S,
    GIB,
    USABLE,
    MemoryPlan,
    Turns,
    plan_rollout_server,
    plan_trainer,
    plan_turns,
)
from loop_recipes.plan.published_folder import folder_to_plan
from loop_recipes.plan.time_plan import sampled_tokens_per_s, update_seconds
from loop_recipes.run.tracker import named_tracker
from model_families.base_model import BaseModel
from rollout_server.config import ModelConfig, NodeConfig, ServersConfig
from rollout_server.inference.command import ServerStartError, check_divided, check_serves, compile_cache

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
class Placement:
    """The division of a node's GPUs: those that train, and those (by index) that vLLM may use on a rollout node.

    Of several nodes the last trains. On one whose GPUs both have in turns, each has all of them. Another one is divided
    in halves, the trainer's first, unless it has only one GPU or the config's only server is on GPU 0: then the trainer
    has one rank, on that GPU, and shares it.
    """

    trainer_gpus: int
    rollout_gpus: range
    shared: bool

    @classmethod
    def of(cls, machines: Machines, servers: ServersConfig) -> Placement:
        if servers.share is not None and machines.nodes == 1:
            return cls(machines.gpus, range(machines.gpus), shared=True)
        if machines.nodes > 1:
            return cls(machines.gpus, range(machines.gpus), shared=False)
        if machines.gpus == 1 or servers.gpus == [[0]]:
            return cls(1, range(machines.gpus), shared=True)
        half = machines.gpus // 2
        return cls(half, range(half, machines.gpus), shared=False)


@dataclass
class Report:
    """``lines`` say what would happen, ``problems`` what would stop it, one line each.

    ``unopened``: the environment knows what it needs when it is opened only, which nobody did here.
    """

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unopened: bool = False

    def row(self, name: str, text: str) -> None:
        self.lines.append(f"{name:<15}{text}")

    def plan(self, plan: MemoryPlan) -> None:
        self.lines.append(plan.table())
        if plan.over:
            self.problems.append(plan.over)


def check_job(cfg: DictConfig, node: NodeConfig, machines: Machines) -> Report:
    """Check a training job and its node against the machines that are to run them.

    Args:
        cfg: the training config, composed.
        node: its ``node``.
    """
    report = Report()
    cuda = str(cfg.get("device", "cpu")).startswith("cuda")
    place = Placement.of(machines, node.servers)
    _placement(report, cfg, node, machines, place, cuda)
    _port(report, node)
    _compiling(report, node)
    try:
        config = read_loop_config(cfg)
    except ConfigError as error:  # with no more to go by than that
        report.problems.append(str(error))
        return report
    sound = _run(report, config)
    _head(report, config)
    _trackers(report, config)
    _dataset(report, config, node)
    if sound:
        _run_state(report, config)
    try:
        shape = BaseModel.read(node.model.path)
    except ValueError as error:
        if sound:
            report.problems.append(f"model: {error}")
        if cuda and not _is_there(node.model.path):
            with folder_to_plan(node.model.path) as folder:
                if folder is not None:
                    name = Path(node.model.path).name
                    report.row("memory", f"of the published {name}, whose folder is not here")
                    config, shape = _reading(config, folder), BaseModel.read(folder)
                    server = _memory(report, config, node, machines, place, shape)
                    _time(report, config, node, shape, server, place.trainer_gpus)
        return report
    _served(report, node.model, shape, cuda)
    if sound:
        _sizes(report, config, shape)
    lora_rank = config.model.get("lora_rank", 16)
    _disk(report, config, shape.adapter_parameters(lora_rank))
    if cuda:
        server = _memory(report, config, node, machines, place, shape)
        _time(report, config, node, shape, server, place.trainer_gpus)
    return report


def _trackers(report: Report, config: LoopConfig) -> None:
    """Where the trackers write, and whether that can be reached from here."""
    for name in config.tracker:
        tracker = named_tracker(name)
        try:
            url = tracker.check()
        except ConfigError as error:
            report.problems.append(str(error))
            continue
        away = None if url is None else _unreachable(url)
        place = "on this machine" if url is None else url
        report.row("tracker", f"{name}: {place}" + (f" cannot be reached: {away}; {tracker.offline}" if away else ""))


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
                cells = [_fits(name, words, folder, gpu_gib) for words in (["node.servers.share=null"], IN_TURNS)]
            except ValueError as error:  # ConfigError too
                cells = [f"not planned: {error}"]
        lines.append(f"{name:<24}" + "".join(f"{cell:<20}" for cell in cells).rstrip())
    return [
        *lines,
        f"no: it does not fit GPUs of {gpu_gib:g} GiB, of which a config has as many as `loop check NAME` says.",
        "Where trainer and server divide one GPU, both figures are of it.",
    ]


def _fits(name: str, words: Sequence[str], folder: str, gpu_gib: float) -> str:
    cfg = compose(name, words)
    config, node = read_loop_config(cfg), described_node(cfg)
    machines = Machines(*usual_machines(node.servers), gpu_gib)
    place, report = Placement.of(machines, node.servers), Report()
    _memory(report, _reading(config, folder), node, machines, place, BaseModel.read(folder))
    sums = re.findall(r"^  sum +([\d.]+) GiB$", "\n".join(report.lines), re.M)
    return ", ".join(sums) + (" no" if report.problems else "")


def _reading(config: LoopConfig, folder: str) -> LoopConfig:
    """The config with the model in ``folder`` in place of one that is not here."""
    return replace(config, model={**config.model, "path": folder}) if "path" in config.model else config


def _is_there(model: str) -> bool:
    return (Path(model) / "config.json").is_file()


def _memory(
    report: Report, config: LoopConfig, node: NodeConfig, machines: Machines, place: Placement, shape: BaseModel
) -> MemoryPlan:
    """The tables of a trainer rank and of a server, and of what both take of a GPU that they share; in turns, of both
    phases. Returns the server's."""
    sharers, rank, ranks = config.sequence_parallel, config.model.get("lora_rank", 16), place.trainer_gpus
    try:
        check_sharers(sharers, ranks)
    except ConfigError as error:
        report.problems.append(str(error))
    try:
        check_divided(shape, node.servers.tensor_parallel_size)
    except ServerStartError as error:
        report.problems.append(f"node.{error}")
    tokens = max(-(-config.collection.limits.max_context // sharers), config.update.micro_batch_tokens)
    keeps, offloads = config.keep_attention, config.enable_activation_offloading
    counted = None if shape.family is not None else _counted(report, config)
    trainer = plan_trainer(shape, rank, tokens, ranks, machines.gpu_gib, keeps, sharers, offloads, counted)
    if node.servers.share is not None:
        turns = plan_turns(shape, node, trainer, machines.gpu_gib)
        _turns(report, turns, ranks)
        return turns.server
    server = plan_rollout_server(shape, node, machines.gpu_gib)
    for plan in (trainer, server):
        report.plan(plan)
    together = trainer.sum + server.sum
    if place.shared and not (trainer.over or server.over) and together > machines.gpu_gib * USABLE:
        report.problems.append(
            f"trainer and vLLM server need about {together:.0f} GiB of the {machines.gpu_gib:.0f} of the GPU that they "
            "share: lower servers.kv_cache_bytes, update.micro_batch_tokens or collection.limits.max_context, or have "
            "it in turns with node.servers.share=trainer"
        )
    return server


def _turns(report: Report, turns: Turns, ranks: int) -> None:
    for plan in (turns.sampling, turns.training):
        report.plan(plan)
    pinned = f"about {turns.pinned * ranks:.1f} GiB, pinned, before torch rounds each weight up (arithmetic)"
    report.row("host's memory", pinned)
    swap = f"{turns.swap_s:.1f} s an iteration for moving weights at {BUS_GB_S:g} GB/s (arithmetic)"
    report.row("turns", swap)


def _time(
    report: Report, config: LoopConfig, node: NodeConfig, shape: BaseModel, server: MemoryPlan, ranks: int
) -> None:
    """What bounds an iteration, so that configs compare; nothing where the model cannot be built."""
    try:
        model = meta_model(config.model, DTYPES[config.dtype])
    except ConfigError:  # which has been said
        return
    minutes, sampled = update_seconds(config, model, ranks) / 60, sampled_tokens_per_s(shape, node, server)
    rollouts = config.collection.tasks_per_iteration * config.collection.rollouts_per_task
    report.row("sampling", f"at most {sampled:,.0f} tokens a second, by what H100s read of their memory (arithmetic)")
    report.row(
        "update",
        f"{minutes:.1f} min, were each of {rollouts} rollouts {config.longest_rollout} tokens long, at the speed of "
        "H100s (arithmetic)",
    )


def _counted(report: Report, config: LoopConfig) -> LayerBytes | None:
    """What a layer takes of a model that transformers builds; None where it cannot be built or does not run."""
    try:
        return layer_bytes(meta_model(config.model, DTYPES[config.dtype]))
    except ConfigError as error:
        if str(error) not in report.problems:
            report.problems.append(str(error))
    except ValueError as error:
        report.row("memory", f"{error}; it is planned as a layer of a dense decoder is")
    return None


def _placement(
    report: Report, cfg: DictConfig, node: NodeConfig, machines: Machines, place: Placement, cuda: bool
) -> None:
    servers = node.servers
    if servers.share is not None and machines.nodes > 1:
        report.problems.append("node.servers.share: trainer is for one node, whose GPUs both have: give --nodes 1")
    count, per_server = len(servers.urls or []) or servers.count, servers.tensor_parallel_size
    if not cuda:
        here = f"{_several(count, 'vLLM server')} on CPU, {node.max_concurrent_episodes} episodes at a time"
        report.row("rollout node", here)
        report.row("trainer", f"1 rank on CPU, {cfg.get('dtype', 'fp32')}")
        return
    nodes = "" if machines.nodes == 1 else f"{_several(machines.nodes - 1, 'node')} of "
    takes = f"{_several(count, 'vLLM server')} on {_several(per_server, 'GPU')}{' each' if count > 1 else ''}"
    report.row("rollout node", f"{nodes}{takes}, {node.max_concurrent_episodes} episodes at a time")
    last = place.trainer_gpus - 1
    where = "the last node" if machines.nodes > 1 else f"GPUs 0 to {last}" if last else "GPU 0"
    if place.shared:
        where += ", which it shares with vLLM" if servers.share is None else ", in turns with vLLM"
    elif machines.nodes == 1:
        where += " of the same node"
    report.row("trainer", f"{_several(place.trainer_gpus, 'rank')} on {where}, {cfg.get('dtype', 'fp32')}")
    if servers.urls is not None:
        return
    allowed = place.rollout_gpus
    if place.shared and (servers.gpu_memory_utilization is None or servers.kv_cache_bytes is None):
        report.problems.append(
            "on a GPU that vLLM shares with the trainer, node.servers needs both gpu_memory_utilization "
            "(checked when it starts) and kv_cache_bytes (else it counts the trainer's memory as its own)"
        )
    if count * per_server > len(allowed):
        report.problems.append(
            f"the servers need {count * per_server} GPUs, a rollout node has {len(allowed)}: lower "
            "node.servers.count or tensor_parallel_size"
        )
    uses = Counter(gpu for gpus in servers.gpus or [] for gpu in gpus)
    named = sorted(uses)
    if several := [gpu for gpu in named if uses[gpu] > 1]:
        report.problems.append(
            f"node.servers.gpus names {several} more than once, and a server is planned as the only one on its GPUs: "
            "give each GPUs of its own"
        )
    if any(gpu not in allowed for gpu in named):
        report.problems.append(
            f"node.servers.gpus names {named}, but on {machines.nodes} node(s) of {machines.gpus} "
            f"vLLM may use {allowed.start} to {allowed.stop - 1}"
        )
    if servers.gpus is None and (count > 1 or allowed.start > 0):
        report.problems.append("node.servers.gpus must say which GPUs each server takes")


def _several(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"


def _port(report: Report, node: NodeConfig) -> None:
    if node.port == 0:
        return
    problem = port_problem(node)
    state = "free" if problem is None else f"not to be had ({problem})"
    report.row("port", f"{node.port} is {state} on this machine; the job's preflight asks the nodes")


def _compiling(report: Report, node: NodeConfig) -> None:
    if node.servers.urls is not None:
        return
    try:
        compile_cache(node.servers, Path(node.root))
    except ServerStartError as error:
        report.problems.append(f"node.servers: {error}")


def _run(report: Report, config: LoopConfig) -> bool:
    """Whether all is there that the config names. Its run may exist already, and the port is not this machine's
    matter."""
    try:
        check_run(config, starts_now=False)
    except ConfigError as error:
        report.problems.append(str(error))
        return False
    return True


def _head(report: Report, config: LoopConfig) -> None:
    """Say which head gives the log-probs, in the words of its class."""
    try:
        head = check_component("log_probs", config.log_probs)
    except ConfigError:  # which has been said
        return
    first = " ".join((inspect.getdoc(head) or "").split()).partition(". ")[0]
    report.row("log-probs", f"{head.__name__}{f', {first}' if first else ''}")


def _dataset(report: Report, config: LoopConfig, node: NodeConfig) -> None:
    try:
        ahead = tasks_ahead(config, node)
    except ConfigError as error:
        if str(error) not in report.problems:
            report.problems.append(str(error))
        return
    if ahead is None:
        ahead = _environment(report, config, node)
    if ahead is None:
        return
    dataset, tasks = ahead
    report.row(
        "dataset",
        f"{dataset}, {len(tasks)} tasks of {config.collection.split}, {config.collection.tasks_per_iteration} x "
        f"{config.collection.rollouts_per_task} rollouts an iteration",
    )
    if len(tasks) < config.collection.tasks_per_iteration:
        report.problems.append(
            f"collection.tasks_per_iteration is {config.collection.tasks_per_iteration}, but the split has {len(tasks)}"
        )


def _environment(report: Report, config: LoopConfig, node: NodeConfig) -> tuple[str, list[str]] | None:
    """Builds the node's pool, without opening it: options that it does not take.

    Returns:
        Its dataset and the tasks to train on, where it knows its splits by then.
    """
    settings = node.environment
    wanted = config.collection.tasks
    ahead = None
    report.row("environment", settings.name)
    try:
        pool = create_pool(settings.name, settings.options, lambda text: [])
        report.unopened = not isinstance(pool, PoolWithSplits)
        if not report.unopened:
            pool.check_tasks(wanted or [])
            ahead = (pool.dataset, wanted or pool.tasks(config.collection.split))
    except UnknownTask as error:
        report.problems.append(f"collection.{'tasks' if wanted else 'split'}: {error}")
    except Exception as error:
        said = str(error) if isinstance(error, ValueError | OSError) else error_line(error)
        report.problems.append(f"node.environment: {said}")
    python = settings.options.get("python")
    told = isinstance(python, str) and any(python in problem for problem in report.problems)
    if isinstance(python, str) and os.sep in python and not os.access(python, os.X_OK) and not told:
        report.problems.append(f"node.environment.python: there is no interpreter at {python}")
    return ahead


def _served(report: Report, model: ModelConfig, shape: BaseModel, cuda: bool) -> None:
    """Say of the node's model what an earlier problem of the run left unsaid; of a CPU's, whether vLLM serves it."""
    try:
        check_served(model)
        if not cuda:
            check_serves(model.path, shape)
    except (ConfigError, ServerStartError) as error:
        if str(error) not in report.problems:
            report.problems.append(str(error))


def _sizes(report: Report, config: LoopConfig, shape: BaseModel) -> None:
    """Compare what is built under `model` with config.json, of which the weights are."""
    try:
        model = meta_model(config.model, DTYPES[config.dtype])
        check_built(model, shape, config)
        check_context(model, config.collection.limits.max_context, "collection.limits.max_context")
    except ConfigError as error:
        report.problems.append(str(error))


def probe_model(report: Report, path: str) -> None:
    """Read the model in the folder ``path`` and compare it as the trainer computes it with transformers' own."""
    try:
        base = BaseModel.read(path)
        if base.family is not None:
            report.row("exact", f"a {base.model_type} is built by torchtune's modules, which tests compare")
            return
        weights, buffers = read_weights(path, base, torch.float32)
        report.row("exact", str(probe(path, base, weights | buffers, torch.float32, torch.device("cpu"))))
    except (OSError, ValueError) as error:
        report.problems.append(f"model: {error}")


def _run_state(report: Report, config: LoopConfig) -> None:
    folder = Path(config.output_dir).resolve()
    checkpoint = latest_checkpoint(folder / "checkpoints")
    begin = f"goes on from {checkpoint.name}" if checkpoint is not None else "starts from the beginning"
    report.row("run", f"{folder}, {begin}, to iteration {config.max_iterations}")


def _disk(report: Report, config: LoopConfig, adapter_parameters: int) -> None:
    """Every version's adapter is kept; checkpoints (adapter, two moments) are few."""
    each = adapter_parameters * (2 if config.adapter_dtype in ("bf16", "fp16") else 4)
    checkpoints = (config.keep_last_checkpoints + 1) * adapter_parameters * 12
    need = each * config.max_iterations + checkpoints
    folder = Path(config.output_dir).resolve()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    report.row("disk", f"about {need / GIB:.1f} GiB of adapters and checkpoints, {free / GIB:.0f} GiB free in {folder}")
    if need > free:
        report.problems.append(f"disk: {folder} has {free / GIB:.0f} GiB free, the run needs {need / GIB:.0f}")
