"""Reads the config in a run's folder as data: the folder may be somebody else's."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf

from agent_environments.protocol import ENVIRONMENTS
from loop_formats.schema import ConfigError, fields_of, require
from loop_plumbing.plug_ins import packages
from loop_plumbing.sanitize import sanitize
from loop_plumbing.trusted import VARIABLE, is_trusted
from loop_recipes.config.loop_config import read_config
from rollout_server.config import read_file

Section = TypeVar("Section")
_METHOD = "loop_recipes.algorithm."
_PLACES: dict[str, tuple[str, ...]] = {
    "log_probs": ("loop_recipes.engine.logprobs.", "loop_recipes.engine.cut_cross_entropy."),
    "optimizer": ("torch.optim.", "bitsandbytes.optim."),
    "lr_scheduler": (_METHOD, "torchtune.training.lr_schedulers."),
    "model": ("loop_recipes.engine.model_builders.", "torchtune.models."),
    "checkpointer": ("torchtune.training.",),
    "metric_logger": ("torchtune.training.metric_logging.",),
}
"""Prefixes of the component names that a stored config may choose, by key; under other keys, parts of a method, of an
environment of the project's, and of installed packages that extend the project."""
_MAKERS = ("lr_schedules", "lr_schedulers", "_builders", "_model_builders")
"""Endings of the names of modules whose functions are components; in other modules only classes are."""


def read_stored(file: Path, section: type[Section]) -> tuple[dict[str, Any], Section]:
    """Read a run's stored config. Return the keys, and an instance of ``section`` made of them.

    Raises:
        ConfigError: the file cannot be read, :func:`check_stored` refuses it, or the keys are not such a section.
    """
    _check_aliases(file)
    stored = read_file(file)
    of_section = {key: stored[key] for key in fields_of(section) if key in stored}
    check_stored(of_section)
    return stored, read_config(of_section, section)


def _check_aliases(file: Path) -> None:
    """Refuse YAML's aliases, because ten lines with aliases can stand for arbitrarily much data."""
    try:
        with file.open(encoding="utf-8") as text:
            repeats = any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, OSError):
        repeats = False  # read_file reports the fault
    require(not repeats, f"{file} repeats parts of itself by *name: the config of a run holds values alone")


def check_stored(stored: Any, path: str = "") -> None:
    """Check that a run's stored config has no interpolation, and names only components that belong under their keys. A
    folder's content is data: any other component is imported only if the user's own config names it.

    Raises:
        ConfigError: one line that names the key; nothing has been resolved or imported.
    """
    items = stored.items() if isinstance(stored, Mapping) else enumerate(stored) if isinstance(stored, list) else ()
    for key, value in items:
        place = f"{path}.{key}" if path else str(key)
        if (
            key == "_component_"
            and not _belongs(value, place.partition(".")[0])
            and not _is_trusted_elsewhere(str(value))
        ):
            name = sanitize(str(value), 200)
            cure = f"if you trust it, set {VARIABLE}={name.partition('.')[0]}"
            raise ConfigError(
                f"{place} is {name}, which only this file names: it is not one of the project's for that key; {cure}"
            )
        if isinstance(value, str) and OmegaConf.is_interpolation(OmegaConf.create({"value": value}), "value"):
            raise ConfigError(f"{place} is {sanitize(value, 200)}: the config of a run holds values alone")
        check_stored(value, place)


def _is_trusted_elsewhere(name: str) -> bool:
    """Return whether the user trusts the package of a component. The packages of :data:`_PLACES` are never trusted
    under other keys, though every config names parts of them."""
    own = {prefix.partition(".")[0] for prefixes in _PLACES.values() for prefix in prefixes}
    return name.partition(".")[0] not in own and is_trusted(name)


def _belongs(name: object, key: str) -> bool:
    """Return whether a component, a class or a maker of a schedule or a model, belongs under a key."""
    environments = {f"{path.partition('.')[0]}." for path in ENVIRONMENTS.values()}
    begin = (*_PLACES.get(key, (_METHOD, *environments)), *(f"{package}." for package in packages()))
    if not isinstance(name, str) or not name.startswith(begin):
        return False
    try:
        target = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError):
        return False
    return f"{getattr(target, '__module__', '')}.".startswith(begin) and (
        inspect.isclass(target) or (inspect.isfunction(target) and target.__module__.endswith(_MAKERS))
    )
