"""The node's configuration, and how its YAML is read: a mistake in it is one clear line before anything is started."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, field
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc
from pydantic import AfterValidator, BeforeValidator, Field, PositiveFloat, PositiveInt, model_validator
from pydantic.dataclasses import dataclass
from yaml import KeyToken, ScalarToken, YAMLError

from loop_formats.run_files import write_whole
from loop_formats.schema import STRICT, ConfigError, Some, from_mapping, require
from model_families.weights.hub import local_path

ALL_ADDRESSES = ("0.0.0.0", "::")
"""Values of ``host`` that listen at every address of this machine, of IPv4 or IPv6."""
MAX_LORA_RANK = 512
_A_TEXT = re.compile(
    r"[-+]?(0[0-9bxo][0-9a-fA-F_]*|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)|\+[0-9]+"
    r"|(?![0-9]{1,3}(_[0-9]{3})+$)[0-9]+_[0-9_]*|(?i:yes|no|on|off)"
)
"""Texts to a reader that YAML takes for a number or a truth value: 0755, 0x1F, 12:30, 1099_1, no."""
_INTERPOLATION = re.compile(r"(\\*)\$\{")
_MISSING = re.compile(r"\\*\?\?\?")
"""Texts that OmegaConf takes for another value, or for a missing one, unless a backslash is before them."""
_NAMES_ENVIRONMENT = re.compile(r"([^$\\]|\$\{oc\.env:[^${}]*\})*")
"""A text that names environment variables, and no keys of its own config."""


def _template(value: Any) -> Any:
    """Refuse every ``chat`` but the template. Older versions had named chat formats."""
    if value not in (None, "template"):
        raise ValueError(
            f"{value} is not a choice; leave chat_format out, the model's own chat template writes its chat"
        )
    return value


def node_url(host: str, port: int) -> str:
    """Return ``http://host:port``, with brackets around a literal IPv6 address."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """The base model that all servers hold."""

    path: Annotated[str, AfterValidator(local_path)]
    """The model: its folder in Hugging Face's format, or its name on the hub (``Qwen/Qwen3-0.6B``, with ``@REVISION``
    behind it or not), which becomes the folder that it is fetched to."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Precision in which vLLM computes and keeps the weights."""
    max_context: Annotated[int, Field(ge=16)] = 32768
    """The longest sequence vLLM serves, in tokens, prompt and sampled ones together."""
    lora_rank: Annotated[int, Field(ge=1, le=MAX_LORA_RANK)] = 16
    """The highest rank of an adapter that can be published."""
    chat_format: Annotated[Literal["template"] | None, BeforeValidator(_template)] = None
    """Leave it out: the chat template in the model's folder defines how messages become tokens."""
    thinking: Literal["kept", "stripped", "off"] | None = None
    """The thinking of a model: ``kept`` in its history, ``stripped`` from it as its template does at each user message
    (one sequence a turn), or ``off``; null is ``kept``."""
    observation_role: Literal["user", "tool"] | None = None
    """The role in which the model reads the environment's answers; null is ``tool`` where thinking is kept, else
    ``user``."""


@dataclass(frozen=True, config=STRICT)
class ServersConfig:
    """The vLLM servers."""

    count: PositiveInt = 1
    """The number of servers to start."""
    urls: Some[str] | None = None
    """URLs of servers that run already; the node uses them, and starts none."""
    tensor_parallel_size: PositiveInt = 1
    """GPUs that share the weights of one server."""
    gpus: list[list[int]] | None = None
    """The indices of each server's GPUs, among those that CUDA_VISIBLE_DEVICES shows where it is set; null shows every
    server all of them."""
    max_num_seqs: PositiveInt = 32
    """Sequences that one server samples at a time."""
    kv_cache_bytes: PositiveInt | None = None
    """Size of a server's KV cache; null lets vLLM take the memory that is free."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of a GPU's memory that vLLM takes; null is vLLM's default."""
    max_loras: int = 2
    """Policy versions that can be sampled from at the same time; at least 2."""
    max_cpu_loras: int = 8
    """Policy versions kept in a server's CPU memory; at least ``max_loras``."""
    start_timeout_s: PositiveFloat = 3600.0
    """Last resort for a server that starts, in seconds. The node notices a server that ends at once, one that does
    nothing after two minutes, and waits for one that is slow."""
    share: Literal["trainer"] | None = None
    """``trainer``: the servers share their GPUs with a trainer. They sleep during its turn, and wake when it ends, with
    all policy versions proven anew. Null: they have their GPUs, or their part of them, for good."""
    niceness: Annotated[int, Field(ge=0, le=19)] = 5
    """Added niceness of a server that computes on the CPU: the worlds, which make the requests, go first."""
    extra_args: list[str] = field(default_factory=list)
    """More arguments for the command line of every vLLM server."""
    env: dict[str, str] = field(default_factory=dict)
    """More environment variables for every vLLM server."""

    def __post_init__(self) -> None:
        require(self.max_loras >= 2, "max_loras must be at least 2: one to serve while the next is proven")
        require(self.max_cpu_loras >= self.max_loras, "max_cpu_loras must be at least max_loras")
        if self.gpus is not None:
            require(len(self.gpus) == self.count, f"gpus must be a list of GPUs for each of {self.count} servers")
            fits = all(len(devices) == self.tensor_parallel_size for devices in self.gpus)
            require(fits, f"gpus must be lists of tensor_parallel_size = {self.tensor_parallel_size} GPUs")


