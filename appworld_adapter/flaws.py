"""Deliberate flaws for demonstrations: reference turns made as wrong as a careless agent would make them.

Pure standard library, so that programs which build supervised data can import it without the engine:

    turns = json.loads((ground_truth / "turns.json").read_text())
    demonstration = json.loads((ground_truth / "demonstration.json").read_text())
    rng = random.Random(0)
    flawed = flawed_turns(turns, demonstration, rng, rng.choice(possible_flaws(demonstration)))

The caller executes the result in order, like the reference turns, also after a turn that fails.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

Turn = dict[str, str]
FLAWS = (
    "placeholder_password",
    "several_cells",
    "assumed_value",
    "guessed_interface",
    "corrected_error",
    "wrong_value",
    "skipped_lookup",
    "gave_up",
    "wrong_answer",
)
"""The first four are habits of the LOOP paper's agent before training. Each shows in a figure of
:mod:`appworld_adapter.behavior`: ``dummy``, ``multiple_cells_per_turn``, ``assume`` and ``show_api_doc``. Most
end in an error and in giving up, which is its ``give_up_rate``; ``corrected_error`` shows the other way."""

CORRECTED_ERROR = "corrected_error"
CORRECTABLE = ("placeholder_password", "several_cells", "guessed_interface")
"""Flaws after whose error the agent can still go on with the reference solution."""

PLACEHOLDER_PASSWORD = "password123"
GIVING_UP: Turn = {"thought": "It does not work, so I stop.", "code": "apis.supervisor.complete_task()"}
NEXT_CELL = "\n```\n```python\n"
"""The text between two cells of a turn's ``code``, which the caller puts into one fenced block."""
GUESSED_PARAMETER = "data"
ASSUMED = ((r"\d{1,9}", "1"), (r"\d+", "5550000000"), (r".*@.*", "someone@example.com"), (r".*", "someone"))
"""Values that an agent assumes instead of looking them up, by the shape of the right value."""


def flawed_turns(turns: Sequence[Turn], demonstration: Mapping[str, Any], rng: random.Random, flaw: str) -> list[Turn]:
    """Return a copy of ``turns`` with ``flaw``, one of :func:`possible_flaws`; ``rng`` draws the flaw's details.

    ``demonstration`` is the content of the task's demonstration.json. Raises ValueError if the task does not allow the
    flaw. The result differs from ``turns`` and never solves the task, except for :data:`CORRECTED_ERROR`.
    """
    possible = possible_flaws(demonstration)
    if flaw not in possible:
        raise ValueError(f"flaw {flaw!r} is not possible here: choose one of {', '.join(possible)}")
    copies = [dict(turn) for turn in turns]
    roles = demonstration["roles"]
    if flaw == "placeholder_password":
        return _placeholder_password(copies, demonstration)
    if flaw == "several_cells":
        return _several_cells(copies, demonstration)
    if flaw == "assumed_value":
        return _assumed_value(copies, demonstration, rng)
    if flaw == "guessed_interface":
        return _guessed_interface(copies, roles)
    if flaw == CORRECTED_ERROR:
        return _corrected_error(copies, demonstration, rng)
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
    """Return the flaws that can be put into the task's reference solution; never empty."""
    roles = demonstration["roles"]
    slipping = {roles[slip["turn"]] for slip in demonstration["slips"]}
    possible = {
        "placeholder_password": "login" in roles,
        "several_cells": "login" in roles,
        "assumed_value": bool(_looked_up_slips(demonstration)),
        "guessed_interface": "docs" in roles,
        "corrected_error": "login" in roles or "docs" in roles,
        "wrong_value": "act" in slipping,
        "skipped_lookup": "act" in slipping and "lookup" in roles,
        "gave_up": "act" in roles,
        "wrong_answer": "complete" in slipping,
    }
    return [flaw for flaw in FLAWS if possible[flaw]]


def _placeholder_password(turns: list[Turn], demonstration: Mapping[str, Any]) -> list[Turn]:
    """Leave out the look-up of passwords; the first log-in fails, and the agent gives up."""
    first = _log_in_with_placeholder(turns, demonstration)
    turns[first]["thought"] = turns[first]["thought"].removesuffix(".") + " with a dummy password."
    return [*_without(turns[:first], demonstration["roles"], "passwords"), turns[first], dict(GIVING_UP)]


