"""Samples every task at several temperatures until it is solved: the collection of rejection-sampling fine-tuning.

LOOP, appendix C.2: for each of 20 temperatures and each task, rollouts of the base model until one has return 1 or the
budget is spent. Here a round asks once for every task that a temperature has not solved, all temperatures together.
Rounds follow from what earlier ones found, and the node finds a collection again by its id: the same search started
again repeats nothing that is on the node's disk.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loop_formats.collection_request import CollectionRequest, Limits, Sampling, check_temperature
from loop_formats.ids import search_id
from loop_formats.run_files import COLLECTIONS, write_rollouts
from loop_formats.schema import require
from loop_recipes.rollouts.source import CollectionSource, NoRollouts, read_not_lost
from rollout_server.collecting.attempt import derive_seed


def check_budget(temperatures: Sequence[float], attempts: int, rollouts: int | None) -> None:
    """Check the temperatures, attempts and rollouts of a search.

    Raises:
        ConfigError: no temperature, one twice to two decimals, one that is 0 or that vLLM does not take, no
            attempt or no rollout.
    """
    require(rollouts is None or rollouts >= 1, "rollouts must be at least one")
    require(temperatures and attempts >= 1, "temperatures and attempts must be at least one")
    for temperature in temperatures:
        check_temperature(temperature)
    percent = {round(100 * temperature) for temperature in temperatures}
    distinct = len(percent) == len(temperatures) and 0 not in percent
    require(distinct, f"temperatures {list(temperatures)} must differ by 0.01 at least and be above 0")


@dataclass(frozen=True)
class SolvedSearch:
    """A plan of sampling: every task at every temperature, ``attempts`` times at most, and ``rollouts`` in all at most.

    Args:
        name: of the run; begins the ids of its collections.
        policy_version: served by the node.
        seed: each temperature has a seed of its own in each round, made from it.

    Raises:
        ConfigError: see :func:`check_budget`.
    """

    name: str
    tasks: Sequence[str]
    temperatures: Sequence[float]
    attempts: int
    limits: Limits
    policy_version: int = 0
    seed: int = 0
    rollouts: int | None = None

    def __post_init__(self) -> None:
        check_budget(self.temperatures, self.attempts, self.rollouts)

    def round(self, solved: Mapping[float, Collection[str]], attempt: int, asked: int) -> list[CollectionRequest]:
        """Return the requests of a round after ``asked`` rollouts: what each temperature has not solved. Where
        ``rollouts`` does not suffice for all, the first tasks at every temperature."""
        missing = [
            (temperature, task) for task in self.tasks for temperature in solved if task not in solved[temperature]
        ]
        if self.rollouts is not None:
            missing = missing[: self.rollouts - asked]
        tasks = {temperature: [task for other, task in missing if other == temperature] for temperature in solved}
        return [self.request(temperature, attempt, wanted) for temperature, wanted in tasks.items() if wanted]

    def request(self, temperature: float, attempt: int, tasks: Sequence[str]) -> CollectionRequest:
        """Request a rollout of each of ``tasks``; ``attempt`` counts from 1."""
        return CollectionRequest(
            id=search_id(self.name, temperature, attempt),
            tasks=list(tasks),
            rollouts_per_task=1,
            policy_version=self.policy_version,
            seed=derive_seed(self.seed, f"{temperature:.2f}", attempt),
            sampling=Sampling(temperature=temperature),
            limits=self.limits,
        )


@dataclass(frozen=True)
class SearchState:
    """The state of a search: the round, tasks times temperatures, and how many of these are solved."""

    attempt: int
    wanted: int
    solved: int
    tasks: int
    """Tasks that some temperature has solved."""


def search(
    source: CollectionSource,
    wanted: SolvedSearch,
    out: Path,
    on_round: Callable[[SearchState], None] = lambda state: None,
    out_of_time: Callable[[], bool] = lambda: False,
) -> SearchState:
    """Sample until everything is solved, attempts or rollouts are spent, or ``out_of_time`` before a round.

    The solved rollouts are in ``out/collections/<collection>.jsonl`` after each round, one log for each of its requests
    that solved something. A lost rollout is one that solved nothing.

    Raises:
        NoRollouts: everything was lost.
        Exception: what the source raises; see :data:`~loop_recipes.rollouts.source.SOURCE_ERRORS`.
    """
    solved: dict[float, set[str]] = {temperature: set() for temperature in wanted.temperatures}
    state = SearchState(0, len(wanted.tasks) * len(solved), 0, 0)
    asked = had = 0
    for attempt in range(1, wanted.attempts + 1):
        requests = wanted.round(solved, attempt, asked)
        if not requests or out_of_time():
            break
        for request in requests:
            source.start(request)
        for request in requests:
            asked += len(request.tasks)
            rollouts = read_not_lost(source, request)
            had += len(rollouts)
            successes = [rollout for rollout in rollouts if rollout.reward >= 1.0]
            solved[request.sampling.temperature] |= {rollout.task_id for rollout in successes}
            if successes:
                ordered = sorted(successes, key=lambda rollout: (rollout.episode_id, rollout.segment))
                write_rollouts(out / COLLECTIONS, request.id, ordered)
        if not had:
            raise NoRollouts(f"all of the {asked} rollouts asked for are lost; the warnings say why")
        tasks = len(set().union(*solved.values()))
        state = SearchState(attempt, state.wanted, sum(map(len, solved.values())), tasks)
        on_round(state)
    return state
