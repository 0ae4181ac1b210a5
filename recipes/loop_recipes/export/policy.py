"""Exports a policy from a run's folder: the adapter with a server's files, or the merged model; and its card."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import NonNegativeInt
from pydantic.dataclasses import dataclass as checked

from loop_formats.places import run_meant
from loop_formats.run_files import (
    ADAPTER_CONFIG,
    ADAPTER_FILES,
    copy_folder,
    is_adapter,
    newest_adapter,
    whole_folder,
    writing,
)
from loop_formats.schema import STRICT, ConfigError, require
from loop_plumbing.breakage import raised_as
from loop_recipes.config.loop_config import LearnerConfig
from loop_recipes.config.stored import read_stored
from loop_recipes.export.card import Base, Card
from model_families.base_model import BaseModel
from model_families.chat.calls import ObjectCalls
from model_families.opening import open_model_chat
from model_families.own_tokenizer import differing_ids, read_as_written
from model_families.weights.hub import cached_name
from rollout_server.inference.command import RANKS_OF_VLLM
from rollout_server.policies.adapter_check import read_adapter_config

_BESIDE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
    "own_tokenizer.py",
    "additional_chat_templates",
)
"""Files and folders of a base model's folder that define its tokenizer, chat template and sampling."""
UNTRAINED = "policy-v0000"
"""The version that a run begins with."""

_NAMES_BASE = {
    ADAPTER_CONFIG: "base_model_name_or_path",
    "config.json": "_name_or_path",
    "tokenizer_config.json": "name_or_path",
}
"""Files that may hold the base model's path, and the key."""
_PARSERS: dict[tuple[type, str], str] = {
    (ObjectCalls, "<tool_call>"): "hermes",
    (ObjectCalls, "[TOOL_CALLS]"): "mistral",
    (ObjectCalls, ""): "llama3_json",
}
"""vLLM's parsers by the form of calls and their opening text."""
_NO_PARSER = "for requests with tools add --enable-auto-tool-choice and the --tool-call-parser that reads its calls"


@checked(frozen=True, config=STRICT)
class ExportConfig:
    """The keys of ``loop export``."""

    merge: Literal["bf16", "fp32"] | None = None
    """Adds the adapter to the base model's weights, which are then of this type; null leaves it an adapter."""
    policy: str | None = None
    """The folder of a version in the run's ``policies``, such as policy-v0007, or any adapter; null is the newest."""
    to: str | None = None
    """The folder to write, which must not exist; null is ``export/<policy>`` in the run, with the type of a merge."""
    rollouts: NonNegativeInt = 64
    """Stored rollouts by which a merged model is compared with the adapter; 0 compares nothing."""


@dataclass(frozen=True)
class Exported:
    """An exported ``folder``, notes on the export, and the commands that serve the model."""

    folder: Path
    notes: list[str]
    serve: list[str]

    def lines(self) -> list[str]:
        """Return the lines for the terminal."""
        return [f"written: {self.folder}", *self.notes, *(f"serve:   {line}" for line in self.serve)]


def export(run: Path, config: ExportConfig) -> Exported:
    """Write a run's policy into a folder of its own; the folder appears whole or not at all.

    Raises:
        ConfigError: there is no such run or policy, the folder exists, or the merged model is not the trained policy;
            one line.
        WriteFailed: the disk is full.
    """
    stored, conf = config_of_run(run)
    adapter, base_folder = _adapter_of(run, config.policy), Path(conf.base_model)
    folder = Path(config.to or run / "export" / "-".join(filter(None, (adapter.name, config.merge)))).absolute()
    require(not folder.exists(), f"{folder} exists; remove it, or give to=FOLDER")
    gone = "is not there any more" if base_folder.is_absolute() else "is not here: go to where the run was started"
    require(base_folder.is_dir(), f"the base model {base_folder} {gone}")
    for each in (adapter, base_folder):
        _check_links(each)
    base, check = Base.of(base_folder), None
    title = re.sub(r"[^\w.-]+", "-", f"{run.resolve().name}-{adapter.name}")
    with writing(folder), whole_folder(folder) as partial:
        if config.merge is None:
            for name in ADAPTER_FILES:
                shutil.copyfile(adapter / name, partial / name)
            for path in (base_folder / name for name in _BESIDE):
                if path.exists():
                    (copy_folder if path.is_dir() else shutil.copyfile)(path, partial / path.name)
        else:
            check = _merged(run, conf, config, adapter, partial)
        notes = _same_ids(base_folder, partial)
        own = bool(notes)
        if adapter.name == UNTRAINED:
            notes = [*notes, f"{adapter.name} is the adapter that the run began with: no step has trained it"]
        _name_base(base, partial)
        tools, unknown = _tool_words(base_folder)
        notes = [*notes, *unknown]

        def serve(there: str, base_model: Sequence[str]) -> str:
            words = _serve(base_model, adapter, there, title, config.merge, own)
            return shlex.join(["vllm", "serve", *words, *tools])

        on_card = serve(".", base.served if base.commit else [base.name])
        card = Card(title, run, adapter, base, stored, config.merge, [on_card], check, notes)
        with raised_as(ConfigError):
            (partial / "README.md").write_text(card.text(), encoding="utf-8")
    return Exported(folder, [*notes, *([f"merge:   {check}"] if check else [])], [serve(str(folder), base.served)])


