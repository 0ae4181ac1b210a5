"""The keys of ``eval_appworld``'s YAML, and everything that can be refused before any work begins."""

from __future__ import annotations

import copy
import glob
import hashlib
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from loop_recipes.config.loop_config import RolloutNodeConfig
from loop_recipes.config.schema import ConfigError, read_config
from rollout_server.collection_request import Limits
from rollout_server.config import NodeConfig, from_mapping
from rollout_server.run_files import ADAPTER_FILES, is_adapter


@dataclass(frozen=True)
class EndpointConfig:
    """A chat endpoint: ``POST <url>/chat/completions``.

    ``api_key_env`` names the environment variable that holds the key (null: none is sent). ``request`` is merged into
    every request's body, for what one service wants and another refuses; a null there leaves a key out.
    """

    url: str
    model: str
    api_key_env: str | None = "OPENAI_API_KEY"
    max_concurrent: int = 8
    request_timeout_s: float = 600.0
    request: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"endpoint.url {self.url!r} must begin with http:// or https://")
        if self.max_concurrent < 1 or self.request_timeout_s <= 0:
            raise ConfigError("endpoint.max_concurrent must be at least 1 and endpoint.request_timeout_s above 0")

    @property
    def digest(self) -> str:
        """What a result depends on, as far as this side can know it."""
        return f"endpoint {self.url} {self.model} {json.dumps(self.request, sort_keys=True)}"

    def headers(self) -> dict[str, str]:
        """What authorizes a request.

        Raises:
            ConfigError: the environment variable is not set.
        """
        if self.api_key_env is None:
            return {}
        key = os.environ.get(self.api_key_env)
        if not key:
            raise ConfigError(
                f"the environment variable {self.api_key_env} must hold the endpoint's key (api_key_env: null for none)"
            )
        return {"Authorization": f"Bearer {key}"}


@dataclass(frozen=True)
class PolicyConfig:
    """A policy to evaluate: the node's base model with the PEFT adapter in folder ``adapter``, or as it is for null.

    The folder of a training run stands for the newest version in its ``policies``, that of an evaluation for the best
    adapter it found. A pattern with ``*`` stands for every adapter folder it matches, for choosing among checkpoints;
    each is called ``name`` and its folder's name. With ``endpoint`` the policy is a model that others serve.
    """

    name: str
    adapter: str | None = None
    endpoint: EndpointConfig | None = None


