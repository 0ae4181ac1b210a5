"""A port of this host that is taken, and that an attacker may try to reach."""

from __future__ import annotations

import socket


class Listener:
    """A TCP listener on the host; remembers whether anyone came."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen()
        self._socket.setblocking(False)
        self.port = self._socket.getsockname()[1]

    def visited(self) -> bool:
        try:
            self._socket.accept()
        except BlockingIOError:
            return False
        return True
