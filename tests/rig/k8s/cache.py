"""Owns what the Kubernetes rig is built from, beside what the Docker rig builds; starts nothing."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Final

from tests.rig.docker import cache
from tests.rig.docker.cache import DESTINATION, Part

_HERE: Final = Path(__file__).parent


def kubernetes() -> Part:
    """Return the cluster's own programs."""
    script, modules, shared = _HERE / "build.sh", _HERE / "modules", cache.HERE / "modules"
    pinned = tuple(path for name in ("engine", "gvisor") for path in sorted((shared / name).glob("go.*")))
    command = (str(script), str(modules), str(shared), DESTINATION)
    return Part(name="kubernetes", inputs=(script, modules, *pinned), command=command)


def everything() -> tuple[Part, ...]:
    """Return all that a cluster is started from, in the order to build."""
    return (cache.packages(), cache.agent(), cache.proxy(), cache.go(), kubernetes())


def built() -> bool:
    """Say whether nothing has to be built."""
    return all(part.built for part in everything())


def environment() -> dict[str, str]:
    """Return what the cluster's programs find their tools and libraries by, before the machine's own."""
    shared, go, own = (part().path for part in (cache.packages, cache.go, kubernetes))
    unpacked, multiarch = (own / "debian", shared / "tools"), f"{platform.machine()}-linux-gnu"
    programs = [
        own / "bin",
        go / "bin",
        *(place / each for place in unpacked for each in ("usr/sbin", "usr/bin", "sbin")),
    ]
    libraries = [place / each / multiarch for place in unpacked for each in ("lib", "usr/lib")]
    return {
        "PATH": ":".join([*map(str, programs), os.defpath, "/usr/sbin:/sbin"]),
        "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
        "XTABLES_LIBDIR": str(shared / "tools/usr/lib" / multiarch / "xtables"),
    }
