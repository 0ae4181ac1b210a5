"""Checks a recipe's YAML before anything is built, so that a misspelt key is one clear line and not a late surprise.

A schema is a frozen dataclass: a field whose type is another dataclass is a section, a field without a default a
required key. A node that names what to build by ``_component_`` is a field of type ``dict[str, Any]``;
:func:`check_component` compares its keys with the signature of what it names, without building it.
"""

from __future__ import annotations

import difflib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torchtune import config

from rollout_server.config import ConfigError, from_mapping

__all__ = ["ConfigError", "build", "check_component", "read_config"]

Schema = TypeVar("Schema")


def read_config(cfg: DictConfig | Mapping[str, Any], schema: type[Schema]) -> Schema:
    """Resolve ``cfg`` and turn it into ``schema``.

    Raises:
        ConfigError: an interpolation that does not resolve, an unknown, missing or ill-typed key.
    """
    try:
        plain = OmegaConf.to_container(OmegaConf.create(cfg), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"config: {str(error).splitlines()[0]}") from error
    return from_mapping(schema, plain)


def build(component: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Build what ``component`` names; positional arguments first, ``kwargs`` win over the component's own keys."""
    return config.instantiate(OmegaConf.create(dict(component)), *args, **kwargs)


def check_component(
    path: str, component: Mapping[str, Any], positional: int = 0, provided: Iterable[str] = ()
) -> Callable[..., Any]:
    """Import what ``component`` names, check that it can be called with its keys, and return it.

    Args:
        path: key of the node, for messages.
        positional: number of positional arguments the recipe will pass.
        provided: keyword arguments the recipe will pass.

    Raises:
        ConfigError: no ``_component_``, one that cannot be imported, or keys that do not fit its signature.
    """
    name = component.get("_component_")
    if not isinstance(name, str):
        raise ConfigError(f"{path} needs _component_, the dotted name of what to build")
    try:
        target = pkgutil.resolve_name(name)
        signature = inspect.signature(target)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}._component_: cannot use {name!r}: {error}") from error
    parameters = signature.parameters.values()
    known = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    arguments = {key: value for key, value in component.items() if key != "_component_"}
    for key in arguments:
        if key not in known and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            near = difflib.get_close_matches(key, known, n=1)
            cure = f"did you mean {near[0]!r}?" if near else f"it takes: {', '.join(known)}"
            raise ConfigError(f"unknown key '{path}.{key}' for {name}; {cure}")
    try:
        signature.bind(*[None] * positional, **{**arguments, **dict.fromkeys(provided)})
    except TypeError as error:
        raise ConfigError(f"{path}: {name} cannot be called with these keys: {error}") from error
    return target
