"""A model by its name on the Hugging Face hub, in place of a folder: ``Qwen/Qwen3-0.6B``, or ``Qwen/Qwen3-0.6B@main``.

Fetched files lie in huggingface_hub's own cache, by its own token, progress bar and variables (``HF_HOME``,
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
"""``models`` is not an owner there, but the folder of models in a checkout."""
_CACHED = re.compile(r"models--(?P<owner>.+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})")


def is_hub_name(name: str) -> bool:
    """Return whether ``name`` names a model on the hub. It does not if a folder of that name exists, or if the first
    folder of the path exists."""
    return _NAME.fullmatch(name) is not None and not Path(name).exists() and not Path(name).parent.is_dir()


def pinned(name: str) -> str:
    """Return a hub ``name`` with its current commit, and fetch the files of that commit; return a folder unchanged.

    Raises:
        ValueError: in the same cases as :func:`model_folder`.
    """
    return f"{name.partition('@')[0]}@{model_folder(name).name}" if is_hub_name(name) else name


def cached_name(folder: str | Path) -> str | None:
    """Return ``OWNER/NAME@COMMIT`` of a folder in a hub cache, even if the folder is gone; None for other folders."""
    match = _CACHED.fullmatch("/".join(Path(folder).absolute().parts[-3:]))
    return None if match is None else f"{match['owner']}/{match['name']}@{match['commit']}"


def kept_name(folder: str) -> str:
    """Return the name with which :func:`local_path` finds ``folder``: its hub name if the present cache holds it."""
    from huggingface_hub import constants

    name, cache = cached_name(folder), Path(constants.HF_HUB_CACHE).absolute()
    return name if name is not None and Path(folder).absolute().is_relative_to(cache) else folder


def local_path(name: str) -> str:
    """Return the folder of a hub name, fetched if necessary; return any other ``name`` unchanged. A folder that is gone
    from the cache is fetched again.

    Raises:
        ValueError: in the same cases as :func:`model_folder`.
    """
    name = name if Path(name).is_dir() else cached_name(name) or name
    return str(model_folder(name)) if is_hub_name(name) else name


@lru_cache(maxsize=32)
def model_folder(name: str) -> Path:
    """Return the folder of the model ``name``. A name that is not a hub name is a path.

    Raises:
        ValueError: the hub cannot be reached, lacks the model or revision, or denies this user access; one line.
    """
    if not is_hub_name(name):
        return Path(name).expanduser()
    match = _NAME.fullmatch(name)
    assert match is not None
    from model_families.weights.hub_fetch import fetched  # not needed for a folder

    return fetched(match["id"], match["revision"])
