"""The messages that open an AppWorld episode, from a template file in ``prompts/``.

A template is text with lines ``=== system``, ``=== user`` and ``=== assistant`` that begin its messages, and
``{{name}}`` where a value of the task goes. The task message itself is not in the template: it is the paper's, the same
for every template.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

from agent_environments.protocol import Message, Role

PROMPT_FOLDER = Path(__file__).resolve().parent / "prompts"
TASK_MESSAGE_HEAD = "Using these APIs, now generate code to solve the actual task:\n\n"

_HEADER = re.compile(r"^=== (\w+)[ \t]*\n", re.MULTILINE)
_FIELD = re.compile(r"\{\{(\w+)\}\}")


@dataclass(frozen=True)
class TaskCard:
    """The facts of a task that the agent's prompt states, from the task's ``specs.json``."""

    task_id: str
    instruction: str
    first_name: str
    last_name: str
    email: str
    phone_number: str
    date: str

    @classmethod
    def load(cls, root: str | Path, task_id: str) -> TaskCard:
        specs: Mapping[str, Any] = json.loads(
            (Path(root) / "data" / "tasks" / task_id / "specs.json").read_text(encoding="utf-8")
        )
        supervisor = specs["supervisor"]
        return cls(
            task_id=task_id,
            instruction=specs["instruction"],
            first_name=supervisor["first_name"],
            last_name=supervisor["last_name"],
            email=supervisor["email"],
            phone_number=supervisor["phone_number"],
            date=datetime.datetime.fromisoformat(specs["datetime"]).isoformat(),
        )


def task_lines(card: TaskCard) -> str:
    """Return the three lines that end the task message and every observation but the last."""
    return (
        f"Today's date is: {card.date}\n"
        f"My name is: {card.first_name} {card.last_name}. "
        f"My personal email is {card.email} and phone number is {card.phone_number}.\n"
        f"Task: {card.instruction}"
    )


class Prompt:
    """A template, read and checked once."""

    def __init__(self, name: str) -> None:
        path = PROMPT_FOLDER / f"{name}.txt"
        if Path(name).name != name or not path.exists():
            names = ", ".join(sorted(path.stem for path in PROMPT_FOLDER.glob("*.txt")))
            raise ValueError(f"no prompt {name!r}; there are {names}")
        parts = _HEADER.split(path.read_text(encoding="utf-8"))
        if parts[0].strip():
            raise ValueError(f"prompt {name!r}: text before the first === line")
        self._messages: list[tuple[Role, str]] = []
        for role, text in zip(parts[1::2], parts[2::2], strict=True):
            if role not in get_args(Role):
                raise ValueError(f"prompt {name!r}: {role!r} is not a role")
            unknown = set(_FIELD.findall(text)) - set(TaskCard.__dataclass_fields__)
            if unknown:
                raise ValueError(f"prompt {name!r}: unknown fields {', '.join(sorted(unknown))}")
            self._messages.append((cast(Role, role), text.strip("\n")))

    def messages(self, card: TaskCard) -> list[Message]:
        """Return the opening messages: the template rendered for the task's supervisor, then the task message."""
        rendered = [
            Message(role, _FIELD.sub(lambda field: str(getattr(card, field[1])), text)) for role, text in self._messages
        ]
        return [*rendered, Message("user", TASK_MESSAGE_HEAD + task_lines(card))]
