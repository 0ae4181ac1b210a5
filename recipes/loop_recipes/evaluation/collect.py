"""Runs an evaluation on rollout nodes: one collection per policy and way of sampling, resumable, with named failures.

Every rollout that arrives becomes a line of ``journal.jsonl`` at once, so an evaluation that is started again with the
same config asks only for what is missing; the node, too, finds again what it has under the collection's id.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from loop_recipes.evaluation.config import PolicyUnderTest, SamplingConfig
from loop_recipes.evaluation.scores import TaskResult
from rollout_server.client import CollectionFailed
from rollout_server.collection_request import CollectionRequest, Limits, Progress, Sampling
from rollout_server.ids import evaluation_id, single_task_id
from rollout_server.rollout import Rollout
from rollout_server.run_files import append_to, to_json, writing


class EvaluationTimeout(RuntimeError):
    """The rollouts did not come within ``deadline_s``; what came is kept."""


@dataclass(frozen=True)
class Cell:
    """What gets one score: a policy, a way of sampling, and R runs over the tasks."""

    policy: PolicyUnderTest
    sampling: SamplingConfig
    request: CollectionRequest

    @property
    def label(self) -> str:
        return f"{self.policy.name}, {self.sampling.label}"

    @property
    def expected(self) -> list[tuple[str, int]]:
        """(task id, run) of every attempt."""
        return [(task, run) for task in self.request.tasks for run in range(self.request.rollouts_per_task)]


def evaluation_request(
    name: str,
    tasks: Sequence[str],
    version: int,
    sampling: SamplingConfig,
    limits: Limits,
    seed: int,
    identity: Any = None,
    environment_turns: Mapping[str, int] = MappingProxyType({}),
) -> CollectionRequest:
    """The collection behind one score: every run of every task, under one pinned version.

    Its id ends in a hash of everything that the result depends on, so another protocol is another collection and the
    same one is found again.

    Args:
        name: readable start of the id.
        identity: what else the result depends on, JSON-able: the adapter's digest, the base model, the environment.
        environment_turns: environment of a mixture -> turns of its episodes, in place of ``limits.max_turns``.
    """
    protocol: list[Any] = [list(tasks), version, asdict(sampling), asdict(limits), seed, identity]
    if environment_turns:  # without them the ids are those of evaluations that knew no such turns
        protocol.append(dict(environment_turns))
    content = json.dumps(protocol, sort_keys=True)
    return CollectionRequest(
        id=evaluation_id(name, content),
        tasks=list(tasks),
        rollouts_per_task=sampling.runs,
        policy_version=version,
        seed=seed,
        sampling=Sampling(sampling.temperature, sampling.top_p, sampling.top_k),
        limits=limits,
        environment_turns=dict(environment_turns),
    )


class ResultStore:
    """``journal.jsonl``: one line per attempt, {"cell": collection id, "policy", "sampling", ...TaskResult}.

    Lines are kept whatever the config becomes; only those of the cells asked for are used. A recorded failure is
    ignored, and so is a line that is no result: starting the evaluation again tries those tasks again.
    """

    def __init__(self, path: Path) -> None:
        self._results: dict[str, dict[tuple[str, int], TaskResult]] = {}
        self._path = path
        append_to(path).close()
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                data = json.loads(line)
                cell, result = data["cell"], TaskResult.from_dict(data)
            except (ValueError, TypeError, KeyError):
                continue
            if result.failure is None:
                self._results.setdefault(cell, {})[result.task_id, result.run] = result

    def add(self, cell: Cell, result: TaskResult) -> bool:
        """Store it unless it is there; returns whether it was new."""
        known = self._results.setdefault(cell.request.id, {})
        if (result.task_id, result.run) in known:
            return False
        known[result.task_id, result.run] = result
        line = {"cell": cell.request.id, "policy": cell.policy.name, "sampling": cell.sampling.label}
        with writing(self._path), append_to(self._path) as file:
            file.write(f"{to_json(line | result.to_dict())}\n")
        return True

    def results(self, cell: Cell) -> list[TaskResult]:
        """What is there of a cell, in the order of its tasks and runs."""
        known = self._results.get(cell.request.id, {})
        return [known[key] for key in cell.expected if key in known]

    def missing(self, cell: Cell) -> list[tuple[str, int]]:
        known = self._results.get(cell.request.id, {})
        return [key for key in cell.expected if key not in known]


class Nodes(Protocol):
    """What an evaluation asks of the rollout node, or of several as of one."""

    def start(self, request: CollectionRequest) -> None:
        """Ask for a collection without waiting; asking again is harmless."""
        ...

    def events(self, request: CollectionRequest) -> Iterator[Rollout | Progress]:
        """Each rollout of a started collection as it finishes and, in between, the collection's progress.

        Raises:
            CollectionFailed: not every rollout could be made; raised after the last one.
        """
        ...


def run_cells(
    nodes: Nodes,
    cells: Sequence[Cell],
    store: ResultStore,
    *,
    retries: int,
    deadline_s: float,
    on_result: Callable[[Cell, TaskResult], None] = lambda cell, result: None,
) -> None:
    """Fill the store with a result for every attempt of ``cells``, whose policy is served already.

    All collections are started first, so that the last episodes of one overlap with the first of the next. A task whose
    attempts keep failing is asked for again by itself, ``retries`` times, then recorded as failed.

    Raises:
        EvaluationTimeout: not done after ``deadline_s``.
        RolloutNodeError, NodeUnreachable, NodeDied: of the nodes.
    """
    give_up = time.monotonic() + deadline_s
    waiting = [cell for cell in cells if store.missing(cell)]
    for cell in waiting:
        nodes.start(cell.request)
    for cell in waiting:

        def take(rollouts: Iterator[Rollout], cell: Cell = cell) -> None:
            # The sequences of an episode follow each other. With the last it is stored, before another is asked for:
            # that may raise.
            sequences: list[Rollout] = []
            for rollout in rollouts:
                sequences.append(rollout)
                if rollout.segment + 1 == rollout.segments:
                    result = TaskResult.from_rollout(*sequences)
                    sequences = []
                    if store.add(cell, result):
                        on_result(cell, result)

        try:
            take(_read(nodes, cell.request, give_up))
        except CollectionFailed:
            # One hopeless task ends its whole collection, so from here on every task has its own.
            for task in dict.fromkeys(task for task, _ in store.missing(cell)):
                failure = _retry_task(nodes, cell.request, task, retries, give_up, take)
                for _, run in [key for key in store.missing(cell) if key[0] == task]:
                    result = TaskResult(task_id=task, run=run, failure=failure)
                    store.add(cell, result)
                    on_result(cell, result)


def _retry_task(
    nodes: Nodes,
    request: CollectionRequest,
    task: str,
    retries: int,
    give_up: float,
    take: Callable[[Iterator[Rollout]], None],
) -> str:
    """Ask for one task alone, and again while it fails; returns the last failure, "" if there was none."""
    alone = CollectionRequest.from_dict(request.to_dict() | {"id": single_task_id(request.id, task), "tasks": [task]})
    failure = ""
    for _ in range(retries + 1):
        nodes.start(alone)
        try:
            take(_read(nodes, alone, give_up))
            return ""
        except CollectionFailed as error:
            failure = str(error)
    return failure


def _read(nodes: Nodes, request: CollectionRequest, give_up: float) -> Iterator[Rollout]:
    for event in nodes.events(request):
        if time.monotonic() > give_up:
            raise EvaluationTimeout(
                f"collection {request.id} was not done within deadline_s; start the same evaluation again to go on"
            )
        if isinstance(event, Rollout):
            yield event
