"""Samples every task at several temperatures until it is solved: the collection of rejection-sampling fine-tuning.

LOOP, appendix C.2: for each of 20 temperatures and each task, rollouts of the base model until one has return 1 or the
budget is spent. Here a round asks once for every task that a temperature has not solved, all temperatures together.
Each round follows from the results of earlier ones, and the node finds a collection again by its id. So the same
search, started again, repeats nothing that is on the node's disk.
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
        ConfigError: there is no temperature, attempt or rollout, two temperatures are equal to two decimals, or a
            temperature is 0 or refused by vLLM.
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
    """A sampling plan: each task at each temperature up to ``attempts`` times, with at most ``rollouts`` in total.

    Args:
        name: name of the run, with which the ids of its collections begin.
        policy_version: version of the policy that the node serves.
        seed: the seeds of all temperatures and rounds are derived from this seed.

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
        """Return the requests of a round, for the tasks that each temperature has not solved. ``asked`` rollouts were
        requested before. If ``rollouts`` is too small for all tasks, the first tasks come at every temperature."""
        missing = [
            (temperature, task) for task in self.tasks for temperature in solved if task not in solved[temperature]
        ]
        if self.rollouts is not None:
            missing = missing[: self.rollouts - asked]
        tasks = {temperature: [task for other, task in missing if other == temperature] for temperature in solved}
        return [self.request(temperature, attempt, wanted) for temperature, wanted in tasks.items() if wanted]

    def request(self, temperature: float, attempt: int, tasks: Sequence[str]) -> CollectionRequest:
        """Return the request for one rollout of each of ``tasks``. ``attempt`` counts from 1."""
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
    """The state of a search: the round, the number of (task, temperature) pairs, and how many of them are solved."""

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
    """Sample until all tasks are solved, no attempts or rollouts are left, or ``out_of_time()`` is true before a round.

    Each round writes its solved rollouts to ``out/collections/<collection>.jsonl``, one log for each request with
    solved rollouts. A lost rollout counts as not solved.

    Raises:
        NoRollouts: all rollouts were lost.
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
