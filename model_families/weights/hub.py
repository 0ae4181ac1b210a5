"""A model by its name on the Hugging Face hub, in place of a folder: ``Qwen/Qwen3-0.6B``, or ``Qwen/Qwen3-0.6B@main``.

What is fetched lies in huggingface_hub's own cache, by its own token, progress bar and variables (``HF_HOME``,
``HF_TOKEN``, ``HF_HUB_OFFLINE``, ``HF_ENDPOINT``). A name is pinned once, where a job begins: with the commit behind
it, every process that reads it, on any machine, has the same files.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

_NAME = re.compile(
    r"(?!models/)(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[A-Za-z0-9][\w./-]*))?", re.ASCII
)
"""``models`` is nobody's there, and the folder of models in a checkout."""
_CACHED = re.compile(r"models--(?P<owner>.+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})")


def is_hub_name(name: str) -> bool:
    """Return whether ``name`` is one of the hub's, and no folder here: a folder of that name wins, and a path whose
    first folder is here is a path."""
    return _NAME.fullmatch(name) is not None and not Path(name).exists() and not Path(name).parent.is_dir()


def pinned(name: str) -> str:
    """``name`` with the commit that it stands for now, whose files are here; a folder as it is.

    Raises:
        ValueError: as :func:`model_folder`.
    """
    return f"{name.partition('@')[0]}@{model_folder(name).name}" if is_hub_name(name) else name


def cached_name(folder: str | Path) -> str | None:
    """``OWNER/NAME@COMMIT`` of a folder in a cache of the hub's, also of one that is not there any more; else None."""
    found = _CACHED.fullmatch("/".join(Path(folder).absolute().parts[-3:]))
    return None if found is None else f"{found['owner']}/{found['name']}@{found['commit']}"


def kept_name(folder: str) -> str:
    """The name that :func:`local_path` finds ``folder`` by: the hub's, of a folder in the cache that is looked in."""
    from huggingface_hub import constants

    name, cache = cached_name(folder), Path(constants.HF_HUB_CACHE).absolute()
    return name if name is not None and Path(folder).absolute().is_relative_to(cache) else folder


def local_path(name: str) -> str:
    """``name`` as it is, or the folder that a name of the hub's is fetched to. A folder of its cache that is not there
    any more is fetched again.

    Raises:
        ValueError: as :func:`model_folder`.
    """
    name = name if Path(name).is_dir() else cached_name(name) or name
    return str(model_folder(name)) if is_hub_name(name) else name


@lru_cache(maxsize=32)
def model_folder(name: str) -> Path:
    """The folder of the model ``name``; where it is none of the hub's names, the name as a path.

    Raises:
        ValueError: the hub cannot be reached, or has no such model or revision, or none for this user; one line.
    """
    if not is_hub_name(name):
        return Path(name).expanduser()
    found = _NAME.fullmatch(name)
    assert found is not None
    from model_families.weights.hub_fetch import fetched  # for those alone whose model is not a folder

    return fetched(found["id"], found["revision"])
