"""BabyAI (the package ``minigrid``): follow an instruction in a grid of rooms, seen through words.

    python babyai_world.py MEMORY_MB

A task is a level and a seed, ``<level>_<seed>``. Every fifth level is held out (``test_challenge``); of the others,
``train``, ``dev`` and ``test`` differ in their seeds. ``train_one_room`` and so on have the levels that say to go to an
object in a single room with few others, for small policies. The agent sees what the world shows it, 7 x 7 cells ahead,
in our own words. The reward is 1 once the instruction was followed, else 0; the world ends an episode after its own
number of steps.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import Any

import gymnasium
import minigrid  # noqa: F401 - it registers the levels
from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT, STATE_TO_IDX
from minigrid.utils.baby_ai_bot import BabyAIBot
from worker_loop import Step, serve

SEEDS = {"train": range(20), "dev": range(1000, 1002), "test": range(2000, 2005)}
ONE_ROOM_SEEDS = {"train": range(60), "dev": range(1000, 1004), "test": range(2000, 2005)}
HELD_OUT_EVERY = 5

COMMANDS = {
    "turn left": 0,
    "turn right": 1,
    "move forward": 2,
    "pick up": 3,
    "drop": 4,
    "toggle": 5,
}
"""Command -> minigrid's number of the action."""
_NAMES = {number: name for name, number in COMMANDS.items()}
_NAMES[6] = "drop"  # "done" does nothing here; the bot gives it only when there is nothing left to do

INSTRUCTIONS = """\
You are in a grid of rooms and follow an instruction. You see some cells ahead of you, and the commands you can use are:
- turn left, turn right: turn on the spot
- move forward: one cell ahead
- pick up: take the object in the cell ahead of you
- drop: put what you carry into the cell ahead of you
- toggle: open or close the door ahead of you, or open the box; a locked door needs the key of its colour in hand"""

DOOR_STATES = {number: name for name, number in STATE_TO_IDX.items()}
_LEVEL = re.compile(r"BabyAI-(\w+)-v\d+")
ONE_ROOM = re.compile(r"GoTo(Obj(S\d)?|LocalS\dN[2-5]|RedBallNoDists|RedBlueBall)")
"""Levels of the splits that end in ``_one_room``."""
FAR_FROM_THE_MIDDLE = 5
"""Free cells ahead from which the middle of a room lies ahead."""
PATIENCE = 20
"""Commands after which a player who goes straight goes in circles."""
REPLAN_S = 20.0
"""Processor time of the bot for one command, which takes it milliseconds: in some tasks of one family of levels it
looks for a way and never ends."""
LEFT_OUT = re.compile("Debug|Carrying|KeyInBox")
"""Variants for debugging, and levels that the package's bot cannot solve."""


def words(kind: str, colour: str, state: int) -> str:
    if kind == "door":
        return f"{DOOR_STATES[state]} {colour} door"
    return f"{colour} {kind}"


def place(ahead: int, right: int) -> str:
    """Return the place of a cell relative to the agent, such as "ahead 2, left 1"."""
    parts = [f"ahead {ahead}"] if ahead else []
    if right:
        parts.append(f"{'right' if right > 0 else 'left'} {abs(right)}")
    return ", ".join(parts)


@dataclass(frozen=True)
class View:
    """The view of the agent.

    Attributes:
        objects: (words, cells ahead, cells to the right; negative is left) of each object, nearest rows first.
        free: number of free cells ahead of the agent.
        end: the thing behind the free cells; None if the view ends there.
    """

    objects: list[tuple[str, int, int]]
    free: int
    end: str | None

    def describe(self, carrying: Any) -> str:
        objects = [f"- {name} {place(ahead, right)}" for name, ahead, right in self.objects]
        lines = ["You see:", *objects] if objects else ["You see no objects."]
        lines.append(f"Free cells ahead: {self.free}{f', then a {self.end}' if self.end else ''}.")
        lines.append(f"You carry: {'nothing' if carrying is None else f'{carrying.color} {carrying.type}'}.")
        return "\n".join(lines)


def look(image: Any) -> View:
    """Read minigrid's view, [7, 7, 3] of (object, colour, state); the agent is at the bottom, in the middle."""
    width, height, _ = image.shape
    middle = width // 2
    objects, free, end = [], 0, None
    for ahead in range(height):
        for x in sorted(range(width), key=lambda x: (abs(x - middle), x)):
            kind, colour, state = (int(number) for number in image[x, height - 1 - ahead])
            name = IDX_TO_OBJECT[kind]
            if ahead == 0 and x == middle:
                continue  # the agent, or what it carries
            thing = words(name, IDX_TO_COLOR[colour], state) if name in ("door", "ball", "box", "key") else None
            if thing:
                objects.append((thing, ahead, x - middle))
            if x == middle and end is None:
                if name == "wall" or (thing and not thing.startswith("open ")):
                    end = thing or "wall"
                else:
                    free = ahead
    return View(objects, free, end)


