"""The record of a run: its settings, its starts, and the result of its evaluation."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from loop_viewer.run_head import CONFIG, REPORT, read_yaml
from loop_viewer.sound_lines import json_object, sound_lines

EVALUATION, STARTS = "evaluation", "starts.jsonl"
MAY_DIFFER = ("seed", "output_dir", "run_name", "max_iterations", "resume_from_checkpoint", "accept_changes")
"""Keys of a config in which runs of one setting may differ."""


def setting_of(run: Path) -> str:
    """Return a name that is equal for runs that differ in :data:`MAY_DIFFER` only; "" for a run without a config."""
    config = {key: value for key, value in read_yaml(run / CONFIG).items() if key not in MAY_DIFFER}
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest() if config else ""


def settings_of(run: Path) -> dict[str, str]:
    """Return name on the page -> text for the settings that a reader asks for first."""
    match read_yaml(run / CONFIG):
        case {"seed": seed, "optimizer": {"lr": rate}, "collection": {"limits": dict(limits), **asked}}:
            tasks, each = asked.get("tasks_per_iteration"), asked.get("rollouts_per_task")
            turns, tokens, context = (limits.get(f"max_{name}") for name in ("turns", "tokens_per_turn", "context"))
            return {
                "an iteration": f"{tasks} tasks, {each} rollouts of each",
                "an episode": f"at most {turns} turns, {tokens} tokens a turn, {context} tokens in all",
                "learning rate": f"{rate:g}" if isinstance(rate, float) else str(rate),
                "seed": str(seed),
            }
    return {}


def starts_of(run: Path) -> dict[str, str]:
    """Return name on the page -> text for the facts that the run stored at its start; {} if there are none.

    The facts name the machine's folders and the command, so an exported page leaves them out.
    """
    file = run / STARTS
    starts = [line for _, line in sound_lines(file, "start", json_object, []) if line] if file.is_file() else []
    if not starts:
        return {}
    last, words = starts[-1], [str(word) for word in starts[-1].get("command", ())]
    programs = [place for place, word in enumerate(words) if PurePath(word).name in ("tune", "loop")]
    words = [PurePath(words[programs[0]]).name, *words[programs[0] + 1 :]] if programs else words
    packages = last.get("packages")
    return {
        "started": str(starts[0].get("at")),
        "last start": f"{last.get('at')}, start {len(starts)}" if len(starts) > 1 else "",
        "command": shlex.join(words),
        "folder": str(last.get("folder")),
        "commit": str(last.get("commit") or ""),
        "versions": ", ".join(f"{name} {of}" for name, of in packages.items()) if isinstance(packages, dict) else "",
        "config": (run / CONFIG).read_text(encoding="utf-8", errors="replace") if (run / CONFIG).is_file() else "",
    }


def result_of(run: Path) -> dict[str, Any]:
    """Return {"split", "tasks", "scores", "comparisons"} of the first report that can be read, else {}.

    Each score has its "policy", "sampling", mean "reward", and of its success in percent the "mean", "low" and "high".
    A comparison has its "first" and "second" policy, the "sampling", the difference in percentage points as "mean",
    "low" and "high", and how many tasks were "gained" and "lost". A figure that a report lacks is None.
    """
    for file in (run / REPORT, run / EVALUATION / REPORT):
        try:
            report = json.loads(file.read_text(encoding="utf-8"))
            scores = [
                {"policy": str(each["policy"]), "sampling": each.get("sampling", {}).get("label")}
                | {"reward": each.get("reward"), **_interval(each["success"]), "mean": float(each["success"]["mean"])}
                for each in report["scores"]
            ]
            comparisons = [
                {key: str(each[key]) for key in ("first", "second", "sampling")}
                | {**_interval(each["success"]), "gained": len(each["gained"]), "lost": len(each["lost"])}
                for each in report.get("comparisons", ())
            ]
            split, tasks = report.get("split", ""), len(report.get("tasks", ()))
            return {"split": split, "tasks": tasks, "scores": scores, "comparisons": comparisons}
        except (OSError, AttributeError, LookupError, TypeError, ValueError):
            continue
    return {}


def _interval(success: Mapping[str, Any]) -> dict[str, Any]:
    interval = success.get("interval") or {}
    return {"mean": interval.get("estimate"), "low": interval.get("low"), "high": interval.get("high")}
