"""Reads tokens and keys in environment variables, for clients and servers, so that both read them alike."""

from __future__ import annotations

import os


def read_secret(variable: str) -> str:
    """Return the value of ``variable``, without blanks and line ends around it (files often add them); "" if the
    variable is empty or not set.

    Raises:
        ValueError: no HTTP header can carry the secret. The message does not show the secret.
    """
    secret = os.environ.get(variable, "").strip()
    if not all("!" <= letter <= "~" for letter in secret):
        raise ValueError(
            f"the environment variable {variable} must hold printable ASCII without blanks; no HTTP header carries more"
        )
    return secret


def required_secret(variable: str, which: str) -> str:
    """Return the secret of :func:`read_secret`; without one, raise a ValueError that asks for ``which`` secret."""
    if secret := read_secret(variable):
        return secret
    raise ValueError(f"no bearer token: set the environment variable {variable} to {which}")
