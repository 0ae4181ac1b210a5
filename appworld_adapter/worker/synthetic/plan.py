"""What a template makes of one task: instruction, requirements, and the reference solution as turns.

A turn is one step of an agent: a short thought and the code it runs. Values that the agent must find or copy stand in
the code as literals, exactly as they stand in an observation or in the task's text. What a look-up finds is printed as
``name: value``, and the thought before it is used says the same words again. So that a small model copies it by the
words that stand before it, which is the one way of copying that is easy to learn.
"""

from __future__ import annotations

import datetime
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from base_world import Engine
from people import Person

Answer = str | int | None


@dataclass
class SolutionScript:
    """The reference solution under construction, and where in it an agent may plausibly go wrong.

    ``roles[i]`` says what turn i is for (docs, passwords, login, lookup, act, complete). ``slips`` lists literals that
    a careless agent gets wrong: {"turn", "value", "wrong": [...], "found": whether a look-up showed it, as the thought
    says}.
    """

    person: Person
    turns: list[dict[str, str]] = field(default_factory=list)
    roles: list[str] = field(default_factory=list)
    slips: list[dict[str, Any]] = field(default_factory=list)

    def add(self, role: str, thought: str, code: str) -> None:
        self.turns.append({"thought": thought, "code": code})
        self.roles.append(role)

    def docs(self, app: str, api: str) -> None:
        look_up = f"apis.api_docs.show_api_doc(app_name={app!r}, api_name={api!r})"
        self.add("docs", f"I look up how {api} is called.", f"for p in {look_up}['parameters']:\n    print(p['name'])")

    def login(self, app: str) -> None:
        """Two turns: the look-up of the password, and the log-in with it."""
        find = (
            "for a in apis.supervisor.show_account_passwords():\n"
            f"    if a['account_name'] == {app!r}:\n"
            "        print(a['account_name'] + ':', a['password'])"
        )
        self.add("passwords", f"I look up the {app} password.", find)
        password = self.person.passwords[app]
        field = "phone_number" if app == "phone" else "email"
        code = (
            f"{app}_token = apis.{app}.login(username=apis.supervisor.show_profile()[{field!r}], "
            f"password={password!r})['access_token']"
        )
        self.add("login", f"I log in to {app}.", code)
        self.slip(password, [other for name, other in self.person.passwords.items() if name != app])

    def lookup(self, thought: str, records: str, variable: str, shows: Mapping[str, str]) -> None:
        """Prints of each of ``records`` (code) what :func:`labelled` makes of ``shows``."""
        self.add("lookup", thought, f"for {variable} in {records}:\n{labelled(variable, shows)}")

    def act(self, thought: str, app: str, api: str, **arguments: Any) -> None:
        self.add("act", thought, f"print({call(app, api, **arguments)})")

    def slip(self, value: Any, wrong: Sequence[Any]) -> None:
        """Notes that a careless agent may write one of ``wrong`` for ``value`` in the turn added last."""
        wrong = [other for other in wrong if other != value]
        if wrong:
            found = bool(re.search(rf"(?<!\w){re.escape(str(value))}(?!\w)", self.turns[-1]["thought"]))
            self.slips.append({"turn": len(self.turns) - 1, "value": value, "wrong": wrong, "found": found})

    def complete(self, answer: Answer = None, wrong: Sequence[Answer] = (), found: str = "") -> None:
        """Ends the task; ``found`` are the words with which an observation told the answer."""
        if answer is None:
            self.add("complete", "The task is done.", "apis.supervisor.complete_task()")
            return
        self.add("complete", f"I have the answer. {found}", f"apis.supervisor.complete_task(answer={answer!r})")
        self.slip(answer, wrong)


def call(app: str, api: str, **arguments: Any) -> str:
    """Writes the call of an app's function with the token that logging in gave."""
    given = ", ".join([*(f"{name}={value!r}" for name, value in arguments.items()), f"access_token={app}_token"])
    return f"apis.{app}.{api}({given})"


def labelled(variable: str, shows: Mapping[str, str]) -> str:
    """Indented lines that print ``name: value`` of a record.

    A key of ``shows`` is a word or itself a field of the record (``['title']``); a value is one or more fields.
    """
    lines = []
    for name, fields in shows.items():
        label = f"{variable}{name} + ':'" if name.startswith("[") else repr(f"{name}:")
        lines.append(f"    print({', '.join([label, *(f'{variable}{field}' for field in fields.split())])})")
    return "\n".join(lines)


@dataclass(frozen=True)
class Plan:
    """A finished task, but for its place on disk."""

    instruction: str
    requirements: list[dict[str, Any]]
    script: SolutionScript
    answer: Answer = None


