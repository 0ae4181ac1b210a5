"""Hosts on one machine, as network namespaces: several on a bridge, or two on a link with delay and loss.

Needs root and iproute2. Names and addresses are fixed, so one group of each kind exists at a time.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from pathlib import Path

SUBNET = "10.213.7"
BRIDGE = "loopbr0"
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000


def missing_for_networks() -> str | None:
    """Why no network namespaces can be made here, or None."""
    if os.geteuid() != 0:
        return "needs root to make network namespaces"
    absent = [name for name in ("ip", "nsenter") if shutil.which(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (apt-get install iproute2 util-linux)"
    probe = subprocess.run(["ip", "netns", "add", "loopprobe"], capture_output=True, text=True, timeout=30)
    subprocess.run(["ip", "netns", "delete", "loopprobe"], capture_output=True, timeout=30)
    return f"ip netns add: {probe.stderr.strip()}" if probe.returncode else None


def run(*command: str) -> str:
    """A command that must succeed within 30 s; returns its output."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def inside(name: str, *command: str) -> list[str]:
    """The command line that runs ``command`` in a namespace. `ip netns exec` would hide the cgroup mounts."""
    return ["nsenter", f"--net=/run/netns/{name}", *command]


def address(number: int) -> str:
    """Of a host, counted from 2; 1 is this machine on the bridge."""
    return f"{SUBNET}.{number}"


def _add_namespace(name: str, made: list[str]) -> None:
    if Path(f"/run/netns/{name}").exists():
        raise RuntimeError(
            f"network namespace {name} exists already: another run of these tests, or what one left behind "
            f"(ip netns delete {name}; ip link delete {BRIDGE})"
        )
    run("ip", "netns", "add", name)
    made.append(name)


def _remove_namespaces(made: list[str]) -> None:
    while made:
        subprocess.run(["ip", "netns", "delete", made.pop()], capture_output=True, timeout=30)


def _configure(name: str, number: int) -> None:
    run("ip", "-n", name, "address", "add", f"{address(number)}/24", "dev", "eth0")
    run("ip", "-n", name, "link", "set", "eth0", "up")
    run("ip", "-n", name, "link", "set", "lo", "up")


class BridgedNetworks:
    """Namespaces, and this machine as ``10.213.7.1``, on one bridge."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self._made: list[str] = []

    def start(self) -> None:
        for name in self.names:
            _add_namespace(name, self._made)
        run("ip", "link", "add", BRIDGE, "type", "bridge")
        run("ip", "address", "add", f"{address(1)}/24", "dev", BRIDGE)
        run("ip", "link", "set", BRIDGE, "up")
        for number, name in enumerate(self.names, start=2):
            run("ip", "link", "add", self._port(name), "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "link", "set", self._port(name), "master", BRIDGE, "up")
            _configure(name, number)

    def cut(self, name: str) -> None:
        """Pull a host's cable."""
        run("ip", "link", "set", self._port(name), "down")

    def mend(self, name: str) -> None:
        run("ip", "link", "set", self._port(name), "up")

    def stop(self) -> None:
        if self._made:
            subprocess.run(["ip", "link", "delete", BRIDGE], capture_output=True, timeout=30)
        _remove_namespaces(self._made)

    def _port(self, name: str) -> str:
        return f"loopve{self.names.index(name) + 2}"


class LossyLink:
    """Two namespaces joined by a link that delays every frame and loses some, in both directions.

    Frames pass through this process over two TAP devices, because many kernels come without the netem discipline.

    Args:
        delay_s: one way.
        loss: probability that a frame is lost; may be changed under way.
    """

    def __init__(self, names: tuple[str, str], delay_s: float, loss: float, seed: int = 0) -> None:
        self.names = names
        self.delivered = self.lost = 0
        self._delay_s = delay_s
        self.loss = loss
        self._draw = random.Random(seed)
        self._made: list[str] = []
        self._ends: list[int] = []
        self._stop_read, self._stop_write = os.pipe()
        self._thread = threading.Thread(target=self._carry, name="lossy link", daemon=True)

    def start(self) -> None:
        for number, name in enumerate(self.names, start=2):
            _add_namespace(name, self._made)
            device = f"looptap{number}"
            end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            self._ends.append(end)
            fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", device.encode(), _IFF_TAP | _IFF_NO_PI))
            run("ip", "link", "set", device, "netns", name)
            run("ip", "-n", name, "link", "set", device, "name", "eth0")
            _configure(name, number)
        self._thread.start()

    def stop(self) -> None:
        if self._thread.is_alive():
            os.write(self._stop_write, b".")
            self._thread.join(10)
        for descriptor in (*self._ends, self._stop_read, self._stop_write):
            os.close(descriptor)
        _remove_namespaces(self._made)

    def _carry(self) -> None:
        flying: list[tuple[float, int, int, bytes]] = []  # due, number, where to, frame
        number = 0
        while True:
            wait = max(0.0, flying[0][0] - time.monotonic()) if flying else None
            ready, _, _ = select.select([*self._ends, self._stop_read], [], [], wait)
            if self._stop_read in ready:
                return
            for end in ready:
                try:
                    frame = os.read(end, 65536)
                except BlockingIOError:
                    continue
                if self._draw.random() < self.loss:
                    self.lost += 1
                    continue
                number += 1
                other = self._ends[1 - self._ends.index(end)]
                heapq.heappush(flying, (time.monotonic() + self._delay_s, number, other, frame))
            while flying and flying[0][0] <= time.monotonic():
                _, _, end, frame = heapq.heappop(flying)
                try:
                    os.write(end, frame)
                    self.delivered += 1
                except OSError:  # the other side is not up (yet), or its queue is full: lost like any frame
                    self.lost += 1
