"""Owns the text of /proc/PID/mountinfo as values, and what a path on this host would look like when bound elsewhere.

Pure; mounts nothing and reads no file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One line of mountinfo (proc_pid_mountinfo(5)). `root`: what of `device` is seen at `point`."""

    point: str
    root: str
    device: str
    kind: str
    options: frozenset[str]
    super_options: frozenset[str]


def parse(text: str) -> tuple[Mount, ...]:
    """Read all lines, in their order: of two mounts at one point the later one is seen."""
    found = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        _, _, device, root, point, options = before.split(" ")[:6]
        kind, _, super_options = after.split(" ", 2)
        found.append(
            Mount(
                point=_unescaped(point),
                root=_unescaped(root),
                device=device,
                kind=kind,
                options=frozenset(options.split(",")),
                super_options=frozenset(super_options.split(",")),
            )
        )
    return tuple(found)


def below(mounts: Sequence[Mount], path: str) -> tuple[Mount, ...]:
    """Say what a recursive bind of `path` shows: the mount that holds it, cut to it, then every mount below it."""
    seen = {mount.point: mount for mount in mounts}
    holder = seen[max((point for point in seen if _within(path, point)), key=len)]
    inner = path[len(holder.point.rstrip("/")) :]
    top = Mount(
        point=path,
        root=(holder.root.rstrip("/") + inner) or "/",
        device=holder.device,
        kind=holder.kind,
        options=holder.options,
        super_options=holder.super_options,
    )
    return (top, *(mount for point, mount in sorted(seen.items()) if point != path and _within(point, path)))


def _within(path: str, above: str) -> bool:
    return path == above or path.startswith(above.rstrip("/") + "/")


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(lambda found: chr(int(found[1], 8)), text)
