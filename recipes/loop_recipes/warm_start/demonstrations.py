"""Supervised data for the warm start: reference turns of train tasks, run in the real world, as conversations.

A reference solution is a list of turns {"thought", "code"}; some copies are given a deliberate flaw (a skipped look-up,
a wrong amount, another account's password). Each is executed turn by turn through the environment pool, so every
observation, error messages included, is what the engine really printed.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from agent_environments.observation import REMINDER_HEAD
from agent_environments.protocol import EnvironmentPool, Message
from appworld_adapter.flaws import flawed_turns, possible_flaws
from rollout_server.chat_tokens import ChatTokens
from rollout_server.ids import rollout_id
from rollout_server.run_files import write_whole
from rollout_server.schema import ConfigError


@dataclass(frozen=True)
class Demonstration:
    """One executed solution: the opening messages, then (action, observation) steps; the last observation is unused.

    ``flaw`` is its deliberate flaw, None for an unchanged reference solution.
    """

    task_id: str
    flaw: str | None
    reward: float
    success: bool
    opening: tuple[Message, ...]
    steps: tuple[tuple[str, str], ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> Demonstration:
        data = json.loads(line)
        opening = tuple(Message(**message) for message in data.pop("opening"))
        return cls(opening=opening, steps=tuple((action, shown) for action, shown in data.pop("steps")), **data)

    def texts(self) -> list[str]:
        """What the tokenizer is trained on: every message, but no observation of an API's documentation.

        The reminder of the task, which ends most observations, stands in it once.
        """
        shown = [observation for action, observation in self.steps if "apis.api_docs." not in action]
        once = [*shown[:1], *(observation.partition(REMINDER_HEAD)[0] for observation in shown[1:])]
        return [*(message.content for message in self.opening), *(action for action, _ in self.steps), *once]


def format_action(turn: Mapping[str, str]) -> str:
    """A turn as the policy writes it: the thought, then one fenced block."""
    return f"{turn['thought']}\n```python\n{turn['code']}\n```"


@dataclass(frozen=True)
class Script:
    """What one episode will do."""

    task_id: str
    flaw: str | None
    turns: tuple[Mapping[str, str], ...]


_LITERAL = re.compile(r"\b(?!\w+_id\b)(\w+)=('[^']+'|\d+)")


def quoting(turns: Sequence[Mapping[str, str]], roles: Sequence[str], task: str) -> list[dict[str, str]]:
    """``turns``, where the thought of a look-up or deed first quotes each value that the text of the task gives it.

    "Send $48, so amount: 48. note is fruit, so description: fruit. I send the money." Quoted are the value and up to
    two words before it. A small model copies what stands behind words that it has just written; the words that lead to
    a value in the task are others than the code's, and the quotation joins them. An id is never in the task's text:
    the same digits there are another number.
    """
    quoted = []
    for turn, role in zip(turns, roles, strict=True):
        said = ""
        for name, literal in _LITERAL.findall(turn["code"] if role in ("lookup", "act") else ""):
            value = literal.strip("'")
            found = re.search(rf"(?<!\S)(?:[A-Za-z]+:? ){{0,2}}\$?{re.escape(value)}(?![\w@]|:\d)", task)
            if found:
                said += f"{found[0]}, so {name}: {value}. "
        quoted.append({**turn, "thought": said + turn["thought"]})
    return quoted


def draw_scripts(
    root: Path, tasks: Sequence[str], count: int, seed: int, flawed_share: float = 0.0, habits: Sequence[str] = ()
) -> list[Script]:
    """``count`` scripts, task after task in a shuffled order.

    With ``habits`` all of them have one of these flaws, and tasks that leave no room for any are passed over; without,
    a share of them has any flaw. Which one is drawn anew each time.

    Raises:
        ConfigError: no task leaves room for a habit.
    """
    rng = random.Random(f"demonstrations {seed}")
    solutions = []
    for task_id in rng.sample(list(tasks), len(tasks)):
        folder = root / "data" / "tasks" / task_id
        turns, demonstration = (
            json.loads((folder / "ground_truth" / f"{name}.json").read_text()) for name in ("turns", "demonstration")
        )
        task = json.loads((folder / "specs.json").read_text())["instruction"]
        turns = quoting(turns, demonstration["roles"], task)
        possible = [flaw for flaw in possible_flaws(demonstration) if not habits or flaw in habits]
        if possible or not habits:
            solutions.append((task_id, turns, demonstration, possible))
    if not solutions:
        raise ConfigError(f"demonstrations.habits: none of {len(tasks)} tasks leaves room for {', '.join(habits)}")
    scripts = []
    for task_id, turns, demonstration, possible in itertools.islice(itertools.cycle(solutions), count):
        flaw = rng.choice(possible) if habits or rng.random() < flawed_share else None
        if flaw is not None:
            turns = flawed_turns(turns, demonstration, rng, flaw)
        scripts.append(Script(task_id, flaw, tuple(turns)))
    return scripts


async def _play(pool: EnvironmentPool, script: Script, episode_id: str) -> Demonstration:
    environment = await pool.acquire(episode_id)
    try:
        opening = await environment.start(script.task_id)
        steps = []
        for turn in script.turns:
            action = format_action(turn)
            result = await environment.step(action)
            steps.append((action, result.observation))
            if result.done:
                break
        grade = await environment.grade()
    finally:
        await environment.close()
    return Demonstration(script.task_id, script.flaw, grade.reward, grade.success, tuple(opening), tuple(steps))


async def collect(pool: EnvironmentPool, scripts: Sequence[Script], at_once: int) -> list[Demonstration]:
    """Play all scripts, ``at_once`` at a time, in a pool that is opened and closed here."""
    columns = (TextColumn("demonstrations"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    places = asyncio.Semaphore(at_once)
    await pool.open()
    try:
        with Progress(*columns) as progress:
            bar = progress.add_task("", total=len(scripts))

            async def play(index: int, script: Script) -> Demonstration:
                async with places:
                    demonstration = await _play(pool, script, rollout_id("demonstration", script.task_id, index, 0))
                progress.advance(bar)
                return demonstration

            return list(await asyncio.gather(*(play(index, script) for index, script in enumerate(scripts))))
    finally:
        await pool.close()


def save(demonstrations: Iterable[Demonstration], path: Path) -> None:
    """One JSON object a line; the file appears only when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(f"{demonstration.to_json()}\n" for demonstration in demonstrations))


