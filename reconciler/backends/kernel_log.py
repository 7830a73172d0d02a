"""Owns what the kernel's log says of a control group that reached a limit; keeps nothing of it.

The group's own counters go with the group, which an engine removes before anybody can read them; the log stays.
"""

from __future__ import annotations

import os

_LOG = "/dev/kmsg"
_REFUSED = b"fork rejected by pids controller in "
"""kernel/cgroup/pids.c: written once for each group, followed by its path."""
_KILLED_FOR_MEMORY = b"oom-kill:constraint=CONSTRAINT_MEMCG,"
"""mm/oom_kill.c: followed by, among others, the paths of the group whose limit it was and of the one that it hit."""
_LONGEST_RECORD = 8192


def fork_was_refused(name: str, log: str = _LOG) -> bool:
    """Say whether the log has it that a process was refused to the group whose path holds `name`.

    False also where the log cannot be read: then nothing is known.
    """
    return _any_record(log, _REFUSED, name)


def memory_ran_out(name: str, log: str = _LOG) -> bool:
    """Say whether the log has it that a process was killed at the limit of the group whose path holds `name`.

    False also where the log cannot be read, or where it has too much of these to name each.
    """
    return _any_record(log, _KILLED_FOR_MEMORY, name)


def _any_record(log: str, sign: bytes, name: str) -> bool:
    try:
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return _has(descriptor, sign, name.encode())
    finally:
        os.close(descriptor)


def _has(descriptor: int, sign: bytes, name: bytes) -> bool:
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
        _, said, rest = record.partition(sign)
        if said and name in rest:
            return True