@dataclass(frozen=True, config=STRICT)
class EnvironmentConfig:
    """The environment that the episodes run in."""

    name: str
    """A name of docs/environments.md, or of your own ``tools`` (functions), ``harness`` (an agent) or
    ``package.module:Class``: docs/your_own_task.md."""
    options: dict[str, Any] = field(default_factory=dict)
    """Every other key: options of the environment's pool; those of ``appworld`` are in docs/appworld.md, of ``tools``
    in docs/your_own_task.md."""

    @model_validator(mode="before")
    @classmethod
    def _options_beside_the_name(cls, keys: Any) -> Any:
        if not isinstance(keys, dict):  # a call in Python
            return keys
        flat = dict(keys)
        return {name: flat.pop(name) for name in ("name",) if name in flat} | {"options": flat}


@dataclass(frozen=True, config=STRICT)
class NodeConfig:
    """The configuration of a rollout node."""

    root: str
    """Folder of the node's logs, policies and address file."""
    model: ModelConfig
    environment: EnvironmentConfig
    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 (or ::, for IPv6) is reachable from other machines."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8700
    """Port to listen at; 0 takes any free one, and ``<root>/node.json`` then says which."""
    public_url: str | None = None
    """Address at which agents of your own reach the node's endpoint, where the node listens at another one."""
    endpoint: bool = True
    """Serve chat APIs and keys to agents of your own (docs/agents.md). A node whose environment is a program does so in
    any case; `loop train FILE.py` sets false."""
    token_env: str = "ROLLOUT_SERVER_TOKEN"
    """The environment variable that holds the bearer token."""
    servers: ServersConfig = field(default_factory=ServersConfig)
    max_concurrent_episodes: PositiveInt = 32
    """Episodes that run at the same time."""


def load_node_config(file: str | Path, overrides: Sequence[str] = ()) -> NodeConfig:
    """Read a node's YAML; ``overrides`` are ``key=value`` as on the command line.

    Raises:
        ConfigError: the file is missing or not YAML, a ``${...}`` is unresolved, or :func:`from_mapping` fails.
    """
    if not Path(file).is_file():
        raise ConfigError(f"no configuration file {file}")
    for override in overrides:
        if "=" not in override:
            raise ConfigError(f"override {override!r} must be key=value")
    keys = read_file(Path(file))
    words = [f"{key}={as_yaml(value)}" for key, _, value in (word.partition("=") for word in overrides)]
    try:
        merged = OmegaConf.merge(OmegaConf.create(keys), OmegaConf.from_dotlist(words))
    except Exception as error:  # the parser's, and a list in the place of a section
        raise ConfigError(f"{' '.join(overrides)}: {' '.join(str(error).split())}") from error
    try:
        data = resolved(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{file}: {str(error).splitlines()[0]}") from error
    return from_mapping(NodeConfig, data)


def read_file(file: Path) -> dict[str, Any]:
    """Return a YAML file's content :func:`as_written`. Keys, and values that match :data:`_A_TEXT`, become strings.

    Raises:
        ConfigError: the file cannot be read, or is not a mapping.
    """
    try:
        OmegaConf.load(file)  # names the place of a mistake, before quotes move it
        content = OmegaConf.load(io.StringIO(quoted(file.read_text(encoding="utf-8"))))
    except (OmegaConfBaseException, YAMLError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {' '.join(str(error).split())}") from error
    require(isinstance(content, DictConfig), f"{file}: a config must be a mapping of keys to values")
    return as_written(cast(DictConfig, content))


def quoted(text: str) -> str:
    """Return YAML text with quotes around its keys, and around values that match :data:`_A_TEXT`."""
    pieces, end, is_key = [], 0, False
    try:
        for token in yaml.scan(text):
            bare = isinstance(token, ScalarToken) and token.plain and token.value != "<<"
            if bare and (is_key or _A_TEXT.fullmatch(token.value)):
                pieces += [text[end : token.start_mark.index], json.dumps(token.value, ensure_ascii=False)]
                end = token.end_mark.index
            is_key = isinstance(token, KeyToken)
    except YAMLError:  # its reader reports it
        return text
    return "".join([*pieces, text[end:]])


def as_yaml(value: str) -> str:
    """Return a command-line value as YAML. Quotes it if YAML would change it, as ``a #b`` or ``&a b``."""
    if value.lstrip()[:1] in ("", "'", '"', "[", "{", "!"):
        return quoted(value)
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]))["value"]  # type: ignore[index,call-overload]
    except Exception:  # the parser's own: the merge reports it
        return value
    other = value.startswith("#") if parsed is None else isinstance(parsed, str) and parsed != value
    return json.dumps(value, ensure_ascii=False) if other else quoted(value)


