"""Searches the turn trees of many tasks at once, one rollout of each task an iteration, and keeps the pairs found.

A search that is started again asks for the same collections, which the node finds on its disk: the trees grow again to
where they were, and nothing is sampled twice. So a search writes only its result: the pairs, and the rollouts that they
name, for ``sft_appworld`` to train on.

It differs from LOOP's DPO-MCTS in one point: there two turns are sampled in a state and one of them is rolled out;
here both turns of a state come from rollouts that were played to their end, because an episode of the node ends in a
grade.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from loop_contrib.dpo_mcts.turn_tree import TURNS_OF_A_STATE, TreeState, TurnTree
from loop_contrib.turn_pairs import turns_of, write_pairs
from loop_formats.branch import Branch
from loop_formats.collection_request import CollectionRequest
from loop_formats.ids import branch_id
from loop_formats.rollout import Rollout
from loop_formats.schema import require
from loop_recipes.config.loop_config import AS_GRADED, UpdateConfig
from loop_recipes.rollouts.branching import HowToSample, branch_requests
from loop_recipes.rollouts.source import CollectionSource, NoRollouts, read_not_lost


def check_search(iterations: int, exploration: float, threshold: float) -> None:
    """Check the numbers of a search.

    Raises:
        ConfigError: there is no iteration, or a weight or threshold is below 0.
    """
    require(iterations >= 1, f"iterations is {iterations}; it must be at least 1")
    require(exploration >= 0, f"exploration is {exploration}; it must not be negative")
    require(threshold >= 0, f"threshold is {threshold}; it must not be negative")


@dataclass(frozen=True)
class TreeSearch:
    """A search with ``iterations`` rollouts of each task, besides the two rollouts with which a task's tree begins.

    The ids of the collections begin with ``name``. ``exploration`` is UCB's weight in units of the return. The values
    of a pair, mean returns under the settings ``paid``, differ by more than ``threshold``.

    Raises:
        ConfigError: see :func:`check_search`.
    """

    name: str
    tasks: Sequence[str]
    how: HowToSample
    iterations: int = 30
    exploration: float = 1.0
    threshold: float = 0.0
    paid: UpdateConfig = AS_GRADED

    def __post_init__(self) -> None:
        check_search(self.iterations, self.exploration, self.threshold)

    def run(
        self, source: CollectionSource, folder: Path, on_iteration: Callable[[int, int], None] = lambda *_: None
    ) -> list[TurnTree]:
        """Search, write the pairs to ``folder/pairs.jsonl``, and write their rollouts to ``folder/collections``.

        Args:
            on_iteration: called after each iteration with the number of iterations and of rollouts so far.

        Raises:
            NoRollouts: every first rollout was lost.
            Exception: what the source raises; see :data:`~loop_recipes.rollouts.source.SOURCE_ERRORS`.
        """
        trees = {task_id: TurnTree(task_id, self.exploration) for task_id in self.tasks}
        known: dict[str, Rollout] = {}
        for rollout in self._collect(source, self._first_request()):
            known[rollout.rollout_id] = rollout
            tree = trees[rollout.task_id]
            tree.add(tree.root, rollout.rollout_id, turns_of(rollout), self.paid.return_of(rollout))
        if not known:
            raise NoRollouts("every first rollout is lost; the warnings say why")
        for tree in trees.values():
            tree.root.closed = not tree.root.sampled  # nothing can go on from rollouts that are lost
        for iteration in range(self.iterations):
            states = {task_id: state for task_id, tree in trees.items() if (state := tree.select()) is not None}
            if not states:
                break
            self._grow(source, trees, states, known, iteration)
            on_iteration(iteration + 1, len(known))
        pairs = [pair for tree in trees.values() for pair in tree.pairs(self.threshold)]
        write_pairs(folder, known.values(), pairs)
        return list(trees.values())

    def _grow(
        self,
        source: CollectionSource,
        trees: dict[str, TurnTree],
        states: dict[str, TreeState],
        known: dict[str, Rollout],
        iteration: int,
    ) -> None:
        """Collect a rollout from each of ``states``. A state whose rollout is refused or lost is closed."""
        branches = [Branch.of(known[state.sampled[0].rollout_id], [state.turn]) for state in states.values()]
        how = dataclasses.replace(self.how, continuations=1, seed=self.how.seed + iteration)
        waiting = dict(states)
        for rollout in self._collect(source, *branch_requests(branches, how)):
            known[rollout.rollout_id] = rollout
            state = waiting.pop(rollout.task_id)
            trees[rollout.task_id].add(state, rollout.rollout_id, turns_of(rollout), self.paid.return_of(rollout))
        for state in waiting.values():
            state.closed = True

    def _first_request(self) -> CollectionRequest:
        how = dataclasses.replace(self.how, continuations=TURNS_OF_A_STATE)
        protocol = json.dumps([list(self.tasks), dataclasses.asdict(how)], sort_keys=True)
        return CollectionRequest(
            id=branch_id(self.name, protocol),
            tasks=list(self.tasks),
            rollouts_per_task=TURNS_OF_A_STATE,
            policy_version=how.policy_version,
            seed=how.seed,
            sampling=how.sampling,
            limits=how.limits,
        )

    @staticmethod
    def _collect(source: CollectionSource, *requests: CollectionRequest) -> list[Rollout]:
        """Collect and return the rollouts of all requests. Their order does not depend on which rollout ended first."""
        for request in requests:
            source.start(request)
        rollouts = [rollout for request in requests for rollout in read_not_lost(source, request)]
        return sorted(rollouts, key=lambda rollout: (rollout.task_id, rollout.index))
