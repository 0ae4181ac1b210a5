"""The node's configuration: YAML to frozen dataclasses, with one clear error for what does not fit.

A missing or misspelt key, or a value of another type, is refused before anything is started; the error names the key
by its path and suggests the nearest one there is.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException


class ConfigError(ValueError):
    """A configuration that cannot be used; the message is one line."""


@dataclass(frozen=True)
class ModelConfig:
    """The base model that all servers hold. ``max_context`` counts prompt and sampled tokens together."""

    path: str
    dtype: str = "bfloat16"
    max_context: int = 32768
    lora_rank: int = 16

    def __post_init__(self) -> None:
        _require(self.dtype in ("float32", "bfloat16", "float16"), "model.dtype", "float32, bfloat16 or float16")
        _require(self.max_context >= 16, "model.max_context", "at least 16")
        _require(1 <= self.lora_rank <= 512, "model.lora_rank", "1 to 512")


@dataclass(frozen=True)
class ServersConfig:
    """The vLLM servers. With ``urls`` they run already and are only used; otherwise ``count`` of them are started.

    ``gpus`` holds one list of device indices per server; ``env`` and ``extra_args`` go to every server.
    """

    count: int = 1
    urls: list[str] | None = None
    tensor_parallel_size: int = 1
    gpus: list[list[int]] | None = None
    max_num_seqs: int = 32
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    max_loras: int = 2
    max_cpu_loras: int = 8
    start_timeout_s: float = 300.0
    extra_args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(self.count >= 1, "servers.count", "at least 1")
        _require(self.urls is None or len(self.urls) > 0, "servers.urls", "null or at least one URL")
        _require(self.max_num_seqs >= 1, "servers.max_num_seqs", "at least 1")
        _require(self.max_loras >= 2, "servers.max_loras", "at least 2: one to serve while the next is proven")
        _require(self.max_cpu_loras >= self.max_loras, "servers.max_cpu_loras", "at least servers.max_loras")
        _require(self.start_timeout_s > 0, "servers.start_timeout_s", "above 0")
        if self.gpus is not None:
            _require(len(self.gpus) == self.count, "servers.gpus", f"a list of GPUs for each of {self.count} servers")
            fits = all(len(devices) == self.tensor_parallel_size for devices in self.gpus)
            _require(fits, "servers.gpus", f"lists of servers.tensor_parallel_size = {self.tensor_parallel_size} GPUs")


@dataclass(frozen=True)
class EnvironmentConfig:
    """Which environment, and the options its pool takes."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NodeConfig:
    """All of a rollout node. ``port`` 0 takes any free port; ``<root>/node.json`` then says which."""

    root: str
    model: ModelConfig
    environment: EnvironmentConfig
    host: str = "127.0.0.1"
    port: int = 8700
    token_env: str = "ROLLOUT_SERVER_TOKEN"
    policy_root: str | None = None
    servers: ServersConfig = field(default_factory=ServersConfig)
    max_concurrent_episodes: int = 32

    def __post_init__(self) -> None:
        _require(0 <= self.port <= 65535, "port", "0 to 65535")
        _require(self.max_concurrent_episodes >= 1, "max_concurrent_episodes", "at least 1")


def _require(holds: bool, key: str, expected: str) -> None:
    if not holds:
        raise ConfigError(f"{key} must be {expected}")


def _matches(value: Any, hint: Any) -> bool:
    """Whether a YAML value fits a type hint of this file (plain types, list, dict, and unions with None)."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (types.UnionType, typing.Union):
        return any(_matches(value, option) for option in arguments)
    if origin is list:
        return isinstance(value, list) and all(_matches(item, arguments[0]) for item in value)
    if origin is dict:
        fits_key, fits_value = arguments
        return isinstance(value, dict) and all(
            _matches(key, fits_key) and _matches(item, fits_value) for key, item in value.items()
        )
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def from_mapping(cls: type, data: Any, path: str = "") -> Any:
    """Build the dataclass ``cls`` from plain data; ``path`` is where it stands in the whole, for errors.

    Raises:
        ConfigError: an unknown or missing key, a value of another type or out of range.
    """
    where = path or "the configuration"
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where} must be a mapping, not {type(data).__name__}")
    fields = {item.name: item for item in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    for key in data:
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1)
            cure = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(fields)}"
            raise ConfigError(f"unknown key {_join(path, str(key))!r}; {cure}")
    values = {}
    for name, item in fields.items():
        key = _join(path, name)
        if name not in data:
            if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
                raise ConfigError(f"missing key {key!r}")
            continue
        value, hint = data[name], hints[name]
        options = [option for option in typing.get_args(hint) if dataclasses.is_dataclass(option)]
        if dataclasses.is_dataclass(hint):
            values[name] = from_mapping(hint, value, key)
        elif options and typing.get_origin(hint) is types.UnionType and value is not None:
            values[name] = from_mapping(options[0], value, key)
        elif typing.get_origin(hint) is list and dataclasses.is_dataclass(typing.get_args(hint)[0]):
            items = value if isinstance(value, list) else [value]
            (section,) = typing.get_args(hint)
            values[name] = [from_mapping(section, item, f"{key}[{number}]") for number, item in enumerate(items)]
        elif _matches(value, hint):
            values[name] = float(value) if hint is float else value
        else:
            expected = getattr(hint, "__name__", None) if isinstance(hint, type) else str(hint)
            raise ConfigError(f"{key} must be {expected}, not {value!r}")
    return cls(**values)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def load_node_config(file: str | Path, overrides: Sequence[str] = ()) -> NodeConfig:
    """Read a node's YAML; ``overrides`` are ``key=value`` as on the command line.

    Raises:
        ConfigError: no such file, not YAML, an unresolved ``${...}``, or anything :func:`from_mapping` refuses.
    """
    if not Path(file).is_file():
        raise ConfigError(f"no configuration file {file}")
    for override in overrides:
        if "=" not in override:
            raise ConfigError(f"override {override!r} must be key=value")
    try:
        merged = OmegaConf.merge(OmegaConf.load(file), OmegaConf.from_dotlist(list(overrides)))
        data = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{file}: {str(error).splitlines()[0]}") from error
    except Exception as error:  # the YAML parser's own errors, whose class depends on the parser in use
        raise ConfigError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from error
    return from_mapping(NodeConfig, data)
