"""An append-only file of JSON lines that survives a SIGKILL at any byte, a full disk and damage to some of its lines.

A record counts once its line is whole and fsynced; only then does :attr:`AppendLog.count` include it, so a client that
reads by cursor never gets a record that a crash could take back. Cursor n is the n-th line, counted from 1.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from loop_formats.run_files import is_blank, sync

logger = logging.getLogger(__name__)

THREADS = ThreadPoolExecutor(8, "log")
"""Threads for the files of collections alone: work of agents and worlds in threads does not keep them waiting."""

T = TypeVar("T")


async def beside(work: Callable[..., T], *arguments: Any) -> T:
    """Run ``work(*arguments)`` in one of :data:`THREADS`, and return the result."""
    return await asyncio.get_running_loop().run_in_executor(THREADS, work, *arguments)


class AppendLog:
    """An append-only file of records, for any number of threads. Opening the file recovers it after a crash.

    Bytes after the last whole record come from a write that a crash cut short. No reader has got them: they are cut
    off. A reader may have got a damaged line before them: such a line is copied to ``<file>.damaged`` and blanked, so
    that later records keep their places.

    Args:
        path: created when missing; its folder must be there.
        visit: called in order with every decoded record that is already in the file. It raises KeyError, TypeError or
            ValueError for a record that is torn, of another version or without its predecessor. It returns whether the
            file may end after this record; at the end of the file, records that need later records are dropped.
    """

    def __init__(self, path: Path, visit: Callable[[Any], bool]):
        self.path = path
        self._ends: list[int] = []
        self._lock = threading.Lock()
        self._recover(visit)

    @property
    def count(self) -> int:
        """The number of lines that are safely on disk."""
        return len(self._ends)

    def _recover(self, visit: Callable[[Any], bool]) -> None:
        created = not self.path.exists()
        with open(self.path, "ab+") as file:
            file.seek(0)
            end, whole, damaged, why = 0, 0, list[int](), "others that belong to it are missing"
            group: list[int] = []  # numbers, from 0, of the lines that need the next
            bad: list[int] = []  # since the last whole record
            for number, line in enumerate(file):
                end += len(line)
                self._ends.append(end)
                try:
                    if not line.endswith(b"\n"):
                        raise ValueError("no line end")
                    if is_blank(line):
                        continue
                    group.append(number)
                    may_end = visit(json.loads(line))
                except (KeyError, TypeError, ValueError) as error:
                    why = str(error)
                    bad, group = sorted({*bad, *group, number}), []
                    continue
                if may_end:
                    whole, damaged, bad, group = self.count, damaged + bad, [], []
            size = end
            del self._ends[whole:]
            end = self._ends[-1] if self._ends else 0
            if end < size:
                logger.warning(
                    "%s: record %d is torn (%s), dropping the last %d bytes", self.path, whole + 1, why, size - end
                )
            os.ftruncate(file.fileno(), end)
            if damaged:
                self._set_aside(damaged)
            sync(file.fileno())
        if created:
            sync(self.path.parent)

    def _set_aside(self, damaged: Sequence[int]) -> None:
        """Move the lines with these numbers (from 0) out of the file. All other lines keep their places."""
        aside = self.path.with_name(f"{self.path.name}.damaged")
        numbers = ", ".join(str(number + 1) for number in damaged)
        logger.warning("%s is damaged in line %s: set aside in %s; the others are kept", self.path, numbers, aside)
        spans = [(self._ends[number - 1] if number else 0, self._ends[number] - 1) for number in damaged]
        with open(aside, "ab") as aside_file, open(self.path, "rb+") as log:
            for start, end in spans:
                log.seek(start)
                aside_file.write(log.read(end - start) + b"\n")
            aside_file.flush()
            sync(aside_file.fileno())
            for start, end in spans:
                log.seek(start)
                log.write(b" " * (end - start))

    def append(self, lines: Sequence[str]) -> None:
        """Write and fsync all records, or none of them.

        Raises:
            OSError: the disk is full or broken; the file is as it was before.
        """
        records = [f"{line}\n".encode() for line in lines]
        data = b"".join(records)
        with self._lock:
            end = self._ends[-1] if self._ends else 0
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(descriptor, view) :]
                sync(descriptor)
            except OSError:
                os.ftruncate(descriptor, end)
                raise
            finally:
                os.close(descriptor)
            self._ends += list(itertools.accumulate(map(len, records), initial=end))[1:]

    def read(self, after: int, most: int) -> list[bytes]:
        """Return up to ``most`` lines after cursor ``after``, without line ends. Damaged lines are blank."""
        last = min(after + most, self.count)
        if after >= last:
            return []
        start = self._ends[after - 1] if after else 0
        with open(self.path, "rb") as file:
            file.seek(start)
            return file.read(self._ends[last - 1] - start).split(b"\n")[:-1]
