"""Names of configs of the last release, which are read until the next one: `grpo extends=qwen2_5_7b`, `babyai_cpu`."""

from __future__ import annotations

from dataclasses import dataclass

from loop_formats.old_keys import say_once
from loop_formats.schema import ConfigError
from loop_recipes.paths import KINDS, config_files

_MACHINES = {
    "horizon_curriculum": "qwen2_5_32b",
    "paper": "qwen2_5_32b",
    "authors_code": "qwen2_5_32b",
    "on_policy_fp16": "qwen2_5_32b",
}
"""What an algorithm or a preset stood over unless ``extends`` said otherwise; the others over tiny_cpu."""
_WORLDS = {
    "babyai_cpu": "babyai",
    "colbench_cpu": "colbench",
    "mixed_cpu": "mixed",
    "textworldexpress_cpu": "textworldexpress",
    "tiny_cpu_agent": "agent",
}


@dataclass(frozen=True)
class OldName:
    """The meaning of an old name: names of files by their kind, and the name of its output folder, if of its own."""

    files: dict[str, str]
    label: str | None = None


def found_under_old_name(name: str, extends: str | None, recipe: str, said_as: str = "") -> OldName:
    """Return the meaning of ``name`` over ``extends``, said once on stderr; without files where it is no old name.

    Raises:
        ConfigError: both are worlds.
    """
    files = _files(name)
    if not files:
        return OldName({})
    label = None
    if "world" not in files:
        label = f"{extends or files['machine']}_{name}"
    if extends is not None:
        below = _files(extends) or {"machine": extends}
        if "world" in below and "world" in files:
            raise ConfigError(f"extends={extends}: {extends} and {name} are two worlds; name one of them")
        over = {kind: f"[{below[kind]},{own}]" if kind in below else own for kind, own in files.items()}
        files = {**over, **below, **{kind: over[kind] for kind in over if kind != "machine"}}
    changes = " ".join(f"{kind}={files[kind]}" for kind in KINDS[1:] if kind in files)
    before = f"{recipe}/{name}" + ("" if extends is None else f" extends={extends}")
    say_once(f"loop: {said_as}{before} is {files['machine']} {changes} now; the old name works for one release")
    return OldName(files, label)


def _files(name: str) -> dict[str, str]:
    if name in _WORLDS:
        return {"machine": "tiny_cpu", "world": _WORLDS[name]}
    for kind in ("algorithm", "preset"):
        if name in config_files()[kind]:
            return {"machine": _MACHINES.get(name, "tiny_cpu"), kind: name}
    return {}
