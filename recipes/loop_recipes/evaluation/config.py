"""The keys of ``eval_appworld``'s YAML, and every check that runs before any work begins."""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any

from omegaconf import DictConfig
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from agent_environments.protocol import PoolWithFinalStates, pool_class
from loop_formats.collection_request import Limits, Sampling
from loop_formats.places import run_meant
from loop_formats.run_files import ADAPTER_FILES, adapter_digest, in_order, is_adapter, newest_adapter
from loop_formats.run_folder import read_description
from loop_formats.schema import STRICT, ConfigError, Seed, Some, require
from loop_recipes.config.loop_config import EndpointConfig, read_config
from loop_recipes.config.rollout_node import WithNode, check_token
from rollout_server.config import EnvironmentConfig, NodeConfig

_WHERE = ("python", "root", "module", "max_worlds", "experiments_root", "keep_experiments", "sandbox_minimum")
"""Options of environments that say where episodes run and how many, on which no result depends: a dataset is identified
by its name, a module by the digest of its code."""


@dataclass(frozen=True, config=STRICT)
class PolicyConfig:
    """A policy to evaluate: an adapter, the node's base model as it is (``adapter: null``), or an endpoint's model."""

    name: Annotated[str, Field(pattern=r"^[\w.+-]{1,40}$")]
    """The policy's name in the report: 1 to 40 letters, digits or ``_.+-``."""
    adapter: str | None = None
    """A folder in PEFT's format. The folder of a training run stands for the newest version in its ``policies``, that
    of an evaluation for the best adapter it found. A pattern with ``*`` stands for every adapter folder it matches, for
    choosing among checkpoints; each is called ``name`` and its folder's name."""
    endpoint: EndpointConfig | None = None
    """A model that others serve."""


@dataclass(frozen=True, config=STRICT)
class SamplingConfig(Sampling):
    """A way of sampling."""

    temperature: float = 0.0
    """0 is greedy; at most 2."""
    runs: PositiveInt = 5
    """Number of runs over all tasks."""

    @property
    def label(self) -> str:
        """Return ``T=0``, with top_p and top_k if they are set."""
        parts = [f"T={self.temperature:g}"]
        parts += [f"top_p={self.top_p:g}"] if self.top_p != 1.0 else []
        parts += [f"top_k={self.top_k}"] if self.top_k != -1 else []
        return " ".join(parts)


@dataclass(frozen=True, config=STRICT)
class StatisticsConfig:
    """The bootstrap intervals."""

    level: Annotated[float, Field(ge=0.5, lt=1)] = 0.95
    """Confidence of an interval."""
    resamples: Annotated[int, Field(ge=100)] = 10_000
    """Number of bootstrap samples of the groups of tasks."""


