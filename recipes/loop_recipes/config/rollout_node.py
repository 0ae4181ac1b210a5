"""The sections ``rollout_node`` and ``node``, which training and evaluation share."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass

from agent_environments.protocol import is_harness
from loop_formats.collection_request import Limits
from loop_formats.schema import STRICT, ConfigError, from_mapping, require
from loop_plumbing.breakage import raised_as
from loop_plumbing.secret import read_secret
from rollout_server.config import NodeConfig, resolved


@dataclass(frozen=True, config=STRICT)
class RolloutNodeConfig:
    """The rollout node to use: exactly one of ``launch`` and ``url``."""

    launch: bool = False
    """Starts the node that the section ``node`` describes as a child of the recipe, and stops it with the recipe."""
    url: str | None = None
    """Uses a node that runs elsewhere, or several, separated by commas, which share the tasks."""
    token_env: str = "ROLLOUT_SERVER_TOKEN"
    """The environment variable that holds the bearer token; a launched node needs none."""
    start_deadline_s: PositiveFloat = 600.0
    """Seconds without a sign of life after which the recipe gives up a node that is not ready, at the beginning and
    after a restart. The recipe waits for a slow node; its own deadlines are in ``node``."""

    def __post_init__(self) -> None:
        ways = self._ways()
        require(sum(ways.values()) == 1, f"exactly one of {', '.join(ways)} must be given")

    def _ways(self) -> dict[str, bool]:
        return {"launch: true": self.launch, "url": self.url is not None}


@dataclass(frozen=True, config=STRICT, kw_only=True)
class WithNode:
    """The keys of a recipe that may launch a rollout node."""

    rollout_node: RolloutNodeConfig
    node: NodeConfig | None = None
    """The node that ``rollout_node.launch`` and ``loop node CONFIG`` start."""

    def __post_init__(self) -> None:
        require(
            not self.rollout_node.launch or self.node is not None,
            "node is missing; say there what the launched node serves",
        )

    @property
    def child(self) -> NodeConfig:
        """The node to launch; read this only if ``rollout_node.launch`` is on."""
        assert self.node is not None
        return self.node

    @property
    def takes_turns(self) -> bool:
        """True if the trainer and the node's servers use the same GPUs, in turns."""
        return self.node is not None and self.node.servers.share is not None

    def check_compaction(self, key: str, limits: Limits) -> None:
        """Raise ConfigError if the node would leave ``limits.compaction`` to a program."""
        by_node = self.node is None or not is_harness(self.node.environment.name)
        of_program = f"{key}.compaction must be null: an agent of your own (harness) shortens its history itself"
        require(by_node or limits.compaction is None, of_program)


def described_node(config: DictConfig) -> NodeConfig:
    """Return the node that a composed config describes in ``node``, whether or not the recipe launches it.

    Raises:
        ConfigError: the config has no node, or an unknown, missing or ill-typed key.
    """
    try:
        plain = OmegaConf.select(config, "node")
        if isinstance(plain, DictConfig):
            plain = resolved(plain)
    except OmegaConfBaseException as error:
        raise ConfigError(f"node: {str(error).splitlines()[0]}") from error
    if not plain:
        raise ConfigError("the config has no node: say there what the rollout node serves")
    return from_mapping(NodeConfig, plain, "node")


def check_token(variable: str) -> None:
    """Raise ConfigError unless the environment variable holds the token of a node that runs elsewhere."""
    require(read_token(variable), f"the environment variable {variable} must hold the rollout node's bearer token")


def read_token(variable: str) -> str:
    """Read a token as :func:`~loop_plumbing.secret.read_secret` does.

    Raises:
        ConfigError: no HTTP header can carry the token.
    """
    with raised_as(ConfigError):
        return read_secret(variable)
