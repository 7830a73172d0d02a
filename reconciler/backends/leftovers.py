"""Owns the directory of a run, and finding and removing what it left on this host: processes, groups, that directory.

Knows labels and names only; how a sandbox was built is unknown here.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
from typing import TYPE_CHECKING

import anyio

from reconciler.backends.base import Reaped
from reconciler.backends.cgroup import Cgroup, Root, children

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from reconciler.backends.base import Launch

_EMPTY_S = 5.0
_POLL_S = 0.02
LABEL = "label.json"


@contextlib.contextmanager
def run_folder(above: Path, launch: Launch) -> Iterator[Path]:
    """Make the directory of a run below `above`, with its label; at the end of the context it is gone."""
    folder = above / launch.run
    # Passable, not readable: the path canary in it must be out of reach because of the fence, not of this mode.
    folder.mkdir(mode=0o711, parents=True)
    label = {"run": launch.run, "agent": launch.agent, "owner": launch.owner, "expires_at": launch.expires_at}
    try:
        (folder / LABEL).write_text(json.dumps(label, sort_keys=True), "utf-8")
        yield folder
    finally:
        (folder / LABEL).unlink(missing_ok=True)
        folder.rmdir()


async def empty(cgroup: Cgroup, *, limit: float = _EMPTY_S) -> bool:
    """Kill everything inside and remove the group; False when something outlived `limit` seconds of that."""
    with anyio.move_on_after(limit):
        while True:
            cgroup.send(signal.SIGKILL)
            if not cgroup.pids() and cgroup.remove():
                return True
            await anyio.sleep(_POLL_S)
    return False


def read_label(folder: Path) -> Mapping[str, object]:
    """Read a run directory's label; empty where a crash left none."""
    try:
        label = json.loads((folder / LABEL).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return label if isinstance(label, dict) else {}


async def reap(
    *, roots: Mapping[str, Root], group: str, folder: Path, live: frozenset[str], now: float
) -> tuple[Reaped, ...]:
    """Remove what lies below `group` and `folder` of runs that are not live, or are past their expiry at `now`.

    Args:
        roots: where control groups are.
        group: the parent of all groups of this owner, named `<run>.<role>`.
        folder: the directory of all runs of this owner, each named by its run.
        live: runs that are to stay.
        now: Unix seconds.
    """
    found: list[Reaped] = []
    kept = frozenset(run for run in live if not _expired(folder / run, now))
    for name in sorted(children(roots, group)):
        run = name.rpartition("/")[2].rpartition(".")[0]
        if run not in kept:
            cgroup = Cgroup(roots, name)
            found += [Reaped(kind="process", name=str(pid), run=run) for pid in sorted(cgroup.pids())]
            if await empty(cgroup):
                found.append(Reaped(kind="cgroup", name=name, run=run))
    for path in _inside(folder):
        if path.name not in kept:
            shutil.rmtree(path)
            found.append(Reaped(kind="directory", name=str(path), run=path.name))
    return tuple(found)


def _expired(folder: Path, now: float) -> bool:
    expires = read_label(folder).get("expires_at")
    return isinstance(expires, int | float) and now > expires


def _inside(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []
