"""Samples of pairs of turns, for a fixed set of stored rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from loop_contrib.turn_pairs import TurnPair, read_pairs
from loop_formats.ids import paired_turn_id
from loop_formats.rollout import Rollout
from loop_formats.schema import ConfigError, require
from loop_plumbing.breakage import raised_as
from loop_recipes.algorithm.method_plan import MethodPlan
from loop_recipes.config.loop_config import UpdateConfig
from loop_recipes.config.sft_config import SftConfig
from loop_recipes.engine.samples import Sample
from loop_recipes.rollouts.fixed_set import SampleMaker


class TurnPairs(SampleMaker):
    """Makes samples from pairs of turns only, each turn with its whole history. The loss must be a loss on pairs.

    The two turns of a pair form a group, and a turn's value is its return. ``ReturnPairs`` then finds the same pair
    if the two values differ by more than the threshold of ``ReturnPairs``.

    Args:
        file: file of pairs from ``loop method trees`` or ``rank-turns``; ``rollouts.logs`` must hold their rollouts.
    """

    reads_branches = True

    def __init__(self, file: str) -> None:
        self._file = Path(file)
        self._pairs: list[TurnPair] = []

    def check(self, config: SftConfig, plan: MethodPlan) -> None:
        require(
            plan.compares_pairs,
            f"samples: {config.loss['_component_']} compares no pairs; give "
            "loss._component_=loop_recipes.algorithm.preferences.DPO, or leave samples out",
        )

    def see(self, rollouts: Sequence[Rollout]) -> None:
        file = self._file
        require(file.is_file(), f"samples.file: {file} does not exist; loop method trees writes such a file")
        with raised_as(ConfigError, "samples.file: "):
            self._pairs = read_pairs(file)
        require(self._pairs, f"samples.file: {file} holds no pair; search more iterations, or with a lower threshold")
        known = {rollout.rollout_id: rollout for rollout in rollouts}
        for pair in self._pairs:
            for name in (pair.chosen, pair.rejected):
                require(name in known, f"samples.file: {file} names rollout {name}, which is not in rollouts.logs")
                own = pair.turn - known[name].turns_before
                sampled = 0 <= own < len(known[name].turns)
                require(sampled, f"samples.file: {file}: rollout {name} did not sample turn {pair.turn}")

    def samples(self, rollouts: Sequence[Rollout], update: UpdateConfig, model_dir: str) -> list[Sample]:
        length, known = update.max_tokens_per_rollout, {rollout.rollout_id: rollout for rollout in rollouts}
        samples: list[Sample] = []
        for number in range(len(self._pairs)):
            turns = self._turns_of(number, known)
            if length is None or max(turn.tokens for turn in turns) <= length:
                samples += turns
        require(samples, f"update.max_tokens_per_rollout is {length}, and no pair of turns is so early")
        return samples

    def _turns_of(self, number: int, rollouts: Mapping[str, Rollout]) -> list[Sample]:
        pair = self._pairs[number]
        turns = []
        for name, value in ((pair.chosen, pair.chosen_value), (pair.rejected, pair.rejected_value)):
            turn = Sample.from_rollout(rollouts[name]).only_turn(pair.turn - rollouts[name].turns_before)
            turn_name = paired_turn_id(number, name, pair.turn)
            turns.append(
                replace(turn, rollout_id=turn_name, episode_id=turn_name, task_id=f"pair {number}", reward=value)
            )
        return turns

    def sources(self, samples: Sequence[Sample]) -> set[str]:
        made = {sample.rollout_id for sample in samples}
        sources: set[str] = set()
        for number, pair in enumerate(self._pairs):
            if paired_turn_id(number, pair.chosen, pair.turn) in made:
                sources |= {pair.chosen, pair.rejected}
        return sources

    def identity(self) -> list[str]:
        return [str(pair) for pair in self._pairs]
