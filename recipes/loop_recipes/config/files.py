"""Composes the config of a run: a machine's config, and over it what differs.

    loop train qwen2_5_7b algorithm=grpo

The same in a file of one's own, whose paths are relative to it:

    machine: qwen2_5_7b          # a complete run: model, hardware, node
    world: ./my_world.yaml       # where the agent acts: environment, splits, limits
    preset: on_policy            # settings that belong together
    algorithm: grpo              # or several: [rloo, horizon_curriculum]
    update: {epochs: 2}          # and keys of its own

Each wins over those before it: machine, world, preset, algorithm, the file's own keys, the command line. A file
without the key ``machine`` is itself a machine's config. Sections are merged key by key, but a section that names
another ``_component_``, or an environment of another ``name``, replaces the one below, whose arguments would mean
nothing to it.

One file serves several recipes: the sections ``train``, ``sft``, ``eval`` and ``warm_start`` hold what is meant for one
of them alone, and each recipe passes over the others' keys. The section ``when`` holds what is meant for machines with
a trait: ``when: {tiny_policy: ...}`` for those that say ``traits: [tiny_policy]``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

import loop_recipes.config.resolvers  # noqa: F401 - registers the resolvers that configs use
from loop_formats.schema import ConfigError, fields_of, from_mapping, require
from loop_plumbing.names import nearest
from loop_recipes.paths import KINDS, RECIPES, config_files, recipes_folder
from model_families.weights.hub import is_hub_name, pinned
from rollout_server.config import as_written, as_yaml

Section = TypeVar("Section")
Tree = dict[str, Any]
CONFIGS = recipes_folder() / "configs"
_NOT_KEYS = KINDS
"""What chooses files, and is no key of a recipe; ``${machine}`` refers to it."""
_UNREADABLE = (OmegaConfBaseException, YAMLError, OSError, UnicodeDecodeError)
_MERGE_ERRORS = (OmegaConfBaseException, YAMLError, TypeError, ValueError, AssertionError)


def read_file(file: Path) -> Tree:
    """A YAML's content.

    Raises:
        ConfigError: it cannot be read, or is no mapping.
    """
    try:
        content = OmegaConf.load(file)
    except _UNREADABLE as error:
        raise ConfigError(f"{file}: {' '.join(str(error).split())}") from error
    require(isinstance(content, DictConfig), f"{file}: a config must be a mapping of keys to values")
    return _plain(cast(DictConfig, content))


def compose(name: str, overrides: Sequence[str] = (), recipe: str = "loop_appworld") -> DictConfig:
    """The config that ``tune run recipe --config name overrides...`` runs with.

    Args:
        name: a machine as in `tune ls`, with or without the recipe's name before it, or a YAML file.
        overrides: ``key=value``, ``~key``, or one of ``machine``, ``world``, ``preset``, ``algorithm`` with a name or a
            file.

    Raises:
        ConfigError: there is no such file, it cannot be read, or a word is not understood.
    """
    check_overrides(overrides, recipe)
    chosen = dict(word.split("=", 1) for word in overrides if word.partition("=")[0] in _NOT_KEYS)
    words = [word for word in overrides if word.partition("=")[0] not in _NOT_KEYS]
    run = _run(name, chosen, recipe)
    try:
        return OmegaConf.create(with_words(run.tree(), words))
    except OmegaConfBaseException as error:
        raise ConfigError(f"config {name}: {' '.join(str(error).split())}") from error


def pinned_models(config: DictConfig) -> list[str]:
    """The words that give each model of the hub's that ``config`` names the commit that it stands for now.

    Raises:
        ConfigError: it cannot be fetched; one line.
    """
    words, written = [], _plain(config)
    for key in ("model.path", "node.model.path"):
        name = _at(written, key)
        if isinstance(name, str) and is_hub_name(name):
            try:
                words.append(f"{key}={pinned(name)}")
            except ValueError as error:
                raise ConfigError(f"{key}: {error}") from error
    return words


def check_overrides(words: Sequence[str], recipe: str = "loop_appworld") -> None:
    """Check that every word is ``key=value`` or ``~key``.

    Raises:
        ConfigError: a word is neither ``key=value`` nor ``~key``.
    """
    for word, after in zip(words, (*words[1:], ""), strict=False):
        key = word.partition("=")[0]
        kind = next((kind for kind in KINDS if len(key) > 2 and (kind.startswith(key) or key == f"{kind}s")), key)
        require(kind == key or key in _training_keys(), f"unknown key {key!r}; did you mean {kind!r}?")
        if not word.startswith("~") and ("=" not in word or word.startswith(("-", "="))):
            raise ConfigError(f"{word!r} is not understood; {_meant(word, after, recipe)}")


def _meant(word: str, after: str, recipe: str) -> str:
    """The cure for a word that is no ``key=value``, with another ``after`` it."""
    known = config_files(recipe, CONFIGS)
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
    """``name`` as `tune run` knows it: a file, or with the name of ``recipe`` before it where it has none."""
    return name if Path(name).is_file() or "/" in name or name.endswith(".yaml") else f"{recipe}/{name}"


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words before ``--``, and those after it."""
    at = list(words).index("--") if "--" in words else len(words)
    return list(words[:at]), list(words[at + 1 :])


