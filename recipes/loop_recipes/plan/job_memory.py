"""Plans a job's memory on its GPUs and on the host, by arithmetic, and which configs fit a card."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch

from loop_formats.schema import ConfigError
from loop_recipes.config.files import compose
from loop_recipes.config.loop_config import LoopConfig, read_config
from loop_recipes.config.preflight import check_sharers
from loop_recipes.config.rollout_node import described_node
from loop_recipes.engine.diagnostics import training_flops
from loop_recipes.engine.model import DTYPES, AnyDecoder, meta_model
from loop_recipes.plan.host_memory import available, check_host, host_line
from loop_recipes.plan.layer_memory import LayerBytes, layer_bytes
from loop_recipes.plan.memory_plan import (
    BUS_GB_S,
    USABLE,
    MemoryPlan,
    plan_host,
    plan_rank,
    plan_rollout_server,
    plan_turns,
)
from loop_recipes.plan.published_folder import folder_to_plan
from loop_recipes.plan.report import (
    Finding,
    GpuDivision,
    Machines,
    Problem,
    Report,
    ReportRow,
    problems,
    usual_machines,
)
from loop_recipes.plan.time_plan import H100, card_of, sampled_tokens_per_s, update_work
from model_families.base_model import BaseModel
from rollout_server.config import NodeConfig
from rollout_server.inference.command import check_divided


class Planned(NamedTuple):
    """The plans of a server alone and a trainer's rank alone, and layer bytes of a model that transformers builds."""

    server: MemoryPlan
    trainer: MemoryPlan
    counted: LayerBytes | None


Unloaded: TypeAlias = "AnyDecoder | ConfigError"
"""A model without storage, or why it cannot be built."""
IN_TURNS = ("node.servers.share=trainer", "collection.max_policy_lag=0")


def what_fits(names: Iterable[str], gpu_gib: float) -> list[str]:
    """Return a line for each GPU config, first those that fit: whether the job fits GPUs of ``gpu_gib`` GiB by
    arithmetic, with GPUs divided and in turns. A model that is not here is planned by its published sizes, if known."""
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
        *sorted(lines, key=lambda line: line.count(" no") + ("not planned" in line)),
        f"no: it does not fit on GPUs of {gpu_gib:g} GiB; `loop check NAME` says how many GPUs a config has.",
        "Where trainer and server divide one GPU, both figures are of it.",
    ]


def _fits(name: str, folder: str, gpu_gib: float) -> Iterator[str]:
    shape = BaseModel.read(folder)
    for words in (("node.servers.share=null",), IN_TURNS):
        cfg = compose(name, words)
        config, node = _reading(read_config(cfg, LoopConfig), folder), described_node(cfg)
        machines = Machines(*usual_machines(node.servers), gpu_gib)
        findings = [*_memory(config, node, machines, shape, partial(unloaded, config))]
        sums = [f"{each.sum:.2f}" for each in findings if isinstance(each, MemoryPlan)]
        yield ", ".join(sums) + (" no" if Report.of(findings).problems else "")


def _reading(config: LoopConfig, folder: str) -> LoopConfig:
    """Return the config with the model in ``folder`` in place of a missing model."""
    return replace(config, model={**config.model, "path": folder}) if "path" in config.model else config


def unloaded(config: LoopConfig) -> Unloaded:
    """Build the config's model without storage."""
    try:
        return meta_model(config.model, DTYPES[config.dtype])
    except ConfigError as error:
        return error
    except (ImportError, AttributeError) as error:
        return ConfigError(f"model: {error}")


def needs_of_published(config: LoopConfig, node: NodeConfig, machines: Machines) -> Iterator[Finding]:
    """Plan a model whose folder is missing by its published sizes. Yield nothing if these are not known."""
    if (Path(node.model.path) / "config.json").is_file():
        return
    with folder_to_plan(node.model.path) as folder:
        if folder is not None:
            yield ReportRow("memory", f"of the published {Path(node.model.path).name}, whose folder is not here")
            config, shape = _reading(config, folder), BaseModel.read(folder)
            yield from needs(config, node, machines, shape, unloaded(config))


def needs(
    config: LoopConfig, node: NodeConfig, machines: Machines, shape: BaseModel, model: Unloaded
) -> Iterator[Finding]:
    """Plan the memory that the job needs on its GPUs, and bounds of an iteration's time, to compare configs."""
    ranks = GpuDivision.of(machines, node.servers).trainer_gpus
    flops = None if isinstance(model, ConfigError) else training_flops(model, config.longest_rollout, 0)
    planned = yield from _memory(config, node, machines, shape, lambda: model)
    yield from _host(plan_host(shape, node, planned.trainer, ranks))
    if flops is None:
        return
    rollouts = config.collection.tasks_per_iteration * config.collection.rollouts_per_task
    card, work = card_of(machines.gpu_gib), update_work(config, flops, planned.counted)
    # The measurements are of H100s and torchtune's modules.
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
    """Plan a GPU of a server and a GPU of a trainer rank or, if they take turns, both phases of one GPU.

    Args:
        model: called if transformers builds the model; the result cannot be used afterwards.
    """
    place = GpuDivision.of(machines, node.servers)
    yield from problems("sharers", lambda: check_sharers(config.sequence_parallel, place.trainer_gpus))
    yield from problems("divided", lambda: check_divided(shape, node.servers.tensor_parallel_size), "node.")
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
    """Compare the host memory that the job needs with this machine's; the GPUs may be in another machine."""
    free, gpus = available(), torch.cuda.device_count()
    here = f"{free.gib:.1f} GiB available here{'' if gpus else ', where torch finds no GPU'}"
    yield ReportRow("host's memory", f"{host_line(parts)} (arithmetic); {here}")
    if gpus:
        yield from problems("host's memory", lambda: check_host(parts, free))


def _planned(*plans: MemoryPlan) -> Iterator[Finding]:
    for plan in plans:
        yield plan
        if plan.over is not None:
            yield Problem(plan.title, plan.over)


def _counted(model: Unloaded) -> Generator[Finding, None, LayerBytes | None]:
    """Return the bytes of a layer of a model that transformers builds; None if the model cannot be built or run."""
    if isinstance(model, ConfigError):
        yield Problem("model", str(model))
        return None
    try:
        return layer_bytes(model)
    except ValueError as error:
        yield ReportRow("memory", f"{error}; it is planned as a layer of a dense decoder is")
        return None
