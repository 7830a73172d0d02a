"""Owns the audit log's files: their names, the stored head, and reading rows in order; neither writes rows nor judges.

`audit.jsonl` is the file that rows are written to. When it is full it becomes `audit.<number of its last row>.jsonl`,
and the chain goes on in a new one.
"""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reconciler.core.audit import Broken, Head, read_row
from reconciler.core.cut import canonical
from reconciler.durable import write_all

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOG = "audit.jsonl"
HEAD = "head.json"
_FULL = re.compile(r"audit\.([0-9]{20})\.jsonl")
_CHUNK = 1 << 16
_WRITING_S = 0.1


def full(seq: int) -> str:
    """Name the file whose last row is `seq`."""
    return f"audit.{seq:020}.jsonl"


def all_full(directory: Path) -> list[Path]:
    """Give the files that are full, oldest first."""
    return sorted(path for path in directory.iterdir() if _FULL.fullmatch(path.name))


def line_before(log: int, offset: int) -> bytes:
    """Read the line that ends at `offset`, newline included; whatever is there when no line ends there."""
    data, position = b"", offset
    while position > 0 and data[:-1].rfind(b"\n") < 0:
        step = min(_CHUNK, position)
        position -= step
        data = os.pread(log, step, position) + data
    return data[data[:-1].rfind(b"\n") + 1 :]


def write_head(directory: int, head: Head, size: int) -> None:
    """Store the head, and the size of `audit.jsonl` at it: it is on disk when this returns.

    Raises:
        OSError: it is not.
    """
    temporary = f".{HEAD}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(temporary, flags, 0o600, dir_fd=directory)
    try:
        write_all(descriptor, canonical({"seq": head.seq, "hash": head.hash, "size": size}) + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.rename(temporary, HEAD, src_dir_fd=directory, dst_dir_fd=directory)
    os.fsync(directory)


def read_head(directory: Path) -> tuple[Head, int] | str | None:
    """Read head.json: the head and the log's size at it, None when there is none, or what is wrong with it."""
    try:
        value: object = json.loads((directory / HEAD).read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        return f"{HEAD} is not JSON"
    match value:
        case {"seq": int(seq), "hash": str(digest), "size": int(size)} if seq >= 0 and size >= 0:
            return Head(seq, digest), size
        case _:
            return f"{HEAD} does not have the fields seq, hash and size"


@dataclass(frozen=True, slots=True)
class Log:
    """An audit log as a reader sees it: its stored head, and its lines on demand."""

    directory: Path
    head: Head | None

    def lines(self) -> Iterator[bytes]:
        """Give every line in order, newline included. A last line that is being written is waited for, for a moment."""
        # The last file is opened first: it may be full, and have another name, before the others are through.
        with (self.directory / LOG).open("rb") as file:
            own = os.fstat(file.fileno())
            for path in all_full(self.directory):
                with path.open("rb") as earlier:
                    facts = os.fstat(earlier.fileno())
                    if (facts.st_dev, facts.st_ino) != (own.st_dev, own.st_ino):
                        yield from earlier
            for line in file:
                whole, until = line, time.monotonic() + _WRITING_S
                while not whole.endswith(b"\n") and time.monotonic() < until:
                    time.sleep(_WRITING_S / 10)
                    whole += file.readline()
                yield whole

    def rows(self) -> Iterator[dict[str, object]]:
        """Give every row that holds by itself; for showing, not for proving."""
        for line in self.lines():
            row = read_row(line)
            if not isinstance(row, str):
                yield row


def read(directory: Path) -> Log | Broken:
    """Open the log below `directory` for reading; needs no lock and changes nothing.

    The head is read first, so a log that grows meanwhile is never taken for one that was cut off.

    Raises:
        OSError: there is no log, or it may not be read.
    """
    stored = read_head(directory)
    if isinstance(stored, str):
        return Broken(0, 0, stored)
    if not (directory / LOG).exists():
        raise FileNotFoundError(2, "there is no audit log", str(directory / LOG))
    return Log(directory, None if stored is None else stored[0])
