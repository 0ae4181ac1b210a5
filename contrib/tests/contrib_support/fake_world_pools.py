"""The world of ``fake_world.py`` as a pool."""

from __future__ import annotations

from pathlib import Path

from loop_contrib.worlds.pool import WorldKind, WorldPool

FAKE_WORLD = Path(__file__).with_name("fake_world.py")


class FakePool(WorldPool):
    kind = WorldKind("fake", FAKE_WORLD, memory_mb=512)
