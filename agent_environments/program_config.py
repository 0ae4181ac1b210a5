"""The config of a program: its command and its variables, which YAML may have read as other types, and the variables
that it inherits."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

_NAMES = (
    "PATH HOME USER LOGNAME SHELL TERM COLUMNS LINES TZ TMPDIR TEMP TMP DISPLAY LANG LANGUAGE LC_ALL LC_ADDRESS "
    "LC_COLLATE LC_CTYPE LC_IDENTIFICATION LC_MEASUREMENT LC_MESSAGES LC_MONETARY LC_NAME LC_NUMERIC LC_PAPER "
    "LC_TELEPHONE LC_TIME PYTHONDONTWRITEBYTECODE PYTHONFAULTHANDLER PYTHONHASHSEED PYTHONHOME PYTHONIOENCODING "
    "PYTHONNOUSERSITE PYTHONOPTIMIZE PYTHONPATH PYTHONSAFEPATH PYTHONUNBUFFERED PYTHONUSERBASE PYTHONUTF8 "
    "PYTHONWARNINGS LD_LIBRARY_PATH JAVA_HOME NODE_PATH NODE_EXTRA_CA_CERTS NODE_OPTIONS NPM_CONFIG_CACHE "
    "PIP_CACHE_DIR UV_CACHE_DIR UV_PYTHON XDG_CACHE_HOME "
    "XDG_CONFIG_HOME XDG_DATA_HOME SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE http_proxy "
    "https_proxy all_proxy no_proxy ftp_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY FTP_PROXY "
    "CUDA_VISIBLE_DEVICES CUDA_HOME NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES OMP_NUM_THREADS OMP_WAIT_POLICY "
    "MKL_NUM_THREADS OPENBLAS_NUM_THREADS NUMEXPR_NUM_THREADS TOKENIZERS_PARALLELISM HF_HOME HF_HUB_OFFLINE "
    "HF_HUB_CACHE HF_DATASETS_OFFLINE HF_DATASETS_CACHE TRANSFORMERS_OFFLINE"
)
INHERITED = frozenset(_NAMES.split())
"""The variables of this process that a program sees. Any other may be a secret, whatever its name: the config of the
environment gives a program what else it needs."""


def words(key: str, value: Any) -> list[str]:
    """Return a config's list of words as texts; whole numbers become text.

    Raises:
        ValueError: the value is one text, or holds something other than words; the message names ``key`` and the cure.
    """
    if isinstance(value, str):
        raise ValueError(f"{key} must be a list of words: write {json.dumps(shlex.split(value))}, not {value!r}")
    if not isinstance(value, list | tuple):
        raise ValueError(f"{key} must be a list of words, not {value!r}")
    return [_text(key, word) for word in value]


def variables(key: str, value: Any) -> dict[str, str]:
    """Return a config's environment variables as texts; whole numbers become text.

    Raises:
        ValueError: the value is not a mapping to texts and whole numbers; the message names ``key`` and the cure.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"{key} must be a mapping of names to texts, not {value!r}")
    return {_text(key, name): _text(f"{key}.{name}", each) for name, each in value.items()}


def inherited() -> dict[str, str]:
    """Return the variables of :data:`INHERITED` that a program inherits from this process, without users' keys."""
    named = {name: os.environ[name] for name in os.environ if name in INHERITED}
    return {name: value for name, value in named.items() if not _names_a_user(name, value)}


def _names_a_user(name: str, value: str) -> bool:
    """Return whether an address, such as a proxy's, holds a user or a password: either may be a key."""
    if "://" not in value and not name.lower().endswith("_proxy"):
        return False
    try:
        return urlsplit(value if "://" in value else f"//{value}").username is not None
    except ValueError:
        return True


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str | int) or isinstance(value, bool):
        # YAML may have read 1.10 as 1.1, and YES as True: nobody knows which was meant.
        raise ValueError(f"{key} holds {value!r}, which is not a text: put quotes around what is meant")
    return str(value)