def _several_cells(turns: list[Turn], demonstration: Mapping[str, Any]) -> list[Turn]:
    """Put look-up and log-in into one turn, which writes the password before reading it; the agent gives up."""
    first = _log_in_with_placeholder(turns, demonstration)
    look_up, log_in = turns[first - 1], turns[first]
    both = {"thought": look_up["thought"], "code": look_up["code"] + NEXT_CELL + log_in["code"]}
    return [*turns[: first - 1], both, dict(GIVING_UP)]


def _log_in_with_placeholder(turns: Sequence[Turn], demonstration: Mapping[str, Any]) -> int:
    """Put the placeholder into the first log-in; return the log-in's turn. The turn before looks the password up."""
    first: int = demonstration["roles"].index("login")
    password = next(slip["value"] for slip in demonstration["slips"] if slip["turn"] == first)
    _replace(turns[first], password, PLACEHOLDER_PASSWORD)
    return first


def _looked_up_slips(demonstration: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the slips whose right value a look-up showed and whose turn acts or answers."""
    roles = demonstration["roles"]
    return [slip for slip in demonstration["slips"] if slip["found"] and roles[slip["turn"]] in ("act", "complete")]


def _assumed_value(turns: list[Turn], demonstration: Mapping[str, Any], rng: random.Random) -> list[Turn]:
    """Leave out look-ups other than passwords; the deed with an assumed value fails, and the agent gives up."""
    slip = rng.choice(_looked_up_slips(demonstration))
    number, value = slip["turn"], slip["value"]
    assumed = next(assumed for shape, assumed in ASSUMED if re.fullmatch(shape, str(value)))
    assumed = type(value)(assumed)
    _replace(turns[number], value, assumed)
    # Before its last sentence a deed's thought quotes the task for the other values, which are not assumed.
    quoted, stop, _ = turns[number]["thought"].rpartition(". ") if demonstration["roles"][number] == "act" else [""] * 3
    turns[number]["thought"] = f"{quoted}{stop}I assume it is {assumed}"
    before = _without(turns[:number], demonstration["roles"], "lookup")
    return [*before, turns[number], *([dict(GIVING_UP)] if demonstration["roles"][number] == "act" else [])]


def _guessed_interface(turns: list[Turn], roles: Sequence[str]) -> list[Turn]:
    """Leave out the documentation; the deed's first parameter gets another name, and the agent gives up."""
    act = roles.index("act")
    turns[act]["code"] = re.sub(r"(apis\.\w+\.\w+\()\w+=", rf"\1{GUESSED_PARAMETER}=", turns[act]["code"], count=1)
    return [*_without(turns[:act], roles, "docs"), turns[act], dict(GIVING_UP)]


def _corrected_error(turns: list[Turn], demonstration: Mapping[str, Any], rng: random.Random) -> list[Turn]:
    """Put one flaw of :data:`CORRECTABLE` in; after the error the agent does the omitted turns and does not give up."""
    roles = demonstration["roles"]
    flaw = rng.choice([flaw for flaw in possible_flaws(demonstration) if flaw in CORRECTABLE])
    flawed = flawed_turns(turns, demonstration, rng, flaw)
    if flaw == "guessed_interface":
        return [*flawed[:-1], turns[roles.index("docs")], *turns[roles.index("act") :]]
    return [*flawed[:-1], *turns[roles.index("passwords") :]]


def _without(turns: Sequence[Turn], roles: Sequence[str], role: str) -> list[Turn]:
    """Return the first turns of a solution, those with ``role`` left out."""
    return [turn for turn, its_role in zip(turns, roles, strict=False) if its_role != role]


def _replace(turn: Turn, value: Any, wrong: Any) -> None:
    """Put ``wrong`` in place of the literal ``value`` in the code, and in the thought.

    In the thought, equal digits within another number or a time of day stay as they are.
    """
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
    turn["thought"] = re.sub(rf"(?<![\w:]){re.escape(str(value))}(?!\w|:\d)", lambda _: str(wrong), turn["thought"])
