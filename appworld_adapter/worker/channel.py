"""JSON lines over a file descriptor, blocking, for processes that may not import asyncio (frozen time) or trust a peer.

The functions of :mod:`os` are bound here at import, because the engine's guard replaces ``os.read`` and ``os.write``
while agent code runs.
"""

from __future__ import annotations

import json
import os
import select
from typing import Any

_read = os.read
_write = os.write
_poll = select.poll

MAX_LINE = 64 * 1024 * 1024
"""Longest message in bytes; a peer that sends more is broken or hostile."""


class ChannelClosed(Exception):
    """The peer is gone."""


class ChannelGarbage(Exception):
    """The peer did not send a JSON object on a line of bounded length."""


class Channel:
    """An end of a two-way connection that carries JSON objects, one object per line."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._pending = bytearray()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; raises ChannelClosed if the peer no longer reads."""
        view = memoryview(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        try:
            while view:
                view = view[_write(self.descriptor, view) :]
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self) -> dict[str, Any]:
        """Return the next message. Raises ChannelClosed or ChannelGarbage."""
        scanned = 0
        while (end := self._pending.find(b"\n", scanned)) < 0:
            scanned = len(self._pending)
            if scanned > MAX_LINE:
                raise ChannelGarbage(f"a line of more than {MAX_LINE} bytes")
            try:
                chunk = _read(self.descriptor, 1 << 16)
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if not chunk:
                raise ChannelClosed("end of stream")
            self._pending += chunk
        line = bytes(self._pending[:end])
        del self._pending[: end + 1]
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ChannelGarbage("not JSON") from error
        if not isinstance(message, dict):
            raise ChannelGarbage("not a JSON object")
        return message

    @property
    def has_pending(self) -> bool:
        """Return whether a whole message has been read already; polling the descriptor would miss this message."""
        return b"\n" in self._pending


def wait_readable(channels: list[Channel], longest_ms: int | None = None) -> list[Channel]:
    """Wait until a channel has at least part of a message, or was closed by its peer. Return all such ``channels``."""
    ready = [channel for channel in channels if channel.has_pending]
    if ready:
        return ready
    poller = _poll()
    for channel in channels:
        poller.register(channel.descriptor, select.POLLIN | select.POLLHUP)
    descriptors = {descriptor for descriptor, _ in poller.poll(longest_ms)}
    return [channel for channel in channels if channel.descriptor in descriptors]
