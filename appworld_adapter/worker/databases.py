"""Base databases loaded once in the warm parent and inherited by its children, page by page, as they are written.

The engine copies every base database into memory for every world. A forked child already has the parent's memory:
it takes the parent's copy as its own and applies the task's changes to it, and the kernel copies only the pages that
differ. Saves most of a world's memory and half of the time to bring one up.
"""

from __future__ import annotations

import os
import sqlite3

from appworld.apps import get_all_apps, model_lib
from appworld.apps.model_lib import (
    CachedDBHandler,
    DBChangesTracker,
    ModelHashHandler,
    SQLEngine,
    StaticPool,
    apply_db_changes,
    create_engine,
    db_app_path_to_format,
    db_home_to_app_path,
    get_db_home_path,
)

_get_db_args = model_lib.get_db_args
_inherited: dict[str, list[sqlite3.Connection]] = {}


def forget() -> None:
    """Drop every database that the engine has cached."""
    CachedDBHandler.reset()
    ModelHashHandler.reset()
    model_lib.get_direct_cached_sqlite3_connection.cache_clear()


def preload(copies: int) -> None:
    """Load every base database ``copies`` times, and hand out these copies from now on.

    A child can take each copy once, so ``copies`` is the number of states with which a child works.
    """
    base = get_db_home_path(storage_type="disk", type="base")
    for app in get_all_apps():
        path = db_home_to_app_path(base, app)
        if os.path.exists(path):
            _inherited[app] = [_load(path) for _ in range(copies)]
    model_lib.get_db_args = _inherited_db_args


def _load(path: str) -> sqlite3.Connection:
    memory = sqlite3.connect(":memory:", check_same_thread=False)
    file = sqlite3.connect(path)
    file.backup(memory)
    file.close()
    return memory


def _inherited_db_args(to_path: str, from_path: str | None = None) -> tuple[SQLEngine, DBChangesTracker]:
    """Replace the engine's ``get_db_args``, which makes the database ``to_path`` from the one at ``from_path``."""
    app = os.path.basename(to_path).partition(".")[0]
    changes_only = from_path is not None and db_app_path_to_format(from_path) == "changes"
    if not (changes_only and to_path.startswith(":memory:") and _inherited.get(app)):
        return _get_db_args(to_path, from_path)
    connection = _inherited[app].pop()
    name = to_path.removeprefix(":memory:")
    engine = create_engine(
        f"sqlite:///file:{name}?mode=memory&cache=shared&uri=true",  # the engine reads names and types off the URL
        creator=lambda: connection,
        poolclass=StaticPool,
    )
    tracker = DBChangesTracker(engine)
    tracker.restart()
    tracker.add_changes(apply_db_changes(engine.raw_connection().connection, from_path))
    return engine, tracker
