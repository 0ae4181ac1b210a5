"""Composes the config of a run: a machine's config, and over it the changes.

    loop train qwen2_5_7b algorithm=grpo

The same in a file of one's own, whose paths are relative to it:

    machine: qwen2_5_7b          # a complete run: model, hardware, node
    world: ./my_world.yaml       # where the agent acts: environment, splits, limits
    preset: on_policy            # settings that belong together
    algorithm: grpo              # or several: [rloo, horizon_curriculum]
    update: {epochs: 2}          # and keys of its own

Each wins over those before it: machine, world, preset, algorithm, the file's own keys, the command line. A file
without the key ``machine`` is itself a machine's config. Sections are merged key by key. But a section with another
``_component_``, or an environment with another ``name``, replaces the earlier one, whose arguments it could not use.

One file serves several recipes: the sections ``train``, ``sft``, ``eval`` and ``warm_start`` hold keys for one of them
alone, and each recipe ignores the others' keys. The section ``when`` holds keys for machines with a trait: ``when:
{tiny_policy: ...}`` for machines with ``traits: [tiny_policy]``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

import loop_recipes.config.resolvers  # noqa: F401 - registers the resolvers that configs use
from loop_formats.schema import TYPING_ERROR, ConfigError, fields_of, require
from loop_plumbing.breakage import raised_as
from loop_plumbing.names import did_you_mean, nearest, similar_names
from loop_recipes.paths import KINDS, RECIPES, config_files, recipes_folder
from model_families.weights.hub import is_hub_name, pinned
from rollout_server.config import as_written, as_yaml, read_file

Tree = dict[str, Any]
CONFIGS = recipes_folder() / "configs"
_SOME = (*RECIPES.values(), "when", "traits")
"""Sections of a file that are not for all recipes and machines."""
_MERGE_ERRORS = (OmegaConfBaseException, YAMLError, TypeError, ValueError, AssertionError)


def compose(name: str, overrides: Sequence[str] = (), recipe: str = "loop_appworld") -> DictConfig:
    """Return the config of ``tune run recipe --config name overrides...``.

    Args:
        name: a machine as in `tune ls`, with or without the recipe's name before it, or a YAML file.
        overrides: ``key=value``, ``~key``, or one of ``machine``, ``world``, ``preset``, ``algorithm`` with a name or a
            file.

    Raises:
        ConfigError: the file does not exist or cannot be read, or a word is not ``key=value`` or ``~key``.
    """
    check_overrides(overrides, recipe)
    choices = dict(word.split("=", 1) for word in overrides if word.partition("=")[0] in KINDS)
    words = [word for word in overrides if word.partition("=")[0] not in KINDS]
    files = _files(name, choices, recipe)
    tree = functools.reduce(_merged, _layers(files, recipe), cast(Tree, {}))
    tree |= {kind: files[kind].name for kind in KINDS if kind in files}
    try:
        return OmegaConf.create(with_words(tree, words))
    except OmegaConfBaseException as error:
        raise ConfigError(f"config {name}: {' '.join(str(error).split())}") from error


def pin_models(config: DictConfig) -> list[str]:
    """Add the present commit to the name of each hub model in ``config``.

    Returns:
        The changes as words of a command line.

    Raises:
        ConfigError: a model cannot be fetched; one line.
    """
    words, written = [], as_written(config)
    for key in ("model.path", "node.model.path"):
        name = _at(written, key)
        if isinstance(name, str) and is_hub_name(name):
            with raised_as(ConfigError, f"{key}: "):
                commit = pinned(name)
            OmegaConf.update(config, key, commit)
            words.append(f"{key}={commit}")
    return words


def check_overrides(words: Sequence[str], recipe: str = "loop_appworld") -> None:
    """Check that every word is ``key=value`` or ``~key``.

    Raises:
        ConfigError: a word is neither ``key=value`` nor ``~key``.
    """
    for word, after in zip(words, (*words[1:], ""), strict=False):
        _check_no_kind(word.partition("=")[0])
        if not word.startswith("~") and ("=" not in word or word.startswith(("-", "="))):
            raise ConfigError(f"{word!r} is not understood; {_word_cure(word, after, recipe)}")


def _check_no_kind(key: str) -> None:
    """Raise ConfigError if a key is a misspelt kind of file, as no schema has the kinds."""
    if key not in KINDS and (near := similar_names(key, KINDS, TYPING_ERROR)):
        raise ConfigError(f"unknown key {key!r}; {did_you_mean(near)}")


def _word_cure(word: str, after: str, recipe: str) -> str:
    """Return the cure for a ``word`` that is not ``key=value``; ``after`` is the next word."""
    known = config_files(recipe)
    if Path(word).is_dir():
        return f"did you mean {'run' if recipe == 'eval_appworld' else 'output_dir'}={word}?"
    if after.startswith("=") or word == "=":
        return "no blanks stand around the = of key=value"
    for kind in KINDS[1:]:
        if word in known[kind]:
            return f"did you mean {kind}={word}?"
    if after and "=" not in after:
        return f"did you mean {word}={after}?"
    return "after the config come key=value, or ~key to leave one out"


def config_name(name: str, recipe: str) -> str:
    """Return ``name`` as `tune run` takes it: a file, or a name that begins with the recipe's."""
    return name if Path(name).is_file() or "/" in name or name.endswith(".yaml") else f"{recipe}/{name}"


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words before ``--``, and those after it."""
    at = list(words).index("--") if "--" in words else len(words)
    return list(words[:at]), list(words[at + 1 :])


@dataclass(frozen=True)
class _File:
    """A config file of a run, or several files of one kind merged: name, content, and the files it names, by kind."""

    name: str
    content: Tree
    chosen: dict[str, list[Path]]


def _layers(files: Mapping[str, _File], recipe: str) -> list[Tree]:
    """Return the layers of a config; each overrides the layers before it. ``files`` are those of :func:`_files`."""
    verb = RECIPES[recipe]
    traits = files["machine"].content.get("traits") or []
    common: dict[str, Tree] = {"world": {}, "preset": {}, "algorithm": {}, "own": {}}
    special = dict(common)
    for kind, file in files.items():
        when = file.content.get("when") or {}
        content = functools.reduce(_merged, (when.get(trait) or {} for trait in traits), file.content)
        common[kind] = {key: value for key, value in content.items() if key not in _SOME}
        special[kind] = content.get(verb) or {}
        if kind in ("preset", "algorithm"):
            _check_recipe(kind, file, common[kind], special[kind], recipe)
    trained = _merged(common["machine"], common["world"])
    over_training = verb in ("sft", "eval") and _is_of_training(trained)
    return [
        _evaluated(trained) if verb == "eval" else trained,
        read_file(CONFIGS / verb / "base.yaml") if over_training else {},
        special["machine"],
        special["world"],
        common["preset"],
        special["preset"],
        common["algorithm"],
        special["algorithm"],
        _folder(files, common, special, verb),
        _evaluated(common["own"]) if verb == "eval" else common["own"],
        special["own"],
    ]


def _check_recipe(kind: str, file: _File, common: Tree, special: Tree, recipe: str) -> None:
    recipes = [name for name, verb in RECIPES.items() if verb in file.content]
    require(common or special or not recipes, f"{kind} {file.name} is one of {' and '.join(recipes)}, not of {recipe}")
    if kind == "algorithm" and recipe == "sft_appworld":
        foreign = sorted(common.keys() & {"collection", "credit"})
        require(not foreign, f"algorithm {file.name} is one of loop_appworld: it sets {', '.join(foreign)}")


def _evaluated(trained: Tree) -> Tree:
    """Turn a training's keys into the keys of its evaluation: ``output_dir`` becomes ``run``."""
    if not _is_of_training(trained):
        return trained
    return {("run" if key == "output_dir" else key): value for key, value in trained.items()}


