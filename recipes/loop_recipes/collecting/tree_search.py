"""Searches the turn trees of many tasks at once, one rollout of each task an iteration, and keeps the pairs found.

A search that is started again asks for the same collections, which the node finds on its disk: the trees grow again to
where they were, and nothing is sampled twice. So the only file of a search is its buffer of pairs.

It differs from LOOP's DPO-MCTS in one point: there two turns are sampled in a state and one of them is rolled out;
here both turns of a state come from rollouts that were played to their end, because an episode of the node ends in a
grade.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loop_recipes.collecting.branching import HowToSample, continuation_request
from loop_recipes.collecting.source import CollectionSource
from loop_recipes.collecting.turn_pairs import PairBuffer
from loop_recipes.collecting.turn_tree import TURNS_OF_A_STATE, State, TurnTree
from rollout_server.branch import Branch
from rollout_server.collection_request import CollectionRequest
from rollout_server.ids import branch_id
from rollout_server.rollout import Rollout

BRANCHES_OF_A_REQUEST = 16
"""Each brings its rollout's token ids and texts, some 0.3 MB at 32,000 tokens, and a node takes requests of 8 MB."""


@dataclass(frozen=True)
class TreeSearch:
    """``iterations`` rollouts of each of ``tasks`` beside the two that its tree begins with.

    ``name`` begins the ids of the collections; ``threshold`` is between the values of a pair.
    """

    name: str
    tasks: Sequence[str]
    how: HowToSample
    iterations: int = 30
    exploration: float = 1.0
    threshold: float = 0.0

    def run(self, source: CollectionSource, buffer: Path) -> list[TurnTree]:
        """Search, add the pairs to ``buffer``, and return the trees; raises what the source raises.

        Raises:
            ValueError: ``buffer`` is no file of pairs.
        """
        with PairBuffer(buffer) as pairs:  # opened first: a damaged file is said before anything is sampled
            trees = {task_id: TurnTree(task_id, self.exploration) for task_id in self.tasks}
            known: dict[str, Rollout] = {}
            for rollout in self._collect(source, self._first_request()):
                known[rollout.rollout_id] = rollout
                tree = trees[rollout.task_id]
                tree.add(tree.root, rollout.rollout_id, len(rollout.turns), rollout.reward)
            for iteration in range(self.iterations):
                states = {task_id: state for task_id, tree in trees.items() if (state := tree.select()) is not None}
                if not states:
                    break
                self._grow(source, trees, states, known, iteration)
            for tree in trees.values():
                pairs.add(tree.pairs(self.threshold))
            return list(trees.values())

    def _grow(
        self,
        source: CollectionSource,
        trees: dict[str, TurnTree],
        states: dict[str, State],
        known: dict[str, Rollout],
        iteration: int,
    ) -> None:
        """One rollout from each of ``states``; one that is refused closes its state."""
        branches = [Branch.of(known[state.sampled[0].rollout_id], [state.turn]) for state in states.values()]
        how = dataclasses.replace(self.how, continuations=1, seed=self.how.seed + iteration)
        parts = [branches[at : at + BRANCHES_OF_A_REQUEST] for at in range(0, len(branches), BRANCHES_OF_A_REQUEST)]
        waiting = dict(states)
        for rollout in self._collect(source, *(continuation_request(part, how) for part in parts)):
            known[rollout.rollout_id] = rollout
            state = waiting.pop(rollout.task_id)
            trees[rollout.task_id].add(state, rollout.rollout_id, len(rollout.turns), rollout.reward)
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
        """The rollouts of all requests in an order that does not depend on which ended first."""
        for request in requests:
            source.start(request)
        rollouts = [rollout for request in requests for rollout in source.read(request).rollouts]
        return sorted(rollouts, key=lambda rollout: (rollout.task_id, rollout.index))
