"""Plans a run's collections: tasks, limits and seeds of an iteration, and of an evaluation on the way.

Refill (``collection.refill_budget``): tasks of an iteration whose rollouts carry no signal are replaced by others, in
rounds; each round is a collection. It is exact, because a round depends only on state that a resumed run has too: the
sampler of the checkpoint before the iteration, and the earlier rounds, which are on the node's disk before the next one
is requested. So the same tasks are drawn, and the same id finds the same rollouts, wherever a round's early stop cut it
off. The trainer asks all nodes for a round at once. An iteration that was requested ahead (policy lag 1) is refilled by
the newest policy, after the update that it did not wait for.

Rest (``collection.rest_iterations``) begins once an iteration is collected, before the next one is drawn, and is kept
in the checkpoint with the sampler.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from agent_environments.description import DEFAULT_DESCRIPTION, Description
from loop_formats.collection_request import CollectionRequest, Sampling
from loop_formats.ids import dev_id, group_id, id_part, parse_collection_id, training_id
from loop_formats.run_files import write_whole
from loop_formats.schema import ConfigError
from loop_plumbing.breakage import raised_as
from loop_recipes.config.loop_config import HorizonStage, LoopConfig
from loop_recipes.rollouts.task_sampler import TaskSampler, UniformTaskSampler

if TYPE_CHECKING:
    from loop_recipes.rollouts.mixed_tasks import MixedTaskSampler


def run_name(config: LoopConfig, output_dir: Path) -> str:
    """Return the configured name of the run, or else a unique name, which is made once and kept in ``run.json``."""
    if config.run_name is not None:
        return config.run_name
    file = output_dir / "run.json"
    if not file.exists():
        write_whole(file, json.dumps({"run_name": f"{id_part(output_dir.name)}-{secrets.token_hex(3)}"}))
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["run_name"])
    except (ValueError, KeyError, TypeError) as error:
        cure = "give run_name as the ids of its collections begin, or remove the file for a new name"
        raise ConfigError(f"{file} holds no name of a run, as after a power cut; {cure}") from error


class CollectionPlan:
    """Draws the tasks of each iteration; its state is part of a checkpoint.

    A collection's id ends in a hash of everything that its rollouts depend on: the request, the adapter, and the
    ``fingerprint``. So an interrupted run finds its rollouts again. A run that went back to an earlier checkpoint uses
    version numbers again for other weights; it does not get the rollouts of the old weights.

    Args:
        name: the run's name; the ids of all collections begin with it.
        tasks: the tasks of the training split.
        dev_tasks: the tasks of ``dev_evaluation.split``, if policies are scored during training.
        environment: the tasks' environment.
        fingerprint: name -> digest of the base model, tasks and grader, which rollouts depend on too.

    Raises:
        ConfigError: there are fewer tasks than an iteration takes, or an environment has no task.
    """

    def __init__(
        self,
        config: LoopConfig,
        name: str,
        tasks: Sequence[str],
        dev_tasks: Sequence[str] = (),
        environment: Description = DEFAULT_DESCRIPTION,
        fingerprint: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._environment = environment
        self._fingerprint = dict(fingerprint)
        self._config = config.collection
        self._evaluation = config.dev_evaluation
        self._dev_tasks = list(dev_tasks)
        self._name = name
        self._seed = config.seed
        with raised_as(ConfigError, "collection: "):
            self._sampler = self._new_sampler(self._config.tasks or tasks)
        with raised_as(ConfigError, "dev_evaluation.environment_turns."):
            if dev_tasks:
                environment.check_environments(self._evaluation.environment_turns, dev_tasks)
        self._rests_until: dict[str, int] = {}
        """For each task that rests, the first iteration that may take it again."""
        self._drawn: list[str] = []
        """Tasks of a stream that were drawn together with others, and come next."""

    def _new_sampler(self, tasks: Sequence[str]) -> TaskSampler | MixedTaskSampler:
        conf = self._config
        kind = UniformTaskSampler if conf.task_order == "uniform" else TaskSampler
        if not conf.environments:
            return kind(tasks, conf.tasks_per_iteration, self._seed, self._environment)
        from loop_recipes.rollouts.mixed_tasks import MixedTaskSampler  # most runs have one environment

        shares = {name: own.share for name, own in conf.environments.items()}
        return MixedTaskSampler(tasks, conf.tasks_per_iteration, self._seed, shares, kind, self._environment)

    def horizon(self, iteration: int) -> int:
        """Return the turns that an episode may take: the turns of the last begun stage, else ``limits.max_turns``.

        The interaction-horizon curriculum of ScalingInter-RL (AgentGym-RL, arXiv 2509.08755, section 3).
        """
        return _turns(self._config.horizons, iteration, self._config.limits.max_turns)

    def environment_horizons(self, iteration: int) -> dict[str, int]:
        """Return environment -> turns for the environments of a mixture that have a horizon of their own."""
        return {
            name: _turns(own.horizons, iteration, own.max_turns or self._config.limits.max_turns)
            for name, own in self._config.environments.items()
            if own.horizons or own.max_turns is not None
        }

    def training(self, iteration: int, policy_version: int, adapter: str) -> CollectionRequest:
        """Request the next tasks under ``version``, whose adapter has the digest ``adapter``. Every call draws tasks:
        call it once per iteration, in order."""
        request = self._request(self._sampler.next(self._resting(iteration)), iteration, policy_version)
        request = self.with_loss_limit(request)
        return replace(request, id=training_id(self._name, iteration, self._protocol(request, adapter)))

    def _request(self, tasks: list[str], iteration: int, policy_version: int) -> CollectionRequest:
        conf = self._config
        return CollectionRequest(
            id="unnamed",
            tasks=tasks,
            rollouts_per_task=conf.rollouts_per_task,
            policy_version=policy_version,
            min_rollouts_per_task=conf.min_rollouts_per_task,
            min_rollouts_fraction=conf.min_rollouts_fraction,
            seed=self._seed + iteration,
            policy_mode=conf.mode,
            limits=replace(conf.limits, max_turns=self.horizon(iteration)),
            environment_turns=self.environment_horizons(iteration),
        )

    def group(self, number: int, iteration: int, policy_version: int, adapter: str) -> CollectionRequest:
        """Request the next task of a stream, as group ``number``; like :meth:`training` for one task. The trainer ends
        the collection, and all its rollouts may be lost."""
        task = self.next_task(iteration)
        request = replace(
            self._request([task], iteration, policy_version), seed=self._seed + number, min_rollouts_fraction=1.0
        )
        return replace(request, id=group_id(self._name, iteration, self._protocol(request, adapter), number))

    def next_task(self, iteration: int) -> str:
        """Draw the next task of a stream."""
        self._drawn = self._drawn or self._sampler.next(self._resting(iteration))
        return self._drawn.pop(0)

    def refill(
        self, asked: Sequence[CollectionRequest], with_signal: Collection[str], lost: int, version: int, adapter: str
    ) -> CollectionRequest | None:
        """Request other tasks in place of tasks without signal; None if there are none, or the budget is used up. Every
        call draws tasks, like :meth:`training`.

        Args:
            asked: the iteration's requests so far: the first one and one for each round of refill.
            with_signal: the tasks whose rollouts so far carry signal.
            lost: the number of rollouts that the iteration has lost so far.
            version, adapter: as in :meth:`training`.
        """
        conf, first, iteration = self._config, asked[0], parse_collection_id(asked[0].id).iteration or 0
        taken = [task for request in asked for task in request.tasks]
        left = math.floor(conf.refill_budget * len(first.tasks) + 1e-9) - len(taken)
        without = [task for task in asked[-1].tasks if task not in with_signal][: max(0, left)]
        tasks = self._sampler.replacements(without, taken, self._resting(iteration)) if without else []
        if not tasks:
            return None
        request = replace(first, tasks=tasks, policy_version=version)
        of_iteration = math.floor(conf.max_lost_share * sum(each.episodes for each in [*asked, request]))
        protocol = self._protocol(request, adapter)
        return replace(
            request, id=training_id(self._name, iteration, protocol, len(asked)), max_lost=max(0, of_iteration - lost)
        )

    def rest(self, iteration: int, tasks: Collection[str]) -> int:
        """Let ``tasks``, which carried no signal in ``iteration``, rest; returns how many tasks now do."""
        if self._config.rest_iterations:
            self._rests_until |= dict.fromkeys(sorted(tasks), iteration + 1 + self._config.rest_iterations)
        self._rests_until = self._resting(iteration + 1)
        return len(self._rests_until)

    def _resting(self, iteration: int) -> dict[str, int]:
        return {task: until for task, until in self._rests_until.items() if until > iteration}

    def with_loss_limit(self, request: CollectionRequest) -> CollectionRequest:
        """Return the request with ``max_lost_share`` of this config, even if it was made under another config."""
        return replace(request, max_lost=math.floor(self._config.max_lost_share * request.episodes))

    def evaluation(self, iteration: int, policy_version: int, adapter: str) -> CollectionRequest | None:
        """Request rollouts of every dev task by the policy after ``iteration`` (0: before the first); ``adapter`` is
        the digest of the policy's adapter. None if the policy is not to be scored."""
        every = self._evaluation.every
        if not every or iteration % every:
            return None
        request = CollectionRequest(
            id="unnamed",
            tasks=self._dev_tasks,
            rollouts_per_task=self._evaluation.runs,
            policy_version=policy_version,
            seed=self._seed,
            sampling=Sampling(temperature=self._evaluation.temperature, top_p=self._evaluation.top_p),
            limits=replace(self._config.limits, max_turns=self._evaluation.max_turns),
            environment_turns=self._evaluation.environment_turns,
        )
        return replace(request, id=dev_id(self._name, iteration, self._protocol(request, adapter)))

    def anew(self, request: CollectionRequest) -> CollectionRequest:
        """Return the request under a new id, for a run whose fingerprint has changed since the request."""
        name, protocol = parse_collection_id(request.id), self._protocol(request, "")
        new_id = dev_id if name.dev else training_id
        return replace(request, id=new_id(self._name, name.iteration or 0, protocol))

    def _protocol(self, request: CollectionRequest, adapter: str) -> str:
        return json.dumps([request.protocol(), adapter, self._fingerprint], sort_keys=True)

    def state_dict(self) -> dict[str, Any]:
        return self._sampler.state_dict() | {"rests_until": self._rests_until, "drawn": list(self._drawn)}

    def load_state_dict(self, state: dict[str, Any], accept_changes: bool = False) -> None:
        """Go on drawing from a saved state; with ``accept_changes``, begin anew if the state has other tasks or another
        seed.

        Raises:
            ConfigError: the state is of other tasks or of another seed.
        """
        try:
            self._sampler.load_state_dict(state)
            self._rests_until = dict(state["rests_until"])
            self._drawn = list(state.get("drawn", ()))
        except ValueError as error:
            if not accept_changes:
                cure = "give the config the run was started with, or go on knowingly with accept_changes=True"
                raise ConfigError(f"resume_from_checkpoint: {error}; {cure}") from error


def _turns(stages: Sequence[HorizonStage], iteration: int, before: int) -> int:
    """Return the turns of the last stage that has begun at ``iteration``; ``before`` if no stage has."""
    begun = [stage for stage in stages if stage.from_iteration <= iteration]
    return max(begun, key=lambda stage: stage.from_iteration).max_turns if begun else before
