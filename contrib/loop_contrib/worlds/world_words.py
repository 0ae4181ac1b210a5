"""The thoughts of a small agent in a world before the expert's command, and the same thoughts about other things.

A policy of a million parameters decides by what it has just written. So a thought picks out of the observation what the
command depends on. A world that is not named here is played without thoughts and under its own names.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence

from loop_recipes.warm_start.demonstration import Demonstration


class WorldWords:
    """Words of a world for demonstrations: without thoughts, and with unchanged names."""

    def thought(self, task: str, observation: str, plan: Sequence[str]) -> str:
        """Return the thought before the first command of ``plan``, the commands up to the end of the episode.

        ``task`` is the message that opened the episode; ``observation`` is the last observation.
        """
        return ""

    def renamed(self, demonstration: Demonstration, rng: random.Random) -> Demonstration:
        """Return the demonstration with other names for things."""
        return demonstration


class BabyAIWords(WorldWords):
    """The thought says on which side the object is, whether the way ahead is free, and if not, which way leads round.

    Renaming permutes the colours and the kinds of objects.
    """

    _INSTRUCTION = re.compile(r"^Instruction: .*? (?:a|the) ((?:\w+ )?\w+)$", re.MULTILINE)
    _FREE = re.compile(r"^Free cells ahead: \d+", re.MULTILINE)
    _COLOURS = ("blue", "green", "grey", "purple", "red", "yellow")
    _KINDS = ("ball", "box", "key")

    def thought(self, task: str, observation: str, plan: Sequence[str]) -> str:
        wanted = self._INSTRUCTION.findall(task)[0]
        places = re.findall(rf"^- (?:\w+ )*{re.escape(wanted)} (.+)$", observation, re.MULTILINE)
        place = places[0] if places else "not seen"
        side = place.split(" ")[0]
        if side in ("left", "right"):
            return f"The {wanted} {side}."
        free = self._FREE.findall(observation)[0]
        round_it = f" The {wanted} {place}." if places and free.endswith(" 0") else ""
        return f"The {wanted} {side if places else place}. {free}.{round_it}"

    def renamed(self, demonstration: Demonstration, rng: random.Random) -> Demonstration:
        new: dict[str, str] = {}
        for names in (self._COLOURS, self._KINDS):
            new |= dict(zip(names, rng.sample(names, len(names)), strict=True))
        return demonstration.rewritten(_exchange(new))


class TextWorldExpressWords(WorldWords):
    """No thoughts, because in splits that end in ``_following`` the last observation contains the command.

    Each split has its own objects and gestures. So the words in possible commands are replaced by random words from
    ``_NAMES``, which holds the words of all splits. Words in the instructions and in the game's rules stay.
    """

    _POSSIBLE = re.compile(r"^Possible commands: (.*)$", re.MULTILINE)
    _WORD = re.compile("[a-z]+")
    _NAMES = _WORD.findall("""
        apple avocado banana bean blueberry broccoli cabbage carrot celery cherry coconut corn cucumber eggplant fig
        garlic ginger grape grapefruit kiwi leek lemon lettuce lime mango melon mushroom nut olive onion orange
        papaya pea peach pear pepper pineapple plum potato prune pumpkin radish raspberry spinach squash strawberry
        tangerine tomato watermelon arm bark bow cat circle clap dance dog down duck ears eye fingers foot hands
        head hello hop in jump knee left like meow nod nose on quack right shake sing sit spin stand stomp toes turn
        up wave wiggle wink your a and do the to eat examine slice smell touch taste cut bite put box desk bed table
        chair shelf
    """)

    def renamed(self, demonstration: Demonstration, rng: random.Random) -> Demonstration:
        system, start = (message.content for message in demonstration.opening)
        rules = start.partition("\n")[0]
        transcript = "\n".join([start, *(observation for _, observation in demonstration.steps)])
        possible = {word for line in self._POSSIBLE.findall(transcript) for word in self._WORD.findall(line)}
        words = sorted(possible - set(self._WORD.findall(f"{system} {rules}")))
        # Other games than those may have more words than there are names: the last then stay as they are.
        names = rng.sample(self._NAMES, min(len(words), len(self._NAMES)))
        return demonstration.rewritten(_exchange(dict(zip(words, names, strict=False))))


def _exchange(new: Mapping[str, str]) -> Callable[[str], str]:
    """Return a function that exchanges words in one pass, so that two words can change places."""
    return lambda text: re.sub("[A-Za-z]+", lambda word: new.get(word[0], word[0]), text)


WORDS: dict[str, WorldWords] = {"babyai": BabyAIWords(), "textworldexpress": TextWorldExpressWords()}
"""Words by the environment's name; one that is not here has no thoughts and keeps its names."""