def read_config(cfg: DictConfig | Mapping[str, Any], section: type[Section]) -> Section:
    """Resolve ``cfg`` and turn it into ``section``, without what is meant for other recipes.

    Raises:
        ConfigError: an interpolation that does not resolve, an unknown, missing or ill-typed key.
    """
    try:
        config = cfg if isinstance(cfg, DictConfig) else OmegaConf.create(dict(cfg))
        others = {*_NOT_KEYS, *_training_keys()} - fields_of(section).keys()
        plain = {str(key): _resolved(config, str(key)) for key in config if key not in others}
    except OmegaConfBaseException as error:
        raise ConfigError(f"config: {str(error).splitlines()[0]}") from error
    return from_mapping(section, plain)


def _resolved(config: DictConfig, key: str) -> Any:
    value = config[key]
    return OmegaConf.to_container(value, resolve=True, throw_on_missing=True) if OmegaConf.is_config(value) else value


@functools.cache
def _training_keys() -> frozenset[str]:
    """The keys of `loop_appworld`, which a machine has all of."""
    from loop_recipes.config.loop_config import LoopConfig  # which reads its configs by this module

    return frozenset(fields_of(LoopConfig))


@dataclass(frozen=True)
class _File:
    """A file of a run: its name, its content, and the files that it chooses, by their kind."""

    name: str
    content: Tree
    chosen: dict[str, tuple[Path, ...]]

    def parts(self, verb: str, traits: Iterable[str]) -> tuple[Tree, Tree]:
        """Return what is meant for all recipes, and what for the one called ``verb``."""
        common: Tree = {}
        special: Tree = {}
        when = self.content.get("when") or {}
        for layer in (self.content, *(when[trait] for trait in traits if trait in when)):
            own = {key: value for key, value in layer.items() if key not in (*RECIPES.values(), "when", "traits")}
            common, special = _merged(common, own), _merged(special, layer.get(verb) or {})
        return common, special


NOTHING = _File("", {}, {})


def _together(files: Sequence[_File]) -> _File:
    """Several files as one, each over those before it."""
    content = functools.reduce(_merged, (file.content for file in files), cast(Tree, {}))
    return _File("_".join(file.name for file in files), content, {}) if files else NOTHING


def _evaluated(trained: Tree) -> Tree:
    """What a training's keys mean for its evaluation: its ``output_dir`` is the ``run`` to evaluate."""
    if not trained.keys() <= _training_keys() or "output_dir" not in trained:
        return trained
    return {("run" if key == "output_dir" else key): value for key, value in trained.items()}