def _is_of_training(keys: Tree) -> bool:
    """Return whether all keys are keys of a training config."""
    from loop_recipes.config.loop_config import LoopConfig  # a file of functions is tried without its many schemas

    return keys.keys() <= fields_of(LoopConfig).keys()


def _folder(files: Mapping[str, _File], common: Mapping[str, Tree], special: Mapping[str, Tree], verb: str) -> Tree:
    """Return the output folder of a run of several config files, named after all of them."""
    named = [kind for kind in (*KINDS[1:], "own") if kind in files]
    if verb == "eval" and not common["preset"]:  # a preset of evaluations alone is not one of the run's
        named = [kind for kind in named if kind != "preset"]
    if verb == "sft":
        other = bool(named) or ("output_dir" not in special["machine"] and "rollouts" not in common["machine"])
    else:
        other = any(kind != "world" or "output_dir" not in common["world"] for kind in named)
    if not other or verb == "warm_start":
        return {}
    rft = ["rft"] if verb == "sft" and "algorithm" not in files else []
    names = "_".join([*(files[kind].name for kind in ("machine", *named)), *rft])
    return {"run" if verb == "eval" else "output_dir": f"${{loop_home:}}/runs/{names}"}


def _files(name: str, choices: Mapping[str, str], recipe: str) -> dict[str, _File]:
    """Return the files of a run by kind; ``own`` is the command line's file if that is not a machine's.

    Args:
        choices: names or paths from the command line, by kind.
    """
    file = _file_of_run(name, recipe)
    own = _read(file, recipe)
    is_machine = "machine" not in own.chosen or file in config_files(recipe)["machine"].values()
    chosen = {"machine": [file]} if is_machine else dict(own.chosen)
    chosen |= {kind: _chosen(kind, value, Path(), recipe) for kind, value in choices.items()}
    require(len(chosen["machine"]) == 1, "machine must be one")
    files = {"machine": _machine(chosen["machine"][0], recipe)}
    for kind in KINDS[1:]:
        if sources := [_read(path, recipe) for path in {**files["machine"].chosen, **chosen}.get(kind, ())]:
            content = functools.reduce(_merged, (source.content for source in sources))
            files[kind] = _File("_".join(source.name for source in sources), content, {})
    return files if is_machine else {**files, "own": own}


