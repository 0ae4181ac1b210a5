"""A fixed set of stored rollouts to train on, from the logs of runs, collections and demonstrations, and its
samples."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from agent_environments.shared_grade import refuse_shared_grade
from loop_formats.ids import parse_collection_id
from loop_formats.rollout import MOST_IDS, Rollout
from loop_formats.run_files import read_rollouts
from loop_formats.schema import ConfigError, require
from loop_plumbing.breakage import raised_as
from loop_recipes.algorithm.method_plan import MethodPlan
from loop_recipes.config.components import build_checked
from loop_recipes.config.loop_config import UpdateConfig
from loop_recipes.config.sft_config import FixedSetConfig, SftConfig
from loop_recipes.engine.samples import CreditedSample, Sample, training_samples


class SampleMaker:
    """Makes one sample of each rollout of a fixed set. A config names another maker under ``samples``."""

    reads_branches: ClassVar[bool] = False
    """True if branches, which begin in the middle, are read from folders too."""

    def check(self, config: SftConfig, plan: MethodPlan) -> None:
        """Check that the maker fits ``config`` and the plan of the method.

        Raises:
            ConfigError: the maker does not fit; one line that names the key and the cure.
        """

    def see(self, rollouts: Sequence[Rollout]) -> None:
        """Take note of all rollouts before samples are made of them.

        Raises:
            ConfigError: the rollouts are not the ones that the maker's arguments name.
        """

    def samples(self, rollouts: Sequence[Rollout], update: UpdateConfig, model_dir: str) -> list[Sample]:
        """Return the samples to learn from.

        Args:
            model_dir: folder of the model in training, whose tokens the samples have.

        Raises:
            ConfigError: ``update.max_tokens_per_rollout`` leaves no tokens to learn from.
        """
        return training_samples(rollouts, update)

    def sources(self, samples: Sequence[Sample]) -> set[str]:
        """Return the ids of the rollouts that ``samples`` are from."""
        return {sample.rollout_id for sample in samples}

    def identity(self) -> list[str]:
        """Return texts that differ between makers that make different samples of the same rollouts."""
        return []


@dataclass(frozen=True)
class FixedSet:
    """The rollouts, in the order of logs and lines, and the maker of their samples."""

    rollouts: list[Rollout]
    maker: SampleMaker = field(default_factory=SampleMaker)

    @property
    def digest(self) -> str:
        """Return a digest of the rollouts (ids, rewards, tokens) and of the maker's identity."""
        content = hashlib.sha256()
        for rollout in self.rollouts:
            weights = rollout.extra.get("weights", "")
            content.update(f"{rollout.rollout_id} {rollout.reward} {rollout.token_ids}{weights}\n".encode())
        for text in self.maker.identity():
            content.update(f"{text}\n".encode())
        return content.hexdigest()

    def samples(self, update: UpdateConfig, model_dir: str) -> list[Sample]:
        """Return the samples to learn from: see :meth:`SampleMaker.samples`."""
        return self.maker.samples(self.rollouts, update, model_dir)

    def weighted(self, samples: Sequence[CreditedSample]) -> list[CreditedSample]:
        """Give each token of the samples (one per rollout) its turn's weight. A conversation may set the weights:
        ``weights`` in ``extra`` of its rollout, one a turn; the default is 1."""
        weights = {each.rollout_id: each.extra["weights"] for each in self.rollouts if "weights" in each.extra}
        if not weights:
            return list(samples)
        weighted_samples = []
        for sample in samples:
            turns = sample.turn_ids[sample.mask]
            of_turns = torch.tensor(weights.get(sample.rollout_id) or [1.0] * (int(turns.max()) + 1))
            weighted_samples.append(replace(sample, token_advantages=sample.advantage * of_turns[turns]))
        return weighted_samples

    def used(self, samples: Sequence[Sample]) -> list[Rollout]:
        """Return the rollouts from which ``samples`` were made; ``samples`` is a part of :meth:`samples`."""
        sources = self.maker.sources(samples)
        return [rollout for rollout in self.rollouts if rollout.rollout_id in sources]


def sample_maker(component: Mapping[str, Any] | None) -> SampleMaker:
    """Build the maker that ``samples`` of a config names; None makes samples of whole rollouts.

    Raises:
        ConfigError: the component does not exist, or cannot be built.
    """
    if component is None:
        return SampleMaker()
    made: SampleMaker = build_checked("samples", component, SampleMaker)
    return made


def read_fixed_set(config: FixedSetConfig, maker: SampleMaker | None = None, vocabulary: int = MOST_IDS) -> FixedSet:
    """Read the logs.

    A folder's logs that score a policy (on dev or in an evaluation) are left out, since a run's folder holds its own
    evaluation; so are branches, which begin in the middle, unless ``maker`` reads them. A log that is named by itself
    is always read. Ids must be below ``vocabulary``.

    Raises:
        ConfigError: a log or folder holds no rollouts, a line is damaged, a rollout occurs twice or has no token ids,
            or ``maker`` cannot use the rollouts.
    """
    rollouts: list[Rollout] = []
    maker = maker or SampleMaker()
    for path, logs in config.paths():
        for log in logs:
            if path.is_file() or _to_learn_from(log, maker.reads_branches):
                with raised_as(ConfigError, "rollouts.logs: "):
                    rollouts += read_to_train_on(log, vocabulary)
    require(
        rollouts,
        "rollouts.logs: no rollouts, or only scores and branches, are there; to train on one, name its log",
    )
    twice = [name for name, count in Counter(rollout.rollout_id for rollout in rollouts).items() if count > 1]
    require(not twice, f"rollouts.logs: rollout {twice[:1]} is there twice; name each log once")
    datasets = sorted({rollout.dataset for rollout in rollouts})
    require(len(datasets) == 1, f"rollouts.logs: rollouts of several datasets: {', '.join(datasets)}")
    maker.see(rollouts)
    return FixedSet(rollouts, maker)


def _to_learn_from(log: Path, branches: bool) -> bool:
    name = parse_collection_id(log.stem)
    return not name.is_score and (branches or not name.branch)


def read_to_train_on(log: Path, vocabulary: int) -> list[Rollout]:
    """Return the rollouts of a log as :func:`read_rollouts`.

    Raises:
        ValueError: also for a rollout without token ids, or one whose agent could forge its reward.
    """
    rollouts = read_rollouts(log, vocabulary)
    for rollout in rollouts:
        if rollout.text_only:
            raise ValueError(f"{log}: rollout {rollout.rollout_id} has no token ids (it is an endpoint's)")
        refuse_shared_grade(rollout.dataset)
    return rollouts
