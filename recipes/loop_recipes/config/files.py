"""Reads configs by their names, and those that build on others: an algorithm is a few lines over a model's config.

    extends: tiny_cpu            # or qwen2_5_7b, qwen2_5_32b, or the path of a YAML file
    advantage:
      _component_: loop_recipes.algorithm.advantages.StdNormalized

Values of the extending file, and those of the command line, win. ``extends`` can itself be given on the command line:
``tune run loop_appworld --config loop_appworld/grpo extends=qwen2_5_32b``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

import loop_recipes.config.resolvers  # noqa: F401 - registers the resolvers that configs use
from loop_formats.schema import ConfigError, from_mapping
from loop_recipes.paths import recipes_folder

Section = TypeVar("Section")
CONFIGS = recipes_folder() / "configs"
_MERGE_ERRORS = (OmegaConfBaseException, YAMLError, TypeError, ValueError, AssertionError)


def load_config(name: str) -> DictConfig:
    """The YAML that ``name`` means, as it stands there: a file, or a config's name as in `tune ls`.

    Raises:
        ConfigError: there is none (says which there are), or it cannot be read.
    """
    file = Path(name)
    if not file.is_file():
        file = CONFIGS / f"{name}.yaml"
    if not file.is_file():
        known = sorted(str(path.relative_to(CONFIGS).with_suffix("")) for path in CONFIGS.glob("*/*.yaml"))
        raise ConfigError(f"no config {name!r}; there are: {', '.join(known)}, or give a YAML file")
    try:
        content = OmegaConf.load(file)
    except (OmegaConfBaseException, YAMLError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {' '.join(str(error).split())}") from error
    if not isinstance(content, DictConfig):
        raise ConfigError(f"{file}: a config must be a mapping of keys to values")
    return content


def config_name(name: str, recipe: str) -> str:
    """``name`` as `tune run` knows it: a file, or with the folder of ``recipe`` where it has none."""
    return name if Path(name).is_file() or "/" in name or name.endswith(".yaml") else f"{recipe}/{name}"


def check_overrides(words: Sequence[str]) -> None:
    """Check that every word is ``key=value`` or ``~key``.

    Raises:
        ConfigError: a word is neither ``key=value`` nor ``~key``.
    """
    for word in words:
        if not word.startswith("~") and (word.count("=") != 1 or word.startswith("-")):
            raise ConfigError(f"{word!r} is not understood; after the config come key=value, or ~key to leave one out")


def overridden(base: DictConfig, words: Sequence[str]) -> DictConfig:
    """``base`` with ``words`` over it, merged as ``tune run`` merges its command line.

    Not by torchtune's own function, because with it comes torch: a mistake in a config is said in the first second.

    Raises:
        ConfigError: a word that is neither ``key=value`` nor ``~key``, leaves out a key that is not there, or gives a
            value that is no YAML or does not fit the key.
    """
    check_overrides(words)
    keys, values = _plain(base), {}
    for word in words:
        if word.startswith("~"):
            _leave_out(keys, word[1:].split("."), word)
            continue
        key, value = word.split("=")
        if isinstance(section := keys.get(key), dict) and "_component_" in section:
            key += "._component_"
        value = "!!null" if value == "None" else value
        values[f"{key}=!!str {value}" if "max_filename" in key else f"{key}={value}"] = word
    below = OmegaConf.create(keys)
    try:
        return cast(DictConfig, OmegaConf.merge(below, OmegaConf.from_dotlist(list(values))))
    except _MERGE_ERRORS as error:
        for value, word in values.items():
            _check_alone(below, value, word)
        raise ConfigError(f"{' '.join(words)}: {' '.join(str(error).split())}") from error


def _check_alone(base: DictConfig, value: str, word: str) -> None:
    """Say what is wrong with ``word``, if it cannot be merged by itself."""
    try:
        OmegaConf.merge(base, OmegaConf.from_dotlist([value]))
    except TypeError as error:
        raise ConfigError(f"{word}: a list cannot take the place of a section, nor a section that of a list") from error
    except _MERGE_ERRORS as error:
        raise ConfigError(f"{word}: {' '.join(str(error).split())}") from error


def _leave_out(keys: dict[str, Any], path: Sequence[str], word: str) -> None:
    """Delete a key, and the sections that are empty without it; ``word`` asks for it."""
    outer, rest = path[0], path[1:]
    section: Any = keys.get(outer)
    if outer not in keys or (rest and not isinstance(section, dict)):
        raise ConfigError(f"{word}: there is no such key")
    if rest:
        _leave_out(section, rest, word)
        if section:
            return
    elif isinstance(section, dict) and "_component_" in section:
        raise ConfigError(f"{word} is a component, which cannot be left out")
    del keys[outer]


def extended(cfg: DictConfig, recipe: str = "loop_appworld") -> DictConfig:
    """``cfg`` over the config it extends, that one over the one it extends, and so on; ``extends`` itself stays.

    Sections are merged key by key, but a section that names another ``_component_``, or an environment of another
    ``name``, replaces the one it extends, whose arguments would mean nothing to it. A plain string where the base has a
    component names another with the same arguments, as on torchtune's command line.

    Args:
        cfg: a recipe's YAML merged with the command line.
        recipe: the folder of names without one.

    Raises:
        ConfigError: ``extends`` names no config, one that cannot be read, or leads back to itself.
    """
    layers = [_plain(cfg)]
    seen: list[str] = []
    while layers[-1].get("extends") is not None:
        name = str(layers[-1]["extends"])
        if name in seen:
            raise ConfigError(f"extends: {' -> '.join([*seen, name])} goes in a circle")
        seen.append(name)
        try:
            layers.append(_plain(load_config(config_name(name, recipe))))
        except ConfigError as error:
            raise ConfigError(f"extends: {error}") from error
    merged = layers.pop()
    while layers:
        merged = _merged(merged, layers.pop())
    return OmegaConf.create(merged)


def compose(name: str, overrides: Sequence[str], recipe: str = "loop_appworld") -> DictConfig:
    """The config that ``tune run recipe --config name overrides...`` would run with.

    Args:
        recipe: the folder of names without one.

    Raises:
        ConfigError: no such config, or an override that is neither ``key=value`` nor the ``~key`` of a key in it.
    """
    try:
        return extended(overridden(load_config(config_name(name, recipe)), overrides), recipe)
    except OmegaConfBaseException as error:
        raise ConfigError(f"config {name}: {str(error).splitlines()[0]}") from error


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words before ``--``, and those after it."""
    at = list(words).index("--") if "--" in words else len(words)
    return list(words[:at]), list(words[at + 1 :])


def read_config(cfg: DictConfig | Mapping[str, Any], section: type[Section]) -> Section:
    """Resolve ``cfg`` and turn it into ``section``.

    Raises:
        ConfigError: an interpolation that does not resolve, an unknown, missing or ill-typed key.
    """
    try:
        config = cfg if isinstance(cfg, DictConfig) else OmegaConf.create(dict(cfg))
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"config: {str(error).splitlines()[0]}") from error
    return from_mapping(section, plain)


def _plain(cfg: DictConfig) -> dict[str, Any]:
    return cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=False))


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        before = base.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            another = any(word in value and value[word] != before.get(word) for word in ("_component_", "name"))
            result[key] = value if another else _merged(before, value)
        elif isinstance(before, dict) and "_component_" in before and isinstance(value, str):
            result[key] = {**before, "_component_": value}
        else:
            result[key] = value
    return result
