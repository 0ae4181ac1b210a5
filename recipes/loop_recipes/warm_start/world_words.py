"""What a small agent thinks in a world before it gives the expert's command, and how the same is said of other things.

A policy of a million parameters decides by what it has just written. So a thought picks out of the observation what the
command depends on. A world that is not named here is played without thoughts and under its own names.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable, Mapping, Sequence

from loop_recipes.warm_start.demonstration import Demonstration


class WorldWords:
    """No thoughts, and the names as they are."""

    def thought(self, task: str, shown: str, plan: Sequence[str]) -> str:
        """What is thought before the first command of ``plan``, which ends the episode.

        ``task`` opened the episode, ``shown`` is the last observation.
        """
        return ""

    def renamed(self, demonstration: Demonstration, rng: random.Random) -> Demonstration:
        """The same conversation with other names."""
        return demonstration


class BabyAIWords(WorldWords):
    """Says what decides: on which side the object is, whether the way is free if it is ahead, which way round if not.

    Colours and kinds of objects change places.
    """

    _INSTRUCTION = re.compile(r"^Instruction: .*? (?:a|the) ((?:\w+ )?\w+)$", re.MULTILINE)
    _FREE = re.compile(r"^Free cells ahead: \d+", re.MULTILINE)
    _COLOURS = ("blue", "green", "grey", "purple", "red", "yellow")
    _KINDS = ("ball", "box", "key")

    def thought(self, task: str, shown: str, plan: Sequence[str]) -> str:
        wanted = self._INSTRUCTION.findall(task)[0]
        places = re.findall(rf"^- (?:\w+ )*{re.escape(wanted)} (.+)$", shown, re.MULTILINE)
        place = places[0] if places else "not seen"
        side = place.split(" ")[0]
        if side in ("left", "right"):
            return f"The {wanted} {side}."
        free = self._FREE.findall(shown)[0]
        round_it = f" The {wanted} {place}." if places and free.endswith(" 0") else ""
        return f"The {wanted} {side if places else place}. {free}.{round_it}"

    def renamed(self, demonstration: Demonstration, rng: random.Random) -> Demonstration:
        new: dict[str, str] = {}
        for names in (self._COLOURS, self._KINDS):
            new |= dict(zip(names, rng.sample(names, len(names)), strict=True))
        return demonstration.rewritten(_exchange(new))


class TextCraftWords(WorldWords):
    """Says what is missing for the goal, then what for its first missing part, down to what the command is about.

    An item is followed by its ingredients or by a verb, and both are found where a crafting command names the item.
    Words of items change places or give way to words that do not exist, which have to be copied.
    """

    _RECIPE = re.compile(r"craft \d+ (.+) using (.+)")
    _WORD = re.compile("[a-z]+")
    _MADE_UP_SHARE = 0.2

    def thought(self, task: str, shown: str, plan: Sequence[str]) -> str:
        made = [self._made(command) for command in plan]
        users = [0]
        while users[-1] + 1 < len(plan):
            users.append(
                next(user for user in range(users[-1] + 1, len(plan)) if made[users[-1]] in self._parts(plan[user]))
            )
        sentences = []
        for user in reversed(users):
            missing = [f"{count} {item}" for item, count in self._parts(plan[user]).items() if item in made[:user]]
            if missing:
                sentences.append(f"{made[user]} using {', '.join(missing)}.")
            else:
                sentences.append(f"{made[user]} {plan[user].split()[0]} now.")
        return " Next ".join(sentences)

    def _made(self, command: str) -> str:
        """The item that ``get 2 oak logs`` or ``craft 4 oak planks using 1 oak logs`` is about."""
        recipe = self._RECIPE.fullmatch(command)
        return recipe[1] if recipe else command.split(" ", 2)[2]

    def _parts(self, command: str) -> dict[str, str]:
        """Ingredient -> count of a crafting command; none of another command."""
        recipe = self._RECIPE.fullmatch(command)
        parts = recipe[2].split(", ") if recipe else []
        return {item: count for count, _, item in (part.partition(" ") for part in parts)}

    def renamed(self, demonstration: Demonstration, rng: random.Random) -> Demonstration:
        system, task = (message.content for message in demonstration.opening)
        names = [name for recipe in self._RECIPE.findall(task) for name in recipe]
        words = sorted({word for name in names for word in self._WORD.findall(name)} - set(self._WORD.findall(system)))
        others = [self._made_up(rng) if rng.random() < self._MADE_UP_SHARE else word for word in words]
        return demonstration.rewritten(_exchange(dict(zip(words, rng.sample(others, len(others)), strict=True))))

    def _made_up(self, rng: random.Random) -> str:
        return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 7)))


def _exchange(new: Mapping[str, str]) -> Callable[[str], str]:
    """Puts one word for another, in one pass, so that two words can change places."""
    return lambda text: re.sub("[A-Za-z]+", lambda found: new.get(found[0], found[0]), text)


WORDS: dict[str, WorldWords] = {"babyai": BabyAIWords(), "textcraft": TextCraftWords()}
"""By the environment's name; one that is not here has no thoughts and keeps its names."""
