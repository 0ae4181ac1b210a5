"""The memory that this machine's host has for a job, by the system and by the limits of its cgroups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from loop_formats.schema import require
from loop_plumbing.start import launched
from loop_recipes.config.loop_config import LoopConfig
from loop_recipes.plan.memory_plan import GIB, plan_host, plan_rank
from model_families.base_model import BaseModel

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_FILES = {  # of a cgroup, by the version of cgroups: limit, use, and the keys of droppable pages in memory.stat
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
    2: ("memory.max", "memory.current", ("active_file", "inactive_file")),
}


class Available(NamedTuple):
    """The GiB that new processes may take, and the limit that sets this number."""

    gib: float
    by: str


def available() -> Available:
    """Return the minimum of the system's available memory and of the memory that each cgroup's limit leaves."""
    return min([_of_system(), *_of_cgroups()])


def _of_system() -> Available:
    lines = (PROC / "meminfo").read_text(encoding="ascii").splitlines()
    (kibibytes,) = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return Available(int(kibibytes) * 1024 / GIB, "MemAvailable of /proc/meminfo")


def _of_cgroups() -> Iterator[Available]:
    try:
        lines = (PROC / "self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and "memory" not in controllers.split(","):
            continue
        root = CGROUPS / "memory" if controllers else CGROUPS
        place = root / path.lstrip("/")  # folders that a container cannot see do not exist in it
        for folder in (place, *place.parents):
            if folder.is_relative_to(root) and (left := _left(folder, 1 if controllers else 2)) is not None:
                yield left


def _left(folder: Path, version: int) -> Available | None:
    """Return the memory that a cgroup's limit leaves; None without a limit."""
    limit, used, droppable = _FILES[version]
    try:
        most = int((folder / limit).read_text(encoding="ascii"))
        now = int((folder / used).read_text(encoding="ascii"))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):  # "max" is not a number
        return None
    occupied = now - sum(int(stat.get(key, 0)) for key in droppable)
    return Available((most - occupied) / GIB, f"the limit in {folder / limit}")


def host_line(parts: Mapping[str, float]) -> str:
    """Describe in one line ``parts``, the GiB by use, and their sum."""
    uses = ", ".join(f"{size:.1f} {use}" for use, size in parts.items()) or "nothing is pinned"
    return f"about {sum(parts.values()):.1f} GiB: {uses}"


def check_host(parts: Mapping[str, float], free: Available) -> None:
    """Raise ConfigError unless the ``free`` memory has room for ``parts``, the GiB by use."""
    require(
        sum(parts.values()) <= free.gib,
        f"host's memory: the job needs {host_line(parts)}; {free.by} leaves {free.gib:.1f} GiB: give the job more "
        "(--mem of Slurm, --memory of a container), or take a smaller model",
    )


def check_host_memory(config: LoopConfig) -> None:
    """Raise ConfigError unless this machine has the memory that trainer and launched node will take.

    Only a machine's first rank checks. Other ranks might count as taken the memory that the first has begun to take.
    """
    if launched("LOCAL_RANK", 0) > 0:
        return
    shape, ranks = BaseModel.read(config.base_model), launched("LOCAL_WORLD_SIZE", 1)
    trainer = plan_rank(config, shape, ranks, gpu_gib=0.0)
    node = config.node if config.rollout_node.launch else None  # a node that runs already has taken its memory
    if parts := plan_host(shape, node, trainer, ranks):
        check_host(parts, available())
