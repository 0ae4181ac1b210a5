"""Finds the session of a key. A key is made for one episode and dies with it."""

from __future__ import annotations

import hashlib
import secrets

from rollout_server.endpoint.session import Session

KEY_PREFIX = "sk-"


class Sessions:
    """The open sessions by the digests of their keys. With digests, the time of a look-up reveals nothing of a key."""

    def __init__(self) -> None:
        self.base_url = ""
        """The URL at which harnesses reach the endpoint, OpenAI's ``base_url``; known once the node listens."""
        self._sessions: dict[bytes, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, session: Session) -> str:
        """Return a new key for the session."""
        key = KEY_PREFIX + secrets.token_urlsafe(32)
        self._sessions[_digest(key)] = session
        return key

    def find(self, key: str) -> Session | None:
        return self._sessions.get(_digest(key))

    async def close(self, key: str) -> None:
        """Forget the key, and end the calls and steps under way that use the key."""
        session = self._sessions.pop(_digest(key), None)
        if session is not None:
            await session.close()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
