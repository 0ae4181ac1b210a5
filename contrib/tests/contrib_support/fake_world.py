"""A world of the standard library for the tests of the protocol of worlds: count up to the task's number.

    python fake_world.py MEMORY_MB SOCKET

Besides ``add`` it knows what goes wrong in worlds: see :meth:`Episode.step`.
"""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "loop_contrib" / "worlds" / "workers"))

from worker_loop import Step, serve

MADE = 0
"""Episodes that this process has started; ``count`` shows it, so a replay elsewhere differs."""


class Episode:
    def __init__(self, target: int) -> None:
        self._target, self._value = target, 0
        self.opening = f"Bring 0 to {target}."

    def step(self, command: str) -> Step:
        match command.split():
            case ["add"]:
                self._value += 1
            case ["die"]:
                os._exit(3)
            case ["hang"]:
                time.sleep(3600)
            case ["wait-for", marker]:
                Path(f"{marker}-is-awaited").touch()
                while not Path(marker).exists():
                    time.sleep(0.01)
                self._value += 1
            case ["raise"]:
                raise KeyError("a bug in the world")
            case ["eat"]:
                hog = bytearray(4 << 30)
                return Step(str(len(hog)), done=False)
            case ["print"]:
                print("{}")
                subprocess.run(["echo", "{}"], check=True)
            case ["garble"]:
                for descriptor in os.listdir("/proc/self/fd"):
                    with contextlib.suppress(OSError):
                        if stat.S_ISSOCK(os.fstat(int(descriptor)).st_mode):
                            os.write(int(descriptor), b"no json\n")
            case ["fork"]:
                child = subprocess.Popen(["sleep", "3600"])
                return Step(str(child.pid), done=False)
            case ["lose-child", marker]:
                if not Path(marker).exists():
                    Path(marker).touch()
                    self._lost = subprocess.Popen(["sleep", "3600"])  # kept: one that nobody holds is reaped in passing
                    self._lost.kill()
                    raise ConnectionError("the child does not answer")
                self._value += 1
            case ["count"]:
                return Step(str(MADE), done=False)
            case ["environment"]:
                return Step(" ".join(sorted(os.environ)), done=False)
            case _:
                return Step("unknown", done=False, failed=True)
        return Step(str(self._value), done=self._value == self._target)

    def grade(self) -> tuple[float, bool]:
        return min(1.0, self._value / self._target), self._value == self._target

    def close(self) -> None: ...


class FakeWorld:
    instructions = "Say add."

    def tasks(self) -> dict[str, list[str]]:
        return {"train": ["to_3", "to_5"], "dev": ["to_4"]}

    def start(self, task: str) -> Episode:
        global MADE
        MADE += 1
        match task.split():
            case ["hang"]:
                time.sleep(3600)
            case ["compute-until", marker]:
                Path(f"{marker}-is-awaited").touch()
                while not Path(marker).exists():
                    pass
                task = "to_3"
        return Episode(int(task.removeprefix("to_")))

    def expert(self, task: str) -> list[str]:
        return ["add"] * int(task.removeprefix("to_"))


if __name__ == "__main__":
    serve(FakeWorld)