@dataclass(frozen=True, config=STRICT, kw_only=True)
class EvalConfig(WithNode):
    """All keys of the recipe `eval_appworld`. Other keys, such as ``policies``, refer to ``run``, ``adapter`` and
    ``endpoint``, because the command line cannot set an item of a list."""

    output_dir: str
    """Folder of the report and of the journal that an interrupted evaluation goes on from."""
    policies: Some[PolicyConfig]
    limits: Limits
    environment_turns: dict[str, PositiveInt] = field(default_factory=dict)
    """Turns that the episodes of a mixture's environments may take, by name, in place of ``limits.max_turns``."""
    run: str | None = None
    """A training run, to refer to."""
    adapter: str | None = None
    """An adapter, to refer to."""
    endpoint: EndpointConfig | None = None
    split: str | None = None
    """The tasks: a split of the dataset, with difficulties as in ``train:1,2``."""
    tasks: Some[str] | None = None
    """Task ids, which take the place of the split, as in ``collection``."""
    groups: dict[str, str] = field(default_factory=dict)
    """Groups of tasks whose success and reward the report also gives by themselves: name and pattern of task ids, such
    as ``deep: craft/depth4-*``. The environments of a mixture need no pattern."""
    samplings: Some[SamplingConfig] = field(default_factory=lambda: [SamplingConfig()])
    seed: Seed = 0
    """Each run over the tasks has seeds of its own, made from this one."""
    retries: NonNegativeInt = 1
    """Number of times that lost rollouts are played again at the end, all at once, with one attempt each."""
    deadline_s: PositiveFloat = 14_400.0
    """Seconds until the runs of one policy must be done."""
    final_states: bool = False
    """Also writes every run in the environment's own layout (which `appworld evaluate` reads, say), from the final
    states that a launched node then keeps."""
    statistics: StatisticsConfig = field(default_factory=StatisticsConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.split is not None or self.tasks is not None, "give a split, or tasks")
        distinct = self.tasks is None or len(set(self.tasks)) == len(self.tasks)
        require(distinct, "tasks must be distinct; ask for more runs instead")
        labels = [sampling.label for sampling in self.samplings]
        require(len(set(labels)) == len(labels), "samplings must differ; ask for more runs instead")
        self._check_node()

    def _check_node(self) -> None:
        self.check_compaction("limits", self.limits)
        if self.rollout_node.launch:
            served, environment = self.child.model, self.child.environment.name
            require(
                self.limits.max_context <= served.max_context,
                f"limits.max_context is {self.limits.max_context}, more than the node's "
                f"node.model.max_context, {served.max_context}",
            )
            if self.final_states:
                keeps = isinstance(pool_class(environment), PoolWithFinalStates)
                require(keeps, f"final_states: environment {environment!r} keeps no final states")
        else:
            require(
                not any(policy.endpoint for policy in self.policies),
                "policies[].endpoint needs rollout_node.launch: true, and node.environment, which the episodes run in",
            )
            require(
                not self.final_states,
                "final_states needs rollout_node.launch: true, a node whose states are on this machine",
            )

    @property
    def split_name(self) -> str:
        """Return the name of the tasks for a report."""
        return str(self.split) if self.tasks is None else f"{len(self.tasks)} chosen tasks"

    @property
    def environment(self) -> EnvironmentConfig | None:
        """Return the environment of the config's node; None without a node."""
        return None if self.node is None else self.node.environment

    @property
    def node_identity(self) -> dict[str, Any]:
        """The settings of a node on which results depend, beside its model and dataset, by name; {} if the recipe
        launches no node."""
        if not self.rollout_node.launch:
            return {}
        environment, model = self.child.environment, self.child.model
        return {
            "dtype": model.dtype,
            "chat format": [model.chat_format, model.thinking, model.observation_role],
            "environment": [environment.name, _without_where(environment.options)],
        }


def _without_where(options: Any) -> Any:
    """Drop the options that only say where things run (:data:`_WHERE`), also in nested environments."""
    if not isinstance(options, dict):
        return options
    return {name: _without_where(value) for name, value in options.items() if name not in _WHERE}


def child_node_config(config: EvalConfig, worlds: Path) -> NodeConfig:
    """Return the configuration of a launched node; with ``final_states`` it keeps final states in ``worlds``."""
    node, pool = config.child, pool_class(config.child.environment.name)
    if not (config.final_states and isinstance(pool, PoolWithFinalStates)):
        return node
    options = pool.keeping_states(node.environment.options, worlds)
    return replace(node, environment=replace(node.environment, options=options))


@dataclasses.dataclass(frozen=True)
class PolicyUnderTest:
    """A policy and the path of its weights: ``digest`` is the SHA-256 of the adapter's files, "base" without one.

    ``chosen`` says how an evaluation chose the adapter; ``remark`` is a further remark for the reader.
    """

    name: str
    adapter: Path | None
    digest: str
    chosen: str = ""
    remark: str = dataclasses.field(default="", compare=False)
    endpoint: EndpointConfig | None = dataclasses.field(default=None, compare=False)

    @property
    def served_version(self) -> int:
        """Return the policy's version number on the node, equal for equal content; no training run uses it."""
        number = int(hashlib.sha256(self.digest.encode()).hexdigest()[:7], 16)
        return 100_000_000 + number


def read_eval_config(cfg: DictConfig) -> EvalConfig:
    """Check the whole config and the files that it names on this machine.

    Raises:
        ConfigError: one line that names the key and the cure.
    """
    config = read_config(cfg, EvalConfig)
    if not config.rollout_node.launch:
        check_token(config.rollout_node.token_env)
    return config


