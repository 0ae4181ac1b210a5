"""The components that a config names by ``_component_``: compared with their signatures, and built."""

from __future__ import annotations

import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, get_type_hints

from omegaconf import OmegaConf

from loop_formats.schema import ConfigError, check_value, require
from loop_plumbing.breakage import error_line, raised_as
from loop_plumbing.names import did_you_mean, nearest, similar_names
from loop_plumbing.trusted import trust_module
from rollout_server.config import as_config


def build(component: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Build a ``component`` by its name. Positional arguments come first; ``kwargs`` win over the component's keys.

    A value that is itself a component is built first.
    """
    values: dict[str, Any] = OmegaConf.to_object(as_config(component))  # type: ignore[assignment]
    components = {key: build(value) for key, value in values.items() if _is_component(value)}
    return _named(values.pop("_component_"))(*args, **{**values, **components, **kwargs})


def _named(name: str) -> Callable[..., Any]:
    """Import a component, also from a module in the folder that the recipe was started in."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return pkgutil.resolve_name(name)


def _kinds(target: Callable[..., Any], signature: inspect.Signature) -> dict[str, object]:
    """Return the types of a component's arguments: each from the annotation or, without one, from the default."""
    function = inspect.unwrap(target.__init__ if inspect.isclass(target) else target)
    kinds: dict[str, object] = {}
    for name, each in signature.parameters.items():
        if type(each.default) in (int, float, bool):
            kinds[name] = bool if type(each.default) is bool else float
        if each.annotation is not each.empty:
            holder = type("Holder", (), {"__annotations__": {name: each.annotation}})
            with suppress(Exception):  # a name that its module does not have at run time
                kinds |= get_type_hints(holder, getattr(function, "__globals__", {}), include_extras=True)
    return kinds


def _is_component(value: Any) -> bool:
    return isinstance(value, Mapping) and "_component_" in value


def _name_cure(name: str) -> str:
    """Return the cure for an unknown component; "" where there is none."""
    module, _, last = name.rpartition(".")
    if not module:
        return "; give its module too, as in torch.optim.AdamW"
    members = vars(sys.modules[module]) if module in sys.modules else {}
    near = similar_names(last, [each for each, value in members.items() if callable(value)])
    return f"; {did_you_mean([f'{module}.{each}' for each in near])}" if near else ""


def check_component(
    path: str, component: Mapping[str, Any], positional: int = 0, provided: Iterable[str] = (), kind: type = object
) -> Callable[..., Any]:
    """Import and return the class or function of ``component``, and check that it takes the keys. Call this for a
    component of the user's own config, or for one that :func:`~loop_recipes.config.stored.check_stored` has accepted.

    Args:
        path: key of the node, for messages.
        positional: number of positional arguments the recipe will pass.
        provided: keyword arguments the recipe will pass.
        kind: the required base class.

    Raises:
        ConfigError: no ``_component_``, one that cannot be imported or is of another kind, or keys that do not fit its
            signature.
    """
    name = component.get("_component_")
    if not isinstance(name, str):
        raise ConfigError(f"{path} needs _component_, the dotted name of a class or function")
    trust_module(name)
    try:
        target = _named(name)
        signature = inspect.signature(target)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}._component_: cannot use {name!r}: {error}{_name_cure(name)}") from error
    except (Exception, SystemExit) as error:  # of a module of the user's own
        raise ConfigError(f"{path}._component_: {name!r} cannot be imported: {error_line(error)}") from error
    _require_kind(path, name, kind, not inspect.isclass(target) or issubclass(target, kind))
    parameters = signature.parameters.values()
    known = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    arguments = {key: value for key, value in component.items() if key != "_component_"}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if unknown := [key for key in arguments if key not in known and not takes_all]:
        others = " ".join(f"~{path}.{key}" for key in unknown)
        cure = nearest(unknown[0], known, f"it takes {', '.join(known) or 'none'}; leave out the others: {others}")
        raise ConfigError(f"unknown key '{path}.{unknown[0]}' for {name}; {cure}")
    with raised_as(ConfigError, f"{path}: {name} cannot be called with these keys: ", TypeError):
        signature.bind(*[None] * positional, **{**arguments, **dict.fromkeys(provided)})
    kinds = _kinds(target, signature)
    for key, value in arguments.items():
        if _is_component(value):
            check_component(f"{path}.{key}", value)
        elif key in kinds:
            check_value(f"{path}.{key}", kinds[key], value)
    return target


def _require_kind(path: str, name: str, kind: type, holds: bool) -> None:
    """Raise ConfigError unless ``holds`` is true, that is, the object called ``name`` is of the kind."""
    expected = f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"
    cure = f'derive it from {kind.__module__}.{kind.__name__} (docs/architecture.md, "How to add")'
    require(holds, f"{path}: {name} is not {expected}; {cure}")


def build_checked(key: str, component: Mapping[str, Any], kind: type, *args: Any, **kwargs: Any) -> Any:
    """Check the ``component`` under ``key`` of a config, and build it as :func:`build` does: an instance of ``kind``.

    Raises:
        ConfigError: as in :func:`check_component`, or the component refuses its arguments.
    """
    check_component(key, component, len(args), kwargs, kind)
    with raised_as(ConfigError, f"{key}: ", TypeError, ValueError, OSError):
        built = build(component, *args, **kwargs)
    _require_kind(key, component["_component_"], kind, isinstance(built, kind))
    return built
