"""Decides which URLs may be those of an endpoint."""

from __future__ import annotations

from urllib.parse import urlsplit


def url_problem(url: str) -> str | None:
    """Return why an endpoint cannot have this URL, in words that follow "url"; None if the URL is good. URLs are shown
    and recorded, so they must not hold a password."""
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        return "is not a URL"
    if parts.username is not None or parts.password is not None:
        return "must not hold a user or password: an environment variable holds the key, which api_key_env names"
    return None if sound else f"{url!r} must begin with http:// or https:// and name a host"