def find_policies(config: EvalConfig, digest: Callable[[Path], str] = adapter_digest) -> list[PolicyUnderTest]:
    """Return the policies of the config, patterns expanded, in order.

    Args:
        digest: identifies the files of an adapter. To check only that the folders are there, give a cheaper one.

    Raises:
        ConfigError: a folder that is not an adapter, a pattern without a match, a duplicate name.
    """
    policies: list[PolicyUnderTest] = []
    for number, policy in enumerate(config.policies):
        key = f"policies[{number}]"
        if policy.endpoint is not None:
            require(policy.adapter is None, f"{key}: give adapter or endpoint, not both")
            policy.endpoint.headers()
            policies.append(PolicyUnderTest(policy.name, None, policy.endpoint.digest, endpoint=policy.endpoint))
        elif policy.adapter is None:
            policies.append(PolicyUnderTest(policy.name, None, "base"))
        elif "*" in policy.adapter and not Path(policy.adapter).exists():
            matching = map(Path, glob.glob(policy.adapter.replace("[", "[[]")))
            folders = [path for path in in_order(matching) if is_adapter(path)]
            require(bool(folders), f"{key}.adapter: no adapter folder matches {policy.adapter}")
            policies += [PolicyUnderTest(policy.name + path.name, path, digest(path)) for path in folders]
        else:
            path = Path(policy.adapter)
            hint = run_meant(path) or "; give that of an adapter, of a training run or of an evaluation"
            require(path.is_dir(), f"{key}.adapter: there is no folder {path}{hint}")
            folder, chosen = _best_of_evaluation(path, key)
            folder = newest_adapter(folder) or folder
            require(
                is_adapter(folder),
                f"{key}.adapter: {folder} is neither a PEFT adapter (a folder with {' and '.join(ADAPTER_FILES)}) nor "
                f"a training run with policies/policy-v* nor an evaluation with report.json{run_meant(folder)}",
            )
            policies.append(PolicyUnderTest(policy.name, folder, digest(folder), chosen))
    names = [policy.name for policy in policies]
    for name in names:
        require(names.count(name) == 1, f"policies: the name {name!r} is there twice")
    return policies


def _best_of_evaluation(folder: Path, key: str) -> tuple[Path, str]:
    """Return an evaluation's best adapter and how it won; (the folder itself, "") if it is not one."""
    if not (folder / "report.json").is_file():
        return folder, ""
    try:
        return _best_of_report(folder, json.loads((folder / "report.json").read_text(encoding="utf-8")), key)
    except ConfigError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
        raise ConfigError(f"{key}.adapter: {folder / 'report.json'} is damaged; evaluate again") from error


def _best_of_report(folder: Path, report: Mapping[str, Any], key: str) -> tuple[Path, str]:
    on_test = report["split"].startswith("test")
    require(not on_test, f"{key}.adapter: {folder} scored on {report['split']}; choose among adapters on dev")
    choices = [policy for policy in report["policies"] if policy["name"] == report["best"]]
    require(len(choices) == 1 and choices[0]["adapter"] is not None, f"{key}.adapter: {folder} chose among no adapters")
    written, digest = Path(choices[0]["adapter"]), choices[0]["sha256"]
    ends = [Path(*written.parts[-parts:]) for parts in range(1, 4)]  # below the folder, or beside it: both were moved
    places = [written, *(above / end for above in (folder, *folder.absolute().parents) for end in ends)]
    adapter = next((each for each in places if is_adapter(each) and adapter_digest(each) == digest), None)
    require(
        adapter is not None,
        f"{key}.adapter: {written}, the best of {folder}, is gone or has changed since; evaluate again",
    )
    assert adapter is not None
    score = next(score for score in report["scores"] if score["policy"] == report["best"])
    how = f"best of {len(report['policies'])} on {report['split']} of {report['dataset']}: {report['best']}, "
    return (
        adapter,
        f"{how}{read_description(folder).score} {score['success']['mean']:.1f} at {score['sampling']['label']}",
    )
