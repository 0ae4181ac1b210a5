"""What a small agent thinks in a world before it gives the expert's command, and how the same is said of other things.

A policy of a million parameters decides by what it has just written. So a thought picks out of the observation what the
command depends on. A world that is not named here is played without thoughts and under its own names.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping

from loop_recipes.warm_start.demonstration import Demonstration


class WorldWords:
    """No thoughts, and the names as they are."""

    def thought(self, task: str, shown: str, command: str) -> str:
        """What is thought before ``command``; ``task`` opened the episode, ``shown`` is the last observation."""
        return ""

    def renamed(self, demonstration: Demonstration, rng: random.Random) -> Demonstration:
        """The same conversation with other names."""
        return demonstration


class BabyAIWords(WorldWords):
    """Quotes where the nearest object of the instruction is; colours and kinds of objects change places."""

    _INSTRUCTION = re.compile(r"^Instruction: .*? (?:a|the) ((?:\w+ )?\w+)$", re.MULTILINE)
    _COLOURS = ("blue", "green", "grey", "purple", "red", "yellow")
    _KINDS = ("ball", "box", "key")

    def thought(self, task: str, shown: str, command: str) -> str:
        wanted = self._INSTRUCTION.findall(task)[0]
        places = re.findall(rf"^- (?:\w+ )*{re.escape(wanted)}: (.+)$", shown, re.MULTILINE)
        if not places:
            return f"I see no {wanted}."
        return f"The {wanted}: {places[0]}."

    def renamed(self, demonstration: Demonstration, rng: random.Random) -> Demonstration:
        new: dict[str, str] = {}
        for names in (self._COLOURS, self._KINDS):
            new |= dict(zip(names, rng.sample(names, len(names)), strict=True))
        return demonstration.rewritten(_exchange(new))


def _exchange(new: Mapping[str, str]) -> Callable[[str], str]:
    """Puts one word for another, in one pass, so that two words can change places."""
    return lambda text: re.sub("[A-Za-z]+", lambda found: new.get(found[0], found[0]), text)


WORDS: dict[str, WorldWords] = {"babyai": BabyAIWords()}
"""By the environment's name; one that is not here has no thoughts and keeps its names."""
