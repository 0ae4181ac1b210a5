"""Runs an evaluation on rollout nodes: one collection per policy and way of sampling, resumable, with named losses.

Every rollout that arrives becomes a line of ``journal.jsonl`` at once, so an evaluation that is started again with the
same config asks only for the missing rollouts; the node, too, finds again the rollouts stored under the collection's
id. An attempt is identified by its cell's fingerprint, its task and its run: an evaluation of more runs reuses stored
results, and one with another grader, model or other limits begins anew beside them.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from agent_environments.description import DEFAULT_DESCRIPTION, Description
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
from loop_plumbing import running_time
from loop_plumbing.grouping import grouped
from loop_recipes.evaluation.config import PolicyUnderTest, SamplingConfig
from loop_recipes.evaluation.scores import TaskResult
from loop_recipes.run.fingerprint import differing
from rollout_server.client import CollectionFailed


class EvaluationTimeout(RuntimeError):
    """The rollouts did not come within ``deadline_s``; the finished ones are stored."""


class NoScore(RuntimeError):
    """All rollouts of a policy under one way of sampling were lost: there is no score, and a retry would not help."""

    @classmethod
    def of(cls, cell: Cell, why: str) -> NoScore:
        """Make the error for a cell; ``why`` is a line that names the lost rollouts."""
        return cls(f"no score of {cell.label}: {why}; mend that and start the same evaluation again")


@dataclass(frozen=True)
class Cell:
    """A unit that gets one score: a policy, a way of sampling, and R runs over the tasks.

    ``request`` asks for all its rollouts. ``fingerprint`` holds, as JSON-able values, everything that an attempt's
    result depends on besides task and run. Cells with equal fingerprints share their attempts.
    """

    policy: PolicyUnderTest
    sampling: SamplingConfig
    request: CollectionRequest
    fingerprint: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.policy.name}, {self.sampling.label}"

    @property
    def expected(self) -> list[tuple[str, int]]:
        """Return (task id, run) of every attempt."""
        return [(task, run) for task in self.request.tasks for run in range(self.request.rollouts_per_task)]

    @property
    def key(self) -> str:
        """Return the hash of the fingerprint."""
        return hashlib.sha256(json.dumps(self.fingerprint, sort_keys=True).encode()).hexdigest()[:16]


def evaluation_cell(
    policy: PolicyUnderTest,
    tasks: Sequence[str],
    sampling: SamplingConfig,
    limits: Limits,
    seed: int,
    identity: Mapping[str, Any] = MappingProxyType({}),
    environment_turns: Mapping[str, int] = MappingProxyType({}),
) -> Cell:
    """Make the cell for one score: every run of every task, under one pinned policy version.

    The id of the cell's collection ends in a hash of fingerprint, tasks and runs. So a changed protocol makes a new
    collection, and the same protocol finds its collection again.

    Args:
        identity: further facts that a result depends on, by name, JSON-able: base model, dataset, environment's code.
        environment_turns: environment of a mixture -> turns of its episodes, in place of ``limits.max_turns``.
    """
    how = {name: value for name, value in asdict(sampling).items() if name != "runs"}
    own = {"policy": policy.digest, "sampling": how, "limits": limits.non_null(), "seed": seed}
    turns = {"environment_turns": dict(environment_turns)} if environment_turns else {}
    fingerprint = {**identity, **own, **turns}
    request = CollectionRequest(
        id=evaluation_id(
            f"{policy.name}-t{sampling.temperature:g}",
            json.dumps([fingerprint, list(tasks), sampling.runs], sort_keys=True),
        ),
        tasks=list(tasks),
        rollouts_per_task=sampling.runs,
        policy_version=policy.served_version,
        seed=seed,
        sampling=Sampling(**how),
        limits=limits,
        environment_turns=dict(environment_turns),
    )
    return Cell(policy, sampling, request, fingerprint)


class ResultStore:
    """``journal.jsonl``: one line per attempt, {"key": hash of its fingerprint, "cell": collection id, "policy",
    "sampling", ...TaskResult}, and before the first of a key {"key", "fingerprint", "policy", "sampling"}.

    Lines stay when the config changes; only attempts that the cells ask for are used. A lost rollout is only counted,
    and a line that is not a result is ignored: the next start of the evaluation plays both again.
    """

    def __init__(self, path: Path) -> None:
        self._results: dict[str, dict[tuple[str, int], TaskResult]] = {}
        self._from: dict[tuple[str, str, int], str] = {}
        """(key, task, run) -> id of the collection that the result came with."""
        self._heads: dict[str, tuple[str, str, dict[str, Any]]] = {}
        """Key -> the policy's name, the label of the sampling, and the fingerprint."""
        self._losses: Counter[tuple[str, str, int]] = Counter()
        self._path = path
        append_to(path).close()
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                data = json.loads(line)
                key = data["key"]
                if "fingerprint" in data:
                    self._heads[key] = data["policy"], data["sampling"], dict(data["fingerprint"])
                    continue
                collection, result = data["cell"], TaskResult.from_dict(data)
            except (ValueError, TypeError, KeyError):
                continue
            self._keep(key, collection, result)

    def _keep(self, key: str, collection: str, result: TaskResult) -> None:
        if result.lost:
            self._losses[key, result.task_id, result.run] += 1
        else:
            self._results.setdefault(key, {})[result.task_id, result.run] = result
            self._from[key, result.task_id, result.run] = collection

    def add(self, cell: Cell, result: TaskResult) -> bool:
        """Store a result unless the store has it; returns whether it was new."""
        results = self._results.setdefault(cell.key, {})
        if (result.task_id, result.run) in results:
            return False
        results[result.task_id, result.run] = result
        self._from[cell.key, result.task_id, result.run] = cell.request.id
        head = {"key": cell.key, "policy": cell.policy.name, "sampling": cell.sampling.label}
        lines = [head | {"cell": cell.request.id} | result.to_dict()]
        if cell.key not in self._heads:
            self._heads[cell.key] = cell.policy.name, cell.sampling.label, dict(cell.fingerprint)
            lines.insert(0, head | {"fingerprint": dict(cell.fingerprint)})
        with writing(self._path), append_to(self._path) as file:
            file.writelines(f"{to_json(line)}\n" for line in lines)
        return True

    def results(self, cell: Cell) -> list[TaskResult]:
        """Return the stored results of a cell, in the order of its tasks and runs."""
        results = self._results.get(cell.key, {})
        return [results[key] for key in cell.expected if key in results]

    def missing(self, cell: Cell) -> list[tuple[str, int]]:
        results = self._results.get(cell.key, {})
        return [key for key in cell.expected if key not in results]

    def request(self, cell: Cell) -> CollectionRequest:
        """Return the cell's request without attempts that other collections gave; the node finds this collection's own
        rollouts by id."""
        elsewhere = {
            (task, run)
            for task, run in cell.expected
            if self._from.get((cell.key, task, run), cell.request.id) != cell.request.id
        }
        if not elsewhere:
            return cell.request
        only = grouped(each for each in cell.expected if each not in elsewhere)
        return replace(cell.request, id=replay_id(cell.request.id, json.dumps(only)), tasks=list(only), only=only)

    def times_lost(self, cell: Cell) -> int:
        """Return how many earlier starts lost the same attempt: the maximum over the cell's missing attempts."""
        return max((self._losses[cell.key, task, run] for task, run in self.missing(cell)), default=0)

    def set_aside(self, cells: Sequence[Cell]) -> list[str]:
        """Return a line on stored results with the name and sampling of one of ``cells`` but another fingerprint: their
        number, and what has changed. No figure counts these results."""
        lines, used = [], {cell.key for cell in cells}
        for cell in cells:
            for key, (policy, sampling, was) in self._heads.items():
                if key in used or (policy, sampling) != (cell.policy.name, cell.sampling.label):
                    continue
                if count := len(self._results.get(key, {})):
                    changed = ", ".join(differing(was, cell.fingerprint))
                    lines.append(f"{cell.label}: {count} earlier results, since which changed: {changed}")
        return lines


