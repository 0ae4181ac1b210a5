"""An append-only file of JSON lines that survives a SIGKILL at any byte and a full disk.

A record counts once its line is whole and fsynced; only then does :attr:`AppendLog.count` include it, so whoever reads
by cursor is never told of a record that a crash could take back. Cursor n is the n-th line, counted from 1.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rollout_server.run_files import sync

logger = logging.getLogger(__name__)


class AppendLog:
    """One such file. Opening it recovers it: from the first line that is no whole record on, it is cut off.

    After a power cut that line need not be the last, because the records of one write reach the disk in any order; but
    nobody was told of those that followed it.

    Args:
        path: created when missing; its folder must be there.
        visit: called with every record (decoded) that is already in the file, in order; it raises ValueError for one
            that is not whole. It returns whether the file may end there: a record that is nothing without those after
            it is cut off with them.
    """

    def __init__(self, path: Path, visit: Callable[[Any], bool]):
        self.path = path
        self._ends: list[int] = []
        self._recover(visit)

    @property
    def count(self) -> int:
        """Records that are on disk for good."""
        return len(self._ends)

    def _recover(self, visit: Callable[[Any], bool]) -> None:
        created = not self.path.exists()
        with open(self.path, "ab+") as file:
            file.seek(0)
            end, whole, why = 0, 0, "others that belong to it are missing"
            for line in file:
                try:
                    if not line.endswith(b"\n"):
                        raise ValueError("no line end")
                    may_end = visit(json.loads(line))
                except ValueError as error:
                    why = str(error)
                    break
                end += len(line)
                self._ends.append(end)
                if may_end:
                    whole = self.count
            del self._ends[whole:]
            end, size = self._ends[-1] if self._ends else 0, os.fstat(file.fileno()).st_size
            if end < size:
                number = self.count + 1
                logger.warning(
                    "%s: record %d is torn (%s), dropping the last %d bytes", self.path, number, why, size - end
                )
            os.ftruncate(file.fileno(), end)
            os.fsync(file.fileno())
        if created:
            sync(self.path.parent)

    def append(self, lines: Sequence[str]) -> None:
        """Write the records and fsync them, all or none.

        Raises:
            OSError: the disk is full or broken; the file is as it was before.
        """
        end = self._ends[-1] if self._ends else 0
        ends = []
        data = bytearray()
        for line in lines:
            data += line.encode() + b"\n"
            ends.append(end + len(data))
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, end)
            raise
        finally:
            os.close(descriptor)
        self._ends += ends

    def read(self, after: int, most: int) -> list[bytes]:
        """Up to ``most`` records (lines without their ends) that follow cursor ``after``."""
        last = min(after + most, self.count)
        if after >= last:
            return []
        start = self._ends[after - 1] if after else 0
        with open(self.path, "rb") as file:
            file.seek(start)
            return file.read(self._ends[last - 1] - start).split(b"\n")[:-1]