def _machine(file: Path, recipe: str, above: tuple[Path, ...] = ()) -> _File:
    """Read a machine's file, merged over the file of the machine that it names, and so on."""
    if file in above:
        raise ConfigError(f"machine: {' -> '.join(path.name for path in (*above, file))} goes in a circle")
    own = _read(file, recipe)
    if not own.chosen.get("machine"):
        return own
    lower = _machine(own.chosen["machine"][0], recipe, (*above, file))
    return _File(own.name, _merged(lower.content, own.content), {**lower.chosen, **own.chosen})


def _read(file: Path, recipe: str) -> _File:
    content = read_file(file)
    for key in content:
        _check_no_kind(key)
    chosen = {kind: _chosen(kind, content.pop(kind), file.parent, recipe) for kind in KINDS if kind in content}
    return _File(file.stem, content, chosen)


def _chosen(kind: str, value: Any, folder: Path, recipe: str) -> list[Path]:
    """Return the files that ``value`` names: a name or a path relative to ``folder``, a list of them, or null."""
    if isinstance(value, str) and value.startswith("["):
        value = [name.strip() for name in value.strip("[]").split(",")]
    names = value if isinstance(value, list) else [] if value in (None, "null", "None") else [value]
    known = config_files(recipe)[kind]
    files = []
    for name in map(str, names):
        stem = name.removeprefix(f"{recipe}/") if kind == "machine" else name
        file = known.get(stem, folder / name)
        require(file.is_file(), f"no {kind} {name!r}; {_file_cure(name, stem, folder, known)}")
        files.append(file.resolve())
    return files


def _file_of_run(name: str, recipe: str) -> Path:
    """Return the config file that is the first word of a command line."""
    known = config_files(recipe)["machine"]
    stem = name.removeprefix(f"{recipe}/")
    is_file = Path(name).is_file()
    if is_file and name.endswith(".py"):
        written = Path("runs", Path(name).stem, "train.yaml")
        train = f"`loop train {name} --model MODEL` trains on it and writes the config"
        cure = f"`loop try {name}` plays its tasks, {train}"
        if written.is_file():
            cure = "give the one that its training wrote"
        raise ConfigError(f"{name} is a file of functions, not a config: {cure}, {written}")
    if stem in known or is_file:
        return known.get(stem) or Path(name).resolve()
    folder = Path(stem) if Path(stem).is_dir() else Path("runs") / stem
    if stem and folder.is_dir():
        raise ConfigError(f"{folder} is a folder, not a config; give {_config_of(folder, recipe)}")
    cure = _file_cure(name, Path(stem).stem if stem.endswith(".yaml") else stem, Path(), known, f"{recipe}/")
    if (functions := Path(f"{stem}.py")).is_file():
        cure = f"did you mean {functions}?"
    raise ConfigError(f"no config {config_name(name, recipe)!r}; {cure}")