def write_node_config(config: NodeConfig, file: Path) -> None:
    """Write a config file that :func:`load_node_config` can read."""
    write_whole(file, OmegaConf.to_yaml(as_config(as_keys(config), to_read_again=True)))


def as_keys(section: Any) -> dict[str, Any]:
    """Return the keys from which a section can be read again. An environment's options stand beside its name;
    ``${oc.env:...}`` replaces each text that holds the value of an environment variable."""
    plain = asdict(section, dict_factory=_keys)
    keys: dict[str, Any] = _texts(plain, lambda key, text: _from_environment.get((key, text), text))
    return keys


def _keys(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(fields)
    return {"name": keys["name"], **keys["options"]} if keys.keys() == {"name", "options"} else keys


def as_config(data: Mapping[str, Any], to_read_again: bool = False) -> DictConfig:
    """Return ``data`` as a config in which all texts are escaped. Resolving the config gives ``data`` again, even after
    the config was saved and loaded.

    Args:
        to_read_again: resolve the environment variables that :func:`as_keys` named to their values.
    """

    def written(key: str, text: str) -> str:
        return str(text) if to_read_again and isinstance(text, FromEnvironment) else _literal(text)

    escaped: dict[str, Any] = _texts(dict(data), written)
    return OmegaConf.create(escaped)


def _texts(value: Any, change: Callable[[str, str], str], key: str = "") -> Any:
    """Return ``value`` after replacing each text within by ``change(key, text)``."""
    match value:
        case dict():
            return {name: _texts(item, change, str(name)) for name, item in value.items()}
        case list() | tuple():
            return [_texts(item, change, key) for item in value]
        case str():
            return change(key, value)
        case _:
            return value


class FromEnvironment(str):
    """A text of the config in which names of environment variables stand in place of their values."""


_read: dict[str, str] = {}
"""The environment variables in the text that is being resolved, with their values."""
_from_environment: dict[tuple[str, str], FromEnvironment] = {}
"""The replacement for a text that holds such values, by its key and the text. Texts beside the sections, and paths,
have none: they are not secrets, and others read them without this environment."""
_PLACES = ("path", "module", "python", "root")


def _environment_variable(name: str, *default: Any) -> Any:
    """Resolve ``oc.env`` like OmegaConf, and remember the value."""
    if name in os.environ:
        _read[name] = os.environ[name]
    return oc.env(name, *default)


OmegaConf.register_resolver("oc.env", _environment_variable, replace=True)


def resolved(config: Any, keys: Sequence[Any] | None = None) -> dict[Any, Any]:
    """Return the plain value of a config or of some of its keys, with interpolations resolved. Remember for
    :func:`as_keys` which texts hold values of environment variables.

    Raises:
        OmegaConfBaseException: an interpolation does not resolve, or a value is missing.
    """

    chosen = list(config) if keys is None else keys
    values = ((key, config[key]) for key in chosen)
    plain = {
        key: OmegaConf.to_container(value, resolve=True, throw_on_missing=True) if OmegaConf.is_config(value) else value
        for key, value in values
    }
    _note_environment("", config, chosen)
    return plain


def _note_environment(within: str, config: Any, keys: Sequence[Any]) -> None:
    for key in keys:
        name = within if isinstance(config, ListConfig) else str(key)
        _read.clear()
        value = config[key]
        if isinstance(value, DictConfig | ListConfig):
            _note_environment(name, value, list(value) if isinstance(value, DictConfig) else range(len(value)))
        elif isinstance(value, str) and _read and within and name not in _PLACES and not os.path.isabs(value):
            raw: Any = OmegaConf.to_container(config, resolve=False)
            alone = isinstance(raw, list | dict) and _NAMES_ENVIRONMENT.fullmatch(raw[key])
            _from_environment[name, value] = FromEnvironment(raw[key] if alone else _with_variable_names(value))


def _with_variable_names(value: str) -> str:
    """Return the text with each value of an environment variable replaced by the variable's name."""
    names = {_literal(secret): f"${{oc.env:{name}}}" for name, secret in _read.items() if secret}
    secrets = "|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)"
    return re.sub(rf"(\\*)({secrets})", lambda match: match[1] * 2 + names[match[2]], _literal(value))


def _literal(text: str) -> str:
    """Return a text with escapes, so that a config does not interpret the text."""
    return f"\\{text}" if _MISSING.fullmatch(text) else _INTERPOLATION.sub(r"\1\1\\${", text)


def as_written(config: DictConfig) -> dict[str, Any]:
    """Return the keys of a config as its file has them: with interpolations unresolved, and with the backslash that
    keeps a text from being a missing value."""
    plain: dict[str, Any] = _as_written(config, OmegaConf.to_container(config, resolve=False))
    return plain


def _as_written(config: Any, plain: Any) -> Any:
    def item_of(key: Any, value: Any) -> Any:
        if isinstance(value, dict | list):
            return _as_written(config[key], value)
        text = isinstance(value, str) and _MISSING.fullmatch(value) and not OmegaConf.is_missing(config, key)
        return f"\\{value}" if text else value

    if isinstance(plain, list):
        return [item_of(number, value) for number, value in enumerate(plain)]
    return {key: item_of(key, value) for key, value in plain.items()}
