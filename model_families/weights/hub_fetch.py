"""Fetches a model from the Hugging Face hub into huggingface_hub's own cache, or finds it there."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from loop_plumbing.breakage import first_line

logger = logging.getLogger(__name__)
_COMMIT = re.compile(r"[0-9a-f]{40}")
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
_LICENCES = re.compile(r"README\.md|LICENSE[^/]*|NOTICE[^/]*")
"""Files that a model's licence is read from, which a model can do without."""


def fetched(repository: str, revision: str | None) -> Path:
    """Return the folder of a repository at a revision, and fetch it if the cache lacks it.

    Raises:
        ValueError: in the same cases as :func:`~model_families.weights.hub.model_folder`.
    """
    try:
        return Path(_fetched(repository, revision))
    except Exception as error:
        raise error if type(error) is ValueError else ValueError(_reason(repository, revision, error)) from error


def _fetched(repository: str, revision: str | None) -> str:
    # The imports take a quarter of a second.
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    if constants.is_offline_mode():
        return _stored(repository, revision)
    if _COMMIT.fullmatch(revision or ""):
        with suppress(OSError):  # it was pinned on another machine
            return _stored(repository, revision)
    try:
        files = [each.rfilename for each in HfApi().model_info(repository, revision=revision).siblings or ()]
    except (RepositoryNotFoundError, RevisionNotFoundError):  # a gated one, too
        raise
    except Exception as error:  # of the library below the hub's own, by whatever name
        with suppress(OSError):
            folder = _stored(repository, revision)
            reason = f"{constants.ENDPOINT} cannot be asked for it: {first_line(error)}"
            logger.warning(f"{repository} is taken from the cache, at commit {Path(folder).name}; {reason}")
            return folder
        raise
    if not any(map(_WEIGHTS[-1].fullmatch, files)) and any(map(_PICKLES.fullmatch, files)):
        raise ValueError(
            f"{repository} has its weights as pickles alone (pytorch_model.bin), which are not read: fetch it with "
            f"`hf download {repository} --local-dir FOLDER` and give FOLDER: its error says how to convert it"
        )
    wanted = [*_needed(files), *(file for file in files if _LICENCES.fullmatch(file))]
    return snapshot_download(repository, revision=revision, allow_patterns=wanted)


def _stored(repository: str, revision: str | None) -> str:
    """Return the folder of an earlier fetch. Raises OSError if the cache lacks some of its files."""
    from huggingface_hub import constants, get_cached_repo_tree, snapshot_download
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    commit = _cached_commit(Path(constants.HF_HUB_CACHE, f"models--{repository.replace('/', '--')}"), revision)
    try:
        files = list(_needed(each.path for each in get_cached_repo_tree(repository, revision=commit)))
    except CachedRepoTreeNotFoundError:
        files = None  # it was fetched by an older library
    return snapshot_download(repository, revision=commit, local_files_only=True, allow_patterns=files)


def _cached_commit(cache: Path, revision: str | None) -> str | None:
    """Return the commit of a revision according to a repository's ``cache``. If the cache does not say, return its only
    commit (for revision None), else the revision itself."""
    try:
        return (cache / "refs" / (revision or "main")).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError):
        there = [path.name for path in cache.glob("snapshots/*")]
        return there[0] if revision is None and len(there) == 1 else revision


def _needed(files: Iterable[str]) -> Iterable[str]:
    """Return the files of a repository that a model needs: one set of weights, and the files beside them."""
    there = list(files)
    weights = next((matches for form in _WEIGHTS if (matches := list(filter(form.fullmatch, there)))), [])
    return [*weights, *(file for file in there if _BESIDE.fullmatch(file))]


def _reason(repository: str, revision: str | None, error: Exception) -> str:
    """Return one line that says why a repository could not be fetched, and the cure."""
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
    texts: dict[type[Exception], str] = {
        GatedRepoError: f"{name} is gated: ask for access at {hub}/{repository}, then log in with `hf auth login` "
        "or set HF_TOKEN",
        RepositoryNotFoundError: f"{name} is not a folder here, and {hub} has no model of this name that you may "
        "read: correct it, or log in with `hf auth login` or HF_TOKEN if it is private",
        RevisionNotFoundError: f"{repository} has no revision {revision!r}; give a branch, a tag or a commit of "
        f"{hub}/{repository}",
        LocalEntryNotFoundError: f"{name} is not a folder here, and not in huggingface_hub's cache "
        f"({constants.HF_HUB_CACHE}), to which HF_HUB_OFFLINE confines it: unset that, or give the folder of a "
        "model",
        HfHubHTTPError: f"{name} cannot be fetched: {hub} answers {first_line(error)}",
        # Any error of the library below the hub's own: no network, a full disk.
        Exception: f"{name} is not a folder here, and cannot be fetched from {hub} ({first_line(error)}): try "
        "again with a network and room on the disk, or give the folder of a model",
    }
    return next(text for kind, text in texts.items() if isinstance(error, kind))
