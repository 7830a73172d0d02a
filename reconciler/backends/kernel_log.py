"""Owns what the kernel's log says of a control group that reached its limit of processes; keeps nothing of it.

The group's own counters go with the group, which an engine removes before anybody can read them; the log stays.
"""

from __future__ import annotations

import os

_LOG = "/dev/kmsg"
_REFUSED = b"fork rejected by pids controller in "
"""kernel/cgroup/pids.c: written once for each group, followed by its path."""
_LONGEST_RECORD = 8192


def fork_was_refused(name: str, log: str = _LOG) -> bool:
    """Say whether the log has it that a process was refused to the group whose path holds `name`.

    False also where the log cannot be read: then nothing is known.
    """
    try:
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return _any_record(descriptor, name.encode())
    finally:
        os.close(descriptor)


def _any_record(descriptor: int, name: bytes) -> bool:
    while True:
        try:
            record = os.read(descriptor, _LONGEST_RECORD)
        except BrokenPipeError:
            # A record was overwritten before it was read; the next read goes on behind it.
            continue
        except OSError:
            return False
        if not record:
            return False
        _, said, path = record.partition(_REFUSED)
        if said and name in path:
            return True
