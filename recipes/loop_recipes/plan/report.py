"""The findings about a job, as data, and the machines that they are for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from loop_formats.schema import ConfigError
from loop_recipes.plan.memory_plan import MemoryPlan
from rollout_server.config import ServersConfig
from rollout_server.inference.command import ServerStartError


@dataclass(frozen=True)
class Machines:
    """``nodes`` of ``gpus`` GPUs with ``gpu_gib`` GiB each.

    Raises:
        ConfigError: a number of nodes, of GPUs, or of GiB is 0.
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
    """Return the number of nodes, and of GPUs in each, for which a config is made. The servers' GPUs tell: one node if
    the trainer uses the same GPUs, one GPU if the only server is on GPU 0, one node if the first GPUs are left to the
    trainer, else two nodes."""
    if servers.share is not None:
        return 1, servers.count * servers.tensor_parallel_size
    if servers.gpus == [[0]]:
        return 1, 1
    return (1 if servers.gpus and min(map(min, servers.gpus)) > 0 else 2), 8


@dataclass(frozen=True)
class GpuDivision:
    """The division of a node's GPUs: how many train, and the indices of those that vLLM may use on a rollout node.

    The last of several nodes trains. If trainer and servers take turns, both use all GPUs of a node. Any other node is
    divided in halves, with the trainer's first. But if a node has only one GPU, or the config's only server is on GPU
    0, the trainer has one rank and shares that GPU.
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
    """A line about ``name`` that says what would happen."""

    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.name:<15}{self.text}"


class Problem(NamedTuple):
    """A line that says what would stop the job; two problems with the same ``about`` count as one."""

    about: str
    text: str


def problems(about: str, check: Callable[[], object], before: str = "") -> Iterator[Problem]:
    """Yield the problem that ``check`` raises, if any; ``before`` is put before the problem's text."""
    try:
        check()
    except (ConfigError, ServerStartError) as error:
        yield Problem(about, f"{before}{error}")


class Unopened(NamedTuple):
    """An environment that a check did not open, but that knows its needs only when it is open."""

    environment: str


Finding: TypeAlias = ReportRow | MemoryPlan | Problem | Unopened


@dataclass(frozen=True)
class Report:
    """``lines`` say what would happen, ``problems`` what would stop the job, one line each. ``unopened`` is true if
    the environment is :class:`Unopened`."""

    lines: tuple[str, ...]
    problems: tuple[str, ...]
    unopened: bool

    @classmethod
    def of(cls, findings: Iterable[Finding]) -> Report:
        results = [*findings]
        problems = {each.about: each.text for each in results if isinstance(each, Problem)}
        lines = tuple(str(each) for each in results if isinstance(each, ReportRow | MemoryPlan))
        return cls(lines, tuple(problems.values()), any(isinstance(each, Unopened) for each in results))
