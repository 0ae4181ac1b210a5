"""Checkpoints of a training run: one folder per iteration, complete or absent, safetensors and JSON only.

    <output_dir>/checkpoints/iteration_0007/
        state.json                 counters, sampler, scheduler, pending collection, config, optimizer groups
        adapter_v0007.safetensors  LoRA weights (float32, torchtune names), one file per policy version still needed
        optimizer.safetensors      "<parameter>/<attribute>" full tensors
        critic.safetensors         the critic's weights, where there is one
        rng.safetensors            torch (and CUDA) generator states, one per rank

Nothing in it is pickled, so a checkpoint from elsewhere is safe to open.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from loop_recipes.learner.sharding import full_tensor, like_parameter, local_part
from rollout_server.run_files import whole_folder
from rollout_server.schema import ConfigError

_FOLDER = re.compile(r"iteration_(\d+)")
_ADAPTER = re.compile(r"adapter_v(\d+)\.safetensors")


@dataclass(frozen=True)
class TrainingState:
    """What a checkpoint holds; tensors are whole and on the CPU."""

    state: dict[str, Any]
    adapters: dict[int, dict[str, Tensor]]
    optimizer: dict[str, Tensor]
    rng: dict[str, Tensor]
    critic: dict[str, Tensor] = field(default_factory=dict)


def checkpoint_folder(root: Path, iteration: int) -> Path:
    return root / f"iteration_{iteration:04d}"


def latest_checkpoint(root: Path) -> Path | None:
    """The complete checkpoint of the highest iteration under ``root``, if there is one."""
    found = [(int(match[1]), path) for path in root.glob("*") if (match := _FOLDER.fullmatch(path.name))]
    return max(found)[1] if found else None


def save_training_state(root: Path, iteration: int, training: TrainingState) -> Path:
    """Write the checkpoint of ``iteration``; a crash on the way leaves none."""
    for leftover in root.glob(".*partial*"):
        shutil.rmtree(leftover)
    final = checkpoint_folder(root, iteration)
    with whole_folder(final) as partial:
        for version, adapter in training.adapters.items():
            save_file(adapter, partial / f"adapter_v{version:04d}.safetensors")
        save_file(training.optimizer, partial / "optimizer.safetensors")
        save_file(training.rng, partial / "rng.safetensors")
        if training.critic:
            save_file(training.critic, partial / "critic.safetensors")
        (partial / "state.json").write_text(json.dumps(training.state, indent=1))
    return final


def load_training_state(folder: Path) -> TrainingState:
    """Read a checkpoint.

    Raises:
        ConfigError: a file is missing or damaged; names it.
    """
    try:
        state = json.loads((folder / "state.json").read_text())
        adapters = {
            int(match[1]): load_file(path)
            for path in sorted(folder.iterdir())
            if (match := _ADAPTER.fullmatch(path.name))
        }
        optimizer, rng = load_file(folder / "optimizer.safetensors"), load_file(folder / "rng.safetensors")
        critic = load_file(folder / "critic.safetensors") if (folder / "critic.safetensors").exists() else {}
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(
            f"checkpoint {folder} cannot be read ({error}); remove it to go on from the one before"
        ) from error
    if state["policy_version"] not in adapters:
        raise ConfigError(f"checkpoint {folder} lacks the adapter of its policy version {state['policy_version']}")
    return TrainingState(state, adapters, optimizer, rng, critic)


def prune_checkpoints(root: Path, keep_last: int, keep: Collection[int] = ()) -> None:
    """Remove all but the newest ``keep_last`` checkpoints and those of the iterations in ``keep``."""
    found = sorted((int(match[1]), path) for path in root.glob("*") if (match := _FOLDER.fullmatch(path.name)))
    for iteration, path in found[:-keep_last]:
        if iteration not in keep:
            shutil.rmtree(path)


def optimizer_tensors(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The optimizer's state as full CPU tensors named ``<parameter>/<attribute>``; all ranks must call it.

    Raises:
        ValueError: the optimizer keeps something that is not a tensor.
    """
    tensors = {}
    for name, parameter in parameters.items():
        for attribute, value in sorted(optimizer.state.get(parameter, {}).items()):
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"{type(optimizer).__name__} keeps {attribute} as {type(value).__name__}, not a tensor"
                )
            tensors[f"{name}/{attribute}"] = full_tensor(value)
    return tensors


def optimizer_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Learning rates and other options of each parameter group, as plain data."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def restore_optimizer(
    optimizer: Optimizer,
    parameters: Mapping[str, nn.Parameter],
    tensors: Mapping[str, Tensor],
    groups: list[dict[str, Any]],
) -> None:
    """The inverse of the two functions above, onto any number of ranks."""
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: tuple(value) if isinstance(value, list) else value for key, value in saved.items()})
    for key, tensor in tensors.items():
        name, _, attribute = key.rpartition("/")
        parameter = parameters[name]
        # Moments are placed like their parameter; AdamW's step counter is on the CPU unless the kernel wants it near.
        near = optimizer.param_groups[0].get("fused") or optimizer.param_groups[0].get("capturable")
        if tensor.shape == parameter.shape:
            placed = like_parameter(tensor, parameter)
        else:
            placed = tensor.to(local_part(parameter).device) if near else tensor
        optimizer.state[parameter][attribute] = placed


def generator_states() -> bytes:
    """This process's torch generator states (CPU, then its CUDA device), for :func:`gather_bytes`."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states.append(torch.cuda.get_rng_state())
    return torch.cat([torch.tensor([len(states[0])]).view(torch.uint8), *states]).numpy().tobytes()


def restore_generators(data: Tensor) -> None:
    """The inverse of :func:`generator_states`; ``data`` is a uint8 tensor."""
    size = int(data[:8].view(torch.int64))
    torch.set_rng_state(data[8 : 8 + size].clone())
    if len(data) > 8 + size and torch.cuda.is_available():
        torch.cuda.set_rng_state(data[8 + size :].clone())
