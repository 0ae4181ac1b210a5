"""AppWorld's demonstrations: reference turns of a practice world's tasks, some of them flawed, about other people.

A reference solution is a list of turns {"thought", "code"}; some copies get a deliberate flaw (a skipped look-up,
a wrong amount, another account's password).
"""

from __future__ import annotations

import itertools
import json
import random
import re
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import appworld_adapter
from agent_environments.observation import REMINDER_HEAD
from appworld_adapter import flaws
from appworld_adapter.dataset import difficulty_of, load_split
from appworld_adapter.flaws import flawed_turns, possible_flaws
from appworld_adapter.making import interpreter_command
from loop_formats.schema import ConfigError
from loop_recipes.warm_start.config import PracticeWorld
from loop_recipes.warm_start.demonstration import Demonstration, Script
from loop_recipes.warm_start.demonstrator import draw
from rollout_server.config import EnvironmentConfig

GENERATOR = Path(appworld_adapter.__file__).parent / "worker" / "synthetic" / "generate.py"
PROMPTS = Path(appworld_adapter.__file__).parent / "prompts"


class AppWorldDemonstrator:
    """Reference solutions of a practice world; a missing world is generated.

    Args:
        environment: the section of a rollout node; its ``root`` is replaced by the practice world's.
        world: the practice world.
    """

    flaws = flaws.FLAWS

    def __init__(self, environment: EnvironmentConfig, world: PracticeWorld) -> None:
        self.environment = replace(environment, options={**environment.options, "root": world.root})
        self._world = world
        self._root = Path(world.root)

    def prepare(self) -> None:
        world, python = self._world, self.environment.options["python"]
        command = [python, str(GENERATOR), "--root", world.root, "--seed", str(world.seed)]
        command += ["--scenarios-per-template", str(world.scenarios_per_template), "--people", str(world.people)]
        try:
            subprocess.run(command, check=True)
        except OSError as error:
            raise ConfigError(
                f"no AppWorld interpreter at {python}: run {interpreter_command(python)} ({error})"
            ) from error
        except subprocess.CalledProcessError as error:
            raise ConfigError(f"the practice world could not be generated (exit {error.returncode})") from error

    def sources(self) -> list[Path]:
        prompt = PROMPTS / f"{self.environment.options['prompt']}.txt"
        return [self._root / "dataset.json", prompt, Path(flaws.__file__), Path(__file__)]

    def scripts(
        self, split: str, count: int, seed: int, flawed_share: float = 0.0, habits: Sequence[str] = ()
    ) -> list[Script]:
        return draw_scripts(self._root, load_split(self._root, split), count, seed, flawed_share, habits)

    def renamed(self, demonstration: Demonstration, rng: random.Random) -> Demonstration:
        return with_other_names(demonstration, rng)

    def texts(self, demonstration: Demonstration) -> list[str]:
        return texts(demonstration)

    def group(self, task_id: str) -> str:
        return f"difficulty {difficulty_of(str(self._root), task_id)}"


def texts(demonstration: Demonstration) -> list[str]:
    """Return the texts to train the tokenizer on: every message, but no observation of an API's documentation.

    Most observations end with a reminder of the task; the texts have this reminder only once.
    """
    observations = [observation for action, observation in demonstration.steps if "apis.api_docs." not in action]
    once = [*observations[:1], *(observation.partition(REMINDER_HEAD)[0] for observation in observations[1:])]
    return [
        *(message.content for message in demonstration.opening),
        *(action for action, _ in demonstration.steps),
        *once,
    ]


def format_action(turn: Mapping[str, str]) -> str:
    """Write a turn in the policy's form: the thought, then one fenced block."""
    return f"{turn['thought']}\n```python\n{turn['code']}\n```"


_LITERAL = re.compile(r"\b(?!\w+_id\b)(\w+)=('[^']+'|\d+)")


