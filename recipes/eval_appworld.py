"""Evaluates policies on the tasks of any environment: scores over several runs, with their spread and protocol.

tune run eval_appworld --config eval_appworld/tiny_cpu
tune run eval_appworld --config eval_appworld/qwen2_5_32b rollout_node.launch=False rollout_node.url=http://node:8700
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from agent_environments.description import description_of
from agent_environments.protocol import (
    EnvironmentFault,
    FinishedRuns,
    PoolWithDifficulties,
    PoolWithFinalStates,
    create_pool,
    pool_class,
)
from loop_formats.folder_lock import lock_run
from loop_formats.run_files import WriteFailed, writing
from loop_formats.run_folder import write_description
from loop_formats.schema import ConfigError, made_folder
from loop_plumbing.breakage import raised_as
from loop_plumbing.plug_ins import load_part
from loop_plumbing.start import launched
from loop_recipes.config.command_line import parse
from loop_recipes.engine.peft_export import write_empty_adapter
from loop_recipes.evaluation.collect import Cell, EvaluationTimeout, NoScore, ResultStore, evaluation_cell, run_cells
from loop_recipes.evaluation.config import (
    EvalConfig,
    PolicyUnderTest,
    child_node_config,
    find_policies,
    read_eval_config,
)
from loop_recipes.evaluation.groups import task_groups
from loop_recipes.evaluation.report import (
    Protocol,
    compare_cells,
    read_report,
    score_cells,
    terminal_table,
    write_report,
)
from loop_recipes.evaluation.scores import TaskResult
from loop_recipes.exit_status import GOES_ON, interrupted
from loop_recipes.paths import typed
from loop_recipes.rollouts.broken import break_line
from loop_recipes.rollouts.open import open_nodes
from loop_recipes.rollouts.source import NoRollouts
from loop_recipes.rollouts.waiting import Waiting
from loop_recipes.run.starts import environment_packages, package_versions
from loop_recipes.terminal import console
from model_families.base_model import model_digest
from rollout_server.client import CollectionFailed, NodeUnreachable, RolloutNodeError
from rollout_server.node_process import NodeDied
from rollout_server.policies.adapter_check import other_base

_NODE_ERRORS = (NodeUnreachable, RolloutNodeError, CollectionFailed, NodeDied, NoRollouts, EnvironmentFault)
_ERRORS = (*_NODE_ERRORS, EvaluationTimeout, NoScore, WriteFailed)


class EvalAppWorldRecipe:
    """Scores policies on a split or a list of tasks through a rollout node, or several that share the tasks.

    A policy is the node's base model, alone or with a PEFT adapter, or any model behind an OpenAI-compatible endpoint.
    Every way of sampling has R runs, each with its own seeds; an episode that runs over budget is a failure. The report
    has the protocol, mean and standard deviation over runs, bootstrap intervals over groups of tasks, and paired
    differences between policies with a permutation test.

    The same command goes on where it was stopped, and repeats no finished rollout. A lost rollout is played again at
    the end. If it is lost again, it does not count as a failure; the report names it and its possible effect.

    Args:
        cfg (DictConfig): the recipe's YAML merged with the command line; the keys are those of
            :class:`~loop_recipes.evaluation.config.EvalConfig`.

    Raises:
        ConfigError: anything wrong with the config or what it names, before any work begins.
    """

    def __init__(self, cfg: DictConfig) -> None:
        if launched("WORLD_SIZE", 1) > 1:
            raise ConfigError("eval_appworld is one process: run it without --nproc_per_node")
        self._config: EvalConfig = read_eval_config(cfg)
        self._policies = find_policies(self._config)
        self._output_dir = Path(self._config.output_dir).resolve()
        made_folder("output_dir", self._output_dir)
        self._worlds = self._output_dir / "worlds"
        self._console = console(sys.stdout)
        self._cleanup = ExitStack()
        self._break_reported = False

    def setup(self) -> None:
        """Start or find the node, set up the endpoints, and read the tasks and the node's description."""
        self._cleanup.enter_context(lock_run(self._output_dir))
        self._store = ResultStore(self._output_dir / "journal.jsonl")
        if not self._is_finished():
            for policy in self._policies:
                if policy.endpoint is not None:
                    self._endpoint_part().check_reached(policy.endpoint)
            if any(policy.endpoint is None for policy in self._policies):
                self._setup_node()
            if any(policy.endpoint is not None for policy in self._policies):
                self._setup_endpoints()
        with raised_as(ConfigError, "environment_turns."):
            self._environment.check_environments(self._config.environment_turns, self._tasks)
        with writing(self._output_dir):
            write_description(self._output_dir, self._environment)
        self._groups = task_groups(self._tasks, self._config.groups, self._environment)

    def _is_finished(self) -> bool:
        """Return whether an earlier start has stored a result of every attempt; False if only a node or a world could
        tell. If True, this method has read the facts that results depend on, as the node would."""
        conf = self._config
        if not conf.rollout_node.launch or any(policy.endpoint is not None for policy in self._policies):
            return False
        environment = conf.child.environment
        try:
            self._model = read_report(self._output_dir)[0]["model"]
            self._model_digest = model_digest(conf.child.model.path)
            pool = create_pool(environment.name, environment.options, lambda text: [])
            self._environment, self._dataset = description_of(environment.name, pool), pool.dataset
            self._tasks = list(conf.tasks or pool.tasks(str(conf.split)))
            policies = [self._remarked(policy) for policy in self._policies]
            if any(self._store.missing(cell) for policy in policies for cell in self._cells(policy)):
                return False
        except Exception:  # the node reports what is wrong
            return False
        self._policies = policies
        self._console.print("every rollout is there from an earlier start: no node is needed")
        return True

    def _setup_node(self) -> None:
        conf, child = self._config, None
        if conf.rollout_node.launch:
            self._console.print("starting the rollout node (vLLM servers and environment)")
            child = child_node_config(conf, self._worlds)
        self._nodes = open_nodes(conf.rollout_node, child, self._output_dir, conf.deadline_s)
        self._cleanup.callback(self._nodes.close)
        self._nodes.health()  # fails at once where nothing listens
        self._nodes.wait_ready()
        health = self._nodes.health()
        self._dataset, self._model, self._model_digest = health["dataset"], health["model"], health["model_digest"]
        self._environment = self._nodes.description()
        self._tasks = list(self._config.tasks or self._nodes.tasks(str(self._config.split))[1])
        self._policies = [self._remarked(policy) for policy in self._policies]

    def _remarked(self, policy: PolicyUnderTest) -> PolicyUnderTest:
        """Remark, in terminal and report, that an adapter was trained on another base model than the served one."""
        with raised_as(ConfigError, f"policy {policy.name}: "):
            other = None if policy.adapter is None else other_base(policy.adapter, self._model)
        if other is None:
            return policy
        self._console.print(f"policy {policy.name} {other}", markup=False)
        return replace(policy, remark=other)

    @staticmethod
    def _endpoint_part() -> Any:
        with raised_as(ConfigError):
            return load_part("endpoint")

    def _setup_endpoints(self) -> None:
        """Make an environment pool in this process for the endpoints; a node has a pool of its own."""
        node = child_node_config(self._config, self._worlds)
        model = node.model.path
        self._endpoints = self._endpoint_part()(node.environment, model, self._output_dir / "endpoints")
        self._cleanup.callback(self._endpoints.close)
        self._dataset = self._endpoints.dataset
        if all(policy.endpoint is not None for policy in self._policies):
            self._model = f"none served here; observations cut by the tokenizer of {model}"
            self._model_digest = model_digest(model)
            self._environment = self._endpoints.description
            self._tasks = self._config.tasks or self._endpoints.tasks(str(self._config.split))

    def evaluate(self) -> list[Path]:
        """Run missing rollouts, score all, print and write the report; returns the written files."""
        cells = {policy: self._cells(policy) for policy in self._policies}
        self._set_aside = self._store.set_aside([cell for group in cells.values() for cell in group])
        for line in self._set_aside:
            self._console.print(f"in no figure: {line}", markup=False)
        total = sum(len(cell.expected) for group in cells.values() for cell in group)
        missing = sum(len(self._store.missing(cell)) for group in cells.values() for cell in group)
        if missing < total:
            self._console.print(f"going on with {total - missing} of {total} rollouts from an earlier start")
        with Waiting("evaluating") as waiting:
            done, began = total - missing, time.monotonic()

            def ended(cell: Cell, result: TaskResult) -> None:
                nonlocal done
                done += 1
                left = (time.monotonic() - began) * (total - done) / (done - total + missing) / 60
                to_come = f", left {left:.0f} min" if done < total else ""
                waiting.report(f"{cell.label}: {done} of {total} rollouts{to_come}")
                if result.broke is not None and not self._break_reported:
                    self._break_reported = True
                    text = f"task {result.task_id}: {break_line([result.broke], 1)}; mend it before reading scores"
                    waiting.clear()
                    self._console.print(text, markup=False)

            for policy, group in cells.items():
                if any(self._store.missing(cell) for cell in group):
                    self._run(policy, group, ended)
        return self._report([cell for group in cells.values() for cell in group])

    def cleanup(self) -> None:
        """Stop a launched node and close files; safe to call at any point, and twice."""
        self._cleanup.close()

    def _cells(self, policy: PolicyUnderTest) -> list[Cell]:
        conf = self._config
        identity = {
            "dataset": self._dataset,
            "base model": self._model_digest,
            **environment_packages(conf.environment),
            **conf.node_identity,
            **self._environment.whole_identity,
        }
        return [
            evaluation_cell(policy, self._tasks, sampling, conf.limits, conf.seed, identity, conf.environment_turns)
            for sampling in conf.samplings
        ]

    def _run(self, policy: PolicyUnderTest, cells: list[Cell], on_result: Callable[[Cell, TaskResult], None]) -> None:
        if policy.endpoint is not None:
            self._endpoints.run_cells(
                policy.endpoint,
                cells,
                self._store,
                retries=self._config.retries,
                deadline_s=self._config.deadline_s,
                on_result=on_result,
            )
            return
        with tempfile.TemporaryDirectory() as scratch:
            try:
                folder = policy.adapter or write_empty_adapter(Path(scratch) / "base", self._model)
            except ValueError as error:
                raise ConfigError(
                    f"the base model alone cannot be evaluated: {error}; give an adapter instead"
                ) from error
            self._nodes.publish(policy.served_version, folder)
        run_cells(
            self._nodes,
            cells,
            self._store,
            environment=self._environment,
            retries=self._config.retries,
            deadline_s=self._config.deadline_s,
            on_result=on_result,
        )
        self._nodes.retire(policy.served_version)

    def _report(self, cells: list[Cell]) -> list[Path]:
        conf = self._config
        protocol = Protocol(
            environment=self._environment,
            dataset=self._dataset,
            split=conf.split_name,
            tasks=self._tasks,
            difficulties=self._difficulties(),
            model=self._model,
            limits=conf.limits.non_null(),
            environment_turns=conf.environment_turns,
            seed=conf.seed,
            level=conf.statistics.level,
            resamples=conf.statistics.resamples,
            packages=package_versions(conf.environment),
            groups=self._groups,
            set_aside=self._set_aside,
        )
        scored = score_cells([(cell, self._store.results(cell)) for cell in cells], protocol)
        comparisons = compare_cells(scored, protocol)
        terminal_table(protocol, scored, self._console)
        with writing(self._output_dir):
            files = write_report(self._output_dir, conf, protocol, scored, comparisons)
        made = [result for cell in cells for result in self._store.results(cell) if not result.lost]
        if breaks := [result.broke for result in made if result.broke is not None]:
            self._console.print(f"{break_line(breaks, len(made))}; the figures count them as graded", markup=False)
        if conf.final_states:
            self._write_states(cells)
        return files

    def _write_states(self, cells: list[Cell]) -> None:
        """Have the environment write every run's final states in its own layout, and print its messages about them."""
        environment = self._config.child.environment
        pool = pool_class(environment.name)
        assert isinstance(pool, PoolWithFinalStates), "the config was checked"
        split = str(self._config.split) if self._config.tasks is None else "chosen"
        folder = self._output_dir / "final_states"
        for cell in cells:
            states = {
                (result.task_id, result.run): None if result.over_budget else result.rollout_id
                for result in self._store.results(cell)
            }
            runs = FinishedRuns(cell.policy.name, cell.sampling.label, split, states)
            for line in pool.write_states(environment.options, runs, self._worlds, folder):
                self._console.print(line, markup=False)

    def _difficulties(self) -> dict[str, int]:
        """Read difficulties where the dataset is on this machine; the real test splits may come without them."""
        environment = self._config.environment
        if environment is None:
            return {}
        pool = pool_class(environment.name)
        return pool.difficulties(environment.options, self._tasks) if isinstance(pool, PoolWithDifficulties) else {}


@parse(EvalConfig)
def recipe_main(cfg: DictConfig) -> int | str:
    """Entry point of `tune run eval_appworld`: ``cfg`` is composed from --config and the words after it."""
    recipe: EvalAppWorldRecipe | None = None
    try:
        recipe = EvalAppWorldRecipe(cfg)
        recipe.setup()
        files = recipe.evaluate()
        print("written:", *files, sep="\n  ")
    except (ConfigError, *_ERRORS) as error:
        return f"{typed('eval_appworld')}: {error}"
    except KeyboardInterrupt:
        return interrupted(typed("eval_appworld"), GOES_ON)
    finally:
        if recipe is not None:
            recipe.cleanup()
    return 0


if __name__ == "__main__":
    sys.exit(recipe_main())