@dataclass(frozen=True)
class SamplingConfig:
    """One way of sampling, and how many runs over all tasks are made with it."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    runs: int = 5

    def __post_init__(self) -> None:
        _require(self.runs >= 1, "runs must be at least 1")
        _require(0.0 <= self.temperature <= 10.0, "temperature must be 0 to 10")

    @property
    def label(self) -> str:
        """``T=0``, with top_p and top_k where they are not off."""
        parts = [f"T={self.temperature:g}"]
        parts += [f"top_p={self.top_p:g}"] if self.top_p != 1.0 else []
        parts += [f"top_k={self.top_k}"] if self.top_k != -1 else []
        return " ".join(parts)


@dataclass(frozen=True)
class StatisticsConfig:
    """Of the bootstrap intervals."""

    level: float = 0.95
    resamples: int = 10_000

    def __post_init__(self) -> None:
        _require(0.5 <= self.level < 1.0, "level must be 0.5 to below 1")
        _require(self.resamples >= 100, "resamples must be at least 100")


@dataclass(frozen=True)
class EvalConfig:
    """All keys of the recipe; see docs/evaluation.md. ``tasks`` replaces the tasks of ``split``.

    ``retries`` is how often a task that gave no rollout is asked for again, beyond the attempts that the node makes by
    itself. ``dataset_root`` (the folder that holds ``data/``) is where difficulties are read; null takes the root of a
    launched node. ``appworld_experiments`` also writes every run in AppWorld's own layout, from the final states that a
    launched node then keeps. ``run``, ``adapter`` and ``endpoint`` are for ``policies`` and others to refer to, because
    the command line cannot reach into a list.
    """

    output_dir: str
    policies: list[PolicyConfig]
    rollout_node: RolloutNodeConfig
    limits: Limits
    run: str | None = None
    adapter: str | None = None
    endpoint: EndpointConfig | None = None
    split: str | None = None
    tasks: list[str] | None = None
    samplings: list[SamplingConfig] = field(default_factory=lambda: [SamplingConfig()])
    seed: int = 0
    retries: int = 2
    deadline_s: float = 14_400.0
    dataset_root: str | None = None
    appworld_experiments: bool = False
    statistics: StatisticsConfig = field(default_factory=StatisticsConfig)

    def __post_init__(self) -> None:
        _require((self.split is None) != (self.tasks is None), "give exactly one of split and tasks")
        _require(self.tasks is None or len(self.tasks) > 0, "tasks must not be empty")
        _require(bool(self.policies), "policies must name at least one policy")
        _require(bool(self.samplings), "samplings must hold at least one way of sampling")
        labels = [sampling.label for sampling in self.samplings]
        _require(len(set(labels)) == len(labels), "samplings must differ; ask for more runs instead")
        _require(self.retries >= 0, "retries must be 0 or more")
        _require(self.deadline_s > 0, "deadline_s must be above 0")

    @property
    def split_name(self) -> str:
        """What the tasks are called in a report."""
        return self.split if self.split is not None else f"{len(self.tasks or [])} chosen tasks"

    @property
    def metadata_root(self) -> Path | None:
        """Folder to read difficulties from, if any is known."""
        root = self.dataset_root or self.rollout_node.config.get("environment", {}).get("config", {}).get("root")
        return Path(root) if root else None


def child_node_config(config: EvalConfig, worlds: Path) -> dict[str, Any]:
    """The configuration of a launched node; with ``appworld_experiments`` it keeps final states in ``worlds``."""
    node = copy.deepcopy(config.rollout_node.config)
    if config.appworld_experiments:
        node["environment"]["config"] |= {"keep_experiments": True, "experiments_root": str(worlds)}
    return node


@dataclass(frozen=True)
class PolicyUnderTest:
    """A policy with its weights found: ``digest`` is the SHA-256 of the adapter's files, "base" where there is none.

    ``chosen`` says how the adapter was chosen, where an evaluation chose it.
    """

    name: str
    adapter: Path | None
    digest: str
    chosen: str = ""
    endpoint: EndpointConfig | None = field(default=None, compare=False)

    @property
    def served_version(self) -> int:
        """The number under which it is published: far from a training run's, and the same for the same content."""
        number = int(hashlib.sha256(self.digest.encode()).hexdigest()[:7], 16)
        return 100_000_000 + number


def read_eval_config(cfg: DictConfig) -> EvalConfig:
    """Check the whole config and what it names on this machine.

    Raises:
        ConfigError: one line that names the key and the cure.
    """
    config = read_config(cfg, EvalConfig)
    node = config.rollout_node
    if node.replay is not None:
        raise ConfigError("rollout_node.replay cannot be evaluated; give launch: true or url")
    if not node.launch and any(policy.endpoint for policy in config.policies):
        raise ConfigError(
            "policies[].endpoint needs rollout_node.launch: true, whose config.environment the episodes run in"
        )
    if node.launch:
        child = from_mapping(NodeConfig, node.config, "rollout_node.config")
        if child.model.max_context < config.limits.max_context:
            raise ConfigError(
                f"limits.max_context is {config.limits.max_context}, more than the node's "
                f"rollout_node.config.model.max_context, {child.model.max_context}"
            )
        if config.appworld_experiments and child.environment.name != "appworld":
            raise ConfigError(f"appworld_experiments: the environment is {child.environment.name!r}, not 'appworld'")
    elif config.appworld_experiments:
        raise ConfigError(
            "appworld_experiments needs rollout_node.launch: true, a node whose states are on this machine"
        )
    elif not os.environ.get(node.token_env):
        raise ConfigError(f"the environment variable {node.token_env} must hold the rollout node's bearer token")
    if config.dataset_root is not None and not Path(config.dataset_root, "data").is_dir():
        raise ConfigError(f"dataset_root {config.dataset_root} holds no folder data")
    return config


