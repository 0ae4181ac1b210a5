"""Failures of a policy on the synthetic world: where each failed rollout first leaves the reference solution.

    python experiments/ceiling.py runs/demo/evaluation/node/collections/eval-after-t0-*.jsonl

Reads rollouts that an evaluation kept and the reference solutions beside the world's tasks. A rollout leaves the
reference at its first turn whose calls are other ones, or whose calls have another literal argument. That says which
value was not copied, or which call was not made. Another way to the same end counts as leaving too, but only failed
rollouts are read. A second table says what one failed turn costs: how many rollouts with and without one solve
their task.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent_environments.agent_turns import AgentTurn, agent_turns
from agent_environments.extraction import extract_code
from loop_formats.run_files import read_lines

Call = tuple[str, dict[str, str]]


@dataclass
class Row:
    """The rollouts of one template."""

    difficulty: int
    rollouts: int = 0
    solved: int = 0
    departures: Counter[str] = field(default_factory=Counter)


def calls_of(code: str) -> list[Call] | None:
    """Return (``app.api``, literal keyword arguments) of the API calls, in their order; None: not Python."""
    try:
        nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    except (SyntaxError, ValueError):
        return None
    calls = []
    for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset)):
        name = ast.unparse(node.func)
        if name.startswith("apis."):
            literals = {
                keyword.arg: repr(keyword.value.value)
                for keyword in node.keywords
                if keyword.arg is not None and isinstance(keyword.value, ast.Constant)
            }
            calls.append((name.removeprefix("apis."), literals))
    return calls


def departure(codes: Sequence[str], reference: Sequence[str]) -> str:
    """Say where the turns ``codes`` first leave those of ``reference``."""
    for number, expected_code in enumerate(reference):
        expected = calls_of(expected_code) or []
        wanted = expected[0][0] if expected else "a turn"
        if number >= len(codes):
            return f"stopped before {wanted}"
        done = calls_of(codes[number])
        if done is None:
            return f"{wanted}: no Python"
        if [name for name, _ in done] != [name for name, _ in expected]:
            return f"{wanted} not called"
        for (name, arguments), (_, right) in zip(done, expected, strict=True):
            if arguments != right:
                wrong = next(key for key in [*right, *arguments] if arguments.get(key) != right.get(key))
                return f"{name}: {wrong}"
    return "none"


def turns_of(rollout: Mapping[str, Any]) -> list[AgentTurn]:
    return agent_turns(rollout["messages"], [turn["message"] for turn in rollout["turns"]])


def table(rollouts: Iterable[Mapping[str, Any]], tasks: Path) -> dict[str, Row]:
    """Return rows by template, easy templates first; ``tasks`` is the world's folder of tasks."""
    rows: dict[str, Row] = defaultdict(lambda: Row(0))
    for rollout in rollouts:
        truth = tasks / rollout["task_id"] / "ground_truth"
        demonstration = json.loads((truth / "demonstration.json").read_text())
        row = rows[demonstration["template"]]
        row.difficulty = demonstration["difficulty"]
        row.rollouts += 1
        if rollout["success"]:
            row.solved += 1
            continue
        reference = [turn["code"] for turn in json.loads((truth / "turns.json").read_text())]
        row.departures[departure([extract_code(turn.text) for turn in turns_of(rollout)], reference)] += 1
    return dict(sorted(rows.items(), key=lambda item: (item[1].difficulty, item[0])))


def lines(rows: Mapping[str, Row]) -> Iterator[str]:
    """Yield a Markdown table."""
    yield "| template | difficulty | solved | where failed rollouts leave the reference solution |"
    yield "|---|---|---|---|"
    for name, row in rows.items():
        ways = ", ".join(f"{way} ({count})" for way, count in row.departures.most_common())
        yield f"| {name} | {row.difficulty} | {row.solved} of {row.rollouts} | {ways} |"


def cost_of_a_failed_turn(rollouts: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a Markdown table of the rollouts with and without a turn whose code failed or that held none."""
    counts: Counter[tuple[bool, bool]] = Counter()
    for rollout in rollouts:
        failed = any(turn.failed or not extract_code(turn.text) for turn in turns_of(rollout))
        counts[failed, bool(rollout["success"])] += 1
    yield "| rollouts | solved |"
    yield "|---|---|"
    for failed, name in ((False, "without a failed turn"), (True, "with one or more")):
        solved = counts[failed, True]
        yield f"| {name} | {solved} of {solved + counts[failed, False]} |"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What a policy fails at, by template of tasks.")
    parser.add_argument("rollouts", type=Path, nargs="+", help="node/collections/*.jsonl; *.meta.jsonl are passed over")
    parser.add_argument("--world", type=Path, default=Path("worlds/synthetic"))
    arguments = parser.parse_args(words)
    paths = [path for path in arguments.rollouts if not path.name.endswith(".meta.jsonl")]
    try:
        rollouts = [line.record for path in paths for line in read_lines(path)]
        by_template = lines(table(rollouts, arguments.world / "data" / "tasks"))
    except (ValueError, OSError) as error:
        sys.exit(f"ceiling: {error}")
    except KeyError as error:
        sys.exit(f"ceiling: a line lacks {error}; give logs of rollouts, node/collections/*.jsonl")
    print("\n".join([*by_template, "", *cost_of_a_failed_turn(rollouts)]))


if __name__ == "__main__":
    main()
