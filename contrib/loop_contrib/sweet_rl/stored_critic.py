"""A critic of turns as a run of `sft_appworld` has left it, with the model that it stands on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from loop_contrib.sweet_rl.turn_critic import TurnAdvantage, TurnCritic, prefix_of
from loop_formats.run_files import newest_adapter
from loop_formats.schema import ConfigError, require
from loop_plumbing.breakage import raised_as
from loop_recipes.algorithm.learner import Learner
from loop_recipes.algorithm.method import build_method
from loop_recipes.algorithm.scoring import Scorer
from loop_recipes.config.components import build, check_component
from loop_recipes.config.loop_config import LearnerConfig
from loop_recipes.config.preflight import check_trained_on
from loop_recipes.config.sft_config import SftConfig
from loop_recipes.config.stored import read_stored
from loop_recipes.engine.device_check import training_device
from loop_recipes.engine.model import DTYPES, load_base
from loop_recipes.engine.peft_export import load_adapter
from loop_recipes.engine.process_group import init_process_group

LONGEST_WAIT_S = 1800.0
"""Seconds to wait for another rank."""
TRAINS_ONE = "`loop sft ... algorithm=turn_critic` trains one"


def critic_adapter(run: Path) -> Path:
    """Return the newest adapter of a run.

    Raises:
        ConfigError: the run has no adapter.
    """
    adapter = newest_adapter(run)
    if adapter is None:
        raise ConfigError(f"{run / 'policies'} holds no adapter yet")
    return adapter


def adapter_from_the_start(run: Path, before: str | None) -> Path:
    """Return the adapter ``before``, which a resumed run used, if it is from ``run``, else the newest of ``run``. So
    further training of the critic does not change the credits of a resumed run.

    Raises:
        ConfigError: the run has no adapter.
    """
    run = run.resolve()
    return Path(before) if before is not None and Path(before).parents[1] == run else critic_adapter(run)


def stored_config(run: Path) -> SftConfig:
    """Read the config of a run of `sft_appworld`.

    Raises:
        ConfigError: the folder is not a run of `sft_appworld`.
    """
    file = run / "config.yaml"
    require(file.is_file(), f"{run} is not a folder of a run: it holds no config.yaml; {TRAINS_ONE}")
    with raised_as(ConfigError, f"{file} is not a config of sft_appworld: ", ConfigError):
        return read_stored(file, SftConfig)[1]


def critic_config(run: Path) -> tuple[SftConfig, TurnAdvantage]:
    """Return the config and the loss of a run that trained a critic of turns.

    Raises:
        ConfigError: the folder is not a run that trained such a critic.
    """
    conf = stored_config(run)
    if check_component("loss", conf.loss) is not TurnAdvantage:
        raise ConfigError(f"{run} trained with {conf.loss['_component_']}; a critic of turns comes from TurnAdvantage")
    return conf, build(conf.loss)


def load_learner(run: Path) -> tuple[SftConfig, Learner]:
    """Return the config of a run of `sft_appworld` and its learner before the first step. Every rank must call this.

    Raises:
        ConfigError: the folder is not a run of `sft_appworld`, or its config names a file that is gone.
    """
    conf = replace(stored_config(run), sequence_parallel=1)  # which the ranks here need not be enough for
    dtype = DTYPES[conf.dtype]
    device = training_device(conf.device, dtype)
    init_process_group(device, LONGEST_WAIT_S)
    return conf, Learner(conf, *load_base(conf, dtype), device, None, method=build_method(conf))


def load_turn_critic(run: Path, adapter: Path | None = None, reference_sees_hidden: bool = True) -> TurnCritic:
    """Load the critic of a run, with the device and precision of that run. Every rank must call this function.

    Args:
        run: folder of a run with the loss :class:`~loop_contrib.sweet_rl.turn_critic.TurnAdvantage`.
        adapter: one of the adapters in the run's ``policies``; None is the newest.
        reference_sees_hidden: see :class:`~loop_contrib.sweet_rl.turn_critic.TurnCritic`.

    Raises:
        ConfigError: the folder is not such a run, holds no adapter yet, or its config names a file that is gone.
    """
    conf, learner = load_learner(run)
    return critic_over(conf, learner.update.scorer, run, adapter, reference_sees_hidden)


def critic_over(
    config: LearnerConfig, scorer: Scorer, run: Path, adapter: Path | None = None, reference_sees_hidden: bool = True
) -> TurnCritic:
    """Load a run's critic like :func:`load_turn_critic`, but on the model of ``scorer``, which ``config`` names."""
    conf, loss = critic_config(run)
    theirs, ours = (Path(each.base_model).resolve() for each in (conf, config))
    require(theirs == ours, f"the critic in {run} stands on {theirs}, and this run's base model is {ours}")
    adapter = adapter or critic_adapter(run)
    check_trained_on(f"the critic in {run}: adapter", adapter, config)
    tensors = load_adapter(adapter, scorer.model)
    reference = None if conf.initial_adapter is None else load_adapter(Path(conf.initial_adapter), scorer.model)
    prefix = prefix_of(conf)
    return TurnCritic(scorer, tensors, reference, prefix, loss.per_turn, reference_sees_hidden)