def find_policies(config: EvalConfig) -> list[PolicyUnderTest]:
    """The policies of the config, patterns expanded, in order.

    Raises:
        ConfigError: a folder that is no adapter, a pattern without a match, a name twice.
    """
    found: list[PolicyUnderTest] = []
    for number, policy in enumerate(config.policies):
        key = f"policies[{number}]"
        _require(
            re.fullmatch(r"[\w.+-]{1,40}", policy.name) is not None, f"{key}.name must be 1 to 40 of A-Za-z0-9_.+-"
        )
        if policy.endpoint is not None:
            _require(policy.adapter is None, f"{key}: give adapter or endpoint, not both")
            policy.endpoint.headers()
            found.append(PolicyUnderTest(policy.name, None, policy.endpoint.digest, endpoint=policy.endpoint))
        elif policy.adapter is None:
            found.append(PolicyUnderTest(policy.name, None, "base"))
        elif "*" in policy.adapter:
            folders = [Path(path) for path in sorted(glob.glob(policy.adapter)) if is_adapter(Path(path))]
            _require(bool(folders), f"{key}.adapter: no adapter folder matches {policy.adapter}")
            found += [PolicyUnderTest(policy.name + folder.name, folder, adapter_digest(folder)) for folder in folders]
        else:
            folder, chosen = _best_of_evaluation(Path(policy.adapter), key)
            folder = _newest_version(folder)
            _require(
                is_adapter(folder),
                f"{key}.adapter: {folder} is neither a PEFT adapter (a folder with {' and '.join(ADAPTER_FILES)}) nor "
                "a training run with policies/policy-v* nor an evaluation with report.json",
            )
            found.append(PolicyUnderTest(policy.name, folder, adapter_digest(folder), chosen))
    names = [policy.name for policy in found]
    for name in names:
        _require(names.count(name) == 1, f"policies: the name {name!r} is there twice")
    return found


def adapter_digest(folder: Path) -> str:
    """SHA-256 over an adapter's two files."""
    digest = hashlib.sha256()
    for name in ADAPTER_FILES:
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()


def _best_of_evaluation(folder: Path, key: str) -> tuple[Path, str]:
    """The adapter that an evaluation found best, and how; the folder itself, and "", if it is no evaluation."""
    if not (folder / "report.json").is_file():
        return folder, ""
    report = json.loads((folder / "report.json").read_text())
    choices = [policy for policy in report["policies"] if policy["name"] == report["best"]]
    _require(
        len(choices) == 1 and choices[0]["adapter"] is not None, f"{key}.adapter: {folder} chose among no adapters"
    )
    adapter = Path(choices[0]["adapter"])
    _require(
        is_adapter(adapter) and adapter_digest(adapter) == choices[0]["sha256"],
        f"{key}.adapter: {adapter}, the best of {folder}, is gone or has changed since; evaluate again",
    )
    score = next(score for score in report["scores"] if score["policy"] == report["best"])
    how = f"best of {len(report['policies'])} on {report['split']} of {report['dataset']}: {report['best']}, "
    return adapter, f"{how}TGC {score['tgc']['mean']:.1f} at {score['sampling']['label']}"


def _newest_version(folder: Path) -> Path:
    """The last adapter of a training run; the folder itself if it is no run."""
    versions = sorted(path for path in folder.glob("policies/policy-v*") if is_adapter(path))
    return versions[-1] if versions else folder


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)
