"""Runs an evaluation on rollout nodes: one collection per policy and way of sampling, resumable, with named losses.

Every rollout that arrives becomes a line of ``journal.jsonl`` at once, so an evaluation that is started again with the
same config asks only for what is missing; the node, too, finds again what it has under the collection's id.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from agent_environments.description import UNSAID, Description
from loop_formats.collection_request import (
    CollectionEnd,
    CollectionRequest,
    Limits,
    LostRollout,
    Progress,
    Sampling,
    losses,
    too_many_lost,
)
from loop_formats.ids import evaluation_id, replay_id
from loop_formats.rollout import Rollout
from loop_formats.run_files import append_to, to_json, writing
from loop_recipes.evaluation.config import PolicyUnderTest, SamplingConfig
from loop_recipes.evaluation.scores import TaskResult
from rollout_server.client import CollectionFailed


class EvaluationTimeout(RuntimeError):
    """The rollouts did not come within ``deadline_s``; what came is kept."""


class NoScore(RuntimeError):
    """Nothing came of a cell: there is nothing to score, and trying again would be in vain."""

    @classmethod
    def of(cls, cell: Cell, why: str) -> NoScore:
        """``why``: what was lost, in one line."""
        return cls(f"no score of {cell.label}: {why}; mend that and start the same evaluation again")


@dataclass(frozen=True)
class Cell:
    """A unit that gets one score: a policy, a way of sampling, and R runs over the tasks."""

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
    protocol: list[Any] = [list(tasks), version, asdict(sampling), limits.given(), seed, identity]
    if environment_turns:  # without them the ids are those of evaluations that knew no such turns
        protocol.append(dict(environment_turns))
    content = json.dumps(protocol, sort_keys=True)
    return CollectionRequest(
        id=evaluation_id(name, content),
        tasks=list(tasks),
        rollouts_per_task=sampling.runs,
        policy_version=version,
        seed=seed,
        sampling=Sampling(temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k),
        limits=limits,
        environment_turns=dict(environment_turns),
    )


class ResultStore:
    """``journal.jsonl``: one line per attempt, {"cell": collection id, "policy", "sampling", ...TaskResult}.

    Lines are kept whatever the config becomes; only those of the cells asked for are used. A lost rollout is only
    counted, and a line that is no result is ignored: starting the evaluation again plays those again.
    """

    def __init__(self, path: Path) -> None:
        self._results: dict[str, dict[tuple[str, int], TaskResult]] = {}
        self._losses: Counter[tuple[str, str, int]] = Counter()
        self._path = path
        append_to(path).close()
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                data = json.loads(line)
                cell, result = data["cell"], TaskResult.from_dict(data)
            except (ValueError, TypeError, KeyError):
                continue
            if result.lost:
                self._losses[cell, result.task_id, result.run] += 1
            else:
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
        """Return the results of a cell that are there, in the order of its tasks and runs."""
        known = self._results.get(cell.request.id, {})
        return [known[key] for key in cell.expected if key in known]

    def missing(self, cell: Cell) -> list[tuple[str, int]]:
        known = self._results.get(cell.request.id, {})
        return [key for key in cell.expected if key not in known]

    def times_lost(self, cell: Cell) -> int:
        """Return how many earlier starts ended with a loss among what is missing: the most of any of them."""
        return max((self._losses[cell.request.id, task, run] for task, run in self.missing(cell)), default=0)


class Nodes(Protocol):
    """The part of a rollout node that an evaluation uses; several nodes appear as one."""

    def start(self, request: CollectionRequest) -> None:
        """Ask for a collection without waiting; asking again is harmless."""
        ...

    def events(self, request: CollectionRequest) -> Iterator[Rollout | Progress | CollectionEnd]:
        """Each rollout of a started collection as it finishes, in between the collection's progress, and its end, or
        the end of each node's share.

        Raises:
            CollectionFailed: everything was lost, or it failed otherwise; raised after the last rollout.
        """
        ...


def run_cells(
    nodes: Nodes,
    cells: Sequence[Cell],
    store: ResultStore,
    *,
    environment: Description = UNSAID,
    retries: int,
    deadline_s: float,
    on_result: Callable[[Cell, TaskResult], None] = lambda cell, result: None,
) -> None:
    """Fill the store with a result for every rollout of ``cells``, whose policy is served already.

    All collections are started first, so that the last episodes of one overlap with the first of the next. What is lost
    is played again at the end, all of it at once and over all nodes, ``retries`` times with one attempt each, and what
    cannot be had then is recorded as lost.

    Raises:
        NoScore: everything of a cell was lost.
        EvaluationTimeout: not done after ``deadline_s``.
        CollectionFailed: a node's disk is full, or somebody cancelled a collection.
        RolloutNodeError, NodeUnreachable, NodeDied: of the nodes.
    """
    give_up = time.monotonic() + deadline_s
    waiting = [cell for cell in cells if store.missing(cell)]
    lost: dict[str, dict[tuple[str, int], str]] = {cell.request.id: {} for cell in waiting}
    for number in range(retries + 1):
        asked = [(cell, _missing_again(cell, store, number) if number else cell.request) for cell in waiting]
        for _, request in asked:
            nodes.start(request)
        for cell, request in asked:
            found = _read(nodes, cell, request, store, environment, give_up, on_result)
            if found and not store.results(cell):
                raise NoScore.of(cell, losses(found, request.episodes))
            lost[cell.request.id] |= {(each.task_id, each.index): f"{each.reason}: {each.message}" for each in found}
        waiting = [cell for cell in waiting if store.missing(cell)]
    for cell in waiting:
        for task, run in store.missing(cell):
            result = TaskResult(task_id=task, run=run, failure=lost[cell.request.id].get((task, run), ""))
            store.add(cell, result)
            on_result(cell, result)


def _missing_again(cell: Cell, store: ResultStore, number: int) -> CollectionRequest:
    """Return a request for what the cell lacks, with the seeds that it had; ``number`` counts such requests from 1
    since this start of the evaluation."""
    only: dict[str, list[int]] = {}
    for task, run in store.missing(cell):
        only.setdefault(task, []).append(run)
    protocol = json.dumps([only, store.times_lost(cell), number])
    request_id = replay_id(cell.request.id, protocol)
    return replace(cell.request, id=request_id, tasks=list(only), only=only, attempts=1)


def _read(
    nodes: Nodes,
    cell: Cell,
    request: CollectionRequest,
    store: ResultStore,
    environment: Description,
    give_up: float,
    on_result: Callable[[Cell, TaskResult], None],
) -> list[LostRollout]:
    """Store the rollouts of a collection as they come; returns those that were lost."""
    lost: list[LostRollout] = []
    # The sequences of an episode follow each other. With the last it is stored, before another is asked for: that may
    # raise.
    sequences: list[Rollout] = []
    try:
        for event in nodes.events(request):
            if time.monotonic() > give_up:
                raise EvaluationTimeout(
                    f"collection {request.id} was not done within deadline_s; start the same evaluation again to go on"
                )
            if isinstance(event, CollectionEnd):
                lost += event.lost
            if not isinstance(event, Rollout):
                continue
            sequences.append(event)
            if event.segment + 1 == event.segments:
                result = TaskResult.from_rollout(*sequences, environment=environment)
                sequences = []
                if store.add(cell, result):
                    on_result(cell, result)
    except CollectionFailed as error:
        if too_many_lost(error.end.lost, request) is None:
            raise
        lost += error.end.lost
    return lost
