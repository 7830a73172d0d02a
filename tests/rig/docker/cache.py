"""Owns what the Docker rig is built from and where the results are kept; starts nothing.

Each part lies in a directory named by a digest of all that it is made from, so a change of an input makes it anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.rig.rig import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE: Final = Path(__file__).parent
IMAGES: Final = ROOT / "deploy" / "images"
_TIMEOUT_S: Final = 3600
_KEEP_S: Final = 7 * 86400


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One thing to build: `command` (with DESTINATION as its place) run when `inputs` changed."""

    name: str
    inputs: tuple[Path, ...]
    command: tuple[str, ...]
    needs: tuple[Part, ...] = ()

    @property
    def digest(self) -> str:
        """Hex digest over the inputs' names and bytes, the command, and what it needs."""
        state = hashlib.sha256()
        for path in _files(self.inputs):
            content = path.read_bytes()
            state.update(f"{path.relative_to(ROOT)}\0{len(content)}\0".encode() + content)
        for part in self.needs:
            state.update(part.digest.encode())
        state.update("\0".join(self.command).replace(str(ROOT), "").replace(str(root()), "").encode())
        return state.hexdigest()[:16]

    @property
    def path(self) -> Path:
        """Where it is, or will be."""
        return root() / f"{self.name}-{self.digest}"

    @property
    def built(self) -> bool:
        """Say whether it is there, whole: it gets its name only when it is finished."""
        return self.path.is_dir()


DESTINATION: Final = "DESTINATION"


def root() -> Path:
    """Return the cache's directory: RINGFENCE_RIG_CACHE, or one that outlives checkouts."""
    return Path(os.environ.get("RINGFENCE_RIG_CACHE") or "/var/cache/ringfence-rig")


def packages() -> Part:
    """Return Debian's engine and the tools that both engines need."""
    script = HERE / "build_packages.sh"
    return Part(name="packages", inputs=(script,), command=(str(script), DESTINATION))


def go() -> Part:
    """Return the current engine and runsc."""
    script, modules = HERE / "build_go.sh", HERE / "modules"
    needed = packages()
    command = (str(script), str(modules), str(needed.path / "tools"), DESTINATION)
    return Part(name="go", inputs=(script, modules), command=command, needs=(needed,))


def rootfs(name: str, architecture: str, listed: Path) -> Part:
    """Return a root file system, as DESTINATION/root and layer.tar, of the Debian packages that a file lists."""
    script, compile_ = IMAGES / "rootfs.sh", IMAGES / "compile.sh"
    steps = (
        f'"{script}" {architecture} "$1/root" $(cat "{listed}")',
        f'"{compile_}" "$1/root" /usr/lib/python3.11',
        'tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -C "$1/root" -cf "$1/layer.tar" .',
    )
    command = ("/bin/sh", "-euc", "\n".join(steps), "sh", DESTINATION)
    return Part(name=f"{name}-{architecture}", inputs=(script, compile_, listed), command=command)


def agent(architecture: str = "amd64") -> Part:
    """Return the root file system of the agent's test image."""
    return rootfs("agent", architecture, HERE / "agent-packages")


def proxy(architecture: str = "amd64") -> Part:
    """Return the root file system of the proxy image, without our package."""
    return rootfs("proxy", architecture, IMAGES / "proxy" / "packages")


def everything() -> tuple[Part, ...]:
    """Return all that the tests on this machine use, in the order to build."""
    return (packages(), agent(), proxy(), proxy("arm64"), go())


def built() -> bool:
    """Say whether nothing has to be built."""
    return all(part.built for part in everything())


def build(*parts: Part) -> None:
    """Build the parts that are not there; one builder at a time. Its output goes to our stderr.

    Raises CalledProcessError.
    """
    if all(part.built for part in parts):
        return  # without waiting for whoever builds other parts, for half an hour maybe
    root().mkdir(parents=True, exist_ok=True)
    with (root() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for dead in root().glob("*.partial"):  # of a builder that was killed: we hold the lock
            shutil.rmtree(dead)
        for part in parts:
            if not part.built:
                _make(part)


def _make(part: Part) -> None:
    sys.stderr.write(f"building {part.path}\n")
    place = Path(tempfile.mkdtemp(prefix=f"{part.name}.", suffix=".partial", dir=root()))
    try:
        place.chmod(0o755)
        command = [str(place) if word == DESTINATION else word for word in part.command]
        subprocess.run(
            ["/usr/bin/nice", "-n", "10", *command],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            timeout=_TIMEOUT_S,
        )
        place.rename(part.path)
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    for old in root().glob(f"{part.name}-????????????????"):
        # A younger one may be in use: by another checkout, by an engine that runs.
        if old != part.path and old.stat().st_mtime < time.time() - _KEEP_S:
            shutil.rmtree(old)


def _files(inputs: tuple[Path, ...]) -> Iterator[Path]:
    for path in inputs:
        yield from sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
