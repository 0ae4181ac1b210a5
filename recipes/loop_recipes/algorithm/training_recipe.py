"""The base of the recipes with a learner: how a run begins, logs, ends, and reports why."""

from __future__ import annotations

import shlex
import sys
import traceback
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import torch
from omegaconf import DictConfig
from torch import Tensor
from torchtune import utils

from agent_environments.description import BehaviorFigure
from loop_formats.folder_lock import lock_run
from loop_formats.run_files import WriteFailed
from loop_formats.schema import ConfigError, made_folder
from loop_recipes.algorithm.credit import CreditFailed
from loop_recipes.algorithm.learner import Learner
from loop_recipes.algorithm.policy_update import NonFiniteLoss
from loop_recipes.config.loop_config import LearnerConfig
from loop_recipes.engine.checkpoint import TrainingState, load_latest
from loop_recipes.engine.device_check import training_device
from loop_recipes.engine.diagnostics import out_of_memory, peak_memory_gib
from loop_recipes.engine.model import DTYPES, AnyDecoder, load_base
from loop_recipes.engine.process_group import (
    RemoteError,
    any_rank,
    destroy_process_group,
    init_process_group,
    launched_rank,
    on_main_rank,
    single_process,
)
from loop_recipes.paths import typed
from loop_recipes.run.fingerprint import compare, model_identity
from loop_recipes.run.stop_request import StopRequest, StopRequested
from loop_recipes.terminal import folded
from model_families.own_tokenizer import differing_ids

log = utils.get_logger("INFO")