def _check_links(folder: Path) -> None:
    """Check that no file to read or copy is a link to another place: a folder from others may link to private files
    here, and an export is for others. The hub's cache may link to its own blobs.

    Raises:
        ConfigError: a file is such a link. Files of weights may be links, because only their tensors are read.
    """
    inside = [folder.resolve()]
    if cached_name(inside[0]):
        inside.append(inside[0].parents[1] / "blobs")
    for path in (path for path in folder.rglob("*") if path.suffix != ".safetensors"):
        if not any(path.resolve().is_relative_to(place) for place in inside):
            raise ConfigError(f"{path} is a link out of its folder: put the file itself there")


def config_of_run(run: Path) -> tuple[dict[str, Any], LearnerConfig]:
    """Read a training run's config.yaml. Return its stored keys, and the keys that all recipes with a learner share.

    Raises:
        ConfigError: the run has no config.yaml, or the file is not of a training run.
    """
    file = run / "config.yaml"
    require(file.is_file(), f"{run} is not a folder of a training run: it holds no config.yaml{run_meant(run)}")
    with raised_as(ConfigError, f"{file} is not a config of a training run: ", ConfigError):
        return read_stored(file, LearnerConfig)


def _adapter_of(run: Path, named: str | None) -> Path:
    if named is None:
        newest = newest_adapter(run)
        require(newest, f"{run} holds no policy yet: there is no adapter in {run / 'policies'}")
        assert newest is not None
        return newest
    adapter = next((each for each in (run / "policies" / named, Path(named)) if is_adapter(each)), None)
    names = ", ".join(sorted(path.name for path in run.glob("policies/policy-v*"))) or "none"
    require(adapter, f"policy: {named} is not an adapter; {run / 'policies'} holds {names}")
    assert adapter is not None
    return adapter


def _merged(run: Path, conf: LearnerConfig, config: ExportConfig, adapter: Path, folder: Path) -> str:
    """Fill ``folder`` with the merged model; returns the result of its comparison.

    Raises:
        ConfigError: the merged model is not the trained policy.
    """
    from loop_recipes.export.comparison import check_merge, stored_samples  # torch, and all of the engine
    from loop_recipes.export.merge import merge

    assert config.merge is not None
    with raised_as(ConfigError, "merge: "):
        merge(Path(conf.base_model), adapter, folder, config.merge)
        samples = stored_samples(run, config.rollouts, BaseModel.read(conf.base_model).positions)
    if not samples:
        return "not compared with the adapter: " + (
            "rollouts=0" if not config.rollouts else f"no rollout lies in {run}"
        )
    return check_merge(conf, samples, adapter, folder, config.merge)


def _same_ids(base_folder: Path, folder: Path) -> list[str]:
    """Make other libraries read the exported tokenizer as it is written; returns notes on it."""
    other = differing_ids(base_folder)
    if other is None:
        return []
    read_as_written(folder)
    left = differing_ids(folder)
    cure = "the exported folder says that it is to be read as it is" if left is None else f"and still: {left}"
    return [f"ids:     {other}; {cure}"]


def _name_base(base: Base, folder: Path) -> None:
    """Write the base model's name into the files of an exported folder in place of its path on this machine."""
    for name, key in _NAMES_BASE.items():
        if not (file := folder / name).is_file() or key not in (settings := json.loads(file.read_text("utf-8"))):
            continue
        settings[key] = base.name
        if name == ADAPTER_CONFIG and base.commit:
            settings["revision"] = base.commit
        file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _tool_words(base_folder: Path) -> tuple[list[str], list[str]]:
    """Return the options that make vLLM read this model's calls of tools, and a note if they are not known."""
    with suppress(ValueError):
        form = open_model_chat(base_folder, BaseModel.read(base_folder)).call_form
        parser = None if form is None else _PARSERS.get((type(form), form.opens.strip()))
        if parser is not None:
            return ["--enable-auto-tool-choice", "--tool-call-parser", parser], []
        if form is not None:
            return [], [f"tools:   {_NO_PARSER}"]
    return [], []


def _serve(base: Sequence[str], adapter: Path, folder: str, title: str, merged: str | None, own: bool) -> list[str]:
    if merged is not None:
        return [folder, "--served-model-name", title]
    rank = read_adapter_config(adapter).rank
    allowed = next((each for each in RANKS_OF_VLLM if each >= rank), rank)
    # The base's own folder is read otherwise than training read it.
    tokenizer = ["--tokenizer", folder] if own else []
    return [*base, *tokenizer, "--enable-lora", "--max-lora-rank", str(allowed), "--lora-modules", f"{title}={folder}"]
