"""Prints a run for a terminal, where there is no browser: `loop view RUN --text [TASK]`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from loop_plumbing.grouping import grouped
from loop_plumbing.sanitize import sanitize
from loop_viewer.run_data import RunData
from loop_viewer.run_folder import RunFolder
from loop_viewer.sound_lines import first_of
from loop_viewer.summaries import cut


def text_lines(data: RunData | RunFolder, task: str = "") -> Iterator[str]:
    """Yield text about a run: the collections with their tasks or, if ``task`` is given, all messages of the task's
    rollouts. For several runs, yield one line for each run.

    Raises:
        ValueError: no collection has a rollout of ``task``; ``task`` is given for several runs; or, after all other
            output, some lines of the logs are damaged (the message names them).
    """
    if isinstance(data, RunFolder):
        if task:
            raise ValueError(f"--text TASK is of one run, and here are {len(data.runs())}: {', '.join(data.runs())}")
        yield from map(_run, data.overview()["runs"])
        return
    run, any_rollout = data, False
    overview = run.overview()
    damage = overview["damage"]
    for item in overview["collections"]:
        name = item["id"]
        entries = [entry for entry in run.summaries(name) if task in ("", entry["task"])]
        first = [entry for entry in entries if entry["segment"] == 0]
        damage += run.damage(name)
        if not first:
            continue
        any_rollout = True
        yield f"# {item['name']}: {_figures(first)}"
        if task:
            for entry in entries:
                yield from _rollout(run.rollout(name, entry["cursor"]))
            continue
        for name_of_task, group in sorted(grouped((entry["task"], entry) for entry in first).items()):
            yield f"{sanitize(name_of_task)}: {_figures(group)}"
            yield f"    {cut(sanitize(group[0]['asks']), 72)}"
    if damage:
        raise ValueError(first_of(damage))
    if not task and not any_rollout:
        yield "no rollout has ended yet"
    if task and not any_rollout:
        raise ValueError(f"{run.path} holds no rollout of task {task!r}; --text alone lists the tasks")


def _run(row: dict[str, Any]) -> str:
    """Return one run's line for the list of runs."""
    if "error" in row:
        return f"{sanitize(row['name'])}: {sanitize(row['error'])}"
    figures = {"reward": row["reward"], "success": row["success"], "dev success": row["dev_success"]}
    figures["held-out success"] = row["held_out_success"]
    facts = [row["state"], *(f"{name} {value:.3f}" for name, value in figures.items() if value is not None)]
    return f"{sanitize(row['name'])}: {', '.join(facts)}"


def _figures(entries: list[dict[str, Any]]) -> str:
    """Return the number of rollouts, how many solve their task, and their mean reward."""
    solved, reward = sum(entry["success"] for entry in entries), sum(entry["reward"] for entry in entries)
    count = "1 rollout" if len(entries) == 1 else f"{len(entries)} rollouts"
    return f"{count}, {solved} solved, mean reward {reward / len(entries):.3f}"


def _rollout(rollout: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a rollout's conversation, with the facts of each turn."""
    turns = {turn["message"]: turn for turn in rollout["turns"]}
    yield f"\n## {sanitize(rollout['rollout_id'])}: reward {rollout['reward']:.3f}, {rollout['end_reason']}"
    if rollout["ungradable"]:
        yield f"its state could not be graded: {sanitize(rollout['ungradable'])}"
    if rollout["broke"]:
        yield f"its environment broke in {rollout['broke']['where']}: {sanitize(rollout['broke']['what'])}"
    yield from (f"missed: {sanitize(each['text'])}" for each in rollout["requirements"] if not each["passed"])
    for place, message in enumerate(rollout["messages"]):
        turn = turns.get(place)
        marks = [f"{turn['end'] - turn['start']} tokens"] if turn else []
        marks += ["cut off by the limit of tokens"] if turn and turn["finish_reason"] == "length" else []
        marks += ["failed"] if turn and turn["failed"] else []
        yield f"\n--- {message['role']}{' (' * bool(marks)}{', '.join(marks)}{')' * bool(marks)}"
        yield sanitize(message["content"]) or "(an empty message)"
