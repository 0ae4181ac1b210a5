"""Checkpoints of a training run: one folder per iteration, complete or absent, safetensors and JSON only.

    <output_dir>/checkpoints/iteration_0007/
        state.json                 counters, sampler, loss scale, canary, config, collections under way
        adapter_v0007.safetensors  LoRA weights (float32, torchtune names), one file per policy version still needed
        optimizer.safetensors      "<parameter>/<attribute>" full tensors
        <name>.safetensors         weights that are trained beside the policy's, by the name that ``credit`` gives them
        rng.safetensors            torch (and CUDA) generator states, one per rank
        SHA256SUMS                 of all files; `sha256sum -c SHA256SUMS` there names a damaged one

Nothing in it is pickled, so a checkpoint from elsewhere is safe to open.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from loop_formats.run_files import bring_back, check_sums, folders_in, remove_folder, to_json, whole_folder, write_sums
from loop_formats.schema import ConfigError
from loop_recipes.engine.process_group import gather_bytes

logger = logging.getLogger(__name__)

_reported: set[Path] = set()
"""Folders that could not be removed, each reported once in the log."""
_FOLDER = re.compile(r"iteration_(\d+)")
OWN_FILES = ("optimizer", "rng")
"""Names that the file of weights trained beside the policy must not have."""
_ADAPTER = re.compile(r"adapter_v(\d+)\.safetensors")


@dataclass(frozen=True)
class TrainingState:
    """The content of a checkpoint; tensors are whole and on the CPU."""

    state: dict[str, Any]
    adapters: dict[int, dict[str, Tensor]]
    optimizer: dict[str, Tensor]
    rng: dict[str, Tensor]
    further: dict[str, dict[str, Tensor]] = field(default_factory=dict)


def latest_checkpoint(root: Path) -> Path | None:
    """Return the complete checkpoint of the highest iteration under ``root``, if there is one."""
    checkpoints = _checkpoints(root)
    return checkpoints[-1][1] if checkpoints else None


def _checkpoints(root: Path) -> list[tuple[int, Path]]:
    """Return the complete checkpoints under ``root`` with their iterations, ascending."""
    named = folders_in(root).items()
    return sorted((int(match[1]), path) for name, path in named if (match := _FOLDER.fullmatch(name)))


def save_training_state(root: Path, iteration: int, training: TrainingState) -> Path:
    """Write the checkpoint of ``iteration``. A crash while writing leaves no checkpoint."""
    bring_back(root)
    for leftover in root.glob(".*partial*"):
        _remove(leftover)
    final = root / f"iteration_{iteration:04d}"
    with whole_folder(final) as partial:
        for version, adapter in training.adapters.items():
            save_file(adapter, partial / f"adapter_v{version:04d}.safetensors")
        save_file(training.optimizer, partial / "optimizer.safetensors")
        save_file(training.rng, partial / "rng.safetensors")
        for name, weights in training.further.items():
            save_file(weights, partial / f"{name}.safetensors")
        (partial / "state.json").write_text(to_json(training.state, indent=1), encoding="utf-8")
        write_sums(partial)
    return final


def load_latest(root: Path, further: Collection[str] = ()) -> TrainingState | None:
    """Return the newest checkpoint under ``root``; None if a requeued run has none yet and starts anew.

    Raises:
        ConfigError: see :func:`load_training_state`; or the weights that were trained beside the policy have other
            names than ``further``.
    """
    folder = latest_checkpoint(root)
    if folder is None:
        return None
    checkpoint = load_training_state(folder)
    if checkpoint.further.keys() != {*further}:
        theirs, ours = (", ".join(sorted(names)) or "nothing" for names in (checkpoint.further, further))
        raise ConfigError(
            f"checkpoint {folder} is of a run that trained {theirs} beside the policy, and this one would train "
            f"{ours}; give credit as in that run"
        )
    return checkpoint


def load_training_state(folder: Path) -> TrainingState:
    """Read a checkpoint.

    Raises:
        ConfigError: a file is missing or damaged. The message names it, and the earlier checkpoint to resume from.
    """
    try:
        check_sums(folder)
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        adapters = {
            int(match[1]): load_file(path)
            for path in sorted(folder.iterdir())
            if (match := _ADAPTER.fullmatch(path.name))
        }
        optimizer, rng = load_file(folder / "optimizer.safetensors"), load_file(folder / "rng.safetensors")
        others = sorted(path for path in folder.glob("*.safetensors") if not _ADAPTER.fullmatch(path.name))
        further = {path.stem: load_file(path) for path in others if path.stem not in OWN_FILES}
        if state["policy_version"] not in adapters:
            raise ValueError(f"it lacks the adapter of its policy version {state['policy_version']}")
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        paths = [path for _, path in _checkpoints(folder.parent)]
        before = paths[paths.index(folder) - 1] if folder in paths[1:] else None
        begin = f"go on from {before.name}" if before else "start from the beginning: there is none before it"
        raise ConfigError(f"checkpoint {folder} cannot be read ({error}); remove it to {begin}") from error
    return TrainingState(state, adapters, optimizer, rng, further)


def prune_checkpoints(root: Path, keep_last: int, keep: Collection[int] = ()) -> None:
    """Remove all but the newest ``keep_last`` checkpoints and those of the iterations in ``keep``. If removing a
    checkpoint fails, the log reports it once and the next pruning tries again."""
    for iteration, path in _checkpoints(root)[:-keep_last]:
        if iteration not in keep:
            _remove(path)


def _remove(folder: Path) -> None:
    error = remove_folder(folder)
    if error is not None and folder not in _reported:
        _reported.add(folder)
        logger.warning("%s cannot be removed (%s); it is tried again after each iteration", folder, error)


def all_generators() -> dict[str, Tensor]:
    """Return every rank's torch generator states by ``rank<number>``; all ranks must call it."""
    states = gather_bytes(_generator_states())
    return {f"rank{rank}": torch.frombuffer(bytearray(state), dtype=torch.uint8) for rank, state in enumerate(states)}


def _generator_states() -> bytes:
    """Return this process's torch generator states: CPU, then its CUDA device."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states.append(torch.cuda.get_rng_state())
    return torch.cat([torch.tensor([len(states[0])]).view(torch.uint8), *states]).numpy().tobytes()


def restore_generators(saved: Mapping[str, Tensor], rank: int) -> None:
    """Restore this rank's generators from :func:`all_generators`; a rank that did not exist then starts anew."""
    data = saved.get(f"rank{rank}")
    if data is None:
        return
    size = int(data[:8].view(torch.int64))
    torch.set_rng_state(data[8 : 8 + size].clone())
    if len(data) > 8 + size and torch.cuda.is_available():
        torch.cuda.set_rng_state(data[8 + size :].clone())
