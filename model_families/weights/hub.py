"""A model by its name on the Hugging Face hub, in place of a folder: ``Qwen/Qwen3-0.6B``, or ``Qwen/Qwen3-0.6B@main``.

What is fetched lies in huggingface_hub's own cache, by its own token, progress bar and variables (``HF_HOME``,
``HF_TOKEN``, ``HF_HUB_OFFLINE``, ``HF_ENDPOINT``). A name is pinned once, where a job begins: with the commit behind
it, every process that reads it, on any machine, has the same files.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

logger = logging.getLogger(__name__)
Fetched = TypeVar("Fetched")
_NAME = re.compile(
    r"(?!models/)(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[A-Za-z0-9][\w./-]*))?", re.ASCII
)
"""``models`` is nobody's there, and the folder of models in a checkout."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CACHED = re.compile(r"models--(?P<owner>.+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})")
_WEIGHTS = (
    re.compile(r"model(-\d+-of-\d+)?\.safetensors"),
    re.compile(r"(?!consolidated|adapter_)[^/]*\.safetensors"),
)
"""Sets of weights: the first of which there is a file is the one that is fetched."""
_PICKLES = re.compile(r"pytorch_model[^/]*\.bin")
_BESIDE = re.compile(
    r"(?!adapter_|[^/]*\.bin\.index)[^/]*\.(json|jinja|model|txt)|additional_chat_templates/[^/]*\.jinja"
)
"""Configurations, tokenizers and chat templates."""
_SAID = re.compile(r"README\.md|LICENSE[^/]*|NOTICE[^/]*")
"""What a model's licence is read from, which a model can do without."""


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
    return _fetched(found["id"], found["revision"])


def _fetched(repository: str, revision: str | None) -> Path:
    # They take a quarter of a second.
    from huggingface_hub import HfApi, constants, get_cached_repo_tree, snapshot_download
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    def stored() -> Path:
        commit = _cached_commit(Path(constants.HF_HUB_CACHE, f"models--{repository.replace('/', '--')}"), revision)
        try:
            files = list(_needed(each.path for each in get_cached_repo_tree(repository, revision=commit)))
        except CachedRepoTreeNotFoundError:
            files = None  # it was fetched by an older library
        return Path(snapshot_download(repository, revision=commit, local_files_only=True, allow_patterns=files))

    def there() -> list[str] | Path:
        try:
            return [each.rfilename for each in HfApi().model_info(repository, revision=revision).siblings or ()]
        except (RepositoryNotFoundError, RevisionNotFoundError):  # a gated one, too
            raise
        except Exception as error:  # of the library below the hub's own, by whatever name
            with suppress(OSError):
                folder = stored()
                reason = f"{constants.ENDPOINT} cannot be asked for it: {_line(error)}"
                logger.warning(f"{repository} is taken from the cache, at commit {folder.name}; {reason}")
                return folder
            raise

    def current() -> Path:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=wanted))

    if constants.is_offline_mode():
        return _in_one_line(repository, revision, stored)
    if _COMMIT.fullmatch(revision or ""):
        try:
            return stored()
        except OSError:
            pass  # it was pinned on another machine
    files = _in_one_line(repository, revision, there)
    if isinstance(files, Path):
        return files
    if not any(map(_WEIGHTS[-1].fullmatch, files)) and any(map(_PICKLES.fullmatch, files)):
        raise ValueError(
            f"{repository} has its weights as pickles alone (pytorch_model.bin), which are not read: fetch it with "
            f"`hf download {repository} --local-dir FOLDER` and give FOLDER: its error says how to convert it"
        )
    wanted = [*_needed(files), *(file for file in files if _SAID.fullmatch(file))]
    return _in_one_line(repository, revision, current)


def _cached_commit(cache: Path, revision: str | None) -> str | None:
    """The commit that a revision stands for in a repository's ``cache``, however that was filled; where nothing says
    which it is, the one that is there alone, or the revision."""
    try:
        return (cache / "refs" / (revision or "main")).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError):
        there = [path.name for path in cache.glob("snapshots/*")]
        return there[0] if revision is None and len(there) == 1 else revision


def _needed(files: Iterable[str]) -> Iterable[str]:
    """Of the files of a repository those that a model needs: one set of weights, and what is beside it."""
    there = list(files)
    weights = next((found for form in _WEIGHTS if (found := list(filter(form.fullmatch, there)))), [])
    return [*weights, *(file for file in there if _BESIDE.fullmatch(file))]


def _in_one_line(repository: str, revision: str | None, fetch: Callable[[], Fetched]) -> Fetched:
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name = repository if revision is None else f"{repository}@{revision}"
    hub = constants.ENDPOINT
    try:
        return fetch()
    except Exception as error:
        said: dict[type[Exception], str] = {
            GatedRepoError: f"{name} is gated: ask for access at {hub}/{repository}, then log in with `hf auth login` "
            "or set HF_TOKEN",
            RepositoryNotFoundError: f"{name} is no folder here, and {hub} has no model of this name that you may "
            "read: correct it, or log in with `hf auth login` or HF_TOKEN if it is private",
            RevisionNotFoundError: f"{repository} has no revision {revision!r}; give a branch, a tag or a commit of "
            f"{hub}/{repository}",
            LocalEntryNotFoundError: f"{name} is no folder here, and not in huggingface_hub's cache "
            f"({constants.HF_HUB_CACHE}), to which HF_HUB_OFFLINE confines it: unset that, or give the folder of a "
            "model",
            HfHubHTTPError: f"{name} cannot be fetched: {hub} answers {_line(error)}",
            # Of the library below the hub's own, by whatever name: no network, a full disk.
            Exception: f"{name} is no folder here, and cannot be fetched from {hub} ({_line(error)}): try again with a "
            "network and room on the disk, or give the folder of a model",
        }
        raise ValueError(next(text for kind, text in said.items() if isinstance(error, kind))) from error


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