def _config_of(folder: Path, recipe: str) -> str:
    """Return the words that the user should give in place of a run's folder."""
    own, stored = folder / "train.yaml", folder / "config.yaml"
    if own.is_file():
        return str(own)
    if recipe == "eval_appworld":
        return f"a config and run={folder}"
    config = stored if stored.is_file() else "the config that it began with"
    return f"{config} and output_dir={folder} resume_from_checkpoint=True"


def _file_cure(name: str, stem: str, folder: Path, known: Mapping[str, Path], prefix: str = "") -> str:
    """Return the cure for a name that is neither one of ``known`` (there as ``stem``) nor a file in ``folder``."""
    there_are = f"there are: {', '.join(f'{prefix}{one}' for one in known)}, or give a YAML file"
    no_file = f"there is no such file in {(folder / name).absolute().parent}"
    return nearest(stem, list(known), no_file if name.endswith((".yaml", ".yml")) else there_are)


def with_words(tree: Tree, words: Iterable[str]) -> Tree:
    """Merge the words of a command line over ``tree``, as torchtune does.

    Raises:
        ConfigError: a word leaves out a missing key, or gives a value that is not YAML.
    """
    result = tree
    for word in words:
        if word.startswith("~"):
            _leave_out(result, word[1:].split("."), word)
            continue
        key, _, value = word.partition("=")
        _check_no_section(key, _at(result, key), value)
        if isinstance(section := result.get(key), dict) and "_component_" in section and not value.startswith("{"):
            key += "._component_"
        value = "!!null" if value == "None" else as_yaml(value)
        try:
            change = as_written(OmegaConf.from_dotlist([f"{key}={value}"]))
        except _MERGE_ERRORS as error:
            raise ConfigError(f"{word}: {' '.join(str(error).split())}") from error
        result = _merged(result, change, ("name",))
    return result


def _check_no_section(key: str, before: Any, value: str) -> None:
    """Raise ConfigError if a text replaces a section to whose keys other keys refer."""
    if isinstance(before, dict) and before and "_component_" not in before and not value.startswith(("{", "$")):
        name = next((name for name in ("path", "name") if name in before and [value] == value.strip("[]").split()), "")
        cure = f"did you mean {key}.{name}={value}?" if name else f"set one of them, such as {key}.{next(iter(before))}"
        require(value in ("null", "None"), f"{key} is a section of keys; {cure}")


def _at(tree: Any, key: str) -> Any:
    """Return the value of a dotted key, unresolved; None if it is missing."""
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _leave_out(keys: Tree, path: Sequence[str], word: str) -> None:
    """Delete a key, and the sections that become empty; ``word`` is the word of the command line that asks for it."""
    outer, rest = path[0], path[1:]
    section: Any = keys.get(outer)
    if outer not in keys or (rest and not isinstance(section, dict)):
        raise ConfigError(f"{word}: there is no such key")
    if rest:
        _leave_out(section, rest, word)
        if section:
            return
    elif isinstance(section, dict) and "_component_" in section and "." not in word:
        raise ConfigError(f"{word} is a component, which cannot be left out")
    del keys[outer]


def _merged(base: Tree, over: Mapping[str, Any], identity: Sequence[str] = ("_component_", "name")) -> Tree:
    """Merge ``over`` over ``base``; a section with a different ``identity`` replaces the section in ``base``."""
    result = dict(base)
    for key, value in over.items():
        before = base.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            another = any(word in value and value[word] != before.get(word) for word in identity)
            result[key] = value if another else _merged(before, value, identity)
        elif isinstance(before, dict) and "_component_" in before and isinstance(value, str):
            result[key] = {**before, "_component_": value}
        else:
            result[key] = value
    return result