@dataclass
class Stage:
    """What a template works with: one person's world at one moment, and a seeded source of choices.

    ``phrasing`` is the same for the three tasks of a scenario, so that they are one instruction with other particulars.
    """

    engine: Engine
    person: Person
    rng: random.Random
    now: datetime.datetime
    phrasing: int
    stirred: set[str] = field(default_factory=set)

    def phrase(self, *wordings: str) -> str:
        return wordings[self.phrasing % len(wordings)]

    def before(self, person: Person, app: str, api: str, **arguments: Any) -> Any:
        """Something that happened the day before the task, done by ``person``."""
        if app not in self.stirred:
            self._stir(app)
        at = self.now - datetime.timedelta(hours=30, seconds=-self.rng.randrange(3600))
        return self.engine.call(person, app, api, at, **arguments)

    def _stir(self, app: str) -> None:
        """Lets people unknown to ``person`` use ``app`` first, so that ids differ from task to task."""
        self.stirred.add(app)
        known = {self.person.email} | {other.email for other in self.engine.population.others(self.person)}
        unknown = [person for person in self.engine.population.people if person.email not in known]
        other, *busy = self.rng.sample(unknown, self.rng.randrange(2, 9))
        for person in busy:
            api, arguments = STRANGERS_DEEDS[app]
            debtor = {"user_email": other.email} if app == "venmo" else {}
            self.before(person, app, api, **arguments, **debtor)

    def look(self, app: str, api: str, **arguments: Any) -> Any:
        """What ``person`` sees when looking now."""
        return self.engine.call(self.person, app, api, self.now, **arguments)

    def user_id(self, person: Person, app: str) -> int:
        return self.engine.user_id(person, app)

    def relation(self) -> tuple[str, Person]:
        return self.rng.choice(self.engine.population.contacts[self.person.email])

    def others(self, count: int) -> list[Person]:
        return self.rng.sample(self.engine.population.others(self.person), count)

    def strangers(self, person: Person) -> list[Person]:
        """The contacts that a careless agent may take for ``person``."""
        return [other for other in self.engine.population.others(self.person) if other is not person]

    def script(self) -> SolutionScript:
        return SolutionScript(self.person)

    def slip_person(self, script: SolutionScript, person: Person, field: str) -> None:
        """Notes that a careless agent may write the ``field`` of another contact for that of ``person``."""
        script.slip(getattr(person, field), [getattr(other, field) for other in self.strangers(person)])


STRANGERS_DEEDS = {
    "phone": ("create_alarm", {"time": "12:00", "label": "lunch"}),
    "simple_note": ("create_note", {"title": "to do", "content": "sleep"}),
    "spotify": ("create_playlist", {"title": "rainy days"}),
    "todoist": ("create_task", {"project_id": 0, "title": "rest"}),
    "venmo": ("create_payment_request", {"amount": 20, "description": "bus"}),
}

Template = Callable[[Stage], Plan]


@dataclass(frozen=True)
class TemplateInfo:
    """A registered template: ``kind`` is "train" (used in train, dev and test_normal), "held_out" (test_normal only)
    or "challenge" (test_challenge only)."""

    name: str
    build: Template
    difficulty: int
    apps: tuple[str, ...]
    kind: str


TEMPLATES: dict[str, TemplateInfo] = {}


def template(difficulty: int, apps: str, kind: str = "train") -> Callable[[Template], Template]:
    """Registers the decorated function under its own name."""

    def register(build: Template) -> Template:
        TEMPLATES[build.__name__] = TemplateInfo(build.__name__, build, difficulty, tuple(apps.split()), kind)
        return build

    return register


# Requirements. All are data, read by evaluation_program.py, which is every task's evaluation.py.


def only(**limits: dict[str, int]) -> dict[str, Any]:
    """Nothing but so many records of these models changed; keys are ``app__Model``. Doing nothing passes it."""
    allowed = {name.replace("__", "."): counts for name, counts in limits.items()}
    text = "Nothing changed but what the task asks for." if allowed else "No record of any app was changed."
    return {"kind": "only", "text": text, "allowed": allowed}


def added(text: str, model: str, **fields: Any) -> dict[str, Any]:
    """A record of ``model`` with these field values was added, and no other one."""
    return {"kind": "added", "text": text, "model": model, "fields": fields, "reported": False}


def updated(text: str, model: str, record_id: int | None = None, **fields: Any) -> dict[str, Any]:
    """One record of ``model`` was updated: the one with ``record_id`` if given, to these values."""
    return {"kind": "updated", "text": text, "model": model, "id": record_id, "fields": fields, "reported": False}


def changed(thing: str, model: str, record_id: int, text: str, **fields: Any) -> list[dict[str, Any]]:
    """The requirements of a change: one ``thing``, the right one, to these values, and nothing else."""
    return [
        only(**{model: {"updated": 1}}),
        updated(f"One {thing} was changed.", model),
        updated(f"The right {thing} was changed.", model, record_id),
        reported(updated(text, model, record_id, **fields)),
    ]


def reported(requirement: dict[str, Any]) -> dict[str, Any]:
    """The same requirement, which now also wants the task to be marked complete, without an answer."""
    return requirement | {"reported": True, "text": requirement["text"] + " The task was then marked complete."}


def answers(*candidates: Answer, of: str) -> list[dict[str, Any]]:
    """The requirements of a question: nothing changed, an answer out of ``candidates``, and the right one."""
    return [
        only(),
        {"kind": "answer_among", "text": f"The answer is one of {of}.", "candidates": list(candidates)},
        {"kind": "answer", "text": "The answer is the right one."},
    ]
