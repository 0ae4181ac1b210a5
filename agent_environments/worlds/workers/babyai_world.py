"""BabyAI (the package ``minigrid``): follow an instruction in a grid of rooms, seen through words.

    python babyai_world.py MEMORY_MB

A task is a level and a seed, ``<level>_<seed>``. Every fifth level is held out (``test_challenge``); of the others,
``train``, ``dev`` and ``test`` differ in their seeds. ``train_one_room`` and so on are those tasks of a split that say
to go to an object in a single room, for small policies. The agent sees what the world shows it, 7 x 7 cells ahead, in
our own words. The reward is 1 once the instruction was followed, else 0; the world ends an episode after its own number
of steps.
"""

from __future__ import annotations

import re
from typing import Any

import gymnasium
import minigrid  # noqa: F401 - it registers the levels
from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT, STATE_TO_IDX
from minigrid.utils.baby_ai_bot import BabyAIBot
from worker_loop import Step, serve

SEEDS = {"train": range(20), "dev": range(1000, 1002), "test": range(2000, 2005)}
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
ONE_ROOM = re.compile(r"GoTo(Obj|Local|RedBall|RedBlueBall)(NoDists|Grey|S\d(N\d)?)?_\d+")
"""Tasks of the splits that end in ``_one_room``."""
LEFT_OUT = re.compile("Debug|Carrying|KeyInBox")
"""Variants for debugging, and levels that the package's bot cannot solve."""


def words(kind: str, colour: str, state: int) -> str:
    if kind == "door":
        return f"{DOOR_STATES[state]} {colour} door"
    return f"{colour} {kind}"


def place(ahead: int, right: int) -> str:
    """Where a cell is, from the agent: "2 ahead, 1 left"."""
    parts = [f"{ahead} ahead"] if ahead else []
    if right:
        parts.append(f"{abs(right)} {'right' if right > 0 else 'left'}")
    return ", ".join(parts)


def describe(image: Any, carrying: Any) -> str:
    """minigrid's view, [7, 7, 3] of (object, colour, state), in words; the agent is at the bottom, in the middle."""
    width, height, _ = image.shape
    middle = width // 2
    seen, wall = [], None
    for ahead in range(height):
        for x in sorted(range(width), key=lambda x: (abs(x - middle), x)):
            kind, colour, state = (int(number) for number in image[x, height - 1 - ahead])
            name = IDX_TO_OBJECT[kind]
            if ahead == 0 and x == middle:
                continue  # the agent, or what it carries
            if name == "wall" and x == middle and wall is None:
                wall = ahead
            if name in ("door", "ball", "box", "key"):
                seen.append(f"- {words(name, IDX_TO_COLOR[colour], state)}: {place(ahead, x - middle)}")
    lines = ["You see:", *seen] if seen else ["You see no objects."]
    if wall is not None:
        lines.append(f"The way ahead ends at a wall: {wall} ahead.")
    lines.append(f"You carry: {'nothing' if carrying is None else f'{carrying.color} {carrying.type}'}.")
    return "\n".join(lines)


class BabyAIEpisode:
    """One level with one seed."""

    def __init__(self, gym_id: str, seed: int) -> None:
        self.game = gymnasium.make(gym_id)
        shown, _ = self.game.reset(seed=seed)
        self._solved = False
        self.opening = f"Instruction: {shown['mission']}\n\n{self._describe(shown)}"

    def _describe(self, shown: dict[str, Any]) -> str:
        return describe(shown["image"], self.game.unwrapped.carrying)

    def step(self, command: str) -> Step:
        action = COMMANDS.get(command.lower())
        if action is None:
            return Step(f"There is no such command. Commands: {', '.join(COMMANDS)}.", done=False, failed=True)
        shown, reward, ended, out_of_steps, _ = self.game.step(action)
        self._solved = bool(ended and reward > 0)
        note = "You did it." if self._solved else "The episode is over." if ended or out_of_steps else None
        return Step(note or self._describe(shown), done=bool(ended or out_of_steps))

    def grade(self) -> tuple[float, bool]:
        return float(self._solved), self._solved

    def close(self) -> None:
        self.game.close()


class BabyAIWorld:
    instructions = INSTRUCTIONS

    def __init__(self) -> None:
        found = sorted(filter(None, map(_LEVEL.fullmatch, gymnasium.registry)), key=lambda match: match[1])
        self._levels = {match[1]: match[0] for match in found if not LEFT_OUT.search(match[1])}

    def tasks(self) -> dict[str, list[str]]:
        levels = list(self._levels)
        held_out = levels[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
        known = [level for level in levels if level not in held_out]
        splits = {split: [f"{level}_{seed}" for seed in seeds for level in known] for split, seeds in SEEDS.items()}
        splits["test_challenge"] = [f"{level}_{seed}" for seed in SEEDS["test"] for level in held_out]
        small = {f"{split}_one_room": list(filter(ONE_ROOM.fullmatch, tasks)) for split, tasks in splits.items()}
        return splits | small

    def start(self, task: str) -> BabyAIEpisode:
        level, _, seed = task.partition("_")
        return BabyAIEpisode(self._levels[level], int(seed))

    def expert(self, task: str) -> list[str]:
        """What the package's bot does; what it did until then where it fails."""
        episode = self.start(task)
        bot, action, commands = BabyAIBot(episode.game), None, []
        try:
            while True:
                action = bot.replan(action)
                commands.append(_NAMES[int(action)])
                if episode.step(commands[-1]).done:
                    return commands
        except Exception:  # its own assertions, in levels that it cannot solve
            return commands
        finally:
            episode.close()


if __name__ == "__main__":
    serve(BabyAIWorld)