@dataclass(frozen=True)
class _Run:
    """The files of a run."""

    recipe: str
    machine: _File
    world: _File
    preset: _File
    algorithm: _File
    own: _File

    def tree(self) -> Tree:
        """All of them merged for the recipe, with interpolations as they are."""
        names = {kind: getattr(self, kind).name for kind in KINDS if getattr(self, kind) is not NOTHING}
        return functools.reduce(_merged, self._layers(), cast(Tree, {})) | names

    def _layers(self) -> list[Tree]:
        """What the run is made of, each over those before it."""
        verb = RECIPES[self.recipe]
        traits = self.machine.content.get("traits") or []
        (machine, machine_only), (world, world_only), preset, algorithm, (own, own_only) = (
            file.parts(verb, traits) for file in (self.machine, self.world, self.preset, self.algorithm, self.own)
        )
        self._check(verb, preset, algorithm)
        trained = _merged(machine, world)
        base = verb in ("sft", "eval") and trained.keys() <= _training_keys()
        return [
            _evaluated(trained) if verb == "eval" else trained,
            read_file(CONFIGS / verb / "base.yaml") if base else {},
            machine_only,
            world_only,
            *preset,
            *algorithm,
            self._folder(verb, world, machine_only, preset),
            _evaluated(own) if verb == "eval" else own,
            own_only,
        ]

    def _folder(self, verb: str, world: Tree, machine_only: Tree, preset: tuple[Tree, Tree]) -> Tree:
        """The output folder of a run that is more than its machine: named by all that it is made of."""
        preset_counts = verb != "eval" or preset[0]  # a preset of evaluations alone is none of the run's
        more = [self.world, self.preset if preset_counts else NOTHING, self.algorithm, self.own]
        more = [file for file in more if file is not NOTHING]
        if verb == "sft":
            named = more or ("output_dir" not in machine_only and "rollouts" not in self.machine.content)
        else:
            named = [file for file in more if file is not self.world or "output_dir" not in world]
        if not named or verb == "warm_start":
            return {}
        rft = ["rft"] if verb == "sft" and self.algorithm is NOTHING else []
        names = "_".join([self.machine.name, *(file.name for file in more), *rft])
        return {"run" if verb == "eval" else "output_dir": f"${{loop_home:}}/runs/{names}"}

    def _check(self, verb: str, preset: tuple[Tree, Tree], algorithm: tuple[Tree, Tree]) -> None:
        """Refuse a preset or an algorithm that is meant for other recipes."""
        recipes = {word: name for name, word in RECIPES.items()}
        for kind, file, (common, special) in (
            ("preset", self.preset, preset),
            ("algorithm", self.algorithm, algorithm),
        ):
            meant = [recipes[word] for word in file.content if word in recipes]
            if file is not NOTHING and meant and not (common or special):
                raise ConfigError(f"{kind} {file.name} is one of {' and '.join(meant)}, not of {self.recipe}")
        if verb == "sft":
            foreign = sorted(algorithm[0].keys() & {"collection", "credit"})
            require(
                not foreign, f"algorithm {self.algorithm.name} is one of loop_appworld: it sets {', '.join(foreign)}"
            )


def _run(name: str, words: Mapping[str, str], recipe: str) -> _Run:
    """Find and read the files of a run. ``words`` are those of the command line that choose some."""
    known = config_files(recipe, CONFIGS)
    chosen: dict[str, tuple[Path, ...]] = {}
    own = NOTHING
    file = _file_of_run(name, name.removeprefix(f"{recipe}/"), recipe)
    first = _read(file, recipe)
    if "machine" in first.chosen and file not in known["machine"].values():
        own = first
        chosen |= first.chosen
    else:
        chosen["machine"] = (file,)
    chosen |= {kind: _chosen(kind, value, Path(), recipe) for kind, value in words.items() if kind in KINDS}
    require(len(chosen["machine"]) == 1, "machine must be one")
    machine = _machine(chosen["machine"][0], recipe)
    chosen = {**machine.chosen, **chosen}
    others = {kind: _together([_read(path, recipe) for path in chosen.get(kind, ())]) for kind in KINDS[1:]}
    return _Run(recipe, machine, **others, own=own)


def _file_of_run(name: str, stem: str, recipe: str) -> Path:
    known = config_files(recipe, CONFIGS)["machine"]
    written = Path("runs", Path(name).stem, "train.yaml")
    require(
        not (name.endswith(".py") and Path(name).is_file()),
        f"{name} is a file of functions, no config: "
        + (
            f"give the one that its training wrote, {written}"
            if written.is_file()
            else f"`loop try {name}` plays its tasks, `loop train {name} --model MODEL` trains on it and writes the "
            f"config, {written}"
        ),
    )
    if stem in known and not (name.endswith(".yaml") and Path(name).is_file()):
        return known[stem]
    if not Path(name).is_file():
        names = ", ".join(f"{recipe}/{one}" for one in known)
        file = Path(stem).stem if stem.endswith(".yaml") else stem
        cure = nearest(file, list(known), _no_file(name, Path()) or f"there are: {names}, or give a YAML file")
        if (functions := Path(f"{stem}.py")).is_file():
            cure = f"did you mean {functions}?"
        folder = Path(stem) if Path(stem).is_dir() else Path("runs") / stem
        if stem and folder.is_dir():
            own, stored = folder / "train.yaml", folder / "config.yaml"
            begun = stored if stored.is_file() else "the config that it began with"
            again = f"{begun} and output_dir={folder} resume_from_checkpoint=True"
            score = f"a config and run={folder}"
            cure = f"give {own if own.is_file() else score if recipe == 'eval_appworld' else again}"
            raise ConfigError(f"{folder} is a folder, no config; {cure}")
        raise ConfigError(f"no config {config_name(name, recipe)!r}; {cure}")
    return Path(name).resolve()