class TrainingRecipe:
    """The base of a recipe with a learner; each recipe has its own ``setup`` and ``train``.

    Args:
        config: the recipe's config, already checked against this machine.

    Raises:
        ConfigError: the device cannot be used, or the output folder cannot be made.
    """

    name: ClassVar[str]
    """The recipe's name in `tune run`."""
    errors: ClassVar[tuple[type[Exception], ...]] = (ConfigError, CreditFailed, NonFiniteLoss, WriteFailed)
    """Exceptions that end a run with one line and no traceback."""
    length_key: ClassVar[str]
    """The key that limits a rollout's tokens, to be lowered where memory runs out."""
    _learner: Learner

    def __init__(self, config: LearnerConfig) -> None:
        if launched_rank() == 0 and config.tracker:
            from loop_recipes.run.tracker import named_tracker  # most runs have none

            for name in config.tracker:
                named_tracker(name).check()
        self._config = config
        self._dtype = DTYPES[config.dtype]
        self._device = training_device(config.device, self._dtype)
        self._output_dir = Path(config.output_dir).resolve()
        made_folder("output_dir", self._output_dir)
        self._stop = StopRequest(self._output_dir / "stop", says=launched_rank() == 0)
        self._cleanup = ExitStack()
        self._together = False
        self._iterations_done = 0
        # Digests of the base model and the initial adapter now.
        self._model_identity: dict[str, str] = {}

    def setup(self) -> None:
        """Load everything that training needs.

        Raises:
            ConfigError: something that the config names cannot be used.
        """
        raise NotImplementedError

    def train(self) -> None:
        """Train until ``max_iterations`` or a reason to stop."""
        raise NotImplementedError

    def _begin(self, longest_wait_s: float, further: Collection[str] = ()) -> TrainingState | None:
        """Lock the folder, wait for the other ranks, seed, and read the checkpoint to go on from, if there is one.

        Args:
            longest_wait_s: seconds that one rank may wait for another.
            further: names of the credits trained beside the policy.
        """
        conf = self._config
        if launched_rank() == 0:
            self._lock = self._cleanup.enter_context(lock_run(self._output_dir))
        init_process_group(self._device, longest_wait_s)
        self._rank = utils.get_world_size_and_rank()[1]
        torch.manual_seed(conf.seed)
        self._stop.listen()
        checkpoint = None
        if conf.resume_from_checkpoint:
            checkpoint = load_latest(self._output_dir / "checkpoints", further)
            if checkpoint is None:
                utils.log_rank_zero(log, f"no checkpoint in {self._output_dir}: starting from the beginning")
        self._model_identity = on_main_rank(lambda: model_identity(conf.base_model, conf.initial_adapter))
        if checkpoint is not None:
            compare(checkpoint.state, "model", self._model_identity, conf.accept_changes)
        if self._rank == 0 and (other := differing_ids(conf.base_model)) is not None:
            log.warning(f"{other}; training and its servers go by tokenizer.json, and so does what loop export writes")
        return checkpoint

    def _load_base(self) -> tuple[AnyDecoder, Mapping[str, Tensor]]:
        return load_base(self._config, self._dtype)

    def _open_metrics(self, figures: Sequence[BehaviorFigure] = ()) -> None:
        """Open the run's metrics. For rank 0."""
        self._metrics = self._learner.open_metrics(self._iterations_done, figures)
        self._cleanup.callback(self._metrics.close)
        self._metrics.tell()  # lines that a killed run had saved and not sent

    def _iterations_left(self) -> range:
        """Return the iterations to come; log that there are none."""
        done, last = self._iterations_done, self._config.max_iterations
        if done >= last:
            utils.log_rank_zero(log, f"{done} iterations are done, and max_iterations is {last}: give more to go on")
        return range(done + 1, last + 1)

    def _write(self, line: dict[str, Any], summary: str) -> None:
        """Log an iteration's line, and its summary to the terminal."""
        on_main_rank(lambda: self._metrics.log({**line, "peak_memory_gib": peak_memory_gib(self._device)}))
        utils.log_rank_zero(log, folded(summary, sys.stderr, "  "))

    def _tell_trackers(self) -> None:
        """Send the trackers new metrics, which must be saved before."""
        on_main_rank(lambda: self._metrics.tell())

    def longest(self) -> int:
        """Return the number of tokens of the longest rollout that the run trains on."""
        raise NotImplementedError

    def out_of_memory(self, error: torch.OutOfMemoryError) -> str:
        """Return the error line with which a run without memory ends; it names the keys to lower."""
        tokens = max(self._config.update.micro_batch_tokens, self.longest())
        return out_of_memory(error, tokens, self._device, self.length_key)

    def stopped(self, where: str) -> None:
        """Print where a requested stop took effect. All ranks end after it."""
        if self._rank == 0:
            line = f"{typed(self.name)}: stopped {where}; {self._way_to_resume()} goes on"
            print(folded(line, sys.stderr), file=sys.stderr)
            self._stop.done()
        self._together = True

    def _way_to_resume(self) -> str:
        """Return the words for the command that resumes a stopped run."""
        return "the same command" if self._config.resume_from_checkpoint else "resume_from_checkpoint=True"

    def _end(self, line: str | None) -> None:
        """Log the reason if the run ends early, and the next command: to resume a run that was asked to stop, else to
        serve the policy. Remove the stop file."""
        if line is not None and any_rank(bool(self._stop)):
            utils.log_rank_zero(log, f"{line}; {self._way_to_resume()} goes on")
        else:
            serving = f"to serve, merge or share the policy: loop export {shlex.quote(str(self._output_dir))}"
            utils.log_rank_zero(log, "\n".join(filter(None, (line, serving))))
        on_main_rank(self._stop.done)
        self._together = True

    def cleanup(self) -> None:
        """Stop child processes and close files. Safe to call at any time and twice; waits for no other rank."""
        self._cleanup.close()
        if self._together or single_process():
            destroy_process_group()


def run_recipe(recipe_class: type[TrainingRecipe], cfg: DictConfig) -> int | str:
    """Set a recipe up, train and clean up; returns the exit status: 0, 1 or a line that says why."""
    recipe: TrainingRecipe | None = None
    try:
        recipe = recipe_class(cfg)  # type: ignore[arg-type]  # a recipe takes the YAML, and hands on its own config
        recipe.setup()
        recipe.train()
    except recipe_class.errors as error:
        return f"{typed(recipe_class.name)}: {error}"
    except StopRequested as error:
        assert recipe is not None, "nothing is waited for before it is there"
        recipe.stopped(str(error))
    except RemoteError:
        return 1
    except torch.OutOfMemoryError as error:
        assert recipe is not None, "nothing is allocated before it is there"
        return f"{typed(recipe_class.name)}: {recipe.out_of_memory(error)}"
    except Exception:  # perhaps on this rank alone, so print before any wait
        traceback.print_exc()
        return 1
    finally:
        if recipe is not None:
            recipe.cleanup()
    return 0
