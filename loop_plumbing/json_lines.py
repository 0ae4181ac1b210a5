"""Reads files of others: their encoding, and the values of JSON lines."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

_PACKED = {
    **{"zstd": b"\x28\xb5\x2f\xfd", "zip": b"PK\x03\x04", "bzip2": b"BZh", "xz": b"\xfd7zXZ"},
    **{"parquet": b"PAR1", "Arrow": b"ARROW1", "SQLite": b"SQLite format 3"},
}
"""The first bytes of files that are not text."""


def most_unpacked(file: Path) -> int:
    """Return the number of bytes to which a foreign packed file may unpack, far more than for any text by people."""
    return (1 << 30) + 32 * file.stat().st_size


def open_text(file: Path) -> IO[str]:
    """Open a foreign text file for reading: UTF-8, or UTF-16 with a byte order mark, gzipped or not.

    Raises:
        OSError: the file cannot be read.
        ValueError: the encoding is another, or the text unpacks to more than :func:`most_unpacked`; names the file.
    """
    content = file.read_bytes()
    try:
        if content.startswith(b"\x1f\x8b"):
            most = most_unpacked(file)
            content = gzip.GzipFile(fileobj=io.BytesIO(content)).read(most + 1)
            if len(content) > most:
                raise ValueError(f"{file} unpacks to more than {most >> 20:,} MiB: unpack it yourself, if it is yours")
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{file} is gzipped and broken: {error}") from error
    table = next((suffix[1:].upper() for suffix in (".csv", ".tsv") if suffix in file.suffixes), None)
    if packed := next((kind for kind, begins in _PACKED.items() if content.startswith(begins)), table):
        raise ValueError(f"{file} is {packed}, which is not read here: give its content as JSON lines")
    encoding = "utf-16" if content.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    try:
        return io.StringIO(content.decode(encoding))
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 (byte {error.start}): convert it, as iconv and editors do") from error


def json_lines(file: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each line of a JSONL file. Empty lines and a byte order mark are passed over.

    Raises:
        OSError: the file cannot be read.
        ValueError: the text is in another encoding, or a line is not JSON; names file and line.
    """
    with open_text(file) as opened:
        for number, line in enumerate(opened, 1):  # not splitlines: a text in JSON may hold other ends of lines
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                whole = "; it must hold a task in each line, not a list of tasks" if line.lstrip()[0] == "[" else ""
                raise ValueError(f"{file}:{number} is not JSON: {error}{whole}") from error