def quoting(
    turns: Sequence[Mapping[str, str]], roles: Sequence[str], task: str, wording: Collection[str]
) -> list[dict[str, str]]:
    """Return ``turns`` in which the thought of a look-up or deed first quotes each value from the text of the task.

    "Send $48, so amount: 48. note is fruit, so description: fruit. I send the money." The quotation is the value and up
    to two words of the ``wording`` before it. A small model copies the text behind words that it has just written; the
    words before a value in the task differ from the code's, and the quotation joins them. Words outside of the wording,
    such as a name, are left out. An id is never in the task's text: the same digits there are another number.
    """
    quoted = []
    for turn, role in zip(turns, roles, strict=True):
        quotes = ""
        for name, literal in _LITERAL.findall(turn["code"] if role in ("lookup", "act") else ""):
            value = literal.strip("'")
            match = re.search(rf"(?<!\S)\$?{re.escape(value)}(?![\w@]|:\d)", task)
            if match:
                before = task[: match.start()].split()[-2:]
                lead = itertools.takewhile(lambda word: word in wording, reversed(before))
                quotes += f"{' '.join([*reversed([*lead]), match[0]])}, so {name}: {value}. "
        quoted.append({**turn, "thought": quotes + turn["thought"]})
    return quoted


def _instruction(root: Path, task_id: str) -> str:
    return json.loads((root / "data" / "tasks" / task_id / "specs.json").read_text())["instruction"]


def _wording(root: Path, task_id: str) -> set[str]:
    """Return the words that all tasks of the scenario share, without the particulars of one task."""
    scenario = task_id.rpartition("_")[0]
    tasks = (root / "data" / "tasks").glob(f"{scenario}_*")
    return set.intersection(*(set(_instruction(root, task.name).split()) for task in tasks))


def draw_scripts(
    root: Path, tasks: Sequence[str], count: int, seed: int, flawed_share: float = 0.0, habits: Sequence[str] = ()
) -> list[Script]:
    """Draw ``count`` scripts of ``tasks`` with :func:`~loop_recipes.warm_start.demonstrator.draw`.

    Raises:
        ConfigError: no task leaves room for a habit.
    """
    rng = random.Random(f"demonstrations {seed}")
    wanted = habits or [flaw for flaw in flaws.FLAWS if flaw != flaws.CORRECTED_ERROR]
    solutions = {task_id: _solution(root, task_id) for task_id in tasks}
    possible = {
        task_id: [flaw for flaw in possible_flaws(demonstration) if flaw in wanted]
        for task_id, (_, demonstration) in solutions.items()
    }
    scripts = []
    for task_id, flaw in draw(possible, count, rng, flawed_share, habits):
        turns, demonstration = solutions[task_id]
        if flaw is not None:
            turns = flawed_turns(turns, demonstration, rng, flaw)
        scripts.append(Script(task_id, flaw, tuple(map(format_action, turns))))
    return scripts


def _solution(root: Path, task_id: str) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """Read a task's reference turns, changed to quote the task, and the task's demonstration.json."""
    folder = root / "data" / "tasks" / task_id
    turns, demonstration = (
        json.loads((folder / "ground_truth" / f"{name}.json").read_text()) for name in ("turns", "demonstration")
    )
    return quoting(turns, demonstration["roles"], _instruction(root, task_id), _wording(root, task_id)), demonstration


