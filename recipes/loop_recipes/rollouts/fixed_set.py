"""A fixed set of stored rollouts to train on, from the logs of runs, collections and demonstrations."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from loop_formats.ids import paired_turn_id, parse_collection_id
from loop_formats.rollout import Rollout
from loop_formats.run_files import find_logs, read_rollouts
from loop_formats.schema import ConfigError, require
from loop_recipes.config.loop_config import UpdateConfig
from loop_recipes.config.sft_config import FixedSetConfig
from loop_recipes.engine.samples import Sample, training_samples
from loop_recipes.rollouts.turn_pairs import TurnPair, read_pairs


@dataclass(frozen=True)
class FixedSet:
    """The rollouts, in the order of logs and lines, and the pairs of their turns where only these are trained on."""

    rollouts: list[Rollout]
    pairs: list[TurnPair] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """The same where the rollouts' ids and tokens are the same, and the pairs."""
        content = hashlib.sha256()
        for rollout in self.rollouts:
            content.update(f"{rollout.rollout_id} {rollout.reward} {rollout.token_ids}\n".encode())
        for pair in self.pairs:
            content.update(f"{pair}\n".encode())
        return content.hexdigest()

    def samples(self, update: UpdateConfig) -> list[Sample]:
        """Return the samples to learn from: the rollouts, or the two turns of every pair.

        The turns of a pair are a group by themselves, and the return of each is its value. So ``ReturnPairs`` finds the
        pair again, if its values differ by more than its own threshold too.

        Raises:
            ConfigError: ``update.max_tokens_per_rollout`` leaves nothing.
        """
        if not self.pairs:
            return training_samples(self.rollouts, update)
        length, rollouts = update.max_tokens_per_rollout, {rollout.rollout_id: rollout for rollout in self.rollouts}
        samples: list[Sample] = []
        for number in range(len(self.pairs)):
            turns = self._turns_of(number, rollouts)
            if length is None or max(turn.tokens for turn in turns) <= length:
                samples += turns
        require(samples, f"update.max_tokens_per_rollout is {length}, and no pair of turns is so early")
        return samples

    def _turns_of(self, number: int, rollouts: Mapping[str, Rollout]) -> list[Sample]:
        pair = self.pairs[number]
        turns = []
        for name, value in ((pair.chosen, pair.chosen_value), (pair.rejected, pair.rejected_value)):
            turn = Sample.from_rollout(rollouts[name]).only_turn(pair.turn - rollouts[name].turns_before)
            turn_name = paired_turn_id(number, name, pair.turn)
            turns.append(
                replace(turn, rollout_id=turn_name, episode_id=turn_name, task_id=f"pair {number}", reward=value)
            )
        return turns

    def used(self, samples: Sequence[Sample]) -> list[Rollout]:
        """The rollouts that ``samples``, some of :meth:`samples`, are from."""
        used = {sample.rollout_id for sample in samples}
        for number, pair in enumerate(self.pairs):
            if paired_turn_id(number, pair.chosen, pair.turn) in used:
                used |= {pair.chosen, pair.rejected}
        return [rollout for rollout in self.rollouts if rollout.rollout_id in used]


def read_fixed_set(config: FixedSetConfig) -> FixedSet:
    """Read the logs, and the pairs.

    Of a folder's logs, those that score a policy (on dev or in an evaluation) are left out, since a run's folder holds
    its own evaluation; so are branches, which begin in the middle, unless it is pairs of their turns that are trained
    on. A log that is named by itself is read, whatever it is.

    Raises:
        ConfigError: a log or folder that holds no rollouts, a damaged line, a rollout twice or without token ids, none
            left, or a pair whose rollouts are not there.
    """
    rollouts: list[Rollout] = []
    for name in config.logs:
        given = Path(name)
        logs = find_logs(given) if given.exists() else []
        require(logs, f"rollouts.logs: {name} is no log of rollouts, and no folder with collections/*.jsonl below it")
        for log in logs:
            if given.is_file() or _to_learn_from(log, config.turn_pairs is not None):
                rollouts += _read(log)
    if config.most_per_task is not None:
        rollouts = _at_most(rollouts, config.most_per_task)
    require(
        rollouts,
        "rollouts.logs: no rollouts, or only scores and branches, are there; to train on one, name its log",
    )
    twice = [name for name, count in Counter(rollout.rollout_id for rollout in rollouts).items() if count > 1]
    require(not twice, f"rollouts.logs: rollout {twice[:1]} is there twice; name each log once")
    datasets = sorted({rollout.dataset for rollout in rollouts})
    require(len(datasets) == 1, f"rollouts.logs: rollouts of several datasets: {', '.join(datasets)}")
    return FixedSet(rollouts, [] if config.turn_pairs is None else _read_turn_pairs(Path(config.turn_pairs), rollouts))


def _to_learn_from(log: Path, of_pairs: bool) -> bool:
    name = parse_collection_id(log.stem)
    return not name.is_score and (of_pairs or not name.branch)


def _read_turn_pairs(file: Path, rollouts: Sequence[Rollout]) -> list[TurnPair]:
    require(file.is_file(), f"rollouts.turn_pairs: {file} does not exist; loop method trees writes such a file")
    try:
        pairs = read_pairs(file)
    except ValueError as error:
        raise ConfigError(f"rollouts.turn_pairs: {error}") from error
    require(pairs, f"rollouts.turn_pairs: {file} holds no pair; search more iterations, or with a lower threshold")
    known = {rollout.rollout_id: rollout for rollout in rollouts}
    for pair in pairs:
        for name in (pair.chosen, pair.rejected):
            require(name in known, f"rollouts.turn_pairs: {file} names rollout {name}, which is not in rollouts.logs")
            own = pair.turn - known[name].turns_before
            sampled = 0 <= own < len(known[name].turns)
            require(sampled, f"rollouts.turn_pairs: {file}: rollout {name} did not sample turn {pair.turn}")
    return pairs


def _read(log: Path) -> list[Rollout]:
    try:
        rollouts = read_rollouts(log)
    except ValueError as error:
        raise ConfigError(f"rollouts.logs: {error}") from error
    texts = next((rollout.rollout_id for rollout in rollouts if rollout.text_only), None)
    require(texts is None, f"rollouts.logs: {log}: rollout {texts} has no token ids (it is an endpoint's)")
    return rollouts


def _at_most(rollouts: Sequence[Rollout], most: int) -> list[Rollout]:
    """The first ``most`` solved episodes of each task, and all that are not solved."""
    solved: dict[str, list[str]] = {}
    for rollout in rollouts:
        if rollout.reward >= 1.0 and rollout.segment == 0:
            solved.setdefault(rollout.task_id, []).append(rollout.episode_id)
    kept = {episode for episodes in solved.values() for episode in episodes[:most]}
    return [rollout for rollout in rollouts if rollout.reward < 1.0 or rollout.episode_id in kept]