class Nodes(Protocol):
    """The part of a rollout node that an evaluation uses; several nodes appear as one."""

    def start(self, request: CollectionRequest) -> None:
        """Ask for a collection without waiting; asking again is harmless."""

    def events(self, request: CollectionRequest) -> Iterator[Rollout | Progress | CollectionEnd]:
        """Yield each rollout of a started collection as it finishes, and reports of progress in between. The last item
        is the end of the collection or of a node's share.

        Raises:
            CollectionFailed: all rollouts were lost, or the collection failed; raised after the last rollout.
        """


def run_cells(
    nodes: Nodes,
    cells: Sequence[Cell],
    store: ResultStore,
    *,
    environment: Description = DEFAULT_DESCRIPTION,
    retries: int,
    deadline_s: float,
    on_result: Callable[[Cell, TaskResult], None] = lambda cell, result: None,
) -> None:
    """Fill the store with a result for every rollout of ``cells``, whose policy the nodes serve already.

    All collections are started first, so that the last episodes of one overlap with the first of the next. Lost
    rollouts are played again at the end, all at once and over all nodes, ``retries`` times with one attempt each; those
    that fail again are recorded as lost.

    Raises:
        NoScore: all rollouts of a cell were lost.
        EvaluationTimeout: not done after ``deadline_s``.
        CollectionFailed: a node's disk is full, or somebody cancelled a collection.
        RolloutNodeError, NodeUnreachable, NodeDied: of the nodes.
    """
    give_up = running_time.now() + deadline_s
    waiting = [cell for cell in cells if store.missing(cell)]
    reasons: dict[str, dict[tuple[str, int], str]] = {cell.request.id: {} for cell in waiting}
    for number in range(retries + 1):
        requests = [(cell, _missing_again(cell, store, number) if number else store.request(cell)) for cell in waiting]
        for _, request in requests:
            nodes.start(request)
        for cell, request in requests:
            lost = _read(nodes, cell, request, store, environment, give_up, on_result)
            if lost and not store.results(cell):
                raise NoScore.of(cell, losses(lost, request.episodes))
            reasons[cell.request.id] |= {(each.task_id, each.index): f"{each.reason}: {each.message}" for each in lost}
        waiting = [cell for cell in waiting if store.missing(cell)]
    for cell in waiting:
        for task, run in store.missing(cell):
            result = TaskResult(task_id=task, run=run, failure=reasons[cell.request.id].get((task, run), ""))
            store.add(cell, result)
            on_result(cell, result)


def _missing_again(cell: Cell, store: ResultStore, number: int) -> CollectionRequest:
    """Return a request for the cell's missing attempts, with their seeds; ``number`` counts these requests from 1 in
    this start of the evaluation."""
    only = grouped(store.missing(cell))
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
    """Store the rollouts of a collection as they come; returns the lost ones."""
    lost: list[LostRollout] = []
    # The sequences of an episode follow each other. The episode is stored with its last one, before the next event,
    # which may raise.
    sequences: list[Rollout] = []
    try:
        for event in nodes.events(request):
            if running_time.now() > give_up:
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
