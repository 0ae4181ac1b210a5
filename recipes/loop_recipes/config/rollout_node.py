"""The section ``rollout_node``, which training and evaluation share."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass

from agent_environments.secret import read_secret
from loop_formats.schema import STRICT, ConfigError, from_mapping, require
from rollout_server.config import NodeConfig


@dataclass(frozen=True, config=STRICT)
class RolloutNodeConfig:
    """The rollout node to use: exactly one of ``launch`` and ``url``."""

    launch: bool = False
    """Starts a node described by ``config`` as a child of the recipe, and stops it with the recipe."""
    url: str | None = None
    """Uses a node that runs elsewhere, or several, separated by commas, which share the tasks."""
    token_env: str = "ROLLOUT_SERVER_TOKEN"
    """The environment variable that holds the bearer token; a launched node needs none."""
    start_deadline_s: PositiveFloat = 600.0
    """Seconds without a sign of life after which a node that is not ready is given up, at the beginning and after it
    was restarted. One that is slow is waited for; its own deadlines are in ``config``."""
    config: NodeConfig | None = None
    """The node that ``launch`` and ``loop node CONFIG`` start."""

    def __post_init__(self) -> None:
        ways = self._ways()
        require(sum(ways.values()) == 1, f"exactly one of {', '.join(ways)} must be given")
        require(not self.launch or self.config is not None, "config is missing; say there what the node serves")

    def _ways(self) -> dict[str, bool]:
        return {"launch: true": self.launch, "url": self.url is not None}

    @property
    def child(self) -> NodeConfig:
        """The node to launch; ask only where ``launch`` is true."""
        assert self.config is not None
        return self.config


def described_node(config: DictConfig) -> NodeConfig:
    """The node that a composed config describes in ``rollout_node.config``, whether or not the recipe launches it.

    Raises:
        ConfigError: none is described, or an unknown, missing or ill-typed key.
    """
    try:
        plain = OmegaConf.select(config, "rollout_node.config")
        if OmegaConf.is_config(plain):
            plain = OmegaConf.to_container(plain, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"rollout_node.config: {str(error).splitlines()[0]}") from error
    if not plain:
        raise ConfigError("the config has no rollout_node.config: say there what the rollout node serves")
    return from_mapping(NodeConfig, plain, "rollout_node.config")


def check_token(variable: str) -> None:
    """Check that ``variable`` holds a bearer token.

    Raises:
        ConfigError: the environment variable ``variable`` does not hold the token of a node that runs elsewhere.
    """
    require(read_token(variable), f"the environment variable {variable} must hold the rollout node's bearer token")


def read_token(variable: str) -> str:
    """As :func:`~agent_environments.secret.read_secret`.

    Raises:
        ConfigError: no HTTP header can carry it.
    """
    try:
        return read_secret(variable)
    except ValueError as error:
        raise ConfigError(str(error)) from error