class BabyAIEpisode:
    """An episode: a level of BabyAI, made with a seed."""

    def __init__(self, gym_id: str, seed: int) -> None:
        self.game = gymnasium.make(gym_id)
        observation, _ = self.game.reset(seed=seed)
        self._solved = False
        self.mission = str(observation["mission"])
        self.view = look(observation["image"])
        self.opening = f"Instruction: {self.mission}\n\n{self._describe()}"

    def _describe(self) -> str:
        return self.view.describe(self.game.unwrapped.carrying)

    def step(self, command: str) -> Step:
        action = COMMANDS.get(command.lower())
        if action is None:
            return Step(f"There is no such command. Commands: {', '.join(COMMANDS)}.", done=False, failed=True)
        observation, reward, ended, out_of_steps, _ = self.game.step(action)
        self.view = look(observation["image"])
        self._solved = bool(ended and reward > 0)
        note = "You did it." if self._solved else "The episode is over." if ended or out_of_steps else None
        return Step(note or self._describe(), done=bool(ended or out_of_steps))

    def grade(self) -> tuple[float, bool]:
        return float(self._solved), self._solved

    def close(self) -> None:
        self.game.close()


def straight(view: View, wanted: str) -> str:
    """Return a command that leads to the object ``wanted``. It depends only on the present view.

    While the object is ahead, walk; then turn to its side. If the object is not in view, walk away from the walls
    and then turn, because the corners of a large room are seen only from its middle.
    """
    places = [(ahead, right) for name, ahead, right in view.objects if name.endswith(wanted)]
    if not places:
        return "move forward" if view.free >= FAR_FROM_THE_MIDDLE else "turn right"
    ahead, right = places[0]
    if ahead and view.free:
        return "move forward"
    return "turn left" if right < 0 else "turn right"


class BabyAIWorld:
    instructions = INSTRUCTIONS

    def __init__(self) -> None:
        levels = sorted(filter(None, map(_LEVEL.fullmatch, gymnasium.registry)), key=lambda match: match[1])
        self._levels = {match[1]: match[0] for match in levels if not LEFT_OUT.search(match[1])}

    def tasks(self) -> dict[str, list[str]]:
        levels = list(self._levels)
        held_out = levels[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
        known = [level for level in levels if level not in held_out]
        splits = {split: [f"{level}_{seed}" for seed in seeds for level in known] for split, seeds in SEEDS.items()}
        splits["test_challenge"] = [f"{level}_{seed}" for seed in SEEDS["test"] for level in held_out]
        small = [level for level in known if ONE_ROOM.fullmatch(level)]
        for split, seeds in ONE_ROOM_SEEDS.items():
            splits[f"{split}_one_room"] = [f"{level}_{seed}" for seed in seeds for level in small]
        return splits

    def start(self, task: str) -> BabyAIEpisode:
        level, _, seed = task.partition("_")
        return BabyAIEpisode(self._levels[level], int(seed))

    def expert(self, task: str) -> list[str]:
        """Return commands that should solve the task; they can fail.

        In tasks with one room, :func:`straight` chooses them from the view; it walks in circles if an object
        blocks its way. In all other tasks the package's bot chooses them; the bot remembers the map.
        """
        level, _, _ = task.partition("_")
        return self._straight(task) if ONE_ROOM.fullmatch(level) else self._bot(task)

    def _straight(self, task: str) -> list[str]:
        episode = self.start(task)
        wanted = re.split(r" (?:a|the) ", episode.mission)[1]
        commands: list[str] = []
        try:
            while len(commands) < PATIENCE:
                commands.append(straight(episode.view, wanted))
                if episode.step(commands[-1]).done:
                    break
            return commands
        finally:
            episode.close()

    def _bot(self, task: str) -> list[str]:
        episode = self.start(task)
        bot, action, commands = BabyAIBot(episode.game), None, []
        before = signal.signal(signal.SIGPROF, _give_up)
        try:
            while True:
                signal.setitimer(signal.ITIMER_PROF, REPLAN_S)
                action = bot.replan(action)
                commands.append(_NAMES[int(action)])
                if episode.step(commands[-1]).done:
                    return commands
        except Exception:  # its own assertions, in levels that it cannot solve; or no end
            return commands
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            signal.signal(signal.SIGPROF, before)
            episode.close()


def _give_up(*_: Any) -> None:
    raise TimeoutError(f"the bot has no command after {REPLAN_S:g} s")


if __name__ == "__main__":
    serve(BabyAIWorld)