def _no_file(name: str, folder: Path) -> str:
    """What is wrong with a name that can only be a file's; "" for any other."""
    return f"there is no such file in {(folder / name).absolute().parent}" if name.endswith((".yaml", ".yml")) else ""


def _chosen(kind: str, value: Any, folder: Path, recipe: str) -> tuple[Path, ...]:
    """The files that ``value`` chooses: a name or a path relative to ``folder``, a list of them, or null for none."""
    if isinstance(value, str) and value.startswith("["):
        value = [name.strip() for name in value.strip("[]").split(",")]
    names = value if isinstance(value, list) else [] if value in (None, "null", "None") else [value]
    known = config_files(recipe, CONFIGS)[kind]
    files = []
    for name in map(str, names):
        stem = name.removeprefix(f"{recipe}/") if kind == "machine" else name
        file = known.get(stem, folder / name)
        there_are = _no_file(name, folder) or f"there are: {', '.join(known)}, or give a YAML file"
        cure = nearest(stem, list(known), there_are)
        require(file.is_file(), f"no {kind} {name!r}; {cure}")
        files.append(file.resolve())
    return tuple(files)


def _machine(file: Path, recipe: str, above: tuple[Path, ...] = ()) -> _File:
    """A machine over the one that it names, and so on."""
    if file in above:
        raise ConfigError(f"machine: {' -> '.join(path.name for path in (*above, file))} goes in a circle")
    own = _read(file, recipe)
    below = own.chosen.get("machine")
    if not below:
        return own
    lower = _machine(below[0], recipe, (*above, file))
    content = _merged(lower.content, {key: value for key, value in own.content.items() if key != "when"})
    content["when"] = _merged(lower.content.get("when") or {}, own.content.get("when") or {})
    return _File(own.name, content, {**lower.chosen, **own.chosen})


def _read(file: Path, recipe: str) -> _File:
    content = read_file(file)
    chosen = {kind: _chosen(kind, content.pop(kind), file.parent, recipe) for kind in KINDS if kind in content}
    return _File(file.stem, content, chosen)


def with_words(tree: Tree, words: Iterable[str]) -> Tree:
    """``tree`` with the words of a command line over it, as torchtune merges them.

    Raises:
        ConfigError: a word leaves out a key that is not there, or gives a value that is no YAML.
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
        value = "!!null" if value == "None" else f"!!str {value}" if "max_filename" in key else as_yaml(value)
        try:
            given = _plain(OmegaConf.from_dotlist([f"{key}={value}"]))
        except _MERGE_ERRORS as error:
            raise ConfigError(f"{word}: {' '.join(str(error).split())}") from error
        result = _merged(result, given, ("name",))
    return result


def _check_no_section(key: str, before: Any, value: str) -> None:
    """Refuse a text in place of a section, whose keys others refer to."""
    if isinstance(before, dict) and before and "_component_" not in before and not value.startswith(("{", "$")):
        plain = re.match(r"[\w./~-]+$", value)
        named = next((name for name in ("path", "name") if plain and name in before), None)
        some = f"set one of them, such as {key}.{next(iter(before))}"
        cure = f"did you mean {key}.{named}={value}?" if named else some
        require(value in ("null", "None"), f"{key} is a section of keys; {cure}")


def _at(tree: Any, key: str) -> Any:
    """The value of a dotted key as it stands there; None if it is not there."""
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def _leave_out(keys: Tree, path: Sequence[str], word: str) -> None:
    """Delete a key, and the sections that are empty without it; ``word`` asks for it."""
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


def _plain(cfg: DictConfig) -> Tree:
    return as_written(cfg)


def _merged(base: Tree, over: Mapping[str, Any], identity: Sequence[str] = ("_component_", "name")) -> Tree:
    """``over`` over ``base``; a section with another ``identity`` replaces the one below."""
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
