"""The card of an exported policy: the README.md of its folder, as the Hugging Face hub reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loop_formats.places import METRICS_FILE
from loop_formats.run_files import adapter_digest, is_adapter
from loop_formats.run_folder import read_description, read_metrics
from loop_recipes.evaluation.report import read_report
from loop_recipes.evaluation.scores import score_names
from loop_recipes.evaluation.tables import Table, to_markdown
from loop_recipes.run.starts import package_versions
from model_families.weights.hub import cached_name

UNKNOWN_LICENCE = "not stated in the base model's folder"


@dataclass(frozen=True)
class Base:
    """The base model in ``folder``: the readable ``name``, the ``commit`` if the model is from the hub, and the
    licence."""

    folder: Path
    name: str
    commit: str
    licence: str | None

    @classmethod
    def of(cls, folder: Path) -> Base:
        """Read a base model's folder: its place in the hub's cache, and the licence in README.md or a LICENSE file."""
        name, _, commit = (cached_name(folder) or folder.resolve().name).partition("@")
        return cls(folder, name, commit, _licence(folder))

    @property
    def served(self) -> list[str]:
        """Return the words that name the base model in a server's command line on this machine."""
        return [self.name, "--revision", self.commit] if self.commit else [str(self.folder.absolute())]


def _licence(folder: Path) -> str | None:
    card = folder / "README.md"
    if card.is_file():
        _, _, rest = card.read_text(encoding="utf-8", errors="replace").partition("---\n")
        match = re.search(r"^license:\s*(\S.*)$", rest.partition("\n---")[0], re.MULTILINE)
        if match is not None:
            return match[1].strip()
    for file in sorted(folder.glob("LICENSE*")):
        first = (line.strip() for line in file.read_text(encoding="utf-8", errors="replace").splitlines())
        return next((line for line in first if line), None)
    return None


@dataclass(frozen=True)
class Card:
    """The contents of a card; ``stored`` is the run's config.yaml, ``check`` the result of a merge's comparison.
    ``serve`` are commands to run in the exported folder."""

    title: str
    run: Path
    adapter: Path
    base: Base
    stored: Mapping[str, Any]
    merged: str | None
    serve: Sequence[str]
    check: str | None = None
    further: Sequence[str] = field(default_factory=tuple)

    def text(self) -> str:
        """Return the card as Markdown.

        Raises:
            ValueError: an evaluation in the run's folder is damaged.
        """
        head = {
            "base_model": self.base.name,
            "library_name": "transformers" if self.merged else "peft",
            "pipeline_tag": "text-generation",
            "tags": ["reinforcement-learning", "agent", *([] if self.merged else ["lora"])],
        }
        if self.base.licence is not None and re.fullmatch(r"[a-z0-9.-]+", self.base.licence):
            head["license"] = self.base.licence
        what = f"merged into its base model in {self.merged}" if self.merged else "a LoRA adapter in PEFT's format"
        lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in head.items()), "---", ""]
        lines += [f"# {self.title}", "", f"A policy trained with torchtune-loop: {what}.", ""]
        lines += [f"- {name}: {text}" for name, text in self._facts().items()]
        if self.check is not None:
            lines.append(f"- merge: {self.check}")
        lines += [f"- {text}" for text in self.further]
        lines += ["", "## Scores", "", self._scores(), "## Serve", "", "```bash", *self.serve, "```", ""]
        lines.append("A server samples by its generation_config.json unless a request says otherwise.")
        if "collection" in self.stored:
            lines[-1] += " The policy was trained on its own samples at temperature 1, with top-p 1."
        lines.append("")
        return "\n".join(lines).replace(str(self.base.folder), self.base.name)

    def _facts(self) -> dict[str, str]:
        versions = ", ".join(f"{name} {number}" for name, number in package_versions().items())
        at = f" at commit {self.base.commit}" if self.base.commit else ""
        return {
            "base model": f"{self.base.name}{at} (licence: {self.base.licence or UNKNOWN_LICENCE})",
            **self._beginning(),
            "data": self._data(),
            "algorithm": self._algorithm(),
            "version": self.adapter.name,
            "exported with": versions,
        }

    def _beginning(self) -> dict[str, str]:
        """Return the adapter that the run began with, if any: the end of its path, and a digest if it exists."""
        if not (named := self.stored.get("initial_adapter")):
            return {}
        folder = Path(named)
        digest = f" (SHA-256 {adapter_digest(folder)[:16]})" if is_adapter(folder) else ""
        return {"began with": f"{'/'.join(folder.absolute().parts[-3:])}{digest}"}

    def _data(self) -> str:
        lines = read_metrics(self.run) if (self.run / METRICS_FILE).exists() else []
        dataset = next((str(line["dataset"]) for line in reversed(lines) if line.get("dataset")), None)
        split = (self.stored.get("collection") or {}).get("split")
        each = [int(line.get("rollouts") or 0) for line in lines]
        rollouts = sum(each) if split else max(each, default=0)  # a fixed set is the same in every iteration
        facts = [
            *([dataset] if dataset else ["stored rollouts"]),
            *([f"split {split}"] if split else []),
            *([f"{rollouts} rollouts in {len(lines)} iterations"] if rollouts else []),
        ]
        return ", ".join(facts)

    def _algorithm(self) -> str:
        components = {key: self.stored.get(key) for key in ("advantage", "loss", "optimizer")}
        named = [
            f"{key} {str(component['_component_']).rpartition('.')[2]}"
            for key, component in components.items()
            if isinstance(component, Mapping) and "_component_" in component
        ]
        return f"{', '.join(named)}, {self.stored.get('max_iterations')} iterations, seed {self.stored.get('seed', 0)}"

    def _scores(self) -> str:
        blocks: list[str | Table] = []
        for file in sorted(self.run.glob("evaluation*/report.json")):
            report, _ = read_report(file.parent)
            names = score_names(read_description(file.parent))
            digest = adapter_digest(self.adapter)
            ours = {each["name"]: each for each in report["policies"] if each["sha256"] in (digest, None)}
            ours = {name: each for name, each in ours.items() if each.get("endpoint") is None}
            if not any(each["sha256"] == digest for each in ours.values()):
                continue
            level, tasks = f"{report['level']:.0%}", len(report["tasks"])
            head = ["policy", "sampling", "runs", *(f"{name} [{level} interval]" for name in names.values())]
            rows = [
                [each["policy"], each["sampling"]["label"], str(each["runs"]), *(_figure(each[key]) for key in names)]
                for each in report["scores"]
                if each["policy"] in ours
            ]
            blocks += [f"{report['dataset']}, split {report['split']} ({tasks} tasks):", Table(head, rows)]
        return to_markdown(blocks or ["This version has not been scored on held-out tasks (`loop eval`)."])


def _figure(figure: Mapping[str, Any]) -> str:
    return f"{figure['mean']:.1f} [{figure['interval']['low']:.1f}, {figure['interval']['high']:.1f}]"
