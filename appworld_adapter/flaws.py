"""Deliberate flaws for demonstrations: reference turns made as wrong as a careless agent would make them.

Pure standard library, so that whoever builds supervised data can import it without the engine:

    turns = json.loads((ground_truth / "turns.json").read_text())
    demonstration = json.loads((ground_truth / "demonstration.json").read_text())
    rng = random.Random(0)
    flawed = flawed_turns(turns, demonstration, rng, rng.choice(possible_flaws(demonstration)))

The result is meant to be executed like the reference turns, in order; an agent that errs and goes on is part of it.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Mapping, Sequence
from typing import Any

Turn = dict[str, str]
FLAWS = ("placeholder_password", "wrong_value", "skipped_lookup", "gave_up", "wrong_answer")
PLACEHOLDER_PASSWORD = "password123"
GIVING_UP: Turn = {"thought": "It does not work, so I stop.", "code": "apis.supervisor.complete_task()"}


def flawed_turns(turns: Sequence[Turn], demonstration: Mapping[str, Any], rng: random.Random, flaw: str) -> list[Turn]:
    """A copy of ``turns`` with ``flaw``, one of :func:`possible_flaws`; ``rng`` draws its particulars.

    ``demonstration`` is the content of the task's demonstration.json. Raises ValueError when the task does not allow
    the flaw. The result differs from ``turns`` and never solves the task.
    """
    possible = possible_flaws(demonstration)
    if flaw not in possible:
        raise ValueError(f"flaw {flaw!r} is not possible here: choose one of {', '.join(possible)}")
    copies = [dict(turn) for turn in turns]
    roles = demonstration["roles"]
    if flaw == "placeholder_password":
        return _placeholder_password(copies, demonstration)
    if flaw == "gave_up":
        # Some look-ups are made, but the deed is not.
        stop = rng.randrange(1, roles.index("act"))
        return [*copies[:stop], dict(GIVING_UP)]
    role = "complete" if flaw == "wrong_answer" else "act"
    slip = rng.choice([slip for slip in demonstration["slips"] if roles[slip["turn"]] == role])
    _replace(copies[slip["turn"]], slip["value"], rng.choice(slip["wrong"]))
    if flaw == "skipped_lookup":
        copies = [turn for turn, role in zip(copies, roles, strict=True) if role != "lookup"]
    return copies


def possible_flaws(demonstration: Mapping[str, Any]) -> list[str]:
    """The flaws that the task's reference solution leaves room for; never empty."""
    roles = demonstration["roles"]
    slipping = {roles[slip["turn"]] for slip in demonstration["slips"]}
    possible = {
        "placeholder_password": "login" in roles,
        "wrong_value": "act" in slipping,
        "skipped_lookup": "act" in slipping and "lookup" in roles,
        "gave_up": "act" in roles,
        "wrong_answer": "complete" in slipping,
    }
    return [flaw for flaw in FLAWS if possible[flaw]]


def _placeholder_password(turns: list[Turn], demonstration: Mapping[str, Any]) -> list[Turn]:
    """The passwords are not looked up; the first log-in fails, and the agent gives up."""
    roles = demonstration["roles"]
    first = roles.index("login")
    password = next(slip["value"] for slip in demonstration["slips"] if slip["turn"] == first)
    _replace(turns[first], password, PLACEHOLDER_PASSWORD)
    before = [turn for turn, role in zip(turns[:first], roles[:first], strict=True) if role != "passwords"]
    return [*before, turns[first], dict(GIVING_UP)]


def _replace(turn: Turn, value: Any, wrong: Any) -> None:
    """Puts ``wrong`` where the literal ``value`` stands in the code; not where its digits stand within another one."""
    code = turn["code"]
    starts = [0]
    for line in code.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    places = [
        (starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset)
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Constant) and type(node.value) is type(value) and node.value == value
        if node.end_lineno is not None and node.end_col_offset is not None
    ]
    if not places:
        raise ValueError(f"{value!r} does not stand in {code!r}")
    for start, end in sorted(places, reverse=True):
        code = code[:start] + repr(wrong) + code[end:]
    turn["code"] = code