def load(path: Path) -> list[Demonstration]:
    return [Demonstration.from_json(line) for line in path.read_text().splitlines()]


@dataclass(frozen=True)
class Example:
    """A conversation as it would be served. ``token_ids`` [s] int64; ``mask`` [s] is true where the agent speaks."""

    token_ids: Tensor
    mask: Tensor


def render(demonstration: Demonstration, tokens: ChatTokens) -> Example:
    """Token ids through the rollout node's own chat format; the mask covers each action and its ``<|im_end|>``."""
    token_ids = tokens.prompt(demonstration.opening)
    mask = [False] * len(token_ids)
    for number, (action, _) in enumerate(demonstration.steps):
        if number:
            between = tokens.continuation(demonstration.steps[number - 1][1], closed=True)
            token_ids += between
            mask += [False] * len(between)
        spoken = [*tokens.encode_text(action), tokens.im_end]
        token_ids += spoken
        mask += [True] * len(spoken)
    return Example(torch.tensor(token_ids), torch.tensor(mask))


_ADDRESS = re.compile(r"\b([a-z]+)\.([a-z]+)@")
_PASSWORD = re.compile(r"password='([a-z]{6,})'")
_ACCOUNT = re.compile(r"^[a-z_]+: ([a-z]{6,})$", re.MULTILINE)
_FULL_NAME = re.compile(r"\b([A-Z][a-z]+) ([A-Z][a-z]+)\b")
_PHONE = re.compile(r"\b555\d{7}\b")
_NUMBER = re.compile(r"(?:amount|answer|volume|_id)=(\d+)\b")
_WORDS = re.compile(r"\b(?:title|label|message|content|added_content|description|query|answer)='([a-z ]+)'")
_CLOCK = re.compile(r"\btime='(\d\d:\d\d)'")
_TODAY = re.compile(r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\b")
_DIGITS = re.compile(r"(?<![A-Za-z0-9:-])\d{1,4}(?![A-Za-z0-9:-])")
_SYLLABLE = re.compile(r"[bdfgklmnprstv][aeiou]")


def with_other_names(demonstration: Demonstration, rng: random.Random) -> Demonstration:
    """The same conversation about people with other names, addresses, passwords, phone numbers, amounts and ids.

    A name, password or number is replaced, wherever it stands, by one of the same shape with other syllables or digits;
    because no value is seen twice, a small model must copy values instead of memorising them. A number that the agent
    wrote but nobody showed it (a sum, a guess) stays. So that the date does not tell the task either, it is another
    one, and so are times of alarms and, every other time, the words of titles, labels and messages.
    """
    shown = "\n".join([*(m.content for m in demonstration.opening), *(observed for _, observed in demonstration.steps)])
    text = "\n".join([shown, *(action for action, _ in demonstration.steps)])
    words = {word for pair in _ADDRESS.findall(text) for word in pair}
    words |= {*_PASSWORD.findall(text), *_ACCOUNT.findall(text)}
    # Names that an API printed. In the prompt and in reminders of it other pairs of capitals stand, such as Python's.
    for observed in (observed.partition(REMINDER_HEAD)[0] for _, observed in demonstration.steps):
        words |= {word.lower() for pair in _FULL_NAME.findall(observed) for word in pair}
    new: dict[str, str] = {}
    for word in sorted(words):
        other = _SYLLABLE.sub(lambda _: rng.choice("bdfgklmnprstv") + rng.choice("aeiou"), word)
        new |= {word: other, word.capitalize(): other.capitalize()}
    new |= {phone: f"555{rng.randrange(10**7):07d}" for phone in sorted(set(_PHONE.findall(text)))}
    if rng.random() < 0.5:
        new |= {word: _invented_word(rng) for word in _words_of_values([action for action, _ in demonstration.steps])}
    clocks = sorted({clock for action, _ in demonstration.steps for clock in _CLOCK.findall(action)})
    new |= {clock: f"{rng.randrange(24):02d}:{rng.randrange(60):02d}" for clock in clocks}
    new |= {day: _some_day(rng) for day in sorted(set(_TODAY.findall(text)))}
    taken = set(_DIGITS.findall(text))
    for number in sorted(set(_NUMBER.findall(text)) & set(_DIGITS.findall(shown))):
        free = [n for n in map(str, range(10 ** (len(number) - 1), 10 ** len(number))) if n not in taken]
        if free:
            new[number] = rng.choice(free)
            taken.add(new[number])
    if not new:
        return demonstration
    # Not a part of a longer word, a date or a time of day.
    known = "|".join(sorted(map(re.escape, new), key=len, reverse=True))
    pattern = re.compile(rf"(?<![A-Za-z0-9-])(?<!\d:)(?:{known})(?![A-Za-z0-9-]|:\d)")

    def renamed(content: str) -> str:
        return pattern.sub(lambda found: new[found[0]], content)

    return Demonstration(
        demonstration.task_id,
        demonstration.flaw,
        demonstration.reward,
        demonstration.success,
        tuple(Message(message.role, renamed(message.content)) for message in demonstration.opening),
        tuple((renamed(action), renamed(observation)) for action, observation in demonstration.steps),
    )


def _words_of_values(actions: Sequence[str]) -> list[str]:
    """Of titles, labels and messages that the agent wrote; not those that stand in other parts of what it wrote."""
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