_ADDRESS = re.compile(r"\b([a-z]+)\.([a-z]+)@")
_PASSWORD = re.compile(r"password='([a-z]{6,})'")
_ACCOUNT = re.compile(r"^[a-z_]+: ([a-z]{6,})$", re.MULTILINE)
_FULL_NAME = re.compile(r"\b([A-Z][a-z]+) ([A-Z][a-z]+)\b")
_PHONE = re.compile(r"\b555\d{7}\b")
_NUMBER = re.compile(r"(?:amount|answer|volume|_id)=(\d+)\b")
_LISTED = re.compile(r"^[^\n:]+: (\d{1,4})$", re.MULTILINE)
_WORDS = re.compile(r"\b(?:title|label|message|content|added_content|description|query|answer)='([a-z ]+)'")
_CLOCK = re.compile(r"\btime='(\d\d:\d\d)'")
_TODAY = re.compile(r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\b")
_DIGITS = re.compile(r"(?<![A-Za-z0-9:-])\d{1,4}(?![A-Za-z0-9:-])")
_ASSUMED = {assumed for _, assumed in flaws.ASSUMED}
_SYLLABLE = re.compile(r"[bdfgklmnprstv][aeiou]")


def with_other_names(demonstration: Demonstration, rng: random.Random) -> Demonstration:
    """Rewrite the conversation about people with other names, addresses, passwords, phone numbers, amounts and ids.

    A name, password or number is replaced, wherever it stands, by one of the same shape with other syllables or digits;
    because no value appears twice, a small model must copy values instead of memorising them. A number that the agent
    wrote but did not read (a sum, a guess) stays. The assumption of a careless agent stays too, though it may look like
    a number in the text: drawn anew each time, it would be unpredictable, and a model trained on it babbles. The date
    changes, because it would give the task away. So do times of alarms and, every other time, the words of titles,
    labels and messages.
    """
    context = "\n".join([*(m.content for m in demonstration.opening), *(reply for _, reply in demonstration.steps)])
    text = "\n".join([context, *(action for action, _ in demonstration.steps)])
    words = {word for pair in _ADDRESS.findall(text) for word in pair}
    words |= {*_PASSWORD.findall(text), *_ACCOUNT.findall(text)}
    # Names that an API printed. The prompt and its reminders hold other pairs of capitals, such as Python's.
    for observed in (observed.partition(REMINDER_HEAD)[0] for _, observed in demonstration.steps):
        words |= {word.lower() for pair in _FULL_NAME.findall(observed) for word in pair}
    new: dict[str, str] = {}
    for word in sorted(words):
        other = _SYLLABLE.sub(lambda _: rng.choice("bdfgklmnprstv") + rng.choice("aeiou"), word)
        new |= {word: other, word.capitalize(): other.capitalize()}
    new |= {phone: "555" + "".join(rng.sample("012346789", 7)) for phone in sorted(set(_PHONE.findall(text)))}
    if rng.random() < 0.5:
        new |= {word: _invented_word(rng) for word in _words_of_values([action for action, _ in demonstration.steps])}
    for assumed in _ASSUMED:
        new.pop(assumed, None)
    clocks = sorted({clock for action, _ in demonstration.steps for clock in _CLOCK.findall(action)})
    new |= {clock: f"{rng.randrange(24):02d}:{rng.randrange(60):02d}" for clock in clocks}
    new |= {day: _some_day(rng) for day in sorted(set(_TODAY.findall(text)))}
    written = set(_NUMBER.findall(text)) & set(_DIGITS.findall(context))
    listed = set(_LISTED.findall(context))
    new |= _shifted((written | listed) - _ASSUMED, set(_DIGITS.findall(text)), rng)
    if not new:
        return demonstration
    # Not a part of a longer word, a date or a time of day.
    known = "|".join(sorted(map(re.escape, new), key=len, reverse=True))
    pattern = re.compile(rf"(?<![A-Za-z0-9-])(?<!\d:)(?:{known})(?![A-Za-z0-9-]|:\d)")

    def renamed(content: str) -> str:
        return pattern.sub(lambda match: new[match[0]], content)

    return demonstration.rewritten(renamed)


def _shifted(numbers: set[str], taken: set[str], rng: random.Random) -> dict[str, str]:
    """Shift all ``numbers`` of the same length by the same amount; avoid the ``taken`` numbers that stay.

    So neighbouring ids stay neighbours, as in a database: the first two digits do not distinguish 104 from 105.
    """
    new: dict[str, str] = {}
    for length in sorted({len(number) for number in numbers}):
        low = 10 ** (length - 1)
        group = sorted(number for number in numbers if len(number) == length and int(number) >= low)
        for shift in rng.sample(range(9 * low), min(9 * low, 50)):
            moved = {number: str(low + (int(number) - low + shift) % (9 * low)) for number in group}
            if not set(moved.values()) & (taken - set(group)):
                new |= moved
                break
    return new


def _words_of_values(actions: Sequence[str]) -> list[str]:
    """Return the words of titles, labels and messages that the agent wrote, without words elsewhere in its actions."""
    values = sorted({value for action in actions for value in _WORDS.findall(action)}, key=len, reverse=True)
    rest = "\n".join(actions)
    for value in values:
        rest = rest.replace(value, "")
    known = set(re.findall(r"[A-Za-z]+|\w+", rest))
    return sorted({word for value in values for word in value.split() if len(word) > 2} - known)


def _invented_word(rng: random.Random) -> str:
    syllables = [rng.choice("bdfgklmnprstv") + rng.choice("aeiou") for _ in range(rng.randint(1, 3))]
    return "".join(syllables) + rng.choice(("", "n", "r", "s"))


def _some_day(rng: random.Random) -> str:
    return f"2023-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}T{rng.randrange(24):02d}:{rng.randrange(60):02d}:00"
